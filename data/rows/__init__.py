"""Loaders, one per record of data/types.py: convert formatted rows to token ids, masks and labels."""

"""One loader per record of data/types.py: formatted rows become token ids, masks and labels."""

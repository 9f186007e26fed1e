"""Shared by methods that train on fixed rows: the loop, preference pairs, labelled rows."""

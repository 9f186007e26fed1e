"""Row formats: how the columns of a row become the columns that a loader in data/rows/ reads."""

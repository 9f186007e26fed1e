"""Row formats: convert the columns of a row to the columns that a loader in data/rows/ reads."""

"""Several files of one save, read as one checkpoint."""

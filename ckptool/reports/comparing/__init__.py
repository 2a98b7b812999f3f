"""Compare checkpoints with each other, with a lock file, or by fingerprint. Pure functions that return plain data."""

"""Comparing checkpoints: with each other, with a lock file, by fingerprints. Pure functions that return plain data."""

"""Checks: what can be said about a checkpoint, as plain data."""

"""Predict, without torch, what loading a file would run, whether torch accepts it, and which damage torch overlooks."""

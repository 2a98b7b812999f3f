"""Predictions without torch: what loading a file would run, whether torch takes it, and damage that torch overlooks."""

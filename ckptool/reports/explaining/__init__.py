"""Explain error messages of PyTorch and related libraries, with the command that helps."""

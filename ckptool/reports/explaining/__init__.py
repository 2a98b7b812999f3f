"""What the error messages of PyTorch and its relatives mean, and the command that helps."""

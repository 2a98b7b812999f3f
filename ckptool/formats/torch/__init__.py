"""What a checkpoint becomes in each format: the plan of the file, and what the format cannot hold, as data."""

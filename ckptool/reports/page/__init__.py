"""A page on one checkpoint, or on two: one file of HTML that needs nothing else."""

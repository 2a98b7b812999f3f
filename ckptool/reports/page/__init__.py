"""A page on one or two checkpoints: a single HTML file that needs nothing else."""

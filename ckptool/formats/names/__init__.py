"""What the file names in a folder mean, for each format and training framework."""

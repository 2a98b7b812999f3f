"""From a checkpoint to data: what each command prints as JSON."""

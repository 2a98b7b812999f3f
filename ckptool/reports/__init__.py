"""The reports of commands: from a checkpoint to typed JSON."""

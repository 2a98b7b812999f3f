"""The reports of the commands: functions from a checkpoint to typed JSON."""

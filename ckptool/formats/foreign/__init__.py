"""Files that are not torch checkpoints: each is named, with the tool that opens it."""

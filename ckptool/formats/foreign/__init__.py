"""Files that are not checkpoints of torch: each is named, with the tool that opens it."""

"""Rank files of `torch.save` with DTensors, ShardedTensors or flat FSDP parameters."""

"""Folders that Megatron-LM writes."""

"""Folders that DeepSpeed writes."""

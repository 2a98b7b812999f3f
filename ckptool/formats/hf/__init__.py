"""Folders of Hugging Face: weights alone or in shards, with an index."""

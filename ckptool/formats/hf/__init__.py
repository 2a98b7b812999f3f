"""Hugging Face folders: weights in one file or in shards, with an index."""

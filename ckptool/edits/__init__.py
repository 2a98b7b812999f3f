"""Edits: pure functions from a checkpoint to another. They open no file and print nothing."""

"""Pieces of tensors as boxes: place them, assemble them, and compare copies."""

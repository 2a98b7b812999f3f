"""Models in parts, whose tensors are cut as a recipe describes."""

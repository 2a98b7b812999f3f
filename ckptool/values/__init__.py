"""What the bytes of tensors mean as numbers. ``values.torch`` is the only room that imports torch."""

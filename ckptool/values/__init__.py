"""The values in a checkpoint: tensors as bytes, numbers and text, and objects as Python values."""

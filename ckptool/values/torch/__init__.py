"""The only package that imports torch, and only inside functions: for real loads, and arithmetic on values."""

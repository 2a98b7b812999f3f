"""The only package that imports torch, and only within functions: real loads, and arithmetic on values."""

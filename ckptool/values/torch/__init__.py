"""The only room that imports torch, and only inside of functions: real loads, and what needs values."""

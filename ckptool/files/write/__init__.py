"""The only package that opens files for writing: it executes plans.

``output`` atomically creates a new file or folder. ``in_place`` appends to a file, which at every instant is either the
old version or the new one. ``copying`` moves the bytes of both.
"""

"""The only package that opens files for writing: it executes plans.

``output`` atomically creates a new file or folder; ``in_place`` appends to a file, which is the old version or the new
one at every instant; ``copying`` moves the bytes of both.
"""

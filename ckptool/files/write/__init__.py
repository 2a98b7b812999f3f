"""The only room that opens files for writing: it runs plans.

``output`` makes a new file, whole or not at all; ``in_place`` appends to one, so that it is the old version or the
new one at every instant; ``copying`` moves the bytes of both.
"""

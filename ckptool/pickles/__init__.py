"""Pickles as data: decode to a graph, edit it, encode it again. Knows nothing of torch."""

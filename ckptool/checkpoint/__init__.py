"""Interpret a pickle graph as torch does (tensors, storages, state dicts), and edit it."""

"""Vocabulary shared by every room: errors, limits, dtypes, device maps, name prefixes, globs and text."""

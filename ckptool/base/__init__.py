"""Vocabulary that every room shares: errors, limits, dtypes, prefixes, globs, text."""

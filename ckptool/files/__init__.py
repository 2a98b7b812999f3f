"""Bytes on disk: sources to read, archives within archives, and the one room that writes (``write``)."""

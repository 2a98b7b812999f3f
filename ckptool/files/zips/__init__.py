"""Zip archives, read and written like torch does. Knows nothing of pickles."""

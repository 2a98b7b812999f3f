"""Zip archives as torch reads them and as torch writes them. Knows nothing of pickles."""

"""Zip archives as torch reads them and as torch writes them. Knows nothing of pickles."""

from __future__ import annotations

from .layout import rewritten
from .read import Archive, Record, read_archive

__all__ = ["Archive", "Record", "read_archive", "rewritten"]

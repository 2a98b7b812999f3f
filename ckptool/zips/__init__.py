"""Zip archives as torch reads them and as torch writes them. Knows nothing of pickles."""

from __future__ import annotations

from .append import appended
from .audit import Audit, audit, check_places, signatures
from .fresh import Content, Sum, fresh, summed
from .layout import layout_holds, rewritten
from .read import LOCAL, Archive, Oddity, Record, contents, read_archive
from .versions import Version, note_at, versions
from .walk import Walked, walk

__all__ = [
    "LOCAL",
    "Archive",
    "Audit",
    "Content",
    "Oddity",
    "Record",
    "Sum",
    "Version",
    "Walked",
    "appended",
    "audit",
    "check_places",
    "contents",
    "fresh",
    "layout_holds",
    "note_at",
    "read_archive",
    "rewritten",
    "signatures",
    "summed",
    "versions",
    "walk",
]

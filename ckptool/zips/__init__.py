"""Zip archives as torch reads them and as torch writes them. Knows nothing of pickles."""

from __future__ import annotations

from .append import appended
from .audit import Audit, audit, check_places, end_records, signatures
from .fresh import Content, Sum, content_of, fresh, inflated, summed
from .layout import layout_holds, rewritten
from .read import LOCAL, Archive, Oddity, Record, contents, folded, read_archive, search_begin
from .versions import Version, is_spare, note_at, versions
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
    "content_of",
    "contents",
    "end_records",
    "folded",
    "fresh",
    "inflated",
    "is_spare",
    "layout_holds",
    "note_at",
    "read_archive",
    "rewritten",
    "search_begin",
    "signatures",
    "summed",
    "versions",
    "walk",
]

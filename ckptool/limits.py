"""Every bound on what a file may make ckptool allocate or print, with its reason.

A hostile file declares any size it likes; nothing here is ever taken from the file.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LIMITS", "Limits"]


class Limits(NamedTuple):
    """All limits in one frozen value; ``LIMITS._replace(...)`` gives another."""

    #: bytes of one pickle, inflated. 200,000 tensors need about 55 MB; numpy arrays live inside the pickle.
    pickle_bytes: int = 1 << 30
    #: nodes of one pickle: 200,000 tensors with their optimizer take about 6 million.
    nodes: int = 40_000_000
    #: times that a deflated record may grow; deflate itself stops at 1,032, text and numbers stay below 30.
    inflation: int = 100
    #: bytes that a deflated storage may grow to beyond that, all zeros: some seconds of work.
    inflated_bytes: int = 4 << 30
    #: bytes of a small text record (``version``, ``byteorder``): the real ones have under 64.
    text_bytes: int = 4096
    #: decimal digits of one integer: CPython itself stops at 4,300 when it prints one.
    int_digits: int = 4300
    #: findings or globals printed one by one; the rest is counted.
    listed: int = 10_000
    #: characters of one name or value in a table; JSON is never cut.
    cell_chars: int = 120
    #: characters of a path that are built; no model nests its names this deep.
    path_chars: int = 600
    #: dimensions of one tensor: torch itself allows 64 in most operations; more is hostile or nonsense.
    dimensions: int = 1024


LIMITS = Limits()

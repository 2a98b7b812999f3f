"""The CRC-32 of what stands in a span, inflated where it is compressed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from ..source import Span
from ..threads import blocks
from .read import contents

__all__ = ["checksum"]


def checksum(span: Span, size: int, compressed: bool, name: str, progress: Callable[[int], None] | None = None) -> int:
    """The CRC-32 of ``size`` bytes, inflated; ``name`` is for errors, ``progress`` is told the bytes of each step.

    Raises MalformedError where they do not inflate to their size, or are not all there.
    """
    crc = 0
    there = not compressed and span.offset + span.size <= span.source.size
    for data in blocks(span) if there else contents(span, size, compressed, name):
        crc = zlib.crc32(data, crc)
        if progress:
            progress(len(data))
    return crc

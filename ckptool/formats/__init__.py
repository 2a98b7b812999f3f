"""The formats, one module each, behind one small interface: recognise by content, then read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..checkpoint import Container
from ..source import Source
from . import identify, safetensors, torch_legacy, torch_zip

__all__ = ["FORMATS", "Format", "read_container"]


class Format(NamedTuple):
    """``sniff(head, source)`` looks at the first bytes first, at more only if these fit."""

    name: str
    words: str
    sniff: Callable[[bytes, Source], bool]
    read: Callable[[Source], Container]


FORMATS: Final[tuple[Format, ...]] = (
    Format("torch-zip", torch_zip.WORDS, torch_zip.sniff, torch_zip.read),
    Format("torch-legacy", torch_legacy.WORDS, torch_legacy.sniff, torch_legacy.read),
    Format("safetensors", safetensors.WORDS, safetensors.sniff, safetensors.read),
)

#: Enough to tell every format in formats.md: tar has its mark at 257.
_HEAD = 1024


def read_container(source: Source) -> Container:
    """Read a source in the format that its content tells.

    Raises NotACheckpointError, which names what the file is, and MalformedError for a damaged checkpoint.
    """
    head = source.read(0, _HEAD)
    for known in FORMATS:
        if known.sniff(head, source):
            return known.read(source)
    raise identify.explain(head, source)

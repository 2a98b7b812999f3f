"""The formats, one module each, behind one small interface: recognise by content, then read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from ..container import Container
from ..source import FolderSource, Source
from . import dcp, hf, hf_ranks, identify, safetensors, torch_legacy, torch_tar, torch_zip, zip_archives

__all__ = ["FOLDERS", "FORMATS", "FolderFormat", "Format", "folder_format", "read_container", "read_folder"]


class Format(NamedTuple):
    """``sniff(head, source)`` looks at the first bytes first, at more only if these fit."""

    name: str
    words: str
    sniff: Callable[[bytes, Source], bool]
    read: Callable[[Source], Container]


FORMATS: Final[tuple[Format, ...]] = (
    Format("torch-zip", torch_zip.WORDS, torch_zip.sniff, zip_archives.read),
    Format("torch-legacy", torch_legacy.WORDS, torch_legacy.sniff, torch_legacy.read),
    Format("torch-tar", torch_tar.WORDS, torch_tar.sniff, torch_tar.read),
    Format("safetensors", safetensors.WORDS, safetensors.sniff, safetensors.read),
)


class FolderFormat(NamedTuple):
    """A format of several files in one folder. ``sniff(names)`` looks at the names of the files alone, ``read(path)``
    opens them; what it opened is closed when it raises."""

    name: str
    words: str
    sniff: Callable[[Collection[str]], bool]
    read: Callable[[str], tuple[FolderSource, Container]]


#: In this order: a folder of DCP may have the files of transformers beside it.
FOLDERS: Final[tuple[FolderFormat, ...]] = (
    FolderFormat("dcp", dcp.WORDS, dcp.sniff, dcp.read),
    FolderFormat("dcp-safetensors", hf_ranks.WORDS, hf_ranks.sniff, hf_ranks.read),
    FolderFormat("hf", hf.WORDS, hf.sniff, hf.read),
)

#: Enough to tell every format in formats.md: tar has its mark at 257.
_HEAD = 1024


def folder_format(path: str) -> FolderFormat | None:
    """The format of a folder that is one checkpoint, None for every other path."""
    try:
        names = frozenset(os.listdir(path))
    except OSError:
        return None
    return next((known for known in FOLDERS if known.sniff(names)), None)


def read_folder(path: str) -> tuple[FolderSource, Container] | None:
    """Read a folder in the format that the names of its files tell; None where it is no checkpoint as a whole.

    Raises as ``read_container`` does.
    """
    found = folder_format(path)
    return None if found is None else found.read(path)


def read_container(source: Source) -> Container:
    """Read a source in the format that its content tells.

    Raises NotACheckpointError, which names what the file is, and MalformedError for a damaged checkpoint.
    """
    head = source.read(0, _HEAD)
    for known in FORMATS:
        if known.sniff(head, source):
            return known.read(source)
    raise identify.explain(head, source)

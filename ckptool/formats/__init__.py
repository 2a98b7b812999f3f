"""The formats, one module each, behind one small interface: recognise by content, then read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Final, NamedTuple

from ..checkpoint.container import TWO_FORMATS, Container, Problem
from ..files.sources import FolderSource, Source
from ..files.tars import is_header
from . import zip_kinds
from .foreign import identification
from .torch import legacy_reader, zip_reader


class Format(NamedTuple):
    """``sniff(head, source)`` looks at the first bytes first, at more only if these fit."""

    name: str
    words: str
    sniff: Callable[[bytes, Source], bool]
    read: Callable[[Source], Container]


# Most files are zips or legacy files: the other formats are imported when a file may be one of theirs.


def _tar() -> ModuleType:
    from .torch import tar_reader

    return tar_reader


def _safetensors() -> ModuleType:
    from .safetensors import reader as safetensors_reader

    return safetensors_reader


def _dcp() -> ModuleType:
    from .dcp import folder as dcp_folder

    return dcp_folder


def _hf_ranks() -> ModuleType:
    from .hf import ranks as hf_ranks

    return hf_ranks


def _hf_files() -> ModuleType:
    from .hf import files as hf_files

    return hf_files


def _hf() -> ModuleType:
    from .hf import folder as hf_folder

    return hf_folder


_TAR: Final = "torch-tar"
#: Only tar has no mark at its beginning, so that a file may be of that format and another one.
_TWINS: Final = (
    "it is a tar archive and a file of the format {} at once: torch.load and other readers take it for either"
)

#: In the order in which torch.load asks (torch/serialization.py, ``load`` and ``_legacy_load``): zip by four bytes, tar
#: by Python's tarfile, then the pickles of the legacy format. It takes safetensors by the name of the file.
FORMATS: Final[tuple[Format, ...]] = (
    Format(
        "torch-zip",
        "the zip format of `torch.save`: torch 1.6 and later, 1.4 and 1.5 on request",
        zip_reader.sniff,
        zip_kinds.read,
    ),
    Format(
        _TAR,
        "the tar format of torch 0.1",
        lambda head, source: is_header(head[:512]) and _tar().sniff(head, source),
        lambda source: _tar().read(source),
    ),
    Format(
        "torch-legacy",
        "the sequential format of `torch.save`: torch 1.5 and earlier, later ones on request, Python 2 included",
        legacy_reader.sniff,
        legacy_reader.read,
    ),
    Format(
        "safetensors",
        "safetensors: a JSON header and bare tensors, nothing that could be run",
        lambda head, source: _safetensors().sniff(head, source),
        lambda source: _safetensors().read(source),
    ),
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
    FolderFormat(
        "dcp",
        "a folder of `torch.distributed.checkpoint` (DCP): `.metadata` and `.distcp` files",
        lambda names: _dcp().sniff(names),
        lambda path: _dcp().read(path),
    ),
    FolderFormat(
        "dcp-safetensors",
        "folders of `HuggingFaceStorageWriter(save_distributed=True)`: safetensors, a piece a rank",
        lambda names: _hf_ranks().sniff(names),
        lambda path: _hf_ranks().read(path),
    ),
    FolderFormat(
        "hf",
        "folders of Hugging Face: safetensors or .bin weights, alone or in shards",
        lambda names: _hf_files().sniff(names),
        lambda path: _hf().read(path),
    ),
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
    known = next((known for known in FORMATS if known.sniff(head, source)), None)
    if known is None:
        raise identification.explain(head, source)
    container = known.read(source)
    if is_header(head[:512]):
        twins = [other.name for other in FORMATS if other.name != _TAR and other.sniff(head, source)]
        container.problems.extend(Problem(TWO_FORMATS, "error", _TWINS.format(name), True) for name in twins)
    return container

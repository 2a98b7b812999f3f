"""Kinds of zip archives, recognised by the names of their records, each read by a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..base import lazy
from ..checkpoint.container import Container
from ..files.sources import Source
from ..files.zips.reader import Archive
from ..pickles.nodes import Graph


class ZipFormat(NamedTuple):
    """A kind of zip archive: its name, a description, a noun, the groups of records of which one must be complete, and
    the module whose ``read(archive)`` reads it."""

    name: str
    words: str
    noun: str
    records: tuple[tuple[str, ...], ...]
    module: str

    def read(self, archive: Archive) -> Container:
        """Read an archive of this kind."""
        container: Container = lazy.module(f"formats.programs.{self.module}").read(archive)
        return container


#: The first bytes of every record.
_LOCAL_HEADER: Final = b"PK\x03\x04"
#: The first match counts; any other archive is a checkpoint of torch.save, or refused by name.
ZIPS: Final[tuple[ZipFormat, ...]] = (
    ZipFormat(
        "torchscript",
        "TorchScript (`torch.jit.save`) and PyTorch Mobile archives: a program with its weights",
        "a TorchScript archive",
        (("constants.pkl",),),
        "torchscript",
    ),
    ZipFormat(
        "pt2",
        "torch.export archives (`.pt2`): the weights of a program, by name",
        "a torch.export program (.pt2)",
        (("archive_format", "archive_version"), ("serialized_exported_program.json",)),
        "pt2",
    ),
    ZipFormat(
        "torch-package",
        "torch.package archives: each pickle an entry of a dict",
        "a torch.package archive",
        ((".data/extern_modules",), (".data/python_version",)),
        "package",
    ),
    ZipFormat(
        "torchscript-1.0",
        "TorchScript archives of torch 1.0 to 1.3 (`model.json`)",
        "a TorchScript archive of torch 1.0",
        (("model.json",),),
        "torchscript_json",
    ),
)


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a source begins as a zip archive does."""
    return head.startswith(_LOCAL_HEADER)


def read(source: Source, known: Callable[[bytes], Graph | None] | None = None) -> Container:
    """Read a zip; raises NotACheckpointError, which names its format, and MalformedError for a damaged one.

    ``known`` returns the graph of a checkpoint's pickle where it need not be decoded, None elsewhere.
    """
    zip_reader = lazy.module("formats.torch.zip_reader")
    archive: Archive = zip_reader.read_whole(source)
    kind = kind_of(archive)
    container: Container = zip_reader.read_records(archive, known) if kind is None else kind.read(archive)
    return container


def kind_of(archive: Archive) -> ZipFormat | None:
    """Return the kind of an archive by its records; None for a checkpoint of torch.save, and for anything else."""
    matches = (kind for kind in ZIPS if any(all(map(archive.find, group)) for group in kind.records))
    return next(matches, None)

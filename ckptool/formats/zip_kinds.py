"""Kinds of zip archives, recognised by their record names. Each has its own reader module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from ..base import lazy
from ..base.records import NamedTuple
from ..checkpoint.container import Container
from ..files.sources import Source
from ..files.zips.reader import Archive
from ..pickles.nodes import Graph


class ZipFormat(NamedTuple):
    """A kind of zip archive. ``records`` are groups of record names; an archive with all records of one group is of
    this kind. ``module`` has ``read(archive)``."""

    name: str
    noun: str
    records: tuple[tuple[str, ...], ...]
    module: str

    def read(self, archive: Archive) -> Container:
        """Read an archive of this kind."""
        return cast(Container, lazy.module(f"formats.programs.{self.module}").read(archive))


#: The first match counts. Any other archive is a torch.save checkpoint, or refused with its name.
ZIPS: Final[tuple[ZipFormat, ...]] = (
    ZipFormat("torchscript", "a TorchScript archive", (("constants.pkl",),), "torchscript"),
    ZipFormat(
        "pt2",
        "a torch.export program (.pt2)",
        (("archive_format", "archive_version"), ("serialized_exported_program.json",)),
        "pt2",
    ),
    ZipFormat(
        "torch-package", "a torch.package archive", ((".data/extern_modules",), (".data/python_version",)), "package"
    ),
    ZipFormat("torchscript-1.0", "a TorchScript archive of torch 1.0", (("model.json",),), "torchscript_json"),
)


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a source begins like a zip archive."""
    return head.startswith(b"PK\x03\x04")


def read(source: Source, known: Callable[[bytes], Graph | None] | None = None) -> Container:
    """Read a zip. Raises NotACheckpointError, which names its format, and MalformedError for a damaged one. ``known``
    returns the graph of a checkpoint's pickle if it need not be decoded, else None."""
    zip_reader = lazy.module("formats.torch.zip_reader")
    archive: Archive = zip_reader.read_whole(source)
    kind = kind_of(archive)
    container: Container = zip_reader.read_checkpoint(archive, known) if kind is None else kind.read(archive)
    return container


def kind_of(archive: Archive) -> ZipFormat | None:
    """Return the kind of an archive by its records; None for a torch.save checkpoint and for anything else."""
    names = "\0".join(archive.by_name).lower()  # most archives have none of these names, which is soon seen
    kinds = (kind for kind in ZIPS if any(group[0] in names for group in kind.records))
    return next((kind for kind in kinds if any(all(map(archive.find, group)) for group in kind.records)), None)

"""Which zip is it? Told by the names of its records, read by the module for its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..base.errors import MalformedError
from ..base.limits import LIMITS
from ..checkpoint.container import Container
from ..files.sources import Source
from ..files.zips.reader import Archive
from .torch import zip_reader


class ZipFormat(NamedTuple):
    """A kind of zip archive: its name, what it is in words, groups of records of which one must be there, and what
    reads the archive."""

    name: str
    words: str
    records: tuple[tuple[str, ...], ...]
    read: Callable[[Archive], Container]


def _torchscript(archive: Archive) -> Container:
    from .programs.torchscript import TorchScript

    record = archive.find("data.pkl")
    if record is None:
        what = "it is a TorchScript archive without data.pkl, where its weights are described"
        raise MalformedError(what, path=archive.source.name, next="get a whole copy of the file")
    return TorchScript(archive, record, archive.read(record, LIMITS.pickle_bytes))


def _pt2(archive: Archive) -> Container:
    from .programs import pt2

    return pt2.read(archive)


def _package(archive: Archive) -> Container:
    from .programs import package as programs_package

    return programs_package.read(archive)


def _json(archive: Archive) -> Container:
    from .programs import torchscript_json

    return torchscript_json.read(archive)


#: The first that fits counts; what fits none is a checkpoint of torch.save, or named and refused.
ZIPS: Final[tuple[ZipFormat, ...]] = (
    ZipFormat(
        "torchscript",
        "TorchScript archives (`torch.jit.save`) and PyTorch Mobile models in zip form: a program, with its weights",
        (("constants.pkl",),),
        _torchscript,
    ),
    ZipFormat(
        "pt2",
        "torch.export archives (`.pt2`): the weights of a program, by name",
        (("archive_format", "archive_version"), ("serialized_exported_program.json",)),
        _pt2,
    ),
    ZipFormat(
        "torch-package",
        "torch.package archives: each pickle an entry of a dict",
        ((".data/extern_modules",), (".data/python_version",)),
        _package,
    ),
    ZipFormat("torchscript-1.0", "TorchScript archives of torch 1.0 to 1.3 (`model.json`)", (("model.json",),), _json),
)


def read(source: Source, known: zip_reader.Known | None = None) -> Container:
    """Read a zip; raises NotACheckpointError, which names what it is, and MalformedError for a damaged one.

    ``known`` gives the graph of a checkpoint's pickle where that need not be worked out.
    """
    archive = zip_reader.read_whole(source)
    kind = kind_of(archive)
    return zip_reader.read_records(archive, known) if kind is None else kind.read(archive)


def kind_of(archive: Archive) -> ZipFormat | None:
    """The kind of an archive by its records; None for a checkpoint of torch.save, and for what is none of these."""
    for known in ZIPS:
        if any(all(archive.find(name) is not None for name in group) for group in known.records):
            return known
    return None

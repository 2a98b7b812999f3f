"""The formats. Each is registered here with the name of its module, which is imported only when a file may have that
format."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final, cast

from ..base import lazy
from ..base.errors import UnreadableError
from ..base.findings import TWO_FORMATS, Finding
from ..base.records import NamedTuple
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Container, FoundPickle
from ..files.archives import is_address
from ..files.sources import FolderSource, Source
from ..files.tars import is_header

if TYPE_CHECKING:
    from ..files.folders import Folder


class Format(NamedTuple):
    """A single-file format. ``may_be(head)`` tests the first bytes. Only if they fit, ``module`` is imported, which has
    ``sniff(head, source) -> bool`` and ``read(source) -> Container``."""

    name: str
    module: str
    may_be: Callable[[bytes], bool]

    def sniff(self, head: bytes, source: Source) -> bool:
        """Return whether a source has this format."""
        return self.may_be(head) and bool(lazy.module(f"formats.{self.module}").sniff(head, source))

    def read(self, source: Source) -> Container:
        """Read a source; raise MalformedError for a damaged one."""
        return cast(Container, lazy.module(f"formats.{self.module}").read(source))


_TAR: Final = "torch-tar"
#: In a folder, a file of this format is more often data than weights: it is read only if named.
BARE_PICKLE: Final = "bare-pickle"
#: A tar archive may begin with any bytes, so a file may also have another format.
_TWINS: Final = (
    "it is a tar archive and a file of the format {} at once: torch.load and other readers take it for either"
)

#: In the order in which torch.load tests formats (torch/serialization.py, ``load`` and ``_legacy_load``): zip by four
#: bytes, tar with Python's tarfile, then the pickles of the legacy format. It recognises safetensors by file name.
FORMATS: Final[tuple[Format, ...]] = (
    Format("torch-zip", "zip_kinds", lambda head: head.startswith(b"PK")),
    Format(_TAR, "torch.tar_reader", lambda head: is_header(head[:512])),
    Format("torch-legacy", "torch.legacy_reader", lambda head: head[:1] in b"\x80LI\x8a\x8b("),
    Format("gguf", "gguf.reader", lambda head: head.startswith((b"GGUF", b"\xff" * 8))),
    Format("safetensors", "safetensors.reader", bool),
    Format(BARE_PICKLE, "bare_pickle", lambda head: head[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")),
)


class FolderFormat(NamedTuple):
    """A format of several files in a folder. ``module`` has ``sniff(folder, names) -> bool`` and ``read(folder)``.

    ``sniff`` decides by file names where possible; ``by_names`` tells that it opens no weights. ``read`` opens the
    files, and closes them if it raises. The module is imported only if a file name has one of the ``endings``, if
    given.
    """

    name: str
    module: str
    by_names: bool = True
    endings: tuple[str, ...] = ()

    def sniff(self, folder: Folder, names: Collection[str]) -> bool:
        """Return whether a folder with these file names has this format."""
        if self.endings and not any(name.endswith(self.endings) for name in names):
            return False
        return bool(lazy.module(f"formats.{self.module}").sniff(folder, names))

    def read(self, folder: Folder) -> tuple[FolderSource, Container]:
        """Read a folder; raise MalformedError for a damaged one."""
        return cast("tuple[FolderSource, Container]", lazy.module(f"formats.{self.module}").read(folder))


#: The order matters: a DCP folder may also have files of transformers.
FOLDERS: Final[tuple[FolderFormat, ...]] = (
    FolderFormat(
        "dcp",
        "dcp.folder",
        endings=(".distcp", ".metadata", ".metadata.tmp", "latest_checkpointed_iteration.txt", "pytorch_model_fsdp_0"),
    ),
    FolderFormat("dcp-safetensors", "hf.ranks"),
    FolderFormat("hf", "hf.folder"),
    FolderFormat("deepspeed", "deepspeed.folder"),
    FolderFormat("deepspeed-union", "deepspeed.unions"),
    FolderFormat("megatron", "megatron"),
    FolderFormat("parts", "parts", by_names=False, endings=(".pth", ".pt", ".safetensors")),
    FolderFormat("torch-folder", "torch.unpacked"),
    FolderFormat("rank-files", "fsdp.meshes", by_names=False),
)

#: The first bytes that distinguish all formats (docs/formats.md); tar has its magic bytes at 257.
_HEAD = 1024


def may_be_pattern(path: str) -> bool:
    """Return whether a path may be a pattern of rank files, rather than the name of a file."""
    return bool({"*", "{"} & {*os.path.basename(path)}) and not (is_address(path) or os.path.lexists(path))


def as_folder(path: str | Folder) -> Folder:
    """Return the folder at a path; return a folder unchanged."""
    from ..files.folders import open_folder  # not needed for a file

    return open_folder(path) if isinstance(path, str) else path


def folder_format(path: str | Folder, *, by_names: bool = False) -> FolderFormat | None:
    """Return the format of a folder that is one checkpoint, or None for any other folder or path. With ``by_names``,
    only formats that are recognised without opening weight files are found."""
    folder = as_folder(path)
    try:
        names = folder.names(strict=True)
    except UnreadableError:
        return None
    known_formats = (known for known in FOLDERS if known.by_names or not by_names)
    return next((known for known in known_formats if known.sniff(folder, names)), None)


def read_folder(path: str | Folder) -> tuple[FolderSource, Container] | None:
    """Read a folder in the format that its file names show; return None if it is not one checkpoint. Raises the same
    errors as ``read_container``."""
    folder = as_folder(path)
    known = folder_format(folder)
    return known.read(folder) if known else None


def read_container(source: Source) -> Container:
    """Read a source in the format that its content shows. Raises NotACheckpointError, which names the file's format,
    and MalformedError for a damaged checkpoint."""
    head = source.read(0, _HEAD)
    known = next((known for known in FORMATS if known.sniff(head, source)), None)
    if known is None:
        error: Exception = lazy.module("formats.foreign.identification").explain(head, source)
        raise error
    container = known.read(source)
    if is_header(head[:512]):
        twins = [other.name for other in FORMATS if other.name != _TAR and other.sniff(head, source)]
        container.problems.extend(Finding(TWO_FORMATS, "error", _TWINS.format(name), refused=True) for name in twins)
    return container


def carried_pickles(checkpoint: Checkpoint) -> Iterable[FoundPickle]:
    """Return the pickles carried in tensors, and the metadata configuration that runs code."""
    texts, tensors = checkpoint.container.held_texts(), checkpoint.survey.byte_tensors()
    if next(iter(texts), None) is None and next(tensors, None) is None:
        return ()  # most checkpoints have neither, and import nothing here
    found: Iterable[FoundPickle] = lazy.module("formats.search.carried").carried_pickles(checkpoint)
    return found

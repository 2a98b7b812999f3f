"""Opening of checkpoints by their paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from shlex import quote
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from ..base.addresses import conceal, is_remote
from ..base.errors import CkptoolError, MalformedError, NotACheckpointError, PickleError, RefusedError
from ..base.steps import as_step, command, salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import is_address, open_any
from ..files.sources import FilePath, MemberSource, Source
from ..pickles.nodes import Global
from . import folder_format, may_be_pattern, read_container, read_folder

if TYPE_CHECKING:
    from ..files.folders import Folder

#: The argument of library functions: an opened checkpoint, or a path.
CheckpointOrPath: TypeAlias = FilePath | Checkpoint

#: xser.save of torch_xla adds this to the file name, for the folder with the tensors.
_TENSORS: Final = ".tensors"

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def open_checkpoint(path: FilePath) -> Checkpoint:
    """Open a checkpoint: its metadata only, whatever its size.

    ``path`` may be a folder that is one checkpoint, the index of one, a pattern of rank files such as ``model_*.pt``,
    an address within a zip or tar archive: ``outer.zip!policy.pth``, or the address of any of these in an object store
    or on a server: ``s3://bucket/model.pth``. The files stay open until ``close()`` or the end of a ``with`` block.
    Raises UnreadableError and its kinds: NotACheckpointError names what else the file is, MalformedError says where it
    is damaged.

    >>> with ckptool.open("training.pth") as checkpoint:
    ...     print(list(checkpoint), checkpoint["epoch"])
    ['epoch', 'best_mIoU', 'state_dict', 'optimizer'] 41
    """
    name = path_text(path)
    if may_be_pattern(name):
        from .fsdp.meshes import read_pattern

        if files := read_pattern(name):
            return Checkpoint.of(name, *files)
    elif _is_index(name):
        from ..files.folders import open_folder
        from .hf import folder as hf_folder

        return Checkpoint.of(name, *hf_folder.read(open_folder(os.path.dirname(name)), name))
    elif (folder := _folder_at(name)) is not None:
        if opened := read_folder(folder):
            return Checkpoint.of(name, *opened)
        from .checkpoint_search import explain_directory

        raise explain_directory(name)
    elif _may_be_split(name):
        from .gguf.reader import read_split

        if split := read_split(name):
            return Checkpoint.of(name, *split)
    elif os.path.isdir(name + _TENSORS):
        from . import joined

        if referenced := joined.read_referenced(name):
            return Checkpoint.of(name, *referenced)
    return checkpoint_of(open_any(name))


def path_text(path: FilePath, otherwise: str = "") -> str:
    """Return a path as text, an address without its secrets; raise TypeError for anything else. ``otherwise`` names
    what else is accepted."""
    if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
        raise TypeError(f"a path (str or os.PathLike){otherwise} is expected, not {type(path).__name__}")
    return conceal(name)


_OR_OPENED: Final = " or a Checkpoint"


def as_checkpoint(source: CheckpointOrPath) -> Checkpoint:
    """Return the checkpoint itself, or open a path. That file is closed once nothing refers to it."""
    return source if isinstance(source, Checkpoint) else open_checkpoint(path_text(source, _OR_OPENED))


@contextmanager
def opened(source: CheckpointOrPath) -> Iterator[Checkpoint]:
    """Yield the checkpoint itself, or open a path and close it afterwards."""
    if isinstance(source, Checkpoint):
        yield source
        return
    with as_checkpoint(source) as checkpoint:
        yield checkpoint


def file_of(source: CheckpointOrPath) -> str:
    """Return the path of a checkpoint that is examined as a file; raise RefusedError if it has unsaved edits."""
    if not isinstance(source, Checkpoint):
        return path_text(source, _OR_OPENED)
    if source.edited:
        message = "it was edited and is not saved, and this is about the file"
        raise RefusedError(message, path=source.path, next="ckptool.save it, and name the new file")
    return source.path


def takes_path(
    edit: Callable[Concatenate[Checkpoint, _Parameters], _Result],
) -> Callable[Concatenate[CheckpointOrPath, _Parameters], _Result]:
    """Make a function of a checkpoint also accept a path."""

    @wraps(edit)
    def with_path(source: CheckpointOrPath, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return edit(as_checkpoint(source), *args, **kwargs)

    return with_path


def in_several_files(path: str) -> bool:
    """Return whether a path leads to a checkpoint in several files: a folder, its index, a pattern, or a file with a
    folder of tensors."""
    several = may_be_pattern(path) or _is_index(path) or os.path.isdir(path + _TENSORS) or _may_be_split(path)
    return several or _folder_at(path) is not None


def _may_be_split(path: str) -> bool:
    """Return whether a path names the first of several GGUF files."""
    return path.endswith(".gguf") and "-00001-of-" in path and not is_address(path)


def _is_index(path: str) -> bool:
    if not path.endswith(".json") or is_address(path) or os.path.isdir(path):
        return False
    from .names.hf import is_index

    return is_index(path)


def _folder_at(path: str) -> Folder | None:
    """Return the folder at a path or address, which may lack its slash; None for a file, or if nothing is there."""
    if not os.path.isdir(path) and (not is_remote(path) or is_address(path)):
        return None
    from ..files.folders import folder_at

    return folder_at(path)


def _part_of_folder(source: Source, error: CkptoolError | None = None) -> NotACheckpointError | None:
    """Return the error for a file that belongs to a folder checkpoint, or None for any other file."""
    folder, name = os.path.split(source.name)
    kind = getattr(error, "kind", "")
    part = name == ".metadata" or name.endswith(".distcp")
    if not (part or kind == "json") or isinstance(source, MemberSource):
        return None  # do not list the folder, which may have many files
    known = folder_format(folder or os.curdir, by_names=True)
    if known is None or (part and known.name != "dcp"):
        return None
    what = "it is a part of a DCP folder" if part else "it is JSON text beside the weights"
    step = command("inspect", folder or os.curdir)
    kind = "dcp-part" if part else kind
    return NotACheckpointError(f"{what}: the folder is the checkpoint", kind=kind, path=source.name, next=step)


def checkpoint_of(source: Source) -> Checkpoint:
    """Return the checkpoint in an open file; close the file if an error is raised."""
    try:
        return read_checkpoint(source)
    except BaseException:
        source.close()
        raise


def read_checkpoint(source: Source) -> Checkpoint:
    """Return the checkpoint in an open file, which stays open if an error is raised."""
    # A .distcp file is a series of zips: read alone, the last one would pass for the whole.
    part = _part_of_folder(source) if source.name.endswith(".distcp") else None
    if part is not None:
        raise part
    try:
        container = read_container(source)
        if any(node.name == "TensorReference" for _, node in container.graph.of_type(Global)):
            from .joined import missing_tensors

            container.problems.extend(missing_tensors(container.graph, source.name))
        return Checkpoint.of(source.name, source, container)
    except CkptoolError as error:
        part = _part_of_folder(source, error)
        if part is not None:
            raise part from error
        error.path = error.path or source.name
        if isinstance(source, MemberSource) and quote(source.name) in error.next and not error.step.commands:
            error.step = as_step(source.unpack)  # no other program knows such an address
        if isinstance(error, MalformedError) and not error.step:
            error.step = as_step("it is damaged: get the file again")
            if not isinstance(error, PickleError):
                error.step += ", or " + salvage_step(source.name)
        raise

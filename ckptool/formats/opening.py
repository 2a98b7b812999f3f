"""Opening of checkpoints by their paths."""

from __future__ import annotations

import os
from shlex import quote
from typing import TypeAlias

from ..base.errors import CkptoolError, MalformedError, NotACheckpointError, PickleError
from ..base.steps import as_step, command, salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import is_address, open_any
from ..files.sources import FilePath, FileSource, MemberSource
from . import folder_format, read_container, read_folder


def open_checkpoint(path: FilePath) -> Checkpoint:
    """Open a checkpoint: its metadata only, whatever its size.

    ``path`` may be a folder that is one checkpoint, the index of one, or an address within a zip or tar archive:
    ``outer.zip!policy.pth``. The files stay open until ``close()`` or the end of a ``with`` block. Raises
    UnreadableError and its kinds: NotACheckpointError names what else the file is, MalformedError says where it is
    damaged.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        if opened := read_folder(name):
            return Checkpoint.of(name, *opened)
        from .checkpoint_search import explain_directory

        raise explain_directory(name)
    if in_several_files(name):
        from .hf import folder as hf_folder

        return Checkpoint.of(name, *hf_folder.read(name))
    return checkpoint_of(open_any(name))


def in_several_files(path: str) -> bool:
    """Return whether a path is that of a checkpoint in several files: a folder, or the index of one."""
    if os.path.isdir(path):
        return True
    if not path.endswith(".json") or is_address(path):
        return False
    from .hf.files import is_index

    return is_index(path)


_File: TypeAlias = FileSource | MemberSource


def _part_of_folder(source: _File, error: CkptoolError | None = None) -> NotACheckpointError | None:
    """Return the error for a file of a folder that is a checkpoint as a whole; None for any other file."""
    folder, name = os.path.split(source.name)
    known = folder_format(folder or os.curdir) if isinstance(source, FileSource) else None
    if known is None:
        return None
    kind = getattr(error, "kind", "")
    if known.name == "dcp" and (name == ".metadata" or name.endswith(".distcp")):
        kind = "dcp-part"
        words = "the index of its tensors" if name == ".metadata" else "tensors without their names"
        what = f"it is a part of a DCP folder, {words}: the folder is the checkpoint"
    elif kind == "json":
        from .hf.files import side_files

        words = next((f", {words}" for _, words in side_files([name])), "")
        what = f"it is JSON text{words}, not the weights: they are in the same folder"
    else:
        return None
    step = command("inspect", folder or os.curdir)
    return NotACheckpointError(what, kind=kind, path=source.name, next=step)


def checkpoint_of(source: _File) -> Checkpoint:
    """Return the checkpoint in an open file, which is closed if there is none."""
    # A part of a DCP folder is a series of zips: read alone, the last of them would pass for the whole.
    part = _part_of_folder(source) if source.name.endswith(".distcp") else None
    if part is not None:
        source.close()
        raise part
    try:
        return Checkpoint.of(source.name, source, read_container(source))
    except CkptoolError as error:
        source.close()
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
    except BaseException:
        source.close()
        raise

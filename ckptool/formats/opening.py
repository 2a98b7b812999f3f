"""From a path to a checkpoint."""

from __future__ import annotations

import os
from shlex import quote

from ..base.errors import CkptoolError, MalformedError, NotACheckpointError, PickleError
from ..base.text import argument, salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import is_address, open_any
from ..files.sources import ContainedSource, FilePath, FileSource
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
        found = read_folder(name)
        if found is None:
            from .checkpoint_search import explain_directory

            raise explain_directory(name)
        return Checkpoint.of(name, *found)
    if in_several_files(name):
        from .hf import folder as hf_folder

        return Checkpoint.of(name, *hf_folder.read(name))
    return checkpoint_of(open_any(name))


def in_several_files(path: str) -> bool:
    """Does the path name a checkpoint in several files: a folder, or the index of one?"""
    if os.path.isdir(path):
        return True
    if not path.endswith(".json") or is_address(path):
        return False
    from .hf.files import is_index

    return is_index(path)


def _part_of_folder(
    source: FileSource | ContainedSource, error: CkptoolError | None = None
) -> NotACheckpointError | None:
    """The error for a file that belongs to a folder that is a checkpoint; None for any other."""
    folder, name = os.path.split(source.name)
    known = folder_format(folder or os.curdir) if isinstance(source, FileSource) else None
    if known is None:
        return None
    kind = getattr(error, "kind", "")
    if known.name == "dcp" and (name == ".metadata" or name.endswith(".distcp")):
        kind = "dcp-part"
        words = "what says which tensors are where" if name == ".metadata" else "tensors without their names"
        what = f"it is a part of a DCP folder, {words}: the folder is the checkpoint"
    elif kind == "json":
        from .hf.files import side_files

        words = next((f", {words}" for _, words in side_files([name])), "")
        what = f"it is JSON text{words}, not the weights: they are in the same folder"
    else:
        return None
    step = f"ckptool inspect {argument(folder or os.curdir)}"
    return NotACheckpointError(what, kind=kind, path=source.name, next=step)


def checkpoint_of(source: FileSource | ContainedSource) -> Checkpoint:
    """The checkpoint in an open file, which is closed when there is none."""
    # A part of a DCP folder is zips one behind another: alone, the last of them would be the whole.
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
        if isinstance(source, ContainedSource) and quote(source.name) in error.next:
            # No other program knows such an address.
            error.next = error.next if error.next.startswith("ckptool ") else source.unpack
        if isinstance(error, MalformedError) and not error.next:
            error.next = "it is damaged: get the file again"
            if not isinstance(error, PickleError):
                error.next += f", or {salvage_step(source.name)}"
        raise
    except BaseException:
        source.close()
        raise

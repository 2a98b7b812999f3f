"""Make the files plain that lie beside the weights of a folder: random states, optimizers, arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final

from ...base.addresses import is_remote
from ...base.errors import CkptoolError
from ...base.suffixes import CHECKPOINTS, PICKLES
from ...checkpoint.checkpoint import Change, Checkpoint
from ...files.sources import FolderSource, Plan
from ...files.write.copying import stream_pieces
from ...formats.opening import open_checkpoint
from ...formats.planning import plan_of
from ...safety.storages import storage_flaws
from ...safety.weights_only import weights_only

#: The largest file, in bytes, that is rewritten: its new bytes are kept in memory until the folder is written.
_LARGEST: Final = 64 << 20


def refused_companions(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the paths of the files beside the weights that ``torch.load(path)`` refuses. Nothing is yielded for files
    that are no checkpoints.
    """
    source = checkpoint.source
    for path in source.beside if isinstance(source, FolderSource) else ():
        try:
            if is_remote(path) and not path.endswith((*CHECKPOINTS, *PICKLES)):
                continue  # each costs requests, and texts are many
            if not is_remote(path) and not 0 < os.path.getsize(path) <= _LARGEST:
                continue
            with open_checkpoint(path) as opened:
                small = opened.pickled and opened.source.size <= _LARGEST
                if small and weights_only(opened, storage_flaws(opened)).blockers:
                    yield path
        except (CkptoolError, OSError):
            continue


def with_plain_companions(checkpoint: Checkpoint, edit: Callable[[Checkpoint], Checkpoint]) -> Checkpoint:
    """Return a folder in which ``edit`` made the files plain that torch refuses; files that it refuses stay."""
    changed = dict(checkpoint.companions)
    changes = []
    for path in refused_companions(checkpoint):
        name = os.path.basename(path)
        try:
            with open_checkpoint(path) as opened:
                edited = edit(opened)
                changed[name] = content(edited)
        except CkptoolError:
            continue
        changes += [change._replace(path=f"{name}: {change.path}".rstrip(": ")) for change in edited.changes]
    if not changes:
        return checkpoint
    changes.append(Change("sanitize", "", len(changed), 0, "files beside the weights are rewritten"))
    return checkpoint.replace(companions=changed, changes=(*checkpoint.changes, *changes))


def content(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a small output."""
    planned, _ = plan_of(checkpoint)
    assert isinstance(planned, Plan)
    data = bytearray()
    stream_pieces(planned, data.extend)
    return bytes(data)

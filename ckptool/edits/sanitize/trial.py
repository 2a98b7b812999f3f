"""Find out whether ``sanitize`` makes a checkpoint loadable, and make the files beside the weights plain."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from ...base.addresses import is_remote
from ...base.errors import CkptoolError
from ...base.steps import AnyStep, Step, command, suggested_output
from ...base.suffixes import CHECKPOINTS, PICKLES
from ...checkpoint.checkpoint import Change, Checkpoint, away
from ...files.sources import FolderSource, Piece, Plan, Span
from ...formats.opening import open_checkpoint
from ...formats.planning import plan_of
from ...safety.storages import storage_flaws
from ...safety.weights_only import weights_only
from .sanitizer import sanitize

#: Maximum objects in a pickle for a trial, which takes as long as the edit.
_MOST: Final = 100_000


def options_that_work(checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the flags of ``sanitize`` that make plain ``torch.load(path)`` accept it, or None if none do."""
    stopped = any(problem.blocks_edits or problem.ambiguous for problem in checkpoint.container.problems)
    if stopped or len(checkpoint.graph.nodes) > _MOST:
        return None
    modules = bool(checkpoint.survey.modules)
    for drop_unknown in (False, True):
        with suppress(CkptoolError):
            sanitize(checkpoint, as_state_dict=modules, drop_unknown=drop_unknown)
            flags = {"as_state_dict": modules, "drop_unknown": drop_unknown}
            return tuple(name for name, wanted in flags.items() if wanted)
    return None


def loadable(checkpoint: Checkpoint) -> bool:
    """Return whether ``torch.load(weights_only=True)`` accepts the objects in a checkpoint."""
    return not checkpoint.pickled or not weights_only(checkpoint, storage_flaws(checkpoint)).blockers


def loadable_step(checkpoint: Checkpoint, more: Sequence[Step] = (), extension: str = "") -> AnyStep:
    """Return the command after which plain ``torch.load(path)`` works without a GPU, or "", with ``more`` settings."""
    options = options_that_work(checkpoint)
    if options is None:
        return ""
    path, moved = checkpoint.path, away(checkpoint)
    output = suggested_output(path, "loadable.cpu" if moved else "loadable", extension)
    if not (moved or more):
        return command("sanitize", path, output=output, steps=map(Step, options))
    cpu = [Step("to", "cpu")] if moved else []
    return command("edit", path, output=output, steps=[*map(Step, ("sanitize", *options)), *cpu, *more])


# -- files beside the weights of a folder: random states, optimizers, arguments

#: The largest file, in bytes, that is rewritten: its new bytes are kept in memory until the folder is written.
_LARGEST: Final = 64 << 20


def refused_companions(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the paths of the files beside the weights that are checkpoints and that ``torch.load(path)`` refuses."""
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
    return b"".join(chunk for piece in planned.pieces for chunk in _chunks(piece))


def _chunks(piece: Piece) -> Iterator[bytes]:
    if isinstance(piece, bytes):
        yield piece
    elif isinstance(piece, Span):
        yield piece.source.read(piece.offset, piece.size)
    else:
        yield from piece.chunks()

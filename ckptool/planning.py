"""From an edited checkpoint to the plan of its file: the same file with another pickle, or a file laid out anew."""

from __future__ import annotations

import os
from shlex import quote
from typing import Final, NamedTuple

from .checkpoint import AMBIGUOUS, CUT, UNEDITABLE, Checkpoint, Target
from .edits.prune import used_storages
from .errors import MalformedError, RefusedError
from .human import salvage_step
from .outputs import dcp, programs, safetensors, torch_legacy, torch_zip
from .outputs.proof import codec_is_exact, verified_pickle
from .programs import program_of
from .source import Appending, Files, FolderSource, Plan, Span
from .tensors import TensorReader

__all__ = ["InPlace", "in_place_of", "plan_of", "refuse_damage"]


def plan_of(checkpoint: Checkpoint) -> tuple[Plan | Files, bool]:
    """The output file or folder of a checkpoint, and whether its pickle is proven byte-exact (see ``verified_pickle``).

    Raises MalformedError for a damaged file, RefusedError where something would be lost.
    """
    if not checkpoint.edited and not checkpoint.changes:
        return _as_it_is(checkpoint), True
    refuse_damage(checkpoint)
    program = program_of(checkpoint)
    if program is not None and checkpoint.edited and checkpoint.target is None:
        return programs.plan(checkpoint, program)
    target = checkpoint.target or Target(checkpoint.format if checkpoint.format in _OWN else "")
    if checkpoint.edited and target.format == "safetensors":
        return _safetensors(checkpoint, target), True
    if checkpoint.edited and target.format == "dcp":
        return _dcp(checkpoint), True
    if checkpoint.anew and target.format == "legacy":
        return torch_legacy.plan(checkpoint), codec_is_exact(checkpoint)
    if checkpoint.anew:
        # What is built of a program is new: there is no pickle that it could differ from.
        return torch_zip.plan(checkpoint), program is not None or codec_is_exact(checkpoint)
    if not checkpoint.edited:
        return _as_it_is(checkpoint), True
    data, exact = verified_pickle(checkpoint)
    return checkpoint.container.plan(data), exact


#: Formats that an edit keeps, and that are not a pickle with its storages.
_OWN: Final = frozenset(("safetensors", "dcp"))


def _dcp(checkpoint: Checkpoint) -> Files:
    """A DCP folder; where that was not asked for, RefusedError for what it cannot hold."""
    if checkpoint.target is None:
        losses = dcp.losses(checkpoint)
        if losses:
            step = f"make a torch file of it first: ckptool convert {quote(checkpoint.path)} -o OUT.pth"
            raise RefusedError(f"a DCP folder cannot hold {losses[0].words}", path=checkpoint.path, next=step)
    return dcp.plan(checkpoint)


def _as_it_is(checkpoint: Checkpoint) -> Plan | Files:
    """The input byte for byte, all its files where it is a folder."""
    source = checkpoint.source
    if not isinstance(source, FolderSource):
        return checkpoint.container.plan(None)
    return Files(tuple((os.path.basename(file.name), Plan((Span(file, 0, file.size),))) for file in source.files))


def _safetensors(checkpoint: Checkpoint, target: Target) -> Plan:
    """A safetensors file; where that was not asked for, RefusedError for what it cannot hold."""
    whole = next((item for item in checkpoint.state_dicts if item.path == target.key), None)
    if checkpoint.target is not None and whole is not None:
        return safetensors.plan(checkpoint, whole, tied=target.tied, metadata=target.metadata)
    step = f"make a torch file of it first: ckptool convert {quote(checkpoint.path)} -o OUT.pth"
    if whole is None:
        what = "a safetensors file holds tensors by their names and nothing else"
        raise RefusedError(what, path=checkpoint.path, next=step)
    losses = safetensors.losses(checkpoint, whole)
    if losses:
        what = f"a safetensors file cannot hold {losses[0].words}"
        raise RefusedError(what, path=checkpoint.path, next=step)
    return safetensors.plan(checkpoint, whole, metadata=checkpoint.container.metadata)


class InPlace(NamedTuple):
    """What an edit in place appends, None where nothing changed; ``exact`` as in ``plan_of``.

    ``unused_bytes`` are those of the storages that the edit left out: they stay in the file.
    """

    appending: Appending | None
    exact: bool = True
    unused_bytes: int = 0


def in_place_of(checkpoint: Checkpoint, edit: str, time: int) -> InPlace:
    """The edited checkpoint as a new version behind its own file.

    ``edit`` says what was done and ``time`` when, in seconds since 1970. Raises RefusedError where that takes new bytes
    of tensors, or the format has no room for it.
    """
    if not checkpoint.edited:
        return InPlace(None)
    refuse_damage(checkpoint)
    if checkpoint.added or checkpoint.also:
        what = "the edit makes new bytes of tensors, which only a new file holds"
        raise RefusedError(what, path=checkpoint.path, next="write it with -o")
    program = program_of(checkpoint)
    if program is not None:
        return InPlace(*programs.append(checkpoint, program, edit, time))
    used, before = used_storages(checkpoint.graph), TensorReader(checkpoint.container.graph).storages
    gone = before.keys() - used.keys()
    data, exact = verified_pickle(checkpoint)
    appending = checkpoint.container.append(data, list(used), gone, edit, time)
    return InPlace(appending, exact, sum(before[key].nbytes for key in gone))


def refuse_damage(checkpoint: Checkpoint) -> None:
    # An edit that changed nothing has looked at what may not be what torch reads, too.
    damage = [problem for problem in checkpoint.container.problems if problem.code in UNEDITABLE]
    if damage:
        step = "get a whole copy of the file"
        if damage[0].code == CUT:
            step += f", or {salvage_step(checkpoint.path)}"
        raise MalformedError(damage[0].message, path=checkpoint.path, next=step)
    ambiguous = [problem for problem in checkpoint.container.problems if problem.code in AMBIGUOUS]
    if ambiguous:
        raise RefusedError(f"the archive is ambiguous: {ambiguous[0].message}", path=checkpoint.path)

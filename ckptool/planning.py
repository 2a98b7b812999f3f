"""From an edited checkpoint to the plan of its file: the same file with another pickle, or a file laid out anew."""

from __future__ import annotations

from shlex import quote
from typing import Final, NamedTuple

from .checkpoint import AMBIGUOUS, CUT, INCOMPLETE, UNEDITABLE, Checkpoint, Target
from .edits.prune import used_storages
from .errors import MalformedError, RefusedError
from .formats import hf
from .human import salvage_step
from .outputs import safetensors, shards, torch_zip
from .outputs.proof import codec_is_exact, verified_pickle
from .source import Appending, Files, Plan, Span
from .survey import StateDict
from .tensors import TensorReader

__all__ = ["InPlace", "in_place_of", "makes_folder", "plan_of", "refuse_damage"]


#: What the names of outputs that hold one format end with.
_TORCH: Final = (".pt", ".pth", ".ckpt", ".bin", ".th", ".pth.tar")
_SAFETENSORS: Final = ".safetensors"


def plan_of(checkpoint: Checkpoint, output: str = "") -> tuple[Plan | Files, bool]:
    """The output file or folder of a checkpoint, and whether its pickle is proven byte-exact (see ``verified_pickle``).

    ``output`` is its name where that is known. Raises MalformedError for a damaged file, RefusedError where something
    would be lost, or the name says another format.
    """
    if isinstance(checkpoint.container, hf.HfFolder) and not checkpoint.target:
        return _folder(checkpoint, checkpoint.container, output), True
    if checkpoint.edited and not checkpoint.target:
        _check_name(checkpoint, output)
    if not checkpoint.edited and not checkpoint.changes:
        return checkpoint.container.plan(None), True
    refuse_damage(checkpoint)
    target = checkpoint.target or Target("safetensors" if checkpoint.format == "safetensors" else "")
    if checkpoint.edited and target.shard_size:
        whole = next(item for item in checkpoint.state_dicts if item.path == target.key)
        return shards.plan(checkpoint, whole, target, target.shard_size), True
    if checkpoint.edited and target.format == "safetensors":
        return _safetensors(checkpoint, target), True
    if checkpoint.anew:
        return torch_zip.plan(checkpoint), codec_is_exact(checkpoint)
    if not checkpoint.edited:
        return checkpoint.container.plan(None), True
    data, exact = verified_pickle(checkpoint)
    return checkpoint.container.plan(data), exact


def makes_folder(checkpoint: Checkpoint, output: str) -> bool:
    """Does an edit of it, under this name, write a folder?"""
    return isinstance(checkpoint.container, hf.HfFolder) and not output.endswith((_SAFETENSORS, *_TORCH))


def _check_name(checkpoint: Checkpoint, output: str) -> None:
    """Raise RefusedError for an output whose name says another format than it would have."""
    if checkpoint.pickled and output.endswith(_SAFETENSORS):
        what = "the name says safetensors, and an edit keeps the format: nobody would load it"
    elif not checkpoint.pickled and output.endswith(_TORCH):
        what = "the name says torch, and an edit keeps the format, safetensors: torch.load would not load it"
    else:
        return
    step = f"ckptool convert {quote(checkpoint.path)} -o {quote(output)}, then edit that"
    raise RefusedError(what, path=output, next=step)


def _folder(checkpoint: Checkpoint, folder: hf.HfFolder, output: str) -> Plan | Files:
    """What an edited folder becomes: a folder of shards as large as they were, or a file if the name says so."""
    _check_name(checkpoint, output)
    whole = next((item for item in checkpoint.state_dicts if item.path == ""), None)
    if not makes_folder(checkpoint, output):
        refuse_damage(checkpoint)
        return _safetensors(checkpoint, Target("safetensors")) if not checkpoint.pickled else torch_zip.plan(checkpoint)
    if not checkpoint.edited:
        return Files(tuple((name, Plan((Span(file, 0, file.size),))) for name, file in folder.originals()))
    refuse_damage(checkpoint)
    if whole is None:
        what = "a folder of shards holds tensors by their names and nothing else"
        step = f"make a torch file of it first: ckptool convert {quote(checkpoint.path)} -o OUT.pth"
        raise RefusedError(what, path=checkpoint.path, next=step)
    target = Target("safetensors" if not checkpoint.pickled else "torch", metadata=folder.metadata)
    if not checkpoint.pickled:
        _refuse_losses(checkpoint, whole)
    return shards.plan(checkpoint, whole, target, folder.shard_size or shards.DEFAULT_SIZE)


def _refuse_losses(checkpoint: Checkpoint, whole: StateDict) -> None:
    losses = safetensors.losses(checkpoint, whole)
    if losses:
        step = f"make a torch file of it first: ckptool convert {quote(checkpoint.path)} -o OUT.pth"
        raise RefusedError(f"safetensors cannot hold {losses[0].words}", path=checkpoint.path, next=step)


def _safetensors(checkpoint: Checkpoint, target: Target) -> Plan:
    """A safetensors file; where that was not asked for, RefusedError for what it cannot hold."""
    whole = next((item for item in checkpoint.state_dicts if item.path == target.key), None)
    if checkpoint.target is not None and whole is not None:
        return safetensors.plan(checkpoint, whole, tied=target.tied, metadata=target.metadata)
    step = f"make a torch file of it first: ckptool convert {quote(checkpoint.path)} -o OUT.pth"
    if whole is None:
        what = "a safetensors file holds tensors by their names and nothing else"
        raise RefusedError(what, path=checkpoint.path, next=step)
    _refuse_losses(checkpoint, whole)
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
        if damage[0].code == INCOMPLETE:
            step = "get the files again that are missing or damaged"
        if damage[0].code == CUT:
            step += f", or {salvage_step(checkpoint.path)}"
        raise MalformedError(damage[0].message, path=checkpoint.path, next=step)
    ambiguous = [problem for problem in checkpoint.container.problems if problem.code in AMBIGUOUS]
    if ambiguous:
        raise RefusedError(f"the archive is ambiguous: {ambiguous[0].message}", path=checkpoint.path)

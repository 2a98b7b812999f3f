"""From one format to another: which target is meant, what it cannot hold, and the plan of its files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from .checkpoint import Checkpoint
from .edits.select import selected
from .errors import RefusedError, TargetError
from .human import listed
from .outputs import safetensors, torch_zip
from .outputs.losses import Loss, refuse
from .outputs.safetensors import Tied
from .planning import refuse_damage
from .source import Plan
from .survey import StateDict

__all__ = ["TARGETS", "Converted", "convert", "target_of"]

#: The formats that are written, and the suffixes that mean them.
TARGETS: Final = {
    "torch": (".pt", ".pth", ".ckpt", ".bin", ".th"),
    "safetensors": (".safetensors",),
}


class Converted(NamedTuple):
    """The output as data: its plan, the format, and what it does not hold."""

    plan: Plan
    target: str
    losses: tuple[Loss, ...]


def target_of(path: str, target: str = "") -> str:
    """The format that an output is written in: ``target`` if it is given, else what the suffix of the path says.

    Raises TargetError where neither tells.
    """
    if target:
        return target
    suffix = os.path.splitext(path)[1].lower()
    found = next((name for name, suffixes in TARGETS.items() if suffix in suffixes), "")
    if not found:
        what = f"the suffix {suffix!r} says no format" if suffix else "the name has no suffix that says a format"
        raise TargetError(what, path=path, next=f"say it: --to-format {'|'.join(TARGETS)}")
    return found


def convert(
    checkpoint: Checkpoint,
    target: str,
    *,
    key: str | None = None,
    tied: Tied = "",
    allow: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Converted:
    """The checkpoint in another format.

    ``key`` names the state dict for formats that hold one only. Raises RefusedError where the format cannot hold
    something whose kind is not in ``allow``, and for damaged files.
    """
    refuse_damage(checkpoint)
    if target == "torch":
        if metadata:
            raise TargetError(
                "a file of torch.save has no metadata beside its objects", next="ckptool set PATH KEY=VALUE"
            )
        return Converted(torch_zip.plan(checkpoint), target, ())
    state_dict = _one(checkpoint, key)
    found = safetensors.losses(checkpoint, state_dict, tied)
    refuse(found, allow, checkpoint.path, "safetensors")
    plan = safetensors.plan(checkpoint, state_dict, tied=tied, metadata={"format": "pt", **(metadata or {})})
    return Converted(plan, target, tuple(found))


def _one(checkpoint: Checkpoint, key: str | None) -> StateDict:
    chosen = selected(checkpoint, key)
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        step = f"ckptool inspect {checkpoint.path} says what is in it"
        raise RefusedError("there is no state dict in it", path=checkpoint.path, next=step)
    places = [item.path or "." for item in chosen]
    what = f"there are {len(chosen)} state dicts, and the format holds one"
    raise TargetError(what, path=checkpoint.path, next=f"choose: --key {listed(places)}")

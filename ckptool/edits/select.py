"""Which state dicts an edit is about."""

from __future__ import annotations

from shlex import quote

from ..checkpoint import Checkpoint
from ..errors import TargetError
from ..human import listed
from ..paths import joined, parsed
from ..survey import StateDict
from .places import Place, place

__all__ = ["normal_path", "selected"]


def selected(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """The state dict at the path ``key``, or with None all that are found with high confidence.

    Raises TargetError when there is no state dict at that path; the message lists those there are.
    """
    found = checkpoint.state_dicts
    if key is None:
        return [item for item in found if item.confidence == "high"]
    there = place(checkpoint.graph, [] if key in ("", ".") else parsed(key))
    chosen = [item for item in found if isinstance(there, Place) and item.ref == there.ref]
    if not chosen:
        known = listed([repr(item.path) if item.path else "'.' (the whole file)" for item in found], most=8)
        what = f"no state dict at {key!r}; there is {known}" if found else f"no state dict at {key!r}, nor elsewhere"
        raise TargetError(what, path=checkpoint.path, next=f"ckptool inspect {quote(checkpoint.path)} --tree")
    return chosen


def normal_path(key: str) -> str:
    """The path as the survey spells it; "" and "." are the root."""
    if key in ("", "."):
        return ""
    path = ""
    for step in parsed(key):
        path = joined(path, step.step)
    return path

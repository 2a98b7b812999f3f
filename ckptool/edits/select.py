"""Which state dicts an edit is about."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..errors import TargetError
from ..objects import parse_path, spell_key
from ..survey import StateDict

__all__ = ["selected"]


def selected(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """The state dict at the path ``key``, or with None all that are found with high confidence.

    Raises TargetError when there is no state dict at that path; the message lists those there are.
    """
    found = checkpoint.state_dicts
    if key is None:
        return [item for item in found if item.confidence == "high"]
    path = _normal(key)
    chosen = [item for item in found if item.path == path]
    if not chosen:
        known = ", ".join(repr(item.path) for item in found[:8])
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        what = (
            f"no state dict at {key!r}; there is {known}{more}" if found else f"no state dict at {key!r}, nor anywhere"
        )
        raise TargetError(what, path=checkpoint.path, next=f"ckptool inspect {checkpoint.path} --tree")
    return chosen


def _normal(key: str) -> str:
    """The path as the survey spells it; "" and "." are the root."""
    if key in ("", "."):
        return ""
    path = ""
    for step in parse_path(key):
        path = spell_key(path, step)
    return path

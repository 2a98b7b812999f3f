"""``map_location`` as text, and where it sends each tag: torch's rules, without torch.

Source: ``torch/serialization.py``, ``_get_restore_location``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .errors import TargetError

__all__ = ["MapLocation", "lands_on", "parse_map_location"]

MapLocation: TypeAlias = "str | Mapping[str, str] | None"


def parse_map_location(text: str | None) -> MapLocation:
    """``cpu``, ``cuda:0`` or ``meta`` as they are; ``cuda:1=cuda:0,cuda:2=cpu`` as a dict.

    Raises TargetError for anything else.
    """
    if text is None or not text.strip():
        return None
    if "=" not in text:
        return text.strip()
    pairs = {}
    for part in text.split(","):
        origin, equals, target = (piece.strip() for piece in part.partition("="))
        if not (origin and equals and target):
            raise TargetError(f"{part!r} is no pair of devices", next="write cuda:1=cuda:0,cuda:2=cpu")
        pairs[origin] = target
    return pairs


def lands_on(tag: str, location: MapLocation) -> str:
    """Where torch.load puts a storage with this tag: with a dict, a tag that it lacks stays."""
    if location is None:
        return tag
    return location if isinstance(location, str) else location.get(tag, tag)

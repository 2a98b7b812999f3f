"""``map_location`` as text, and where it sends each tag: torch's rules, without torch.

Source: ``torch/serialization.py``, ``_get_restore_location``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from .errors import TargetError

MapLocation: TypeAlias = "str | Mapping[str, str] | None"


#: Backends that restore tags "name" and "name:index" (torch/serialization.py, ``register_package`` calls), and
#: those that take the place of privateuseone by their own package.
_INDEXED = ("cuda", "xpu", "hpu", "mtia", "privateuseone", "npu", "musa", "mlu", "ipu")
_TARGET = re.compile(rf"(?:cpu|meta|mps|(?:{'|'.join(_INDEXED)})(?::(?:0|[1-9]\d{{0,3}}))?)\Z")


#: Everything that a device was ever called, for telling devices from other texts.
_DEVICE = re.compile(rf"(?:cpu|meta|mps|xla|vulkan|{'|'.join(_INDEXED)})(?::\d{{1,4}})?\Z")


def is_device(text: str) -> bool:
    """Is a text the name of a device, and nothing else?"""
    return _DEVICE.match(text) is not None


def check_target(device: str) -> None:
    """Raise TargetError unless torch can restore this location tag (``_get_restore_location``)."""
    if _TARGET.match(device):
        return
    hint = ""
    kind, number = re.match(r"([a-z]*):?([0-9]*)", device.lower()).groups()  # type: ignore[union-attr]
    guess = f"{kind}:{int(number)}" if number else kind
    if device.lower().startswith("cpu"):
        hint = "write 'cpu'"
    elif guess != device and _TARGET.match(guess):
        hint = f"write {guess!r}"
    elif kind == "gpu":
        hint = f"write 'cuda:{number or 0}'"
    raise TargetError(f"{device!r} is no device that torch could restore", next=hint or "targets look like cpu, cuda:0")


def parse_map_location(text: str | None) -> MapLocation:
    """``cpu``, ``cuda:0`` or ``meta`` as they are; ``cuda:1=cuda:0,cuda:2=cpu`` as a dict.

    Raises TargetError for anything else.
    """
    if text is None or not text.strip():
        return None
    if "=" not in text:
        check_target(text.strip())
        return text.strip()
    pairs = {}
    for part in text.split(","):
        origin, equals, target = (piece.strip() for piece in part.partition("="))
        if not (origin and equals and target):
            raise TargetError(f"{part!r} is no pair of devices", next="write cuda:1=cuda:0,cuda:2=cpu")
        check_target(target)
        pairs[origin] = target
    return pairs


def lands_on(tag: str, location: MapLocation) -> str:
    """Where torch.load puts a storage with this tag: with a dict, a tag that it lacks stays."""
    if location is None:
        return tag
    return location if isinstance(location, str) else location.get(tag, tag)

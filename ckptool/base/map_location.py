"""Parse ``map_location`` and apply it to location tags: torch's rules, without torch.

Source: ``torch/serialization.py``, ``_get_restore_location``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .errors import TargetError
from .lazy import regex

MapLocation: TypeAlias = "str | Mapping[str, str] | None"

#: Backends that restore the tags "name" and "name:index". Source: the ``register_package`` calls in
#: torch/serialization.py, and the packages that replace privateuseone with their own name.
_INDEXED_BACKENDS = ("cuda", "xpu", "hpu", "mtia", "privateuseone", "npu", "musa", "mlu", "ipu")
_RESTORABLE = regex(rf"(?:cpu|meta|mps|(?:{'|'.join(_INDEXED_BACKENDS)})(?::(?:0|[1-9]\d{{0,3}}))?)\Z")
#: Every device name that torch ever had, to tell devices from other strings.
_DEVICE = regex(rf"(?:cpu|meta|mps|xla|vulkan|{'|'.join(_INDEXED_BACKENDS)})(?::\d{{1,4}})?\Z")


def is_device(text: str) -> bool:
    """Return whether a string is exactly the name of a device."""
    return _DEVICE.match(text) is not None


def restorable(device: str) -> bool:
    """Return whether torch can restore this location tag (``_get_restore_location``)."""
    return _RESTORABLE.match(device) is not None


def check_device(device: str) -> None:
    """Raise TargetError unless torch can restore this location tag."""
    if not restorable(device):
        what = f"{device!r} is not a device that torch can restore"
        raise TargetError(what, next="targets look like cpu, cuda:0")


def parse_map_location(text: str | None) -> MapLocation:
    """Parse ``cpu``, ``cuda:0`` or ``meta`` into a string, and ``cuda:1=cuda:0,cuda:2=cpu`` into a dict.

    Return None if the text is None or blank. Raises TargetError for anything else.
    """
    if text is None or not text.strip():
        return None
    if "=" not in text:
        check_device(text.strip())
        return text.strip()
    pairs = {}
    for part in text.split(","):
        origin, equals, target = (piece.strip() for piece in part.partition("="))
        if not (origin and equals and target):
            raise TargetError(f"{part!r} is not a pair of devices", next="write cuda:1=cuda:0,cuda:2=cpu")
        check_device(target)
        pairs[origin] = target
    return pairs


def restored_location(tag: str, location: MapLocation) -> str:
    """Return the device on which torch.load puts a storage with this tag.

    A ``location`` of None, or a dict without the tag, leaves the tag unchanged.
    """
    if location is None:
        return tag
    return location if isinstance(location, str) else location.get(tag, tag)

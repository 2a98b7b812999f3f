"""What is wrong with a DCP folder as far as ``.metadata`` and the sizes of its files tell: each piece by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Protocol

from ..human import listed, shown
from .dcp_chunks import region_missing, regions_overlapping
from .dcp_metadata import Box, Item, Listed, Metadata, box_text

__all__ = ["Noting", "Place", "is_whole", "usable_items"]

#: Which piece: a name, and its offset in the tensor, None for an object.
Place = tuple[str, "tuple[int, ...] | None"]


class Noting(Protocol):
    """Takes down a problem: code, level, message, and where it is."""

    def __call__(self, code: str, level: str, message: str, where: str = "", offset: int = -1) -> None: ...


def usable_items(read: Metadata, sizes: Mapping[str, int], note: Noting) -> dict[Place, Item]:
    """The items that are in their files, as far as the ``sizes`` of these in bytes tell."""
    usable: dict[Place, Item] = {}
    missing: dict[str, list[str]] = {}
    strange: set[str] = set()
    for item in read.items:
        words = _piece(item, read.listed.get(item.name))
        if item.name not in read.listed:
            note("unlisted-item", "warning", f"{item.place} holds {words}, which .metadata does not list")
        elif not _is_name(item.file):
            if item.file not in strange:
                what = f"{words} is said to be in {shown(item.file)}, outside of the folder: not opened"
                note("outside-path", "error", what, item.file)
            strange.add(item.file)
        elif item.file not in sizes:
            missing.setdefault(item.file, []).append(words)
        elif item.at + item.length > sizes[item.file]:
            size = sizes[item.file]
            what = f"{item.file} has {size:,} bytes, and {words} ends at {item.at + item.length:,}: the file is cut"
            note("short-file", "error", what, item.file, item.at)
        elif item.transforms:
            what = f"{words} in {item.file} went through {listed(list(item.transforms))}: its bytes cannot be read"
            note("transformed-item", "error", what, item.file, item.at)
        elif (item.name, item.offset) in usable:
            note("item-twice", "warning", f"{words} is listed twice; the first counts", item.file, item.at)
        else:
            usable[item.name, item.offset] = item
    for file, pieces in missing.items():
        what = f"{file} is missing, and with it {listed(pieces, most=3)}"
        note("missing-file", "error", what, file)
    _look_for_overlaps(usable, note)
    return usable


def _look_for_overlaps(usable: Mapping[Place, Item], note: Noting) -> None:
    """Items that claim the same bytes: one of them was put in the place of the other."""
    last: dict[str, Item] = {}
    for item in sorted(usable.values(), key=lambda item: (item.file, item.at)):
        before = last.get(item.file)
        if before is not None and before.at + before.length > item.at:
            what = f"{item.file}: {before.name!r} and {item.name!r} overlap at byte {item.at:,}"
            note("item-overlap", "error", what, item.file, item.at)
        last[item.file] = item


def is_whole(
    name: str, value: Listed, usable: Mapping[Place, Item], mentioned: Collection[Place], note: Noting
) -> bool:
    """Are all pieces of a tensor there, as far as sizes tell? Says what is wrong."""
    good: list[Box] = []
    for box in value.chunks:
        outside = any(at + size > whole for at, size, whole in zip(*box, value.shape))
        if outside:
            what = f"{name}: the piece {box_text(box)} lies outside of the tensor, {list(value.shape)}"
            note("chunk-bounds", "error", what, name)
        else:
            good.append(box)
    twice = regions_overlapping(good)
    if twice:
        what = f"{name}: the pieces {box_text(twice[0])} and {box_text(twice[1])} overlap"
        note("chunk-overlap", "error", what, name)
        return False
    hole = region_missing(value.shape, good) if value.shape or not good else None
    if hole and prod(value.shape):
        note("chunk-hole", "error", f"{name}: no piece of .metadata has {box_text(hole)}", name)
    lost = [box for box in good if (name, box[0]) not in usable]
    for box in lost:
        if (name, box[0]) not in mentioned and 0 not in box[1]:
            what = f"{name}: .metadata does not say where the piece {box_text(box)} is"
            note("missing-item", "error", what, name)
    return not hole and len(good) == len(value.chunks) and all(0 in box[1] for box in lost)


def _is_name(text: str) -> bool:
    """Is it the name of a file in the folder, and no way out of it?"""
    return bool(text) and text not in (".", "..") and not any(mark in text for mark in "/\\\0:")


def _piece(item: Item, value: Listed | None) -> str:
    """What an item is, in words: a name, and which part of the tensor."""
    if value is None or item.offset is None or len(value.chunks) <= 1:
        return item.name
    box = next((box for box in value.chunks if box[0] == item.offset), None)
    return f"{item.name} {box_text(box)}" if box else f"{item.name} at {list(item.offset)}"

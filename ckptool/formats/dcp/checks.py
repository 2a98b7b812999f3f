"""What is wrong with a DCP folder as far as ``.metadata`` and the sizes of its files tell: each piece by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from ...base.text import listed, shown
from ...checkpoint.container import UNCHECKED
from .chunks import region_missing, regions_overlapping
from .metadata import Box, Item, Listed, Metadata, box_text

#: Names of files that are DCP's own.
_OWN: Final = (".distcp", ".metadata", ".tmp")
#: What frameworks put into the folder for themselves.
_BESIDE: Final = {
    "meta.pt": "the rest of a checkpoint of Lightning: loops, callbacks, hyperparameters",
    "common.pt": "what is no tensor in a checkpoint of Megatron-LM: arguments, iteration",
    "metadata.json": "which format of Megatron-LM it is",
}

#: Which piece: a name, and its offset in the tensor, None for an object.
Place = tuple[str, "tuple[int, ...] | None"]


def others(names: Iterable[str]) -> dict[str, str]:
    """The files of a folder that are not DCP's own, each with what it is, "" where that is not known."""
    return {name: _BESIDE.get(name, "") for name in names if not name.endswith(_OWN)}


class Noting(Protocol):
    """Takes down a problem: code, level, message, and where it is."""

    def __call__(self, code: str, level: str, message: str, where: str = "", offset: int = -1) -> None: ...


class _Sorted(NamedTuple):
    """Items by what is wrong with their file: ``gone`` it is not there, ``cut`` they end beyond it."""

    gone: dict[str, list[Item]]
    cut: dict[str, list[Item]]


def usable_items(
    read: Metadata, sizes: Mapping[str, int], note: Noting, closed: Mapping[str, str] = MappingProxyType({})
) -> dict[Place, Item]:
    """The items that are in their files, as far as the ``sizes`` of these in bytes tell; ``closed`` are the files that
    cannot be opened, with the reason."""
    usable: dict[Place, Item] = {}
    found = _Sorted({}, {})
    strange: set[str] = set()
    pieces = Pieces(read.listed)
    for item in read.items:
        if item.name not in read.listed:
            what = f"{item.place} holds {pieces.words(item)}, which .metadata does not list"
            note("unlisted-item", "warning", what)
        elif not _is_name(item.file):
            if item.file not in strange:
                what = f"{pieces.words(item)} is said to be in {shown(item.file)}, outside of the folder: not opened"
                note("outside-path", "error", what, item.file)
            strange.add(item.file)
        elif item.file not in sizes:
            found.gone.setdefault(item.file, []).append(item)
        elif item.at + item.length > sizes[item.file]:
            found.cut.setdefault(item.file, []).append(item)
        elif item.transforms:
            what = f"{pieces.words(item)} in {item.file} went through {listed(list(item.transforms))}"
            what += ": its bytes cannot be read here; torch.distributed.checkpoint loads it with the same extensions"
            note("transformed-item", "error", what, item.file, item.at)
        elif (item.name, item.offset) in usable:
            what = f"{pieces.words(item)} is listed twice: torch takes the last, another reader the first"
            note("item-twice", "error", what, item.file, item.at)
            usable[item.name, item.offset] = item
        else:
            usable[item.name, item.offset] = item
    _tell_files(read, sizes, closed, found, pieces, note)
    _take_overlaps(usable, note)
    return usable


def _tell_files(
    read: Metadata,
    sizes: Mapping[str, int],
    closed: Mapping[str, str],
    found: _Sorted,
    pieces: Pieces,
    note: Noting,
) -> None:
    """One remark for each file that is not there or cut, however many pieces were in it."""
    for file, items in found.gone.items():
        gone = f"cannot be read: {closed[file]}" if file in closed else "is missing"
        note("missing-file", "error", f"{file} {gone}, and with it {_with(items, pieces)}", file)
    for file in closed.keys() - found.gone.keys():
        note("stray-file", "warning", f"{file} cannot be read: {closed[file]}; .metadata names nothing in it", file)
    if not found.cut:
        return
    ends: dict[str, int] = {}
    for item in read.items:
        ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
    for file, items in found.cut.items():
        what = (
            f"{file} has {sizes[file]:,} bytes, and {pieces.words(items[0])} ends at {items[0].at + items[0].length:,}"
        )
        other = next((name for name in sizes if sizes[name] == ends[file] and ends.get(name) == sizes[file]), "")
        more = f"; {other} is as large as it should be: they may have been swapped" if other else ": the file is cut"
        rest = f", and with it {_with(items[1:], pieces)}" if items[1:] and not other else ""
        note("short-file", "error", what + more + rest, file, items[0].at)


def _with(items: list[Item], pieces: Pieces) -> str:
    """Some pieces by their names, and how many there are more."""
    return listed([pieces.words(item) for item in items[:3]], len(items), most=3)


def _take_overlaps(usable: dict[Place, Item], note: Noting) -> None:
    """Take out items that claim bytes of another: one of the two was put in the place of the other. What is left takes
    no longer than the files are large."""
    last: dict[str, Item] = {}
    for item in sorted(usable.values(), key=lambda item: (item.file, item.at)):
        before = last.get(item.file)
        if before is not None and before.at + before.length > item.at:
            what = f"{item.file}: {before.name!r} and {item.name!r} overlap at byte {item.at:,}"
            note("item-overlap", "error", what, item.file, item.at)
            del usable[item.name, item.offset]
        else:
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
    overlap = regions_overlapping(good)
    if overlap.boxes:
        what = f"{name}: the pieces {box_text(overlap.boxes[0])} and {box_text(overlap.boxes[1])} overlap"
        note("chunk-overlap", "error", what, name)
        return False
    if not overlap.sure:
        note(UNCHECKED, "warning", not_compared(name, len(good)), name)
    hole = region_missing(value.shape, good) if value.shape or not good else None
    if hole and prod(value.shape):
        note("chunk-hole", "error", f"{name}: no piece of .metadata has {box_text(hole)}", name)
    lost = [box for box in good if (name, box[0]) not in usable]
    for box in lost:
        if (name, box[0]) not in mentioned and 0 not in box[1]:
            what = f"{name}: .metadata does not say where the piece {box_text(box)} is"
            note("missing-item", "error", what, name)
    return not hole and len(good) == len(value.chunks) and all(0 in box[1] for box in lost)


def not_compared(name: str, pieces: int) -> str:
    """What is said where it would take too long to find out whether pieces overlap."""
    what = f"{name}: {pieces:,} pieces that no line separates were not all compared"
    return f"{what}: whether they overlap, and which of them counts, is not known"


def _is_name(text: str) -> bool:
    """Is it the name of a file in the folder, and no way out of it?"""
    return bool(text) and text not in (".", "..") and not any(mark in text for mark in "/\\\0:")


class Pieces:
    """Where each piece of a tensor is in it, found by its offset."""

    def __init__(self, tensors: Mapping[str, Listed]) -> None:
        self._listed = tensors
        self._boxes: dict[str, dict[tuple[int, ...], Box]] = {}

    def box(self, item: Item) -> Box | None:
        """The box that .metadata has for an item; None for an object, and where it lists none."""
        value = self._listed.get(item.name)
        if value is None or item.offset is None:
            return None
        boxes = self._boxes.get(item.name)
        if boxes is None:
            # Of two at one place the first counts.
            boxes = self._boxes[item.name] = {box[0]: box for box in reversed(value.chunks)}
        return boxes.get(item.offset)

    def words(self, item: Item) -> str:
        """What an item is: a name, and which part of the tensor."""
        value = self._listed.get(item.name)
        if value is None or item.offset is None or len(value.chunks) <= 1:
            return item.name
        box = self.box(item)
        return f"{item.name} {box_text(box)}" if box else f"{item.name} at {list(item.offset)}"

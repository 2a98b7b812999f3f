"""Check a DCP folder by ``.metadata`` and file sizes; find the problems and the affected pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from ...base.errors import CkptoolError
from ...base.findings import TRANSFORMED
from ...base.text import join_limited, quoted, shown
from ...files import compressed
from ..pieces.boxes import Box, box_text, misfit
from .metadata import Item, Metadata, ValueMetadata

#: Suffixes of DCP's own files.
_OWN: Final = (".distcp", ".metadata", ".tmp")
#: Files that frameworks add to the folder.
_FRAMEWORK_FILES: Final = {
    "meta.pt": "the rest of a checkpoint of Lightning: loops, callbacks, hyperparameters",
    "common.pt": "the values of a Megatron-LM checkpoint that are not tensors: arguments, iteration",
    "metadata.json": "the version of Megatron-LM's format",
}

#: The identity of a piece: a name, and the offset in its tensor (None for an object).
ItemKey = tuple[str, "tuple[int, ...] | None"]


def extra_files(names: Iterable[str]) -> dict[str, str]:
    """Return the files that are not DCP's own with their descriptions, "" for an unknown file."""
    return {name: _FRAMEWORK_FILES.get(name, "") for name in names if not name.endswith(_OWN)}


class AddProblem(Protocol):
    """A function that adds a problem: code, level, message, and where it is."""

    def __call__(self, code: str, level: str, message: str, where: str = "", offset: int = -1) -> None: ...


def usable_items(
    metadata: Metadata,
    sizes: Mapping[str, int],
    note: AddProblem,
    closed: Mapping[str, CkptoolError] = MappingProxyType({}),
) -> dict[ItemKey, Item]:
    """Return the items that are within their files, in file order; report all others. ``sizes`` are the file sizes in
    bytes. ``closed`` has the files that cannot be opened, with the errors."""
    usable: dict[ItemKey, Item] = {}
    missing: dict[str, list[Item]] = {}
    cut: dict[str, list[Item]] = {}
    outside: set[str] = set()
    named: dict[str, bool] = {}
    folders = {folder for name in (*sizes, *closed) for folder, slash, _ in (name.partition("/"),) if slash}
    pieces = Pieces(metadata.values)
    for item in metadata.items:
        if item.name not in metadata.values:
            note("unlisted-item", "warning", f"{item.place} holds {pieces.name(item)}, which .metadata does not list")
        elif not (named.get(item.file) or named.setdefault(item.file, _is_name(item.file, folders))):
            if item.file not in outside:
                what = f"{pieces.name(item)} is said to be in {quoted(item.file)}, outside of the folder: not opened"
                note("outside-path", "error", what, item.file)
            outside.add(item.file)
        elif item.file not in sizes:
            missing.setdefault(item.file, []).append(item)
        elif item.at + item.length > sizes[item.file]:
            cut.setdefault(item.file, []).append(item)
        elif item.transforms and (why := _unread(item.transforms)):
            what = f"{pieces.name(item)} in {item.file} went through {join_limited(list(item.transforms))}: {why}"
            note(TRANSFORMED, "error", what, item.file, item.at)
        else:
            if (item.name, item.offset) in usable:
                what = f"{pieces.name(item)} is listed twice: torch takes the last, another reader the first"
                note("item-twice", "error", what, item.file, item.at)
            usable[item.name, item.offset] = item
    _note_missing_files(missing, closed, pieces, note)
    if cut:
        _note_cut_files(metadata, sizes, cut, pieces, note)
    return _without_overlaps(usable, note)


def _unread(transforms: tuple[str, ...]) -> str:
    """Return why bytes that went through these extensions cannot be read, or "" if they can."""
    if not is_zstd(transforms):
        return "its bytes cannot be read here; torch.distributed.checkpoint loads it with the same extensions"
    return "" if compressed.available() else f"reading it takes a package that is not installed: {compressed.INSTALL}"


def is_zstd(transforms: tuple[str, ...]) -> bool:
    """Return whether an item is compressed with zstd, by ``ZStandard`` of
    torch/distributed/checkpoint/_extension.py."""
    name, _, version = transforms[0].partition("/") if len(transforms) == 1 else ("", "", "")
    return name == "stream.zstd" and version.partition(".")[0] == "1"


def _note_missing_files(
    missing: Mapping[str, list[Item]], closed: Mapping[str, CkptoolError], pieces: Pieces, note: AddProblem
) -> None:
    for file, items in missing.items():
        state = f"cannot be read: {closed[file].what}" if file in closed else "is missing"
        note("missing-file", "error", f"{file} {state}, and with it {pieces.names(items)}", file)
    for file in closed.keys() - missing.keys():
        note(
            "stray-file", "warning", f"{file} cannot be read: {closed[file].what}; .metadata names nothing in it", file
        )


def _note_cut_files(
    metadata: Metadata, sizes: Mapping[str, int], cut: Mapping[str, list[Item]], pieces: Pieces, note: AddProblem
) -> None:
    ends: dict[str, int] = {}
    for item in metadata.items:
        ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
    for file, items in cut.items():
        end = items[0].at + items[0].length
        what = f"{file} has {sizes[file]:,} bytes, and {pieces.name(items[0])} ends at {end:,}"
        other = next((name for name in sizes if sizes[name] == ends[file] and ends.get(name) == sizes[file]), "")
        what += (
            f"; {other} is as large as it should be: they may have been swapped, and renaming them is enough"
            if other
            else ": the file is cut"
        )
        what += f", and with it {pieces.names(items[1:])}" if items[1:] and not other else ""
        note("short-file", "error", what, file, items[0].at)


def _without_overlaps(usable: Mapping[ItemKey, Item], note: AddProblem) -> dict[ItemKey, Item]:
    """Return the items in file order, without items that overlap the one before, so that the size of the files bounds
    the time to read them all."""
    # Sort twice by an attribute rather than once by a tuple: there may be a million items.
    ordered = sorted(usable, key=lambda key: usable[key].at)
    ordered.sort(key=lambda key: usable[key].file)
    kept: dict[ItemKey, Item] = {}
    before: Item | None = None
    for key in ordered:
        item = usable[key]
        if before is not None and before.file == item.file and before.at + before.length > item.at:
            what = f"{item.file}: {before.name!r} and {item.name!r} overlap at byte {item.at:,}"
            note("item-overlap", "error", what, item.file, item.at)
        else:
            kept[key] = before = item
    return kept


def is_whole(
    name: str,
    value: ValueMetadata,
    usable: Mapping[ItemKey, Item],
    mentioned: Callable[[], Collection[ItemKey]],
    note: AddProblem,
) -> bool:
    """Return whether all pieces of a tensor exist, judging by sizes; report each missing piece. ``mentioned`` returns
    the items that .metadata locates."""
    if len(value.chunks) == 1:
        ((offset, sizes),) = value.chunks
        if sizes == value.shape and not any(offset) and (name, offset) in usable:
            return True  # one piece holds the whole tensor
    inside: list[Box] = []
    for box in value.chunks:
        if any(at + size > whole for at, size, whole in zip(*box, value.shape)):
            what = f"{name}: the piece {box_text(box)} lies outside of the tensor, {list(value.shape)}"
            note("chunk-bounds", "error", what, name)
        else:
            inside.append(box)
    odd = misfit(value.shape, inside)
    if odd and odd.boxes:
        note("chunk-overlap", "error", f"{name}: the pieces {' and '.join(map(box_text, odd.boxes))} overlap", name)
        return False
    if odd:
        note("chunk-hole", "error", f"{name}: no piece of .metadata has {box_text(odd.place)}", name)
    lost = [box for box in inside if (name, box[0]) not in usable]
    for box in lost:
        if (name, box[0]) not in mentioned() and 0 not in box[1]:
            what = f"{name}: .metadata does not say where the piece {box_text(box)} is"
            note("missing-item", "error", what, name)
    return not odd and len(inside) == len(value.chunks) and all(0 in box[1] for box in lost)


def _is_name(text: str, folders: Collection[str] = ()) -> bool:
    folder, slash, name = text.partition("/")
    text = name if slash and folder in folders else text
    return text not in ("", ".", "..") and not any(character in text for character in "/\\\0:")


class Pieces:
    """The boxes of each tensor's pieces, found by their offsets."""

    def __init__(self, values: Mapping[str, ValueMetadata]) -> None:
        self._values = values
        self._boxes: dict[str, dict[tuple[int, ...], Box]] = {}

    def box(self, item: Item) -> Box | None:
        """Return the box that .metadata has for an item; None for an object, or if it lists none."""
        value = self._values.get(item.name)
        if value is None or item.offset is None:
            return None
        boxes = self._boxes.get(item.name)
        if boxes is None:
            # Of two boxes at one offset, the first counts.
            boxes = self._boxes[item.name] = {box[0]: box for box in reversed(value.chunks)}
        return boxes.get(item.offset)

    def name(self, item: Item) -> str:
        """Return the name of an item; for one of several pieces, also its box."""
        value = self._values.get(item.name)
        if value is None or item.offset is None or len(value.chunks) <= 1:
            return item.name
        box = self.box(item)
        return f"{item.name} {box_text(box)}" if box else f"{item.name} at {list(item.offset)}"

    def names(self, items: list[Item]) -> str:
        """Return the names of the items: where lists are shortened, of the first three."""
        return join_limited([self.name(item) for item in items[: shown(3)]], len(items), most=3)

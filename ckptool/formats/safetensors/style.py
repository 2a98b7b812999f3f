"""How a writer spells the header of a safetensors file: an edit keeps the spelling of other writers than the library.

The library writes compact JSON with the metadata first, and pads it with blanks to a multiple of 8 bytes. Others write
spaces, null for no metadata, tensors in an order other than that of their bytes, or no padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...files.sources import Source
from .header import MAX_HEADER

METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 8
_SEPARATORS: Final = ((",", ":"), (", ", ": "), (",", ": "))


class HeaderStyle(NamedTuple):
    """The spelling of a header.

    ``order`` has the places of the tensors in the file, in the order of their names in the JSON, () for that order
    itself. ``metadata_at`` is the place of the metadata among the names; ``empty`` is what stands there without texts,
    "" for no entry. ``fields`` are the names of the values of a tensor, in order; ``aligned`` says that blanks fill the
    header up to a multiple of 8 bytes.
    """

    separators: tuple[str, str] = _SEPARATORS[0]
    is_ascii: bool = False
    order: tuple[int, ...] = ()
    metadata_at: int = 0
    empty: str = ""
    fields: tuple[str, ...] = ("dtype", "shape", "data_offsets")
    aligned: bool = True

    def text(self, tensors: Sequence[tuple[str, Mapping[str, Any]]], texts: Mapping[str, str]) -> bytes:
        """Return the header for tensors in the order of their bytes; raise UnicodeEncodeError for half a character."""
        order = self.order if len(self.order) == len(tensors) else range(len(tensors))
        items = [(name, {field: entry[field] for field in self.fields}) for name, entry in (tensors[n] for n in order)]
        pairs: list[tuple[str, Any]] = list(items)
        if texts or self.empty:
            pairs.insert(self.metadata_at, (METADATA, dict(texts) if texts or self.empty == "{}" else None))
        text = json.dumps(dict(pairs), ensure_ascii=self.is_ascii, separators=self.separators).encode()
        if self.aligned:
            return text + b" " * (-len(text) % _ALIGNMENT)
        # A length that looks aligned gets a blank, by which the next reader knows that it is not.
        return text if len(text) % _ALIGNMENT else text + b" "


#: How the library writes.
LIBRARY: Final = HeaderStyle()


def style_of(source: Source) -> HeaderStyle:
    """Return the style in which the header of a valid file is spelled; that of the library for any other spelling."""
    size = int.from_bytes(source.read(0, 8), "little")
    if size > MAX_HEADER:
        return LIBRARY
    raw = source.read(8, size)
    fields: dict[str, Any] = json.loads(raw)
    metadata, at = fields.get(METADATA), list(fields).index(METADATA) if METADATA in fields else 0
    spelled = "" if METADATA not in fields else "null" if metadata is None else "{}" if not metadata else ""
    named = [(name, entry) for name, entry in fields.items() if name != METADATA]
    places = sorted(range(len(named)), key=lambda number: tuple(named[number][1]["data_offsets"]))
    tensors = [named[number] for number in places]
    order = [0] * len(places)
    for place, number in enumerate(places):
        order[number] = place
    keys = tuple(named[0][1]) if named else LIBRARY.fields
    known = LIBRARY._replace(metadata_at=at, empty=spelled, order=tuple(order), fields=keys)
    if any(len(entry) != len(keys) or {*entry} != {*keys} for _, entry in named):
        return LIBRARY
    for separators in _SEPARATORS:
        for is_ascii in (False, True):
            for aligned in (True, False):
                style = known._replace(separators=separators, is_ascii=is_ascii, aligned=aligned)
                if style.text(tensors, metadata or {}) == raw:
                    return style
    return LIBRARY

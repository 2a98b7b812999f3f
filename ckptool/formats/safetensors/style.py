"""The spelling of a safetensors header. An edit keeps the spelling of other writers.

The library writes compact JSON with the metadata first, padded with spaces to a multiple of 8 bytes. Other writers add
spaces, write null without metadata, list tensors out of byte order, or do not pad.
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

    - ``order``: the place in the file of each tensor, in JSON order; () if both orders are equal.
    - ``metadata_at``: the place of the metadata among the names.
    - ``empty``: the spelling of missing metadata, "" for no entry.
    - ``fields``: the field names of a tensor, in order.
    - ``aligned``: spaces pad the header to a multiple of 8 bytes.
    """

    separators: tuple[str, str] = _SEPARATORS[0]
    is_ascii: bool = False
    order: tuple[int, ...] = ()
    metadata_at: int = 0
    empty: str = ""
    fields: tuple[str, ...] = ("dtype", "shape", "data_offsets")
    aligned: bool = True

    def text(self, tensors: Sequence[tuple[str, Mapping[str, Any]]], texts: Mapping[str, str]) -> bytes:
        """Return the header for tensors in byte order; raise UnicodeEncodeError for half a surrogate pair."""
        order = self.order if len(self.order) == len(tensors) else range(len(tensors))
        items = [(name, {field: entry[field] for field in self.fields}) for name, entry in (tensors[n] for n in order)]
        pairs: list[tuple[str, Any]] = list(items)
        if texts or self.empty:
            pairs.insert(self.metadata_at, (METADATA, dict(texts) if texts or self.empty == "{}" else None))
        text = json.dumps(dict(pairs), ensure_ascii=self.is_ascii, separators=self.separators).encode()
        if self.aligned:
            return text + b" " * (-len(text) % _ALIGNMENT)
        # A length that looks aligned gets a space, so that the next reader sees the header is not aligned.
        return text if len(text) % _ALIGNMENT else text + b" "


#: The spelling of the library.
LIBRARY: Final = HeaderStyle()


def style_of(source: Source) -> HeaderStyle:
    """Return the spelling of a valid file's header, or the library's if no known spelling reproduces it."""
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

"""Recognise a small file that is one pickle of plain data and nothing else, before any search for other content."""

from __future__ import annotations

from typing import Final

from ..files.compressed import compression_of
from ..files.sources import BytesSource, Source
from ..pickles.plain import plain_strings
from ..safety.held_configuration import may_be_configuration
from . import BARE_PICKLE, FORMATS
from .foreign.frameworks import foreign_pickle
from .foreign.identification import explain_before_pickle
from .search.graph_parts import suspects
from .search.inert import active_parts

#: The most bytes of such a file. A larger one is rare, and its search costs little per byte.
_MOST: Final = 1 << 16
#: Endings of files that belong to a folder which is the checkpoint.
_PARTS: Final = (".distcp", ".metadata")
#: The bytes that begin the end record of a zip archive, which may be in any string.
_ZIP_END: Final = b"PK\x05\x06"


def is_plain_pickle(source: Source) -> bool:
    """Return whether a file holds exactly one pickle of plain data, and no program takes it for anything else. Such a
    file has the kind "pickle". Its pickle names nothing, its strings and bytes hold neither pickles nor configuration,
    and the file fits no other format, so a search would find nothing that could run."""
    if source.size > _MOST or source.name.endswith(_PARTS):
        return False
    data = source.read(0, source.size)
    strings = plain_strings(data)
    if strings is None or _ZIP_END in data or may_be_configuration(strings.texts):
        return False
    if any(True for _ in suspects(strings.texts, strings.binary)):
        return False
    name = source.name
    whole, head = BytesSource(data, name), data[:1024]
    if compression_of(head) is not None or active_parts(name, head[:512], whole):
        return False
    if any(known.sniff(head, whole) for known in FORMATS if known.name != BARE_PICKLE):
        return False
    # Without a class, it has no tensors or arrays, so it is not the format BARE_PICKLE either.
    return explain_before_pickle(head, whole) is None and foreign_pickle((), whole) is None

"""The places of a file's tensors in larger tensors, recorded in its safetensors header as ``DCP_SHARDING_INFO``.

Source: torch/distributed/checkpoint/_hf_utils.py; ``filesystem.py`` writes it into every safetensors file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ...base.errors import MalformedError, RefusedError
from ...base.steps import command, suggested_output
from ...base.text import join_limited, quoted

#: Keys of the header's metadata.
SHARDING_INFO: Final = "DCP_SHARDING_INFO"
VERSION: Final = "DCP_VERSION"
_TOO_LARGE: Final = 1 << 62


def saved_offsets(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, tuple[int, ...]]], where: str
) -> dict[str, tuple[int, ...]]:
    """Return each tensor's offset in the larger tensor that it is a piece of, in elements per dimension.

    As in torch, a file without sharding information has whole tensors. Raises MalformedError if the information is
    invalid.
    """
    if SHARDING_INFO not in metadata:
        return {name: (0,) * len(shape) for name, shape in tensors}
    entries = _offsets(metadata[SHARDING_INFO])
    offsets_of = {}
    for name, shape in tensors:
        offsets = entries.get(name)
        valid = isinstance(offsets, list) and len(offsets) == len(shape)
        if offsets is None or not valid or not all(type(at) is int and 0 <= at < _TOO_LARGE for at in offsets):
            raise MalformedError(f"{SHARDING_INFO} does not say where {quoted(name)} belongs", where=where)
        offsets_of[name] = tuple(offsets)
    return offsets_of


def whole_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the metadata, without sharding information that only has zero offsets.

    Such information must name every tensor of the file, and no reader needs it.
    """
    return without_sharding(metadata) if SHARDING_INFO in metadata and not is_piece(metadata) else metadata


def without_sharding(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the metadata without the sharding information and its version."""
    return {name: text for name, text in metadata.items() if name not in (SHARDING_INFO, VERSION)}


def common_metadata(headers: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Return the metadata that all files share."""
    first, *others = headers
    return {name: text for name, text in first.items() if all(header.get(name) == text for header in others)}


def is_piece(metadata: Mapping[str, str]) -> bool:
    """Return whether some tensor of the file begins within a larger one, or its place is invalid.

    Always False for a file of the first rank.
    """
    if SHARDING_INFO not in metadata:
        return False
    try:
        entries = _offsets(metadata[SHARDING_INFO])
    except MalformedError:
        return True
    return not all(isinstance(offsets, list) and not any(offsets) for offsets in entries.values())


def metadata_for(metadata: Mapping[str, str], names: Iterable[str], path: str) -> Mapping[str, str]:
    """Return the metadata for a file of some of the tensors; raise RefusedError for a tensor whose place is unknown."""
    texts = whole_metadata(metadata)
    if SHARDING_INFO not in texts:
        return texts
    entries = _parse(texts[SHARDING_INFO])
    unknown = [name for name in names if name not in entries]
    if unknown:
        what = f"its tensors are pieces, and {SHARDING_INFO} does not say where {join_limited(unknown, most=3)} belong"
        folder = os.path.dirname(path) or os.curdir
        step = "edit the whole: " + command("convert", folder, output=suggested_output(path, "whole"))
        raise RefusedError(what, path=path, next=step)
    return {**texts, SHARDING_INFO: json.dumps({name: entries[name] for name in names})}


def _offsets(text: str) -> dict[str, Any]:
    """Return the offsets by tensor name, None for a tensor without offsets; raise MalformedError if it is not JSON."""
    entries = _parse(text)
    return {name: entry.get("saved_offsets") if isinstance(entry, dict) else None for name, entry in entries.items()}


def _parse(text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{SHARDING_INFO} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise MalformedError(f"{SHARDING_INFO} is not an object")
    return entries

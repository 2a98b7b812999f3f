"""What a safetensors header says of the places of its tensors in larger ones: ``DCP_SHARDING_INFO``.

Source: torch/distributed/checkpoint/_hf_utils.py; ``filesystem.py`` writes it into every file that it makes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...base.errors import MalformedError, RefusedError
from ...base.text import argument, listed, shown, suggested_output

#: Texts of the header.
PLACES: Final = "DCP_SHARDING_INFO"
VERSION: Final = "DCP_VERSION"
_OFFSETS: Final = "saved_offsets"
_TOO_LARGE: Final = 1 << 62


def saved_offsets(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, tuple[int, ...]]], where: str
) -> dict[str, tuple[int, ...]]:
    """Where each tensor of a file begins in the one that it is a piece of, in elements a dimension.

    Raises MalformedError where that makes no sense. A file that says nothing has whole tensors, as for torch.
    """
    text = metadata.get(PLACES)
    if text is None:
        return {name: (0,) * len(shape) for name, shape in tensors}
    told = _parsed(text)
    found = {}
    for name, shape in tensors:
        one = told.get(name)
        offsets = one.get(_OFFSETS) if isinstance(one, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(shape)
            or not all(type(at) is int and 0 <= at < _TOO_LARGE for at in offsets)
        ):
            raise MalformedError(f"{PLACES} does not say where {shown(name)} belongs", where=where)
        found[name] = tuple(offsets)
    return found


def plain_texts(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """The texts without those of places, where these say of each tensor that it begins where the whole does.

    A reader needs none then; and those that are there must name every tensor, under the name that it has.
    """
    if PLACES not in metadata or is_piece(metadata):
        return metadata
    return {name: text for name, text in metadata.items() if name not in (PLACES, VERSION)}


def is_piece(metadata: Mapping[str, str]) -> bool:
    """Does a tensor of the file begin within a larger one? The first rank's never do."""
    return PLACES in metadata and any(map(any, _told(metadata[PLACES]).values()))


def texts_of(metadata: Mapping[str, str], names: Iterable[str], path: str) -> Mapping[str, str]:
    """The texts for a file of some of the tensors. Raises RefusedError for a tensor whose place is not known."""
    texts = plain_texts(metadata)
    if PLACES not in texts:
        return texts
    told = _parsed(texts[PLACES])
    unknown = [name for name in names if name not in told]
    if unknown:
        what = f"its tensors are pieces, and {PLACES} does not say where {listed(unknown, most=3)} belong"
        folder = os.path.dirname(path) or os.curdir
        step = f"edit the whole: ckptool convert {argument(folder)} -o {argument(suggested_output(path, 'whole'))}"
        raise RefusedError(what, path=path, next=step)
    return {**texts, PLACES: json.dumps({name: told[name] for name in names})}


def _told(text: str) -> dict[str, list[Any]]:
    """The offsets by the names of the tensors; [True] for what makes no sense."""
    try:
        told = _parsed(text)
    except MalformedError:
        return {"": [True]}
    found = {name: one.get(_OFFSETS) if isinstance(one, dict) else None for name, one in told.items()}
    return {name: offsets if isinstance(offsets, list) else [True] for name, offsets in found.items()}


def _parsed(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{PLACES} is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise MalformedError(f"{PLACES} says no places")
    return told

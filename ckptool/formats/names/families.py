"""Name the family of a model by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from ...base.lazy import regex, table

#: Keys that are looked at; every family shows within its first layers.
_LOOKED_AT: Final = 4_000
_NUMBER: Final = regex(r"\.\d+(?=\.)")


def family_of_model(names: Iterable[str]) -> str:
    """Return the family of a model with these keys, such as "GPT-2", or "" if the names show none."""
    text = _NUMBER.sub(".#", "." + "\n.".join(islice(names, _LOOKED_AT)))
    rows = table("formats/names/families")["families"]
    return next((family for family, *parts in rows if all(part in text for part in parts)), "")

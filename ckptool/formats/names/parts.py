"""Names of files that are one part of a larger checkpoint.

Sources: Meta's llama (``consolidated.NN.pth``), torchtune (``FormattedCheckpointFiles`` and ``hf_model_NNNN_E.pt``),
DeepSeek-V3 (``inference/convert.py``), nanotron (``serialize/utils.py``), metaseq (``reshard_mp.py``), fairseq
(``-shardN``), GPT-NeoX (``layer_LL-model_NN-model_states.pt``), vLLM (``sharded_state_loader.py``), huggingface_hub
(``-NNNNN-of-NNNNN``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Final

from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.suffixes import WEIGHTS
from .ranks import with_number

#: How parts relate: slices of the same tensors, or shards with different tensors. ``RANKS`` and ``NUMBERED`` are
#: undecided by name: ranks with the same tensors have slices, numbered files with the same tensors are each complete.
SLICES, SHARDS, RANKS, NUMBERED = "slices", "shards", "ranks", "numbered"


class _Scheme(NamedTuple):
    """A naming scheme for parts: ``mark`` matches the groups ``number`` and, where names have it, ``of`` (the total).

    ``first`` is the lowest number.
    """

    mark: re.Pattern[str]
    first: int
    kind: str


_SCHEMES: Final = (
    (r"(?<![a-z])[a-z]{2}[-_.]?rank[-_.]?(?P<number>\d{1,6})[-_]of[-_](?P<of>\d{1,6})(?!\d)", 0, SLICES),
    (r"\Aconsolidated\.(?P<number>\d\d)(?!\d)", 0, SLICES),
    (r"\Amodel(?P<number>\d{1,6})-mp(?P<of>\d{1,6})(?!\d)", 0, SLICES),
    (r"model_part-(?P<number>\d{1,6})(?!\d)", 0, SLICES),
    (r"\Alayer_\d{1,6}-model_(?P<number>\d{1,6})-model_states", 0, SLICES),
    (r"\Ashard-(?P<number>\d{5})-model-\d{5}-of-\d{5}", 1, SLICES),
    (r"\Ahf_model_(?P<number>\d{4})_\d+(?!\d)", 1, SHARDS),
    (r"[-_.](?P<number>\d{3,6})[-_]of[-_](?P<of>\d{3,6})(?!\d)", 1, SHARDS),
    (r"[-_.](?P<number>\d{1,2})[-_]of[-_](?P<of>\d{1,2})(?!\d)", 1, NUMBERED),
    (r"(?<![a-z])rank[-_.]?(?P<number>\d{1,6})(?!\d)", 0, RANKS),
    (r"(?<![a-z])(?:shard|part)[-_.]?(?P<number>\d{1,6})(?!\d)", 0, RANKS),
)
#: The most digits of a part number.
_DIGITS: Final = 7


class NamedParts(NamedTuple):
    """The numbered files of one checkpoint: ``files`` by number, and ``every`` number that should exist.

    ``kind`` says how the parts relate. ``missing`` are the names of the missing files.
    """

    files: Mapping[int, str]
    every: range
    kind: str
    missing: Sequence[str]


def keeps_number(output: str, path: str) -> bool:
    """Return whether an output's name has the same part number as ``path``, such as ``consolidated.00``."""
    own, its = ({match[0] for _, match in marks(os.path.basename(name))} for name in (path, output))
    return own <= its if own else False


#: Each of these marks contains one of these words, in any case. Most names have none.
_WORDS: Final = ("rank", "consolidated", "model", "shard", "part", "of")


@cache
def _schemes() -> tuple[_Scheme, ...]:
    """Return the naming schemes; compiled on first use, because most names have no number."""
    return tuple(_Scheme(re.compile(mark, re.I), first, kind) for mark, first, kind in _SCHEMES)


def marks(name: str) -> Iterator[tuple[_Scheme, re.Match[str]]]:
    """Yield (scheme, match) for each part number in a name."""
    lower = name.lower()
    may_be_part = name.endswith(WEIGHTS) and (any(word in lower for word in _WORDS) or not name.isascii())
    for scheme in _schemes() if may_be_part else ():
        for match in scheme.mark.finditer(name):
            if int(match.groupdict().get("of") or 2) > 1:
                yield scheme, match


def named_parts(name: str, names: Collection[str]) -> NamedParts | None:
    """Return the parts among ``names`` that belong with the file ``name``, which is one of them.

    Returns None if the name has no part number, or has the first number and no other parts exist.
    """
    for scheme, match in marks(name):
        before, after = name[: match.start("number")], name[match.end("number") :]
        files = {int(match["number"]): name}
        for other in sorted(names):
            middle = other[len(before) : len(other) - len(after)]
            same = other.startswith(before) and other.endswith(after)
            if same and middle.isascii() and middle.isdigit() and len(middle) < _DIGITS:
                files.setdefault(int(middle), other)
        parts = _parts(scheme, match, files)
        if parts is not None:
            return parts
    return None


def _parts(scheme: _Scheme, match: re.Match[str], files: Mapping[int, str]) -> NamedParts | None:
    """Return the parts with these files, or None if one file with the first number is all."""
    of = match.groupdict().get("of")
    first = min(scheme.first, *files)
    last = max(*files, int(of) - 1 + first if of else 0)
    if last == first and not of:
        return None
    every = range(first, last + 1)
    absent = islice((number for number in every if number not in files), LIMITS.listed)
    missing = [with_number(match.string, *match.span("number"), number) for number in absent]
    return NamedParts(dict(sorted(files.items())), every, scheme.kind, missing)


def shards_of_folder(names: Collection[str]) -> list[NamedParts]:
    """Return the sets of shards among file names; the set with the highest number is last."""
    sets: dict[str, tuple[_Scheme, re.Match[str], dict[int, str]]] = {}
    weights = (name for name in names if name.endswith(WEIGHTS))
    marked = [(name, found) for name in weights if (found := list(marks(name)))]  # few of many names have a number
    for name, found in sorted(marked, key=lambda item: _natural(item[0])):
        if any(scheme.kind != SHARDS for scheme, _ in found):
            continue  # a shard of one rank's slices is not a shard of the whole
        for scheme, match in found:
            template = name[: match.start("number")] + "\0" + name[match.end("number") :]
            sets.setdefault(template, (scheme, match, {}))[2].setdefault(int(match["number"]), name)
    every = (_parts(*parts) for parts in sets.values())
    return [parts for parts in every if parts is not None]


def _natural(name: str) -> list[str]:
    """Return a sort key that puts 9 before 10."""
    return [f"{len(part):06d}{part}" if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def join_advice(parts: NamedParts) -> str:
    """Return a message on how the parts become one checkpoint."""
    if parts.kind == SHARDS:
        return "all parts together are the checkpoint"
    return "each part has slices of the tensors, and joining them takes a recipe for the model"

"""Prefixes of parameter names: whole leading segments, and the segments that wrappers put in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["WRAPPERS", "Prefix", "common_prefix", "prefix_of", "without_wrappers", "wrapper_counts"]

#: Segments that wrappers add to names, by who adds them.
WRAPPERS: Final = {
    "module": "DataParallel, DistributedDataParallel, DeepSpeed",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_fpw_module": "FullyShardedDataParallel before torch 1.13",
    "_checkpoint_wrapped_module": "activation checkpointing",
}


#: Wrappers around wrappers that are taken for a prefix.
_MOST: Final = 32


class Prefix(NamedTuple):
    """The wrapper segments in front of names: ``name`` "module." or "module._orig_mod.", "" for none.

    ``keys`` counts the names that have it, of ``total``.
    """

    name: str
    keys: int
    total: int

    @property
    def status(self) -> str:
        """ "all", "some" or "none" of the names."""
        return "none" if not self.keys else "all" if self.keys == self.total else "some"


def prefix_of(names: Sequence[str]) -> Prefix:
    """The wrapper prefix of a state dict: the commonest first segment, then what all that have it share."""
    total = len(names)
    name, having = "", list(names)
    # Nobody wraps deeper; a name of a million segments is not followed.
    for _ in range(_MOST):
        counts: dict[str, int] = {}
        for key in having:
            head, dot, _ = key[len(name) :].partition(".")
            if dot and head in WRAPPERS:
                counts[head] = counts.get(head, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda head: counts[head])
        if name and counts[best] < len(having):
            break
        name += best + "."
        having = [key for key in having if key.startswith(name)]
    return Prefix(name, len(having) if name else 0, total)


def wrapper_counts(names: Iterable[str]) -> dict[str, int]:
    """How many names hold each wrapper segment, anywhere before the last segment."""
    counts: dict[str, int] = {}
    for key in names:
        if "module" not in key and "_orig_mod" not in key:
            continue
        for segment in dict.fromkeys(key.split(".")[:-1]):
            if segment in WRAPPERS:
                counts[segment] = counts.get(segment, 0) + 1
    return counts


def without_wrappers(name: str) -> str:
    """The name without the segments of wrappers, wherever they stand.

    ``module`` is also an ordinary name: it counts in front, and next to another wrapper.
    """
    segments = name.split(".")
    is_wrapper = [segment in WRAPPERS and segment != "module" for segment in segments]
    leading = True
    kept = []
    for number, segment in enumerate(segments):
        wrapper = is_wrapper[number]
        if segment == "module" and number + 1 < len(segments):
            near = (number and is_wrapper[number - 1]) or is_wrapper[number + 1]
            wrapper = leading or bool(near)
        # The last segment is the parameter itself.
        if wrapper and number + 1 < len(segments):
            is_wrapper[number] = True
            continue
        leading = False
        kept.append(segment)
    return ".".join(kept)


def common_prefix(names: Sequence[str]) -> str:
    """The longest run of whole segments that all names begin with, its dot included."""
    if not names:
        return ""
    first, last = min(names), max(names)
    shared = 0
    for number, (a, b) in enumerate(zip(first, last)):
        if a != b:
            break
        if a == ".":
            shared = number + 1
    return first[:shared]

"""Prefixes of parameter names: whole leading segments, and the segments that wrappers put in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

__all__ = [
    "WRAPPERS",
    "Naming",
    "Prefix",
    "common_prefix",
    "naming_of",
    "prefix_of",
    "unwrapping",
    "wrapper_counts",
]

#: Segments that wrappers add to names, by who adds them.
WRAPPERS: Final = {
    "module": "DataParallel, DistributedDataParallel, DeepSpeed",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_fpw_module": "FullyShardedDataParallel before torch 1.13",
    "_checkpoint_wrapped_module": "activation checkpointing",
}

#: What each of them holds.
_IN_ALL: Final = "mod"

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


class Naming(NamedTuple):
    """The keys of a state dict in order, and what wrappers added to them; ``wrappers`` as of ``wrapper_counts``."""

    names: list[str]
    prefix: Prefix
    wrappers: dict[str, int]


def naming_of(names: list[str]) -> Naming:
    """Look for wrappers in the keys of a state dict."""
    return Naming(names, prefix_of(names), wrapper_counts(names))


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
    held = list(names)
    if not any(_IN_ALL in key for key in held):
        return counts
    levels = _Levels(held)
    for key in held:
        spans = levels.spans(key)
        for segment in dict.fromkeys([key[begin:end] for begin, end in spans]) if spans else ():
            counts[segment] = counts.get(segment, 0) + 1
    return counts


def unwrapping(names: Iterable[str]) -> Callable[[str], str]:
    """The function of a name that leaves out the segments of wrappers, for names that belong together.

    Beside a wrapper there are only other wrappers: ``_forward_module`` beside ``_reverse_module`` is a module of the
    model's own. ``module`` is also an ordinary name: it counts in front, and next to another wrapper.
    """
    return _Levels(names).unwrapped


class _Levels:
    """Names that belong together, and which segments in them are wrappers."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({name for name in names if "." in name})
        self._known: dict[str, bool] = {}

    def _wraps(self, level: str) -> bool:
        """Does a wrapper come next in all names that begin with ``level``? Of sorted names each wrapper is one jump."""
        known = self._known.get(level)
        if known is None:
            place = bisect_left(self._names, level)
            end = bisect_left(self._names, level[:-1] + "/") if level else len(self._names)
            while place < end:
                segment, _, _ = self._names[place][len(level) :].partition(".")
                if segment not in WRAPPERS or self._names[place] == level + segment:
                    break
                place = bisect_left(self._names, f"{level}{segment}/", place)
            known = self._known[level] = place >= end
        return known

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return where the wrappers begin and end in a name; the last segment is the parameter itself."""
        if _IN_ALL not in name:
            return []
        # Of tens of thousands of names: a regular expression takes three times as long as these steps.
        places: list[tuple[int, int]] = []
        end = 0
        for _ in range(_MOST):
            at = name.find(_IN_ALL, end)
            end = name.find(".", at) if at >= 0 else -1
            if end < 0:
                break
            begin = name.rfind(".", 0, at) + 1
            if name[begin:end] in WRAPPERS and self._wraps(name[:begin]):
                places.append((begin, end))
        found: list[tuple[int, int]] = []
        front = 0
        for number, (begin, end) in enumerate(places):
            if begin == front:
                front = end + 1
            elif name[begin:end] == "module":
                after = places[number + 1] if number + 1 < len(places) else (-1, -1)
                follows = bool(found) and found[-1][1] + 1 == begin
                if not follows and (after[0] != end + 1 or name[after[0] : after[1]] == "module"):
                    continue
            found.append((begin, end))
        return found

    def unwrapped(self, name: str) -> str:
        """The name without them."""
        kept, done = "", 0
        for begin, end in self.spans(name):
            kept += name[done:begin]
            done = end + 1
        return kept + name[done:]


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

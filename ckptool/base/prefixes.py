"""Prefixes of parameter names: shared leading segments, and the segments that module wrappers insert."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from typing import Final, NamedTuple

#: Segments that wrappers insert into names, and which wrappers do.
WRAPPERS: Final = {
    "module": "DataParallel, DistributedDataParallel, DeepSpeed",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_fpw_module": "FullyShardedDataParallel before torch 1.13",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
#: Wrapper segments looked at in one name: nobody nests deeper, and a name of a million segments is not followed.
_MAX_WRAPPERS: Final = 32


class Prefix(NamedTuple):
    """The wrapper segments names start with: ``name`` is "module." or "module._orig_mod.", "" for none.

    ``keys`` of ``total`` names start with it.
    """

    name: str
    keys: int
    total: int

    @property
    def status(self) -> str:
        """How many names start with it: "all", "some" or "none"."""
        return "none" if not self.keys else "all" if self.keys == self.total else "some"


def wrapper_prefix(names: Sequence[str]) -> Prefix:
    """Return the wrapper prefix of a state dict: the commonest first wrapper, then those shared by all its names."""
    total = len(names)
    prefix, wrapped = "", list(names)
    for _ in range(_MAX_WRAPPERS):
        heads = (key[len(prefix) :].partition(".") for key in wrapped)
        counts = Counter(head for head, dot, _ in heads if dot and head in WRAPPERS)
        if not counts:
            break
        [(head, count)] = counts.most_common(1)
        if prefix and count < len(wrapped):
            break
        prefix += head + "."
        wrapped = [key for key in wrapped if key.startswith(prefix)]
    return Prefix(prefix, len(wrapped) if prefix else 0, total)


def wrapper_counts(names: Iterable[str]) -> dict[str, int]:
    """Count the names that contain each wrapper segment, anywhere before the last segment."""
    keys = list(names)
    tree = _NameTree(keys)
    return dict(Counter(segment for key in keys for segment in dict.fromkeys(tree.wrappers(key))))


def unwrapper(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that removes the wrapper segments from a name; ``names`` are all names of the model.

    A wrapper has no siblings but other wrappers: ``_forward_module`` beside ``_reverse_module`` is a module of the
    model itself. ``module`` is also an ordinary name: it counts only in front, or next to another wrapper.
    """
    return _NameTree(names).unwrap


class _NameTree:
    """The names of one model, and which of their segments are wrappers."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({name for name in names if "." in name})
        self._wrapped: dict[str, bool] = {}

    def _is_wrapped(self, prefix: str) -> bool:
        """Return whether a wrapper follows ``prefix`` in all names that have it; one bisection per wrapper."""
        known = self._wrapped.get(prefix)
        if known is None:
            at = bisect_left(self._names, prefix)
            end = bisect_left(self._names, prefix[:-1] + "/") if prefix else len(self._names)
            while at < end:
                segment, _, _ = self._names[at][len(prefix) :].partition(".")
                if segment not in WRAPPERS or self._names[at] == prefix + segment:
                    break
                at = bisect_left(self._names, f"{prefix}{segment}/", at)
            known = self._wrapped[prefix] = at >= end
        return known

    def _segments(self, name: str) -> list[tuple[str, bool]]:
        """Split a name into (segment, whether it is a wrapper); the last segment is the parameter itself."""
        segments = name.split(".")
        flags = [False] * len(segments)
        candidates = [number for number, segment in enumerate(segments[:-1]) if segment in WRAPPERS][:_MAX_WRAPPERS]
        for number in candidates:
            flags[number] = self._is_wrapped("".join([f"{segment}." for segment in segments[:number]]))
        for number in candidates:
            if segments[number] == "module" and flags[number] and not all(flags[:number]):
                flags[number] = flags[number - 1] or (flags[number + 1] and segments[number + 1] != "module")
        return list(zip(segments, flags))

    def wrappers(self, name: str) -> list[str]:
        """Return the wrapper segments of a name."""
        if "module" not in name and "_orig_mod" not in name:
            return []
        return [segment for segment, is_wrapper in self._segments(name) if is_wrapper]

    def unwrap(self, name: str) -> str:
        """Return the name without its wrapper segments."""
        if "module" not in name and "_orig_mod" not in name:
            return name
        return ".".join(segment for segment, is_wrapper in self._segments(name) if not is_wrapper)


def common_prefix(names: Sequence[str]) -> str:
    """Return the longest run of whole segments that all names start with, including its dot."""
    shared = commonprefix(names)  # noqa: RUF071 (character by character is what is wanted)
    return shared[: shared.rfind(".") + 1]

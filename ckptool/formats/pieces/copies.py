"""Compare the copies that several files hold of one part of a tensor.

Torch records a CRC-32 of each storage, so most copies are compared without reading them. Others are compared by value:
up to 64 MiB when a folder is opened, the rest before an output is made from it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from ...base.findings import COPIES, Finding
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, quoted
from ...files.sources import Source

#: Finding code: values that differ between ranks.
RANK_VALUES: Final = "rank-values"
#: Statistics that a layer updates by itself: FULL_STATE_DICT and DeepSpeed take rank 0's values.
STATISTICS: Final = frozenset(("running_mean", "running_var", "num_batches_tracked"))
#: The most bytes of copies without a usable checksum that are read when a folder is opened.
_AT_ONCE: Final = 64 << 20
#: The most bytes in memory at once.
_BLOCK: Final = 1 << 20


_RANDOM: Final = regex(r"rng|random|generator|seed|cuda|cpu", re.I)


def is_own(path: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether ranks may have different values of a tensor: random generator states and running statistics."""
    random = dtype == "uint8" and len(shape) == 1 and _RANDOM.search(path) is not None
    return random or path.rpartition(".")[2] in STATISTICS


class Copy(NamedTuple):
    """One copy: its file, and its elements, row by row from byte ``begin`` of ``source``. ``crc`` is the recorded
    CRC-32 of the storage, 0 if not recorded. ``place`` describes the elements' place in the storage: its size, the
    offset and the strides. ``is_whole`` tells that the storage holds nothing else."""

    file: str
    source: Source
    begin: int
    crc: int = 0
    place: Hashable = None
    is_whole: bool = False


class CopyPair(NamedTuple):
    """Two copies of the tensor that messages call ``path``, ``size`` bytes each.

    ``width`` is 0, or the element size of same-named tensors in two pipeline stages. These are one tensor only if they
    are equal and have more than one distinct value, since two new layers may be equal by chance. ``why`` tells the user
    how two tensors may have got the same name, "" for copies.
    """

    path: str
    first: Copy
    other: Copy
    size: int
    width: int = 0
    why: str = ""

    def by_checksum(self) -> bool | None:
        """Return whether the recorded checksums prove the copies equal or different; None if they do not tell."""
        first, other = self.first, self.other
        if not self.size:
            return True
        if not (first.crc and other.crc) or first.place != other.place:
            return None
        if first.crc == other.crc:
            return None if self.width else True
        return False if first.is_whole and other.is_whole else None

    def by_value(self) -> bool:
        """Read both copies; return whether they are equal."""
        first, other = self.first, self.other
        if differ(first.source, first.begin, other.source, other.begin, self.size):
            return False
        return not (self.width and is_one_value(first.source, first.begin, self.size, self.width))


class Copies:
    """All copies in the files of one save."""

    def __init__(self) -> None:
        self.different: list[CopyPair] = []
        #: Pairs that have not been compared.
        self.open: list[CopyPair] = []
        self._left = _AT_ONCE

    def compare(self, pair: CopyPair) -> bool | None:
        """Return whether two copies are equal; None if comparing them would exceed the limit for opening."""
        equal = pair.by_checksum()
        if equal is None and pair.size <= self._left:
            self._left -= pair.size
            equal = pair.by_value()
        return equal

    def add(self, pair: CopyPair, *, own: bool = False) -> bool:
        """Add two copies that have to be equal, unless each rank may have its ``own``; return whether it has."""
        equal = self.compare(pair)
        if own:
            return equal is False
        if equal is None:
            self.open.append(pair)
        elif not equal:
            self.different.append(pair)
        return False

    def settle(self, paths: Iterable[str]) -> list[CopyPair]:
        """Compare the pending pairs of these tensors by value; return the pairs that differ."""
        wanted = {*paths} if self.open else set[str]()
        due = [pair for pair in self.open if pair.path in wanted]
        self.open = [pair for pair in self.open if pair.path not in wanted]
        return [pair for pair in due if not pair.by_value()]


def copy_problems(pairs: Iterable[CopyPair], storages: Mapping[str, str]) -> list[Finding]:
    """Return one problem per set of files whose copies differ; ``storages`` maps paths to storage keys."""
    others: dict[str, dict[str, None]] = {}
    firsts: dict[str, CopyPair] = {}
    for pair in pairs:
        firsts.setdefault(pair.path, pair)
        others.setdefault(pair.path, {})[pair.other.file] = None
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for path, pair in firsts.items():
        alike.setdefault((pair.first.file, pair.why, tuple(others[path])), []).append(path)
    problems = []
    for (first, why, files), paths in alike.items():
        names, where = join_limited([quoted(path) for path in paths], most=3), join_limited(list(files), most=3)
        verb = "is" if len(paths) == 1 else "are"
        message = f"{names} in {where} {verb} not the same as in {first}: {why or 'its copies have to be equal'}"
        keys = frozenset(storages[path] for path in paths if path in storages)
        problems.append(Finding(COPIES, "error", message, files[0], storages=keys or None))
    return problems


def differ(one: Source, at: int, other: Source, there: int, size: int) -> bool:
    """Return whether two ranges of bytes differ."""
    return any(
        one.read(at + begin, min(_BLOCK, size - begin)) != other.read(there + begin, min(_BLOCK, size - begin))
        for begin in range(0, size, _BLOCK)
    )


def is_one_value(source: Source, begin: int, size: int, width: int) -> bool:
    """Return whether all elements of ``width`` bytes are equal, like the zeros or ones of a new layer."""
    return size <= width or not differ(source, begin, source, begin + width, size - width)

"""Are tensors equal bit for bit? Stored bytes against stored bytes, as fast as they can be read, without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Final, NamedTuple

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor
from ...files.threads import BLOCK, in_threads
from ...values.elements import dtype_of, reblocked, tensor_size
from ...values.interpretation import Reading, resolved_bytes
from .closeness import Raw, blocks_of, raw_of

#: Bytes of a large tensor that one thread takes at a time.
_SHARE: Final = 32 << 20
#: Bytes between two tensors that are read along with them: headers of records.
_GAP: Final = 4096


class Bits(NamedTuple):
    """How two tensors of one dtype and shape differ: ``first`` is the number of the first element that does, in the
    order in which they count, -1 where all are equal; ``differing`` counts them, -1 where it was not asked for."""

    first: int
    differing: int


_SAME: Final = Bits(-1, 0)


class _Member(NamedTuple):
    """A tensor, or a part of one, in a run: the number of the pair; where it begins in the run and within the
    tensor, and its size, all in bytes."""

    number: int
    begin: int
    within: int
    size: int


class _Run(NamedTuple):
    """Bytes of both files that stand in the same order."""

    a: Raw
    b: Raw
    members: list[_Member]


def compared(
    a: Checkpoint,
    b: Checkpoint,
    pairs: Sequence[tuple[Tensor, Tensor]],
    turned: Mapping[int, tuple[Reading, Reading]] = MappingProxyType({}),
    *,
    count: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[Bits]:
    """Compare pairs of tensors of one dtype and one shape. NaNs with the same bits are the same.

    ``turned`` says how some of them are read instead, by their numbers. Without ``count`` the elements that differ are
    not counted. ``progress`` is called with numbers of bytes of one side. Raises MalformedError where bytes are
    missing.
    """
    return _Comparison(a, b, pairs, turned, count, progress).run()


class _Comparison:
    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        pairs: Sequence[tuple[Tensor, Tensor]],
        turned: Mapping[int, tuple[Reading, Reading]],
        count: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.a, self.b, self.pairs, self.count, self.progress = a, b, pairs, count, progress
        self.turned = turned
        self.found: dict[int, Bits] = {}
        self.lock = threading.Lock()
        self.buffers = threading.local()

    def run(self) -> list[Bits]:
        total = sum(tensor_size(left) for left, _ in self.pairs)
        in_threads(self.work(), self.do, total)
        return [self.found.get(number, _SAME) for number in range(len(self.pairs))]

    def work(self) -> Iterator[_Run | int]:
        """Runs of stored bytes, in the order of the first file; then the numbers of pairs that must be made first."""
        stored: list[tuple[Raw, Raw, int]] = []
        made: list[int] = []
        for number, (left, right) in enumerate(self.pairs):
            ours, theirs = raw_of(self.a, left), raw_of(self.b, right)
            if ours is None or theirs is None or ours.size != theirs.size or number in self.turned:
                made.append(number)
            elif ours.source.identity == theirs.source.identity and ours.offset == theirs.offset:
                self.advance(ours.size)  # the very same bytes
            else:
                stored.append((ours, theirs, number))
        stored.sort(key=lambda item: (item[0].source.name, item[0].offset))
        yield from _runs(stored)
        yield from made

    def do(self, work: _Run | int) -> None:
        if isinstance(work, int):
            self.made(work)
        else:
            self.run_of(work)

    def run_of(self, run: _Run) -> None:
        if not hasattr(self.buffers, "pair"):
            self.buffers.pair = (bytearray(BLOCK), bytearray(BLOCK))
        ours, theirs = self.buffers.pair
        for at in range(0, run.a.size, BLOCK):
            size = min(BLOCK, run.a.size - at)
            if size < BLOCK:
                ours, theirs = bytearray(size), bytearray(size)
            run.a.source.read_into(run.a.offset + at, ours)
            run.b.source.read_into(run.b.offset + at, theirs)
            if ours != theirs:
                for member in run.members:
                    # A run of several members is one block, and of a run of several blocks all are one member's.
                    begin = max(member.begin - at, 0)
                    end = min(member.begin + member.size - at, size)
                    self.note(member.number, member.within + at, ours[begin:end], theirs[begin:end])
            self.advance(size)

    def made(self, number: int) -> None:
        left, right = self.pairs[number]
        at = 0
        if number in self.turned:
            both = zip((self.a, self.b), self.turned[number])
            blocks = [reblocked(resolved_bytes(side, how), BLOCK) for side, how in both]
        else:
            blocks = [blocks_of(self.a, left), blocks_of(self.b, right)]
        for ours, theirs in zip_longest(*blocks, fillvalue=b""):
            size = max(len(ours), len(theirs))
            if ours != theirs:
                self.note(number, at, ours.ljust(size, b"\0"), theirs.ljust(size, b"\0"))
            at += size
            self.advance(size)

    def note(self, number: int, at: int, ours: bytes | bytearray, theirs: bytes | bytearray) -> None:
        """Note the differences of two stretches that begin ``at`` bytes into the tensor."""
        dtype = dtype_of(self.pairs[number][0])
        width = dtype.itemsize if dtype else 1
        known = self.found.get(number)
        if ours == theirs or (not self.count and known is not None and known.first <= at // width):
            return
        first, differing = _differences(ours, theirs, width, self.count)
        with self.lock:
            known = self.found.get(number)
            first += at // width
            if known is not None:
                first = min(first, known.first)
                differing = differing + known.differing if self.count else -1
            self.found[number] = Bits(first, differing)

    def advance(self, size: int) -> None:
        if self.progress:
            with self.lock:
                self.progress(size)


def _runs(stored: list[tuple[Raw, Raw, int]]) -> Iterator[_Run]:
    """Pairs that follow each other in both files are read together, large ones in shares. Of a folder there are several
    files, and places in different ones have nothing to do with each other."""
    run: _Run | None = None
    for ours, theirs, number in stored:
        if run is not None:
            gap = ours.offset - run.a.offset - run.a.size
            apart = theirs.offset - run.b.offset - run.b.size
            size = run.a.size + gap + ours.size
            together = ours.source is run.a.source and theirs.source is run.b.source
            if together and gap == apart and 0 <= gap <= _GAP and size <= BLOCK:
                run.members.append(_Member(number, run.a.size + gap, 0, ours.size))
                run = _Run(run.a._replace(size=size), run.b._replace(size=size), run.members)
                continue
            yield run
            run = None
        if ours.size <= BLOCK:
            run = _Run(ours, theirs, [_Member(number, 0, 0, ours.size)])
            continue
        for at in range(0, ours.size, _SHARE):
            size = min(_SHARE, ours.size - at)
            yield _Run(
                Raw(ours.source, ours.offset + at, size),
                Raw(theirs.source, theirs.offset + at, size),
                [_Member(number, 0, at, size)],
            )
    if run is not None:
        yield run


def _differences(a: bytes | bytearray, b: bytes | bytearray, width: int, count: bool) -> tuple[int, int]:
    """The number of the first element of ``width`` bytes that differs, and how many do (-1: not counted).

    Large integers do in C what a loop over bytes would take a hundred times longer for.
    """
    size = len(a)
    differ = (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(size, "little")
    first = (size - len(differ.lstrip(b"\0"))) // width
    if not count:
        return first, -1
    begin = first * width
    any_bit = 0
    for byte in range(width):
        any_bit |= int.from_bytes(differ[begin + byte :: width], "little")
    elements = -(-(size - begin) // width)
    return first, elements - any_bit.to_bytes(elements, "little").count(0)

"""Compare the values of pairs of tensors bit for bit, and measure how far they are apart, by tensor and in total."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import TYPE_CHECKING, Final, cast

from ...base.dtypes import BY_NAME, TORCH_NAMES, is_complex
from ...base.errors import TargetError, UnreadableError
from ...base.records import NamedTuple, TypedDict
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor, view_id
from ...files.downloads import expect_reads
from ...files.threads import READ_SIZE, from_threads, read_blocks, run_in_threads
from ...files.zips.reader import nearby
from ...pickles.nodes import Ref
from ...values.elements import BitDifference, elements, read_for, reblocked, storage_reader, stored_span, tensor_size
from ...values.interpretation import Reading, interpret, lazy_bits, resolved_bytes
from ...values.torch.distance import Compared, Distance, distance, total
from ...values.torch.loads import need_torch, one_thread
from .graphs import TensorPair
from .places import has_values

if TYPE_CHECKING:
    from ...files.write.copying import Progress

#: The sort orders of rows: by a figure, worst first, as in the file, or by name.
SORTS: Final = ("max", "mean", "l2", "cosine", "differing", "file", "name")
#: Beginnings of dtypes to which a tolerance does not apply: their numbers need a scale, or have no meaning.
_NO_NUMBERS: Final = ("q", "bits", "float4")


class Figures(TypedDict):
    """How far numbers are apart. None means undefined, beyond float64, or not measured.

    ``nonfinite`` counts the pairs without a difference: one number is NaN or infinite, the other is not the same. The
    other figures cover pairs that are finite in both: the largest and the mean |a - b|, the largest relative to |b|,
    the L2 norm of a - b divided by the L2 norm of b, and the cosine of the angle between a and b.
    """

    nonfinite: int | None
    max_abs: float | None
    max_rel: float | None
    mean_abs: float | None
    rel_l2: float | None
    cosine: float | None


class ValueDifference(Figures):
    """Two tensors whose values differ; ``part`` is the place of an inner tensor in the one at ``path``, or "".

    ``dtype`` is the dtype in a, ``other_dtype`` the one in b. ``first`` is the index of the first element that differs.
    ``differing`` counts such elements, with a tolerance those too far apart; it is None if they were not counted.
    ``reason`` says why there are no figures; "" if there are.
    """

    path: str
    part: str
    dtype: str
    other_dtype: str
    shape: list[int]
    first: list[int]
    differing: int | None
    reason: str


class Distances(Figures):
    """Figures over all differing tensors; ``numbers`` counts the finite pairs."""

    tensors: int
    numbers: int


class RankedDifference(NamedTuple):
    """A difference in values, whether it is ``within`` the tolerance, and the figures that rank it."""

    report: ValueDifference
    within: bool
    distance: Distance | None
    #: The index of the pair, or None if its figures mean nothing for the total: indices in a sparse tensor.
    job: int | None


def ranked(differences: Sequence[RankedDifference], sort: str) -> list[ValueDifference]:
    """Return the reports in the order ``sort``, one of SORTS; reports without figures come last."""
    if sort not in SORTS:
        raise TargetError(f"values cannot be sorted by {sort!r}", next=f"sort by {', '.join(SORTS)}")
    if sort == "file":
        return [item.report for item in differences]
    if sort == "name":
        return sorted((item.report for item in differences), key=lambda report: (report["path"], report["part"]))
    return [item.report for item in sorted(differences, key=_BADNESS[sort], reverse=True)]


def _differing(item: RankedDifference) -> tuple[float, ...]:
    count = item.report["differing"]
    return (0, -1 if count is None else count)


def _by(figure: Callable[[Distance], tuple[float | None, ...]]) -> Callable[[RankedDifference], tuple[float, ...]]:
    """Return a sort key that grows with the count of numbers without a difference, then with a figure."""

    def badness(item: RankedDifference) -> tuple[float, ...]:
        found = item.distance
        if found is None:
            return _differing(item)
        return (1, found.nonfinite, *(-inf if value is None else value for value in figure(found)))

    return badness


_BADNESS: Final[dict[str, Callable[[RankedDifference], tuple[float, ...]]]] = {
    "max": _by(lambda found: (found.largest, found.largest_relative)),
    "mean": _by(lambda found: (found.mean_abs,)),
    "l2": _by(lambda found: (found.rel_l2,)),
    "cosine": _by(lambda found: (None if found.cosine is None else -found.cosine,)),
    "differing": _differing,
}


#: The ends of the paths of counters.
_COUNTERS: Final = (".step", "num_batches_tracked", 'num_batches_tracked"]')


def role(path: str) -> int:
    """Return 0 for weights, 1 for the state of an optimizer, 2 for counters, which differ after each step."""
    return 2 if path.endswith(_COUNTERS) else int("optim" in path.partition(".")[0].partition("[")[0])


def total_distance(differences: Sequence[RankedDifference]) -> tuple[Distances | None, int]:
    """Return the figures of all differing tensors together, or None if there are none. A tied tensor counts once.

    Counters are left out, unless nothing else differs: their numbers are so large that they would hide all others.
    The last result is the number of tensors left out.
    """
    rest = [item for item in differences if role(item.report["path"]) < 2]
    counters = {item.report["path"] for item in differences if role(item.report["path"]) == 2} if rest else set()
    once: dict[int, tuple[str, Distance]] = {}
    for item in rest or differences:
        if item.distance is not None and item.job is not None:
            once.setdefault(item.job, (item.report["path"], item.distance))
    if not once:
        return None, len(counters)
    found = total([distance for _, distance in once.values()])
    tensors = len({path for path, _ in once.values()})
    return {"tensors": tensors, "numbers": found.finite, **_figures(found)}, len(counters)


def _figures(found: Distance | None) -> Figures:
    return cast("Figures", {name: None if found is None else getattr(found, name) for name in Figures.__annotations__})


class _Pair(NamedTuple):
    """Two tensors to compare, and their nodes; -1 for tensors inside others."""

    a: Tensor
    b: Tensor
    refs: tuple[Ref, Ref] = (-1, -1)

    @property
    def same_dtype(self) -> bool:
        return self.a.dtype == self.b.dtype

    @property
    def has_numbers(self) -> bool:
        """Whether the elements of both are numbers without a scale, so that a tolerance applies."""
        dtypes = (self.a.dtype, self.b.dtype)
        return all(dtype in TORCH_NAMES and not dtype.startswith(_NO_NUMBERS) for dtype in dtypes)


class _Buffers(threading.local):
    """What a thread reads into: a block, and windows for short tensors in each of the two files."""

    def __init__(self) -> None:
        self.block = bytearray(READ_SIZE)
        self.left, self.right = nearby(), nearby()


@dataclass
class ValueComparison:
    """The values of pairs of tensors. Each pair of stored tensors is compared once, however often it occurs.

    With ``measure``, the distance of differing pairs is measured, and tensors with different dtypes are compared as
    numbers. Without it, this is done only if ``mixed`` dtypes or a ``tolerance`` (relative, absolute) require it.
    ``count`` counts the elements whose bits differ. ``reason`` says why nothing could be measured.
    """

    a: Checkpoint
    b: Checkpoint
    mixed: bool
    tolerance: tuple[float, float] | None
    count: bool
    measure: bool
    progress: Progress | None
    reason: str = ""
    pairs: list[_Pair] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    #: How to read pairs in which only one tensor is conjugated or negated lazily.
    readings: dict[int, tuple[Reading, Reading]] = field(default_factory=dict)
    #: Pairs of indices in sparse tensors and similar; a tolerance makes no sense for them.
    exact: set[int] = field(default_factory=set)
    #: For each pair of tensors: (part, index in ``pairs``).
    jobs: list[list[tuple[str, int]]] = field(default_factory=list)
    bits: list[BitDifference] = field(default_factory=list)
    #: Pairs with equal dtypes, whose bits are compared, and differing pairs that must be measured.
    alike: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    #: The distance of each measured pair, or why it is unknown.
    measured: dict[int, Compared | str] = field(default_factory=dict)
    buffers: _Buffers = field(default_factory=_Buffers)

    def add(self, pair: TensorPair) -> None:
        jobs: list[tuple[str, int]] = []
        for name, a, b in (("", pair.a, pair.b), *pair.inner):
            if a.shape != b.shape or not has_values(a) or not has_values(b):
                continue
            item = _Pair(a, b) if name else _Pair(a, b, pair.refs)
            if not item.same_dtype and not ((self.mixed or self.measure) and item.has_numbers):
                continue
            # One side may store resolved values that the other negates or conjugates lazily.
            lazy = not name and any(item.path in ("conj", "neg") for item in pair.mismatches)
            readings = tuple(
                Reading(tensor, storage_reader(side, tensor.storage), "elements", *lazy_bits(side.survey.reader, ref))
                for side, ref, tensor in zip((self.a, self.b), pair.refs, (a, b) if lazy else ())
            )
            # Two quantizers make different numbers from the same bytes.
            views: tuple[object, ...] = (view_id(a), view_id(b), *readings, *(item.refs if a.dtype[0] == "q" else ()))
            if views not in self.numbers:
                self.numbers[views] = len(self.pairs)
                self.pairs.append(item)
                if readings:
                    self.readings[self.numbers[views]] = (readings[0], readings[1])
            jobs.append((name, self.numbers[views]))
            dtype = BY_NAME.get(a.dtype)
            if name and dtype is not None and not dtype.floating and not is_complex(dtype.name):
                self.exact.add(self.numbers[views])
        self.jobs.append(jobs)

    def compare(self) -> None:
        """Compare the bits of all pairs, without torch; ``wanted`` are then the pairs to measure."""
        # Pairs with different dtypes count as different, because their bytes differ.
        self.bits = [BitDifference(0, -1)] * len(self.pairs)
        self.alike = [number for number, pair in enumerate(self.pairs) if pair.same_dtype]
        self.compare_bits(self.alike, False, self.progress)
        differing = [number for number, bits in enumerate(self.bits) if bits.first >= 0]
        self.wanted = [number for number in differing if self.measure or self.judges(number)]

    def differing(self) -> set[int]:
        """Return the numbers of the pairs of tensors that have ``differences``, or might have some."""
        return {number for number, jobs in enumerate(self.jobs) if any(self.bits[job].first >= 0 for _, job in jobs)}

    def measure_distances(self) -> None:
        """Measure the distances of the ``wanted`` pairs, and count the elements that differ."""
        if self.wanted:
            self.measure_all(self.wanted)
        if self.count:
            for number in self.alike:
                found = self.measured.get(number, "")
                if not isinstance(found, str) and found.bits is not None:
                    self.bits[number] = found.bits
            uncounted = [at for at in self.alike if self.bits[at].first >= 0 > self.bits[at].differing]
            self.compare_bits(uncounted, True, None)

    def compare_bits(self, numbers: Sequence[int], count: bool, progress: Progress | None) -> None:
        """Compare these pairs bit for bit: NaNs with equal bits are equal. Raise MalformedError if bytes are missing.

        Without ``count`` each comparison ends at the first difference, and -1 elements differ. ``progress`` is called
        with numbers of bytes on one side.
        """
        both = [(side, tensor) for number in numbers for side, tensor in zip((self.a, self.b), self.pairs[number][:2])]
        expect_reads(read_for(storage_reader(side, tensor.storage), tensor) for side, tensor in both)
        advance = from_threads(progress)

        def do(number: int) -> None:
            left, at, found = self.pairs[number].a, 0, BitDifference()
            dtype = BY_NAME.get(left.dtype)
            width = dtype.itemsize if dtype else 1
            for ours, theirs in self.blocks(number):
                size = max(len(ours), len(theirs))
                if ours != theirs:
                    first, differing = _different_elements(
                        ours.ljust(size, b"\0"), theirs.ljust(size, b"\0"), width, count
                    )
                    first = first + at // width if found.first < 0 else found.first
                    found = BitDifference(first, found.differing + differing)
                    if not count:
                        break
                at += size
                advance(size)
            advance(max(tensor_size(left) - at, 0))
            self.bits[number] = found

        run_in_threads(numbers, do, [tensor_size(self.pairs[number].a) for number in numbers])

    def blocks(self, number: int) -> Iterator[tuple[bytes | bytearray, bytes | bytearray]]:
        """Yield the bytes of both tensors of a pair, block by block; each is valid until the next one is requested.

        Yield nothing if they are the same bytes in the same file.
        """
        if number in self.readings:
            computed = (reblocked(resolved_bytes(reading), READ_SIZE) for reading in self.readings[number])
            yield from zip_longest(*computed, fillvalue=b"")
            return
        pair = [(storage_reader(side, t.storage), t) for side, t in zip((self.a, self.b), self.pairs[number][:2])]
        one, other = (stored_span(*each) for each in pair)
        file = other.source.local_file() if other is not None else None
        if one is None or other is None or file is None:
            yield from zip_longest(*(reblocked(elements(*each), READ_SIZE) for each in pair), fillvalue=b"")
            return
        if one[1:] == other[1:] and one.source.identity == file.identity:
            return
        if one.size < READ_SIZE:
            yield self.buffers.left(one.source).read(*one[1:]), self.buffers.right(file).read(*other[1:])
            return
        at = other.offset
        for ours in read_blocks(one):
            theirs = self.buffers.block if len(ours) == READ_SIZE else bytearray(len(ours))
            file.read_into(at, theirs)
            yield ours, theirs
            at += len(ours)

    def measure_all(self, wanted: Sequence[int]) -> None:
        """Measure how far these pairs are apart."""
        try:
            torch = need_torch("measuring how far values are apart")
        except UnreadableError as error:
            if any(self.judges(number) and (self.tolerance is not None or self.mixed) for number in wanted):
                raise
            self.reason = str(error)
            self.measured = dict.fromkeys(wanted, self.reason)
            return
        pairs: dict[int, tuple[Reading, Reading]] = {}
        for number in wanted:
            one, other = self.sides(number)
            if isinstance(one, str) or isinstance(other, str):
                self.measured[number] = one if isinstance(one, str) else str(other)
            else:
                pairs[number] = one, other

        def do(number: int) -> None:
            tolerance = (0.0, 0.0) if number in self.exact or self.tolerance is None else self.tolerance
            self.measured[number] = distance(*pairs[number], tolerance)

        expect_reads(read_for(each.storage, each.tensor) for pair in pairs.values() for each in pair)
        with one_thread(torch):
            run_in_threads(pairs, do, [tensor_size(self.pairs[number].a) for number in wanted])

    def judges(self, number: int) -> bool:
        """Return whether a pair's numbers, and not its bits, decide whether it differs."""
        pair = self.pairs[number]
        return pair.has_numbers and (self.tolerance is not None or not pair.same_dtype)

    def sides(self, number: int) -> tuple[Reading | str, Reading | str]:
        """Return how to read the numbers of a pair, or why that is impossible."""
        pair = self.pairs[number]
        if number in self.readings:
            return self.readings[number]
        return self.reading(self.a, pair.a, pair.refs[0]), self.reading(self.b, pair.b, pair.refs[1])

    def reading(self, checkpoint: Checkpoint, tensor: Tensor, ref: Ref) -> Reading | str:
        """Return how to read a tensor's numbers, or why not. Lazy bits on both sides change no distance."""
        if tensor.dtype.startswith("bits"):
            return "bits without a value"
        if tensor.dtype.startswith("q"):
            return interpret(checkpoint, ref) if ref >= 0 else f"{tensor.dtype} without a scale"
        return Reading(tensor, storage_reader(checkpoint, tensor.storage), "elements")

    def differences(self, number: int, path: str) -> Iterator[RankedDifference]:
        """Yield the differences in the values of a pair of tensors."""
        for part, job in self.jobs[number]:
            bits, pair, judged = self.bits[job], self.pairs[job], self.judges(job)
            found = self.measured.get(job, "")
            known = None if isinstance(found, str) else found.distance
            if bits.first < 0 or (judged and (known is None or not known.differing)):
                continue  # equal, equal as numbers (-0.0 and 0.0), or not compared because the dtypes differ
            first = bits.first if pair.same_dtype or known is None else known.first
            differing = known.far if known is not None and judged else bits.differing
            report: ValueDifference = {
                "path": path,
                "part": part,
                "dtype": pair.a.dtype,
                "other_dtype": pair.b.dtype,
                "shape": list(pair.a.shape),
                "first": _index(first, pair.a.shape),
                "differing": differing if differing >= 0 else None,
                **_figures(known),
                "reason": found if isinstance(found, str) else "",
            }
            within = judged and known is not None and not known.far
            yield RankedDifference(report, within, known, None if job in self.exact else job)


def _index(number: int, shape: tuple[int, ...]) -> list[int]:
    """Return the index of the element with this number, counting along the last dimension first."""
    index: list[int] = []
    for size in reversed(shape):
        number, place = divmod(number, max(size, 1))
        index.append(place)
    return index[::-1]


def _different_elements(a: bytes | bytearray, b: bytes | bytearray, width: int, count: bool) -> tuple[int, int]:
    """Return the number of the first element of ``width`` bytes that differs, and how many differ (-1: not counted).

    Operations on large integers run in C; a Python loop over bytes would take a hundred times longer.
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

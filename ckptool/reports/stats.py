"""The report of ``stats``: every tensor in numbers. Needs torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict, TypeVar, cast

from ..base.dtypes import is_complex
from ..base.errors import MalformedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sharding import sharding
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import is_contiguous, view_id
from ..files.threads import run_in_threads
from ..formats.opening import CheckpointOrPath, opened
from ..pickles.nodes import Ref
from ..values.elements import dtype_of, elements, in_storage_order, storage_axes, tensor_size
from ..values.interpretation import Reading, interpret
from ..values.numeric import json_number
from ..values.torch.blocks import layout_of, row_major, rule_of
from ..values.torch.distance import Compared, PairMeasured, measure_pair
from ..values.torch.loads import need_torch
from ..values.torch.measure import PERCENT, Channels, Measured, groups_of, measure, one_thread
from .keys import TensorReport, select_entries, tensor_report
from .shown import ShownStats

if TYPE_CHECKING:
    from ..files.write.copying import Progress

#: Bins of a histogram; the chart in the table has a character for each.
_BINS: Final = 10
#: A larger ratio of the largest absolute value to their 99th percentile is worth a look.
OUTLIERS: Final = 10
#: What the rows can be sorted by: the order of the file, by name, or by a number, largest first.
SORTS: Final = ("file", "name", "bytes", "numel", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs")


class Histogram(TypedDict):
    """Counts of the finite elements between successive edges."""

    counts: list[int]
    edges: list[object]


class Quantiles(TypedDict):
    """The finite elements of the ranks ceil(n * p / 100) in ascending order: numpy's method "inverted_cdf"."""

    p1: float
    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float


class ChannelStatistics(TypedDict):
    """The slices along ``axis``: how many there are, and how many of nothing but zeros (``dead``).

    ``rms`` are root mean squares, each of the finite elements of ceil(count / 64) neighbouring channels, the last of
    those left over; None where there are no such elements.
    """

    axis: int
    count: int
    dead: int
    rms: list[float | None]


class _Statistics(TypedDict):
    of: str | None
    finite: int | None
    min: float | None
    max: float | None
    mean: float | None
    std: object
    norm: object
    zeros: int | None
    nans: int | None
    infs: int | None
    histogram: Histogram | None
    quantiles: Quantiles | None
    quantile_error: float | None
    outlier_ratio: float | None
    channels: ChannelStatistics | None
    reason: str | None


class TensorStatistics(TensorReport, _Statistics):
    """One tensor. ``min``, ``max``, ``mean``, ``std`` (of a sample), ``norm`` (L2) and the histogram are over the
    finite elements; None stands for an unknown number.

    The quantiles are right within a factor of 1 ± ``quantile_error``, 0.0 where they are exact; the histogram counts
    the same numbers, but those of up to 262,144 elements exactly. ``outlier_ratio`` is the largest absolute value over
    the 99th percentile of the absolute values, None where that is 0. ``channels`` is None for fewer than two
    dimensions, and for the values of sparse and nested tensors.

    ``of`` says which numbers were measured, ``reason`` why there are none. Each view of a storage is measured once:
    ``same_as`` is the path of the first. ``numel`` counts the elements in the file.
    """

    numel: int
    same_as: str | None


class StatsSummary(TypedDict):
    """Totals over the rows, each tensor once, and the paths of the tensors to look at.

    ``with_dead_channels`` are those with dead channels and others, ``with_outliers`` those of an outlier ratio above
    10: with a billion normally distributed numbers it is about 2.4, and 5 where their tails are exponential.
    """

    tensors: int
    distinct: int
    elements: int
    zeros: int
    nans: int
    infs: int
    with_nan: list[str]
    with_inf: list[str]
    all_zero: list[str]
    with_dead_channels: list[str]
    with_outliers: list[str]
    without_numbers: list[str]
    missing: list[str]


class StatsReport(TypedDict):
    """``ckptool.stats/1``."""

    schema: Literal["ckptool.stats/1"]
    path: str
    listed: int
    in_file: int
    summary: StatsSummary
    tensors: list[TensorStatistics]


def statistics_of(
    checkpoint: Checkpoint,
    *,
    key: str | None = None,
    everything: bool = False,
    globs: Globs = Globs(),
    sort: str = "file",
    known: Mapping[object, Measured] = MappingProxyType({}),
    progress: Progress | None = None,
) -> StatsReport:
    """Return the report of ``stats`` on the tensors that ``select_entries`` selects.

    ``known`` is what was measured before, by ``reading_id``. ``progress`` is called with numbers of bytes. Raises
    TargetError as ``select_entries`` does, UnreadableError where torch is not installed.
    """
    need_torch("computing with values", checkpoint.path)
    survey = checkpoint.survey
    entries = list(select_entries(checkpoint, key, everything, globs))
    paths: list[str] = []
    readings: list[Reading | str] = []
    numbers: dict[object, int] = {}
    for entry in entries:
        if entry.ref not in numbers:
            reading = interpret(checkpoint, entry.ref)
            number = numbers.setdefault(reading_id(reading), len(readings))
            numbers[entry.ref] = number
            if number == len(readings):
                paths.append(entry.path)
                readings.append(reading)
    measured = _measure_all(readings, known, progress)
    rows: list[TensorStatistics] = []
    missing = []
    for entry in entries:
        path, statistics = paths[numbers[entry.ref]], measured[numbers[entry.ref]]
        if statistics["of"] is not None and statistics["reason"] is not None:
            missing.append(entry.path)
        same = None if path == entry.path else path
        rows.append({**tensor_report(survey, entry), "numel": _numel(checkpoint, entry), **statistics, "same_as": same})
    return {
        "schema": "ckptool.stats/1",
        "path": checkpoint.path,
        "listed": len(rows),
        "in_file": len(survey.tensors),
        "summary": _summary(rows, missing),
        "tensors": _sorted(rows, sort, everything),
    }


def _numel(checkpoint: Checkpoint, entry: TensorEntry) -> int:
    shard = sharding(checkpoint.survey.reader, entry.ref, entry.tensor)
    return entry.tensor.numel if shard is None else sum(prod(part.shape) for part in shard.parts)


def reading_id(reading: Reading | str) -> object:
    """Return the identity of the numbers to measure: places with equal ids have the same numbers."""
    if isinstance(reading, str):
        return object()
    return view_id(reading.tensor), reading.of, reading.negated, reading.affine


def _measure_all(
    readings: Sequence[Reading | str], known: Mapping[object, Measured], progress: Progress | None
) -> list[_Statistics]:
    """Return the statistics of each."""
    before = [known.get(reading_id(reading)) for reading in readings]
    sizes = [
        0 if isinstance(reading, str) or measured else tensor_size(reading.tensor)
        for reading, measured in zip(readings, before)
    ]
    return _in_threads(lambda number, advance: _statistics(readings[number], before[number], advance), sizes, progress)


Result = TypeVar("Result")


def _in_threads(
    work: Callable[[int, Progress], Result], sizes: Sequence[int], progress: Progress | None
) -> list[Result]:
    """Return what ``work`` makes of each number, of so many bytes to read; in several threads where that pays."""
    torch = need_torch("computing with values")
    results: dict[int, Result] = {}
    lock = threading.Lock()

    def advance(count: int) -> None:
        if progress:
            with lock:
                progress(count)

    def do(number: int) -> None:
        results[number] = work(number, advance)

    with one_thread(torch):
        run_in_threads(range(len(sizes)), do, sum(sizes))
    return [results[number] for number in range(len(sizes))]


def _statistics(reading: Reading | str, measured: Measured | None, advance: Progress) -> _Statistics:
    if isinstance(reading, str):
        return _no_statistics(None, reading)
    try:
        measured = measured or _measured(reading, advance)
    except MalformedError as error:
        return _no_statistics(reading.of, error.what)
    return statistics(reading, measured)


def statistics(reading: Reading, measured: Measured) -> _Statistics:
    """Return the measured numbers of a tensor as reports have them."""
    histogram: Histogram = {"counts": list(measured.counts), "edges": [json_number(edge) for edge in measured.edges]}
    names = (f"p{percent}" for percent in PERCENT)
    return {
        "of": "absolute values" if is_complex(reading.tensor.dtype) else reading.of,
        "finite": measured.finite,
        "min": measured.low,
        "max": measured.high,
        "mean": measured.mean,
        # Beyond float64 these are "inf", although all elements are finite.
        "std": json_number(measured.std),
        "norm": json_number(measured.norm),
        "zeros": measured.zeros,
        "nans": measured.nans,
        "infs": measured.infs,
        "histogram": histogram if measured.finite else None,
        "quantiles": cast("Quantiles", dict(zip(names, measured.quantiles))) if measured.finite else None,
        "quantile_error": measured.error if measured.finite else None,
        "outlier_ratio": measured.outlier_ratio,
        "channels": _channels(reading, measured.channels),
        "reason": None,
    }


def _channels(reading: Reading, channels: Channels | None) -> ChannelStatistics | None:
    shape = reading.tensor.shape
    if channels is None or len(shape) < 2 or 0 in shape or reading.of == "values":
        return None
    count, dead, rms = channels
    if count < shape[0]:
        if reading.tensor.stride[0]:
            return None  # too many to tell apart
        count, dead, rms = shape[0], dead * shape[0], rms * groups_of(shape[0])
    return {"axis": 0, "count": count, "dead": dead, "rms": list(rms)}


def _no_statistics(of: str | None, reason: str) -> _Statistics:
    return cast("_Statistics", {**dict.fromkeys(_Statistics.__annotations__), "of": of, "reason": reason})


class MeasuredPairs(NamedTuple):
    """What was measured of pairs of tensors: numbers of each side by ``reading_id``, comparisons by pairs of nodes."""

    sides: tuple[dict[object, Measured], dict[object, Measured]]
    compared: dict[tuple[Ref, Ref], Compared]


def measure_pairs(
    a: Checkpoint, b: Checkpoint, refs: Iterable[tuple[Ref, Ref]], progress: Progress | None = None
) -> MeasuredPairs:
    """Measure pairs of tensors of two checkpoints, given by their nodes: both, and how they compare, in one reading.

    Left out are those without numbers or bytes, of different shapes, and those that ``stats`` reads in another order.
    ``progress`` is called with numbers of bytes of both. Raises UnreadableError where torch is not installed.
    """
    pairs: dict[object, tuple[Reading, Reading]] = {}
    names: dict[tuple[Ref, Ref], tuple[object, object]] = {}
    for nodes in refs:
        one, other = interpret(a, nodes[0]), interpret(b, nodes[1])
        if not isinstance(one, str) and not isinstance(other, str) and _in_step(one, other):
            names[nodes] = name = reading_id(one), reading_id(other)
            pairs.setdefault(name, (one, other))
    sizes = [sum(tensor_size(reading.tensor) for reading in pair) for pair in pairs.values()]
    work = list(pairs.values())

    def measured(number: int, advance: Progress) -> PairMeasured | None:
        try:
            found = measure_pair(*work[number], _BINS)
        except MalformedError:
            return None
        advance(sizes[number])
        return found

    found = dict(zip(pairs, _in_threads(measured, sizes, progress) if pairs else ()))
    result = MeasuredPairs(({}, {}), {})
    for nodes, name in names.items():
        pair = found[name]
        if pair is not None:
            for side, reading, numbers in zip(result.sides, pairs[name], (pair.a, pair.b)):
                side[reading_id(reading)] = numbers
            result.compared[nodes] = pair.compared
    return result


def _in_step(one: Reading, other: Reading) -> bool:
    """Return whether the numbers of two tensors can be read side by side in the order in which ``stats`` reads them."""
    whole = all(reading.of in ("elements", "dequantized") and is_contiguous(reading.tensor) for reading in (one, other))
    return whole and one.tensor.shape == other.tensor.shape and 0 not in one.tensor.shape


def _measured(reading: Reading, advance: Progress) -> Measured:
    tensor, affine = reading.tensor, reading.affine
    dtype = dtype_of(tensor)
    # The scales of channels depend on the order of the elements; everything else can be read as it is stored.
    in_order = (affine is not None and affine.axis >= 0) or (dtype is not None and dtype.packed > 1)
    stored, times = (tensor, 1) if in_order else in_storage_order(tensor)
    layout = row_major(tensor) if in_order else layout_of(tensor, storage_axes(tensor))

    def pieces() -> Iterator[bytes]:
        for data in elements(reading.storage, stored):
            yield data
            advance(len(data))

    measured = measure(pieces(), rule_of(reading), layout, _BINS)
    return measured if times == 1 else _repeated(measured, times)


def _repeated(measured: Measured, times: int) -> Measured:
    """Return the statistics of a tensor in which each element counts several times."""
    finite = measured.finite * times
    std, norm = measured.std, measured.norm
    if finite > 1 and measured.finite:
        std = 0.0 if std is None else std * ((measured.finite - 1) * times / (finite - 1)) ** 0.5
    return measured._replace(
        finite=finite,
        nans=measured.nans * times,
        infs=measured.infs * times,
        zeros=measured.zeros * times,
        std=std,
        norm=None if norm is None else norm * times**0.5,
        counts=tuple(count * times for count in measured.counts),
    )


def _summary(rows: list[TensorStatistics], missing: list[str]) -> StatsSummary:
    once = [row for row in rows if row["same_as"] is None]
    return {
        "tensors": len(rows),
        "distinct": len(once),
        "elements": sum(row["numel"] for row in once),
        "zeros": sum(row["zeros"] or 0 for row in once),
        "nans": sum(row["nans"] or 0 for row in once),
        "infs": sum(row["infs"] or 0 for row in once),
        "with_nan": [row["path"] for row in rows if row["nans"]],
        "with_inf": [row["path"] for row in rows if row["infs"]],
        "all_zero": [row["path"] for row in rows if row["finite"] and row["min"] == 0 == row["max"]],
        "with_dead_channels": [
            row["path"] for row in rows if (slices := row["channels"]) and 0 < slices["dead"] < slices["count"]
        ],
        "with_outliers": [row["path"] for row in rows if (row["outlier_ratio"] or 0) > OUTLIERS],
        "without_numbers": [row["path"] for row in rows if row["reason"] is not None],
        "missing": missing,
    }


def _sorted(rows: list[TensorStatistics], sort: str, everything: bool) -> list[TensorStatistics]:
    if sort == "file":
        return rows
    if sort == "name":
        return sorted(rows, key=lambda row: row["path"] if everything else row["key"])

    def weight(row: Any) -> float:
        """Return the sort key of a row; unknown numbers come last."""
        return inf if row[sort] is None else -float(row[sort])

    return sorted(rows, key=weight)


def bytes_to_read(entries: Iterable[TensorEntry]) -> int:
    """Estimate the bytes reported to ``progress`` in total."""
    return sum(tensor.own_bytes for tensor in {entry.ref: entry.tensor for entry in entries}.values())


def stats(
    path: CheckpointOrPath,
    *,
    key: str | None = None,
    all: bool = False,
    include: Patterns = (),
    exclude: Patterns = (),
    sort: str = "file",
    progress: Progress | None = None,
) -> StatsReport:
    """Return the JSON of ``ckptool stats``, schema ``ckptool.stats/1``. Needs torch for the arithmetic.

    The tensors are chosen as by ``keys``. ``sort`` is "file", "name", or the name of a number, the largest first:
    "bytes", "numel", "min", "max", "mean", "std", "norm", "zeros", "nans" or "infs". ``progress`` is called with
    numbers of bytes. Tensors whose bytes are missing are named in ``summary.missing``.

    >>> rows = ckptool.stats("model.pth", include=["fc.bias"])["tensors"]
    >>> [(row["key"], row["numel"], row["nans"]) for row in rows]
    [('fc.bias', 2, 0)]
    """
    if sort not in SORTS:
        raise TargetError(f"rows cannot be sorted by {sort!r}", next=f"sort by {join_limited(SORTS, most=len(SORTS))}")
    globs = Globs(include, exclude)
    with opened(path) as checkpoint:
        report = statistics_of(checkpoint, key=key, everything=all, globs=globs, sort=sort, progress=progress)
    return cast("StatsReport", ShownStats(report))

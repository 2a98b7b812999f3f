"""The report of ``stats``: every tensor in numbers. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from ..base.dtypes import BY_NAME, is_complex
from ..base.errors import MalformedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.records import NamedTuple, TypedDict
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import select_entries
from ..checkpoint.sharding import sharding
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import Tensor, view_id
from ..files.downloads import expect_reads
from ..files.threads import from_threads, run_in_threads
from ..formats.opening import CheckpointOrPath, opened
from ..values.elements import Filling, StorageReader, elements, filling, in_storage_order, read_for, tensor_size
from ..values.interpretation import Reading, interpret
from ..values.numeric import json_number
from ..values.torch.loads import need_torch, one_thread
from ..values.torch.measure import PACKED, ElementRule, Measured, measure, rule_of
from .keys import TensorReport, tensor_report

if TYPE_CHECKING:
    from ..files.write.copying import Progress

#: Bins of a histogram; the chart in the table has one character per bin.
_BINS: Final = 10
#: The sort orders of rows: as in the file, by name, or by a number, largest first.
SORTS: Final = ("file", "name", "bytes", "numel", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs")


class Histogram(TypedDict):
    """Counts of the finite elements between successive edges."""

    counts: list[int]
    edges: list[object]


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
    reason: str | None


class TensorStatistics(TensorReport, _Statistics):
    """One tensor. ``min``, ``max``, ``mean``, ``std`` (of a sample), ``norm`` (L2) and the histogram cover the finite
    elements. None stands for an unknown number.

    ``of`` names the numbers that were measured; ``reason`` says why there are none. Each view of a storage is measured
    once: ``same_as`` is the path of the first. ``numel`` counts the elements in the file.
    """

    numel: int
    same_as: str | None


class StatsSummary(TypedDict):
    """Totals over the rows, each tensor once, and the paths of tensors that need attention."""

    tensors: int
    distinct: int
    elements: int
    zeros: int
    nans: int
    infs: int
    with_nan: list[str]
    with_inf: list[str]
    all_zero: list[str]
    without_numbers: list[str]
    missing: list[str]


class StatsReport(TypedDict):
    """The report of ``stats``, schema ``ckptool.stats/1``."""

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
    progress: Progress | None = None,
) -> StatsReport:
    """Return the report of ``stats`` on the tensors that ``select_entries`` selects.

    ``progress`` is called with numbers of bytes. Raise TargetError as ``select_entries`` does, UnreadableError if torch
    is not installed.
    """
    need_torch("computing with values", checkpoint.path)
    survey = checkpoint.survey
    entries = list(select_entries(checkpoint, key, everything, globs))
    readings: dict[object, Reading | str] = {}
    first: dict[object, str] = {}
    names: dict[int, object] = {}
    for entry in entries:
        if entry.ref not in names:
            reading = interpret(checkpoint, entry.ref)
            name: object = object()
            if not isinstance(reading, str):  # equal names mean the same numbers
                name = view_id(reading.tensor), reading.of, reading.negated, reading.affine
            names[entry.ref] = name
            readings.setdefault(name, reading)
            first.setdefault(name, entry.path)
    measured = dict(zip(readings, _measure_all(list(readings.values()), progress)))
    rows: list[TensorStatistics] = []
    missing = []
    for entry in entries:
        path, statistics = first[names[entry.ref]], measured[names[entry.ref]]
        if statistics["of"] is not None and statistics["reason"] is not None:
            missing.append(entry.path)
        same = None if path == entry.path else path
        shard = sharding(survey.reader, entry.ref, entry.tensor)
        numel = entry.tensor.numel if shard is None else sum(prod(part.shape) for part in shard.parts)
        rows.append({**tensor_report(survey, entry), "numel": numel, **statistics, "same_as": same})
    return {
        "schema": "ckptool.stats/1",
        "path": checkpoint.path,
        "listed": len(rows),
        "in_file": len(survey.tensors),
        "summary": _summary(rows, missing),
        "tensors": _sorted(rows, sort, everything),
    }


def _measure_all(readings: Sequence[Reading | str], progress: Progress | None) -> list[_Statistics]:
    torch = need_torch("computing with values")
    work = {number: _Work.of(reading) for number, reading in enumerate(readings) if not isinstance(reading, str)}
    found: dict[int, Measured | MalformedError] = {}
    advance = from_threads(progress)

    def do(number: int) -> None:
        try:
            item = work[number]
            found[number] = _repeated(measure(torch, item.read, item.rule, _BINS, advance), item.times)
        except MalformedError as error:
            found[number] = error

    expect_reads(read_for(item.storage, item.tensor) for item in work.values())
    with one_thread(torch):
        run_in_threads(list(work), do, [tensor_size(item.tensor) for item in work.values()])
    return [_statistics(reading, found.get(number)) for number, reading in enumerate(readings)]


def _statistics(reading: Reading | str, measured: Measured | MalformedError | None) -> _Statistics:
    if isinstance(reading, str) or not isinstance(measured, Measured):
        of = None if isinstance(reading, str) else reading.of
        reason = measured.what if isinstance(measured, MalformedError) else str(reading)
        return cast("_Statistics", {**dict.fromkeys(_Statistics.__annotations__), "of": of, "reason": reason})
    histogram: Histogram = {"counts": list(measured.counts), "edges": [json_number(edge) for edge in measured.edges]}
    return {
        "of": "absolute values" if is_complex(reading.tensor.dtype) else reading.of,
        "finite": measured.finite,
        "min": measured.low,
        "max": measured.high,
        "mean": measured.mean,
        # Beyond the range of float64 these are "inf", although all elements are finite.
        "std": json_number(measured.std),
        "norm": json_number(measured.norm),
        "zeros": measured.zeros,
        "nans": measured.nans,
        "infs": measured.infs,
        "histogram": histogram if measured.finite else None,
        "reason": None,
    }


class _Work(NamedTuple):
    """A tensor to measure, in the order in which it is read, and how often each element counts."""

    storage: StorageReader
    tensor: Tensor
    times: int
    rule: ElementRule

    @classmethod
    def of(cls, reading: Reading) -> _Work:
        tensor, affine, dtype = reading.tensor, reading.affine, BY_NAME.get(reading.tensor.dtype)
        # The scales of channels depend on the order of the elements; everything else can be read in storage order.
        in_order = (affine is not None and affine.axis >= 0) or (dtype is not None and dtype.packed > 1)
        stored, times = (tensor, 1) if in_order else in_storage_order(tensor)
        return cls(reading.storage, stored, times, rule_of(reading))

    def read(self) -> Iterable[bytes] | Filling:
        fill = None if self.rule.dtype in PACKED else filling(self.storage, self.tensor)
        return elements(self.storage, self.tensor) if fill is None else fill


def _repeated(measured: Measured, times: int) -> Measured:
    if times == 1:
        return measured
    finite = measured.finite * times
    std, norm = measured.std, measured.norm
    if measured.finite == 1:
        std = 0.0
    elif std is not None:
        std *= ((measured.finite - 1) * times / (finite - 1)) ** 0.5
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
        "without_numbers": [row["path"] for row in rows if row["reason"] is not None],
        "missing": missing,
    }


def _sorted(rows: list[TensorStatistics], sort: str, everything: bool) -> list[TensorStatistics]:
    if sort == "file":
        return rows
    if sort == "name":
        return sorted(rows, key=lambda row: row["path"] if everything else row["key"])

    def weight(row: Any) -> float:
        return inf if row[sort] is None else -float(row[sort])

    return sorted(rows, key=weight)


def bytes_to_read(entries: Iterable[TensorEntry]) -> int:
    """Return the estimated total of the bytes reported to ``progress``."""
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

    The tensors are chosen as by ``keys``. ``sort`` is "file", "name", or the name of a number, largest first: "bytes",
    "numel", "min", "max", "mean", "std", "norm", "zeros", "nans" or "infs". ``progress`` is called with numbers of
    bytes. Tensors whose bytes are missing are listed in ``summary.missing``.

    >>> rows = ckptool.stats("model.pth", include=["fc.bias"])["tensors"]
    >>> [(row["key"], row["numel"], row["nans"]) for row in rows]
    [('fc.bias', 2, 0)]
    """
    if sort not in SORTS:
        raise TargetError(f"rows cannot be sorted by {sort!r}", next=f"sort by {join_limited(SORTS, most=len(SORTS))}")
    globs = Globs(include, exclude)
    with opened(path) as checkpoint:
        return statistics_of(checkpoint, key=key, everything=all, globs=globs, sort=sort, progress=progress)

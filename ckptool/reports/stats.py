"""The report of ``stats``: every tensor in numbers. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, cast

from ..base.errors import MalformedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sharding import sharding
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import view_id
from ..formats.opening import CheckpointOrPath, opened
from ..values.elements import elements, in_storage_order, storage_reader
from ..values.interpretation import Reading, interpret
from ..values.numeric import json_number
from ..values.torch.loads import need_torch
from ..values.torch.measure import STEP, Measured, measure, rule_of
from .keys import TensorReport, select_entries, tensor_report
from .shown import ShownStats

if TYPE_CHECKING:
    from ..files.write.copying import Progress

#: Bins of a histogram; the chart in the table has a character for each.
_BINS: Final = 10
#: What the rows can be sorted by: the order of the file, by name, or by a number, largest first.
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
    """One tensor. ``min``, ``max``, ``mean``, ``std`` (of a sample), ``norm`` (L2) and the histogram are over the
    finite elements; None stands for an unknown number.

    ``of`` says which numbers were measured, ``reason`` why there are none. Each view of a storage is measured once:
    ``same_as`` is the path of the first. ``numel`` counts the elements in the file.
    """

    numel: int
    same_as: str | None


class StatsSummary(TypedDict):
    """Totals over the rows, each tensor once, and the paths of the tensors to look at."""

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
    progress: Progress | None = None,
) -> StatsReport:
    """Return the report of ``stats`` on the tensors that ``select_entries`` selects.

    ``progress`` is called with numbers of bytes. Raises TargetError as ``select_entries`` does, UnreadableError where
    torch is not installed.
    """
    need_torch("computing with values", checkpoint.path)
    survey = checkpoint.survey
    known: dict[object, tuple[str, _Statistics]] = {}
    rows: list[TensorStatistics] = []
    missing = []
    for entry in select_entries(checkpoint, key, everything, globs):
        first = known.get(entry.ref)
        if first is None:
            reading = interpret(checkpoint, entry.ref)
            first = known.get(_view(reading))
            if first is None:
                statistics = _statistics(checkpoint, reading, progress)
                first = known[entry.ref] = known[_view(reading)] = entry.path, statistics
        path, statistics = first
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


def _view(reading: Reading | str) -> object:
    """Return the identity of the numbers to measure: places with equal ids have the same numbers."""
    if isinstance(reading, str):
        return object()
    return view_id(reading.tensor), reading.of, reading.negated, reading.affine


def _statistics(checkpoint: Checkpoint, reading: Reading | str, progress: Progress | None) -> _Statistics:
    if isinstance(reading, str):
        return _no_statistics(None, reading)
    try:
        measured = _measured(checkpoint, reading, progress)
    except MalformedError as error:
        return _no_statistics(reading.of, error.what)
    histogram: Histogram = {"counts": list(measured.counts), "edges": [json_number(edge) for edge in measured.edges]}
    return {
        "of": "absolute values" if reading.tensor.dtype.startswith("complex") else reading.of,
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
        "histogram": histogram if measured.counts else None,
        "reason": None,
    }


def _no_statistics(of: str | None, reason: str) -> _Statistics:
    names = ("finite", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs", "histogram")
    return cast("_Statistics", {"of": of, **dict.fromkeys(names), "reason": reason})


def _measured(checkpoint: Checkpoint, reading: Reading, progress: Progress | None) -> Measured:
    tensor, affine = reading.tensor, reading.affine
    # Channels depend on the order of the elements; everything else can be read as it is stored.
    by_channel = affine is not None and affine.axis >= 0
    stored, times = (tensor, 1) if by_channel else in_storage_order(tensor)
    rule = rule_of(reading._replace(tensor=stored))

    def pieces() -> Iterator[bytes]:
        for data in elements(storage_reader(checkpoint, stored.storage), stored):
            yield data
            if progress:
                progress(len(data))

    measured = measure(pieces, rule, _BINS)
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
    """Estimate the bytes reported to ``progress`` in total: large tensors are read twice."""
    tensors = {entry.ref: entry.tensor for entry in entries}.values()
    return sum(tensor.own_bytes * (1 if tensor.numel <= STEP else 2) for tensor in tensors)


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

"""What ``stats`` tells: every tensor in numbers. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf, prod
from typing import Any, Final

from ..base.errors import MalformedError
from ..base.globs import Globs
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sharding import sharding
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import view_id
from ..values.elements import elements, tensor_size, unordered
from ..values.interpretation import Reading, reading
from ..values.numbers import json_number
from ..values.torch.loads import need_torch
from ..values.torch.measure import STEP, Measured, Rule, measure
from .keys import described, listed_entries

#: Bins of a histogram: as many characters has the chart in the table.
_BINS: Final = 10
#: What the rows can be sorted by: the order of the file, by name, or by a number, largest first.
SORTS: Final = ("file", "name", "bytes", "numel", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs")

Progress = Callable[[int], None]


def statistics_of(
    checkpoint: Checkpoint,
    *,
    key: str | None = None,
    everything: bool = False,
    globs: Globs = Globs(),
    sort: str = "file",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The report of ``stats``, schema ``ckptool.stats/1``.

    Tensors are chosen as ``key_listing`` does. min, max, mean, std (of a sample), norm (L2) and the histogram are
    about the finite elements, zeros, nans and infs are counted beside; null is what cannot be told, and ``reason``
    says why for a tensor without numbers. What is one view of one storage is computed once: ``same_as`` is the path
    of the first. ``progress`` is called with numbers of bytes. Raises TargetError as ``key_listing`` does,
    UnreadableError where torch is not installed.
    """
    need_torch("computing with values", checkpoint.path)
    survey = checkpoint.survey
    chosen = listed_entries(checkpoint, key, everything, globs)
    known: dict[object, tuple[str, dict[str, Any]]] = {}
    rows = []
    missing = []
    for entry in chosen:
        first = known.get(entry.ref)
        if first is None:
            how = reading(checkpoint, entry.ref)
            first = known.get(_mark(how))
            if first is None:
                fields = _row(checkpoint, how, progress)
                first = known[entry.ref] = known[_mark(how)] = entry.path, fields
        if first[1]["of"] is not None and first[1]["reason"] is not None:
            missing.append(entry.path)
        same = None if first[0] == entry.path else first[0]
        rows.append({**described(survey, entry), "numel": _numel(checkpoint, entry), **first[1], "same_as": same})
    return {
        "schema": "ckptool.stats/1",
        "path": checkpoint.path,
        "listed": len(rows),
        "in_file": len(survey.tensors),
        "summary": {**_summary(rows), "missing": missing},
        "tensors": _sorted(rows, sort, everything),
    }


def _numel(checkpoint: Checkpoint, entry: TensorEntry) -> int:
    """The elements that are in the file: of a tensor that is spread over ranks those of its parts."""
    found = sharding(checkpoint.survey.reader, entry.ref, entry.tensor)
    return entry.tensor.numel if found is None else sum(prod(part.shape) for part in found.parts)


def _mark(how: Reading | str) -> object:
    """What two places have in common that show the same numbers."""
    if isinstance(how, str):
        return object()
    return view_id(how.tensor), how.of, how.negated, how.affine


def _row(checkpoint: Checkpoint, how: Reading | str, progress: Progress | None) -> dict[str, Any]:
    if isinstance(how, str):
        return _fields(None, None, how)
    try:
        measured = _measured(checkpoint, how, progress)
    except MalformedError as error:
        return _fields(None, how.of, error.what)
    return _fields(measured, "absolute values" if how.tensor.dtype.startswith("complex") else how.of, None)


def _measured(checkpoint: Checkpoint, how: Reading, progress: Progress | None) -> Measured:
    tensor, affine = how.tensor, how.affine
    # Channels are told by the order of the elements; everything else can be read as it is stored.
    by_channel = affine is not None and affine.axis >= 0
    stored, times = (tensor, 1) if by_channel else unordered(tensor)
    inner = prod(tensor.shape[affine.axis + 1 :]) if affine is not None and by_channel else 1
    scales, zero_points = (affine.scales, affine.zero_points) if affine is not None else ((), ())
    packed = stored.dtype.startswith("quint") and tensor_size(stored) != stored.numel
    rule = Rule(stored.dtype, scales, zero_points, inner, how.negated, stored.numel if packed else -1)

    def pieces() -> Iterable[bytes]:
        return elements(checkpoint, stored)

    measured = measure(lambda: _told(pieces(), progress), rule, _BINS)
    return measured if times == 1 else _repeated(measured, times)


def _told(pieces: Iterable[bytes], progress: Progress | None) -> Iterator[bytes]:
    for data in pieces:
        yield data
        if progress:
            progress(len(data))


def _repeated(measured: Measured, times: int) -> Measured:
    """The numbers of a tensor in which each element counts so many times."""
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


def _fields(measured: Measured | None, of: str | None, reason: str | None) -> dict[str, Any]:
    if measured is None:
        names = ("finite", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs", "histogram")
        return {"of": of, **dict.fromkeys(names), "reason": reason}
    histogram = {"counts": list(measured.counts), "edges": [json_number(edge) for edge in measured.edges]}
    return {
        "of": of,
        "finite": measured.finite,
        "min": measured.low,
        "max": measured.high,
        "mean": measured.mean,
        # Beyond float64 these are "inf", for numbers that are not.
        "std": json_number(measured.std),
        "norm": json_number(measured.norm),
        "zeros": measured.zeros,
        "nans": measured.nans,
        "infs": measured.infs,
        "histogram": histogram if measured.counts else None,
        "reason": reason,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals over the rows, each tensor once, and the paths of the tensors to look at."""
    once = [row for row in rows if row["same_as"] is None]
    told = [row for row in once if row["reason"] is None]
    return {
        "tensors": len(rows),
        "distinct": len(once),
        "elements": sum(row["numel"] for row in once),
        "zeros": sum(row["zeros"] for row in told),
        "nans": sum(row["nans"] for row in told),
        "infs": sum(row["infs"] for row in told),
        "with_nan": [row["path"] for row in rows if row["nans"]],
        "with_inf": [row["path"] for row in rows if row["infs"]],
        "all_zero": [row["path"] for row in rows if row["finite"] and row["min"] == 0 == row["max"]],
        "without_numbers": [row["path"] for row in rows if row["reason"] is not None],
    }


def _sorted(rows: list[dict[str, Any]], sort: str, everything: bool) -> list[dict[str, Any]]:
    if sort == "file":
        return rows
    if sort == "name":
        return sorted(rows, key=lambda row: row["path" if everything else "key"])
    return sorted(rows, key=lambda row: -_weight(row[sort]))


def _weight(value: Any) -> float:
    """What is not known comes last."""
    return -inf if value is None else float(value)


def bytes_to_read(entries: Iterable[TensorEntry]) -> int:
    """How many bytes ``progress`` will be told of, about: large tensors are gone through twice."""
    tensors = {entry.ref: entry.tensor for entry in entries}.values()
    return sum(tensor.own_bytes * (1 if tensor.numel <= STEP else 2) for tensor in tensors)

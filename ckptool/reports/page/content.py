"""The content of a page: the reports on a checkpoint, and the changes in another one, with their tensors paired.

The program of the page reads the tensors as columns of JSON.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from ...base.errors import UnreadableError
from ...base.globs import Globs
from ...base.records import NamedTuple
from ...base.steps import argument
from ...base.text import json_value, shape_text
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.selection import select_entries
from ...checkpoint.survey import TensorEntry
from ...checkpoint.tensors import Tensor, view_id
from ...edits.matching.pairing import pair_names
from ...edits.optimizers import optimizers, state_owners
from ...values.torch.loads import need_torch
from ..comparing.diff import DiffReport, Scope, better_scope, diff_report
from ..comparing.graphs import GraphComparison, compare_graphs
from ..comparing.places import Side, side_of
from ..entries import outline
from ..inspection import InspectReport, inspection
from ..keys import tensor_report
from ..stats import statistics_of
from ..validate import ValidateReport, report_on

if TYPE_CHECKING:
    from ...files.write.copying import Progress

#: How many lines about the entries without tensors a page shows.
_LINES: Final = 400

#: How a tensor of A changed in B, or that only B has it.
SAME: Final = "same"
DIFFERS: Final = "values differ"
CHANGED: Final = "changed"
RENAMED: Final = "renamed"
REMOVED: Final = "only in A"
ADDED: Final = "only in B"
ASIDE: Final = "not compared"


class Tensors(NamedTuple):
    """The tensors of a checkpoint, with one row of ``stats`` or ``keys`` per entry.

    ``first`` has the number of the first row with the same elements in the same bytes, usually the row itself.
    ``owners`` maps rows of optimizer states to the rows of their parameters. ``stateful`` are all rows of optimizers.
    """

    path: str
    entries: Sequence[TensorEntry]
    rows: Sequence[Mapping[str, Any]]
    first: Sequence[int]
    owners: Mapping[int, int]
    stateful: Collection[int]


class Comparison(NamedTuple):
    """The second checkpoint, and the differences.

    ``fate`` has a word for each row of A. ``partners`` maps rows of A to rows of B. ``figures`` and ``changes`` are the
    results of ``diff`` by row of A. It does not pair renamed tensors.
    """

    tensors: Tensors
    inspection: InspectReport
    validation: ValidateReport
    diff: DiffReport
    scope: Scope
    fate: Sequence[str]
    partners: Mapping[int, int]
    figures: Mapping[int, Mapping[str, Any]]
    changes: Mapping[int, Sequence[str]]


class Content(NamedTuple):
    """Everything on a page. ``without_numbers`` says why there are no numbers; "" if there are."""

    tensors: Tensors
    inspection: InspectReport
    validation: ValidateReport
    entries: Sequence[str]
    comparison: Comparison | None
    without_numbers: str


def content_of(
    a: Checkpoint, b: Checkpoint | None, scope: Scope, only: Globs, values: bool, progress: Progress | None = None
) -> Content:
    """Collect the content of a page on the checkpoint ``a``, and with ``b`` on the changes.

    ``scope`` and ``only`` are as for ``diff``; for one checkpoint, the scope's ``key`` and ``only`` choose the tensors.
    Without ``values`` no tensor bytes are read. ``progress`` is called with numbers of bytes. Raise the errors of
    ``diff``.
    """
    without_numbers = "" if values else "the values of tensors were not read, as asked for"
    try:
        need_torch("computing with values")
    except UnreadableError as error:
        without_numbers = without_numbers or str(error)
    measured = not without_numbers
    for side in (a, b):
        if side is not None:
            side.cache.checksums = {}  # keep the checksums of bytes that are read for their numbers
    comparison = None
    if b is None:
        tensors = _tensors(a, scope.key, only, measured, progress)
    else:
        tensors, comparison = _compared(a, b, scope.completed, only, values, measured, progress)
    entries = list(islice(outline(a.lenient()), _LINES))
    validation = report_on(a, quick=not values, progress=progress)
    return Content(tensors, inspection(a), validation, entries, comparison, without_numbers)


def _tensors(
    checkpoint: Checkpoint, key: str | None, only: Globs, measured: bool, progress: Progress | None
) -> Tensors:
    entries = select_entries(checkpoint, key, True, only)
    rows: Sequence[Mapping[str, Any]]
    if measured:
        rows = statistics_of(checkpoint, key=key, everything=True, globs=only, progress=progress)["tensors"]
    else:
        rows = [{**tensor_report(checkpoint.survey, entry), "numel": entry.tensor.numel} for entry in entries]
    numbers: dict[object, int] = {}
    first = [
        numbers.setdefault(view_id(entry.tensor) if entry.tensor.storage else entry.ref, number)
        for number, entry in enumerate(entries)
    ]
    by_key = {(entry.state_dict, entry.key): number for number, entry in enumerate(entries) if entry.state_dict >= 0}
    dicts = {item.ref: number for number, item in enumerate(checkpoint.state_dicts)}
    holders = {
        holder: by_key.get((dicts[state_dict.ref], key))
        for holder, (state_dict, key) in state_owners(checkpoint).items()
    }
    found = ((number, holders.get(entry.holder)) for number, entry in enumerate(entries))
    owners = {number: owner for number, owner in found if owner is not None}
    inside: set[int] = set()
    for optimizer in optimizers(checkpoint.graph):
        inside |= checkpoint.survey.inside(optimizer.ref)
    stateful = {number for number, entry in enumerate(entries) if entry.holder in inside}
    return Tensors(checkpoint.path, entries, rows, first, owners, stateful)


def _compared(
    a: Checkpoint,
    b: Checkpoint,
    scope: Scope,
    only: Globs,
    values: bool,
    measured: bool,
    progress: Progress | None,
) -> tuple[Tensors, Comparison]:
    if not values:
        scope = scope._replace(ignore=scope.ignore | {"values"})
    sides, graphs = _paired(a, b, scope, only)
    better = better_scope(*sides, scope.ignore) if all(graphs.unpaired) else None
    if better is not None:
        scope = better
        sides, graphs = _paired(a, b, scope, only)
    entries = [list(select_entries(side, None, True, only)) for side in (a, b)]
    partners, rows = _partners(graphs, sides, entries[0], entries[1])
    chosen = _chosen(a, sides[0]), _chosen(b, sides[1])
    renamed = _renamed(entries[0], entries[1], partners, chosen)
    both = {**partners, **renamed}
    diff = diff_report(
        a,
        b,
        key=scope.key,
        other_key=scope.other_key,
        ignore=scope.ignore,
        only=only,
        count=measured,
        sort="file",
        progress=progress,
    )
    ours, theirs = (_tensors(side, None, only, measured, progress) for side in (a, b))
    figures: dict[int, Mapping[str, Any]] = {}
    for item in (*diff["values"], *diff["within_tolerance"]):
        for number in rows.get(item["path"], ()):
            figures.setdefault(number, item)
    changes: dict[int, list[str]] = {}
    for change in diff["changed"]:
        for number in rows.get(change["path"], ()):
            changes.setdefault(number, []).append(f"{change['what']}: {change['a']} -> {change['b']}")
    fate = []
    for number, entry in enumerate(ours.entries):
        word = CHANGED if number in changes else DIFFERS if number in figures else SAME
        if number not in partners:
            word = RENAMED if number in renamed else REMOVED
        fate.append(word if chosen[0] is None or entry.state_dict == chosen[0] else ASIDE)
    validation = report_on(b, quick=not values, progress=progress)
    everything = Comparison(theirs, inspection(b), validation, diff, scope, fate, both, figures, changes)
    return ours, everything


def _paired(a: Checkpoint, b: Checkpoint, scope: Scope, only: Globs) -> tuple[tuple[Side, Side], GraphComparison]:
    sides = side_of(a, scope.key), side_of(b, scope.other_key)
    return sides, compare_graphs(*sides, scope.ignore, only)


def _chosen(checkpoint: Checkpoint, side: Side) -> int | None:
    numbers = (number for number, item in enumerate(checkpoint.state_dicts) if item.ref == side.root)
    return None if side.root == side.graph.root and not side.base else next(numbers, None)


def _partners(
    graphs: GraphComparison, sides: tuple[Side, Side], ours: Sequence[TensorEntry], theirs: Sequence[TensorEntry]
) -> tuple[dict[int, int], dict[str, list[int]]]:
    """Map rows of A to rows of B, and paths in ``diff`` to rows of A."""
    finders = [_finder(side, entries) for side, entries in zip(sides, (ours, theirs))]
    partners: dict[int, int] = {}
    rows: dict[str, list[int]] = {}
    for path, number in graphs.places:
        left, right = (find(path, ref) for find, ref in zip(finders, graphs.tensors[number].refs))
        if left is not None and right is not None:
            partners.setdefault(left, right)
            rows.setdefault(path, []).append(left)
    return partners, rows


def _finder(side: Side, entries: Sequence[TensorEntry]) -> Callable[[str, int], int | None]:
    """Return a function that finds the row of a tensor by its path in ``diff``, or by its reference; None if absent."""
    by_path = {entry.path: number for number, entry in enumerate(entries)}
    by_ref: dict[int, list[int]] = {}
    for number, entry in enumerate(entries):
        by_ref.setdefault(entry.ref, []).append(number)
    seen: dict[int, int] = {}

    def find(path: str, ref: int) -> int | None:
        number = by_path.get(side.path_in_file(path))
        if number is not None and entries[number].ref == ref:
            return number
        # The name differs if prefixes are ignored. The places of a tied tensor come in file order.
        numbers = by_ref.get(ref, [])
        place = seen[ref] = seen.get(ref, -1) + 1
        return numbers[min(place, len(numbers) - 1)] if numbers else None

    return find


def _renamed(
    ours: Sequence[TensorEntry],
    theirs: Sequence[TensorEntry],
    partners: Mapping[int, int],
    chosen: tuple[int | None, int | None],
) -> dict[int, int]:
    """Map rows of A to rows of B with another name, pairing names by shapes and ends as ``match`` does."""
    taken = set(partners.values())
    sides = []
    for number, entries in enumerate((ours, theirs)):
        names: dict[str, int] = {}
        for row, entry in enumerate(entries):
            if entry.state_dict >= 0 and chosen[number] in (None, entry.state_dict):
                names.setdefault(entry.key, row)
        sides.append(names)
    one, other = sides
    if all(row in partners for row in one.values()) or all(row in taken for row in other.values()):
        return {}
    have, wanted = (
        {name: entries[row].tensor.shape for name, row in names.items()}
        for names, entries in ((one, ours), (other, theirs))
    )
    pairs = ((one[name], other[partner]) for name, partner in pair_names(have, wanted).items())
    return {row: partner for row, partner in pairs if row not in partners and partner not in taken}


# -- columns: a list with one item per tensor, first the tensors of A, then those found only in B; null is unknown

#: The numbers from ``stats`` and from ``diff`` that are columns.
NUMBERS: Final = ("finite", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs")
FIGURES: Final = ("rel_l2", "cosine", "max_abs", "mean_abs", "nonfinite", "differing")
#: The level of compression: a third of the time of the default level for 3 % more bytes.
_LEVEL: Final = 4


def packed(content: Content) -> str:
    """Return the columns as JSON, deflated, in base64."""
    text = json.dumps(columns(content), ensure_ascii=True, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode("ascii"), _LEVEL)).decode("ascii")


def columns(content: Content) -> dict[str, Any]:
    """Return the columns, and the files that they are about."""
    ours, comparison = content.tensors, content.comparison
    own, added = len(ours.rows), _added(comparison) if comparison is not None else []
    # (checkpoint, row) for each tensor on the page.
    every = [(ours, row) for row in range(own)]
    if comparison is not None:
        every += [(comparison.tensors, row) for row in added]
    rows = [tensors.rows[row] for tensors, row in every]
    data: dict[str, Any] = {
        "file": argument(ours.path),
        "name": [row["path"] if row["state_dict"] is None else row["key"] for row in rows],
        "dict": [row["state_dict"] for row in rows],
        "path": [row["path"] for row in rows],
        "dtype": [row["dtype"] for row in rows],
        "shape": [shape_text(row["shape"]) for row in rows],
        "device": [row["location"] for row in rows],
        "class": [row["class"] or "" for row in rows],
        "kind": [_kind(tensors, row) for tensors, row in every],
        "grad": [row["requires_grad"] for row in rows],
        "bytes": [row["bytes"] for row in rows],
        "numel": [row["numel"] for row in rows],
        "storage": [row["storage"] for row in ours.rows] + [""] * len(added),
        "first": [*ours.first, *range(own, len(rows))],
        "owner": [ours.owners.get(number) for number in range(len(rows))],
        "stats": None if content.without_numbers else _statistics(rows),
        "other": None,
        "diff": None,
    }
    if comparison is not None:
        theirs = comparison.tensors.rows
        partners = [comparison.partners.get(number) for number in range(len(rows))]
        if not content.without_numbers:
            data["other"] = _statistics([{} if row is None else theirs[row] for row in partners])
        # Most tensors have the same name in B.
        paths = [
            "" if row is None or theirs[row]["path"] == path else theirs[row]["path"]
            for row, path in zip(partners, data["path"])
        ]
        figures = [comparison.figures.get(number, {}) for number in range(len(rows))]
        data["diff"] = {
            "file": argument(comparison.tensors.path),
            "fate": [*comparison.fate, *(ADDED for _ in added)],
            "partner": paths,
            **{name: [item.get(name) for item in figures] for name in FIGURES},
            "reason": [item.get("reason") or "" for item in figures],
            "changes": [list(comparison.changes.get(number, ())) for number in range(len(rows))],
        }
    return data


def _kind(tensors: Tensors, row: int) -> str:
    tensor: Tensor = tensors.entries[row].tensor
    if row in tensors.stateful:
        return "optimizer state"
    if tensor.kind != "dense":
        return tensor.kind.replace("_", " ")
    return ("scalar", "vector", "matrix")[len(tensor.shape)] if len(tensor.shape) < 3 else "kernel (3-D and more)"


def _statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {name: [_exact(row.get(name)) for row in rows] for name in NUMBERS}
    result["counts"] = [(row.get("histogram") or {}).get("counts") for row in rows]
    return result | {name: [row.get(name) or "" for row in rows] for name in ("of", "reason")}


def _exact(value: Any) -> object:
    """Return a number that JavaScript can read; a large integer or a non-finite number becomes text."""
    return str(value) if isinstance(value, int) and abs(value) >> 53 else json_value(value)


def _added(comparison: Comparison) -> list[int]:
    taken, theirs = set(comparison.partners.values()), comparison.tensors
    key = comparison.scope.other_key
    inside = "" if key in (None, ".") else key
    return [
        number
        for number, row in enumerate(theirs.rows)
        if number not in taken and (key is None or row["state_dict"] == inside)
    ]

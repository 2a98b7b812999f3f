"""A page's tensors as columns of JSON, which its program reads.

A column is a list with one item per tensor: first the tensors of A, then those found only in B. ``null`` is an unknown
number.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...base.steps import Step, argument, shell_words
from ...base.text import json_value, shape_text
from ...checkpoint.tensors import Tensor
from ..comparing.diff import DiffReport
from .content import ADDED, Comparison, Content, Tensors

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
        data["diff"] = {
            "file": argument(comparison.tensors.path),
            "fate": [*comparison.fate, *(ADDED for _ in added)],
            "partner": paths,
            **_difference(comparison, len(rows)),
        }
    return data


def _kind(tensors: Tensors, row: int) -> str:
    """Return the kind of a tensor in a few words: its layout, its place, or its dimensions."""
    tensor: Tensor = tensors.entries[row].tensor
    if row in tensors.stateful:
        return "optimizer state"
    if tensor.kind != "dense":
        return tensor.kind.replace("_", " ")
    return ("scalar", "vector", "matrix")[len(tensor.shape)] if len(tensor.shape) < 3 else "kernel (3-D and more)"


def _statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of numbers; missing values are null."""
    result: dict[str, Any] = {name: [_exact(row.get(name)) for row in rows] for name in NUMBERS}
    result["counts"] = [(row.get("histogram") or {}).get("counts") for row in rows]
    return result | {name: [row.get(name) or "" for row in rows] for name in ("of", "reason")}


def _exact(value: Any) -> object:
    """Return a number that JavaScript can read; a large integer or a non-finite number becomes text."""
    return str(value) if isinstance(value, int) and abs(value) >> 53 else json_value(value)


def _added(comparison: Comparison) -> list[int]:
    """Return the rows that only B has."""
    taken, theirs = set(comparison.partners.values()), comparison.tensors
    key = comparison.scope.other_key if comparison.scope.other_key is not None else comparison.scope.key
    inside = "" if key in (None, ".") else key
    return [
        number
        for number, row in enumerate(theirs.rows)
        if number not in taken and (key is None or row["state_dict"] == inside)
    ]


def _difference(comparison: Comparison, size: int) -> dict[str, Any]:
    known = [comparison.figures.get(number, {}) for number in range(size)]
    result: dict[str, Any] = {name: [item.get(name) for item in known] for name in FIGURES}
    result["reason"] = [item.get("reason") or "" for item in known]
    result["changes"] = [list(comparison.changes.get(number, ())) for number in range(size)]
    return result


def compared_words(diff: DiffReport) -> str:
    """Return the compared part as options of ``diff``; "" if everything was compared."""
    settings = []
    if diff["key"] is not None:
        settings += [Step("key", diff["key"]), Step("other_key", diff["other_key"] or diff["key"])]
    settings += [Step("include", glob) for glob in diff["include"]]
    settings += [Step("exclude", glob) for glob in diff["exclude"]]
    if diff["ignored"]:
        settings.append(Step("ignore", ",".join(diff["ignored"])))
    return shell_words(word for step in settings for word in step.words)

"""A page's tensors as columns, which its program reads. Names are front-coded, words are numbered.

A column is a list with one item per tensor: first the tensors of A, then those found only in B. A column of words is
``{"words": [...], "at": [...]}``. ``null`` is an unknown number.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ...base.prefixes import common_length
from ...base.steps import Setting, argument, spaced
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
    """Return the columns, and the words and files that they refer to."""
    ours, comparison = content.tensors, content.comparison
    added = _added(comparison) if comparison is not None else []
    # (checkpoint, row) for each tensor on the page.
    every = [(ours, row) for row in range(len(ours.rows))]
    if comparison is not None:
        every += [(comparison.tensors, row) for row in added]
    rows = [tensors.rows[row] for tensors, row in every]
    data: dict[str, Any] = {
        "file": argument(ours.path),
        **_names(rows),
        "dtype": _numbered(row["dtype"] for row in rows),
        "shape": _numbered(shape_text(row["shape"]) for row in rows),
        "device": _numbered(row["location"] for row in rows),
        "class": _numbered(row["class"] or "" for row in rows),
        "kind": _numbered(_kind(tensors, row) for tensors, row in every),
        "grad": [int(row["requires_grad"]) for row in rows],
        "bytes": [row["bytes"] for row in rows],
        "numel": [row["numel"] for row in rows],
        "storage": _storages(ours, len(rows)),
        "first": _firsts(ours, len(rows)),
        "owner": [ours.owners.get(number, -1) for number in range(len(ours.rows))] + [-1] * len(added),
        "stats": None if content.without_numbers else _statistics(rows),
        "other": None,
        "diff": None,
    }
    if comparison is not None:
        theirs = comparison.tensors
        partners = [comparison.partners.get(number) for number in range(len(ours.rows))] + [None] * len(added)
        if not content.without_numbers:
            data["other"] = _statistics([{} if row is None else theirs.rows[row] for row in partners])
        data["diff"] = _difference(comparison, ours.rows, partners, [*comparison.fate, *(ADDED for _ in added)])
        data["diff"]["file"] = argument(theirs.path)
    return data


def front_coded(names: Iterable[str]) -> dict[str, list[Any]]:
    """Return how many UTF-16 units each name keeps from the previous name, and the text it adds."""
    keep, add, before = [], [], ""
    for name in names:
        shared = name[: common_length(before, name)]
        keep.append(len(shared) if shared.isascii() else len(shared.encode("utf-16-le", "surrogatepass")) // 2)
        add.append(name[len(shared) :])
        before = name
    return {"keep": keep, "add": add}


def _names(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns for names and paths: key and state dict, or the path if there is no state dict.

    ``path`` is 1 if it is the key appended as a word, 2 if it is the key appended in quotes; otherwise the path itself.
    """
    paths: list[int | str] = []
    for row in rows:
        base, key, path = row["state_dict"], row["key"], row["path"]
        if path == (f"{base}.{key}" if base else key):
            paths.append(1)
        else:
            paths.append(2 if path == f'{base or ""}["{key}"]' else path)
    return {
        "name": front_coded(row["path"] if row["state_dict"] is None else row["key"] for row in rows),
        "dict": _numbered(row["state_dict"] for row in rows),
        "path": paths,
    }


def _numbered(words: Iterable[str | None]) -> dict[str, list[Any]]:
    numbers: dict[str | None, int] = {}
    at = [numbers.setdefault(word, len(numbers)) for word in words]
    return {"words": list(numbers), "at": at}


def _kind(tensors: Tensors, row: int) -> str:
    """Return the kind of a tensor in a few words: its layout, its place, or its dimensions."""
    tensor: Tensor = tensors.entries[row].tensor
    if row in tensors.stateful:
        return "optimizer state"
    if tensor.kind != "dense":
        return tensor.kind.replace("_", " ")
    return ("scalar", "vector", "matrix")[len(tensor.shape)] if len(tensor.shape) < 3 else "kernel (3-D and more)"


def _storages(tensors: Tensors, size: int) -> list[int]:
    """Return the same number for all tensors that share a storage, -1 for other tensors."""
    users: dict[str, list[int]] = {}
    for number, row in enumerate(tensors.rows):
        if row["storage"]:
            users.setdefault(row["storage"], []).append(number)
    result = [-1] * size
    for place, numbers in enumerate(same for same in users.values() if len(same) > 1):
        for number in numbers:
            result[number] = place
    return result


def _firsts(tensors: Tensors, size: int) -> list[int]:
    """Return the first row with the same elements; -1 if that is the tensor's own row."""
    return [-1 if first == number else first for number, first in enumerate(tensors.first)] + [-1] * (
        size - len(tensors.first)
    )


def _statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of numbers; missing values are null."""
    result: dict[str, Any] = {name: _exact([row.get(name) for row in rows]) for name in NUMBERS}
    result["counts"] = [(row.get("histogram") or {}).get("counts") for row in rows]
    result["of"] = _numbered(row.get("of") or "" for row in rows)
    result["reason"] = _numbered(row.get("reason") or "" for row in rows)
    return result


def _exact(values: list[Any]) -> list[Any]:
    """Return numbers that JavaScript can read; large integers and non-finite numbers become text."""
    with suppress(TypeError, OverflowError):
        # A sum of all takes a tenth of the time, and most columns are small numbers.
        if sum(abs(value) for value in values if value is not None) < 1 << 53:
            return values
    return [str(value) if isinstance(value, int) and abs(value) >> 53 else json_value(value) for value in values]


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


def _difference(
    comparison: Comparison, ours: Sequence[Mapping[str, Any]], partners: Sequence[int | None], fate: Sequence[str]
) -> dict[str, Any]:
    known = [comparison.figures.get(number, {}) for number in range(len(partners))]
    theirs = comparison.tensors.rows
    result: dict[str, Any] = {name: [item.get(name) for item in known] for name in FIGURES}
    result["fate"] = _numbered(fate)
    result["changes"] = {str(number): texts for number, texts in comparison.changes.items()}
    result["reason"] = {str(number): item["reason"] for number, item in enumerate(known) if item.get("reason")}
    # Partners with another name; most names are equal.
    result["partner"] = {
        str(number): theirs[partner]["path"]
        for number, partner in comparison.partners.items()
        if theirs[partner]["path"] != ours[number]["path"]
    }
    return result


def compared_words(diff: DiffReport) -> str:
    """Return the compared part as options of ``diff``; "" if everything was compared."""
    settings = []
    if diff["key"] is not None:
        settings += [Setting("key", diff["key"]), Setting("other_key", diff["other_key"] or diff["key"])]
    settings += [Setting("include", glob) for glob in diff["include"]]
    settings += [Setting("exclude", glob) for glob in diff["exclude"]]
    if diff["ignored"]:
        settings.append(Setting("ignore", ",".join(diff["ignored"])))
    return spaced(settings).advice

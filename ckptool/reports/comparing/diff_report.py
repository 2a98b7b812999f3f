"""The report of ``ckptool diff``, as JSON-ready dicts, and its one line. The keys are a contract (``schema``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import isfinite
from typing import Any

from ...base.limits import LIMITS
from ...base.text import counted
from ...checkpoint.checkpoint import Checkpoint
from .difference import Changed, Values, differences
from .places import Leaf, Side
from .walk import Only


def diff_report(
    one: Checkpoint,
    other: Checkpoint,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Collection[str] = (),
    key: str | None = None,
    other_key: str | None = None,
    count: bool = True,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The report of ``diff``, schema ``ckptool.diff/1``; parameters and errors as for ``differences``."""
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    found, a, b = differences(
        one,
        other,
        key=key,
        other_key=other_key,
        ignore=ignore,
        tolerance=tolerance,
        count=count,
        progress=progress,
    )
    report = {
        "schema": "ckptool.diff/1",
        "a": one.path,
        "b": other.path,
        "key": found.keys[0],
        "other_key": found.keys[1],
        "ignored": sorted(set(ignore)),
        "rtol": tolerance[0] if tolerance else None,
        "atol": tolerance[1] if tolerance else None,
        "same": found.same,
        "tensors": {
            "in_a": found.in_a,
            "in_b": found.in_b,
            "in_both": found.paired,
            "differ": found.tensors,
            "values_differ": found.values_differ,
            "within_tolerance": len({item.path for item in found.close}),
        },
        "container": [_changed(item) for item in found.container],
        "program": [_changed(item) for item in found.program],
        "only_in_a": [_only(a, item) for item in found.only_a],
        "only_in_b": [_only(b, item) for item in found.only_b],
        "changed": [_changed(item) for item in found.changed],
        "values": [_values(item) for item in found.values],
        "within_tolerance": [_values(item) for item in found.close],
        "sharing": [{"path": item.path, "with": item.other, "only_in": item.where} for item in found.sharing],
        "entries": [{"path": item.path, "a": _leaf(item.a), "b": _leaf(item.b)} for item in found.entries],
        "order": [{"path": item.path, "place": item.place, "a": item.a, "b": item.b} for item in found.order],
        "hint": found.hint,
    }
    return report | {"stat": stat_line(report), "verdict": verdict(report)}


def _changed(item: Changed) -> dict[str, Any]:
    return {"path": item.path, "what": item.what, "a": _value(item.a), "b": _value(item.b)}


def _only(side: Side, item: Only) -> dict[str, Any]:
    tensor, leaf = side.tensor(item.ref), side.leaf(item.ref)
    found: dict[str, Any] = {"path": item.path, "type": side.type(item.ref), "tensors": item.tensors}
    if tensor is not None:
        found |= {"dtype": tensor.dtype, "shape": list(tensor.shape), "device": tensor.location}
    return found | ({"value": _value(leaf.value)} if leaf is not None else {})


def _values(item: Values) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": item.path,
        "part": item.part,
        "dtype": item.dtype,
        "shape": list(item.shape),
        "first": list(item.first),
        "differing": item.differing if item.differing >= 0 else None,
    }
    if item.close is not None:
        close = item.close
        found |= {
            "nonfinite": close.nonfinite,
            "max_abs": _value(close.max_abs),
            "max_rel": _value(close.max_rel),
            "mean_abs": _value(close.mean_abs),
        }
    return found


def _leaf(leaf: Leaf) -> dict[str, Any]:
    return {"type": leaf.type} | ({"value": _value(leaf.value)} if leaf.value is not None else {})


def _value(value: object) -> Any:
    """What JSON can carry."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > LIMITS.int_digits * 3:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, bytes | complex):
        return repr(value)
    return value


def stat_line(report: dict[str, Any]) -> str:
    """One line: ``2 of 312 tensors differ, 1 tensor only in A, 3 entries differ``."""
    sums = report["tensors"]
    total = counted(sums["in_both"], "tensor")
    words = [f"{sums['differ']:,} of {total} {'differs' if sums['differ'] == 1 else 'differ'}"]
    if not sums["in_both"]:
        words = ["no tensor in both"]
    if not report["same"]:
        for side in ("a", "b"):
            only = report[f"only_in_{side}"]
            held, others = sum(item["tensors"] for item in only), sum(not item["tensors"] for item in only)
            named = [counted(count, noun) for count, noun in ((held, "tensor"), (others, "entry")) if count]
            words += [f"{' and '.join(named)} only in {side.upper()}"] if named else []
        if report["entries"]:
            words.append(f"{counted(len(report['entries']), 'entry')} {_differ(report['entries'])}")
        if report["order"]:
            words.append(f"keys in another order in {_plural(len(report['order']), 'mapping')}")
        if report["sharing"]:
            words.append(f"{_plural(len(report['sharing']), 'tie')} in one only")
        if report["container"]:
            words.append(f"the container differs in {' and '.join(item['what'] for item in report['container'])}")
        if report["program"]:
            words.append(f"{counted(len(report['program']), 'part')} of the program {_differ(report['program'])}")
    if sums["within_tolerance"]:
        words.append(f"{sums['within_tolerance']:,} within the tolerance")
    return ", ".join(words)


def _differ(items: Sequence[object]) -> str:
    return "differs" if len(items) == 1 else "differ"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def verdict(report: dict[str, Any]) -> str:
    """The answer in a word or two."""
    if not report["same"]:
        return "they differ"
    if report["tensors"]["within_tolerance"]:
        return "the same within the tolerance"
    return "the same" if not report["ignored"] else f"the same but for {', '.join(report['ignored'])}"

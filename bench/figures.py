"""The figures of one run as JSON with the schema ckptool.bench/2. Every table is made from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.jobs import Group, Row, Target
from bench.measure import Result
from bench.stale import commit

SCHEMA = "ckptool.bench/2"
Figures = dict[str, Any]


def published() -> Figures:
    """Return the figures of the last published run."""
    found: Figures = json.loads(Path(__file__).with_name("figures.json").read_text(encoding="utf-8"))
    return found


def figures_of(group: Group, filesystem: str, results: Mapping[str, Result], floor: int) -> list[Figures]:
    """Return the rows of a group as JSON. A row of a failed job has a reason instead of figures."""
    now = commit()
    return [{**_row(group, filesystem, row, results, floor), "commit": now} for row in group.rows]


def put_into(measured: Mapping[str, Any], known: Mapping[str, Any]) -> Figures:
    """Replace groups in earlier figures by the same groups of a new run, so that each group is from a single run.

    New groups come last, and no longer count as left out. The machine of the earlier figures is kept: both runs must
    come from the same machine.
    """
    names = {_of(row) for row in measured["rows"]}
    places: dict[tuple[str, str, str], list[Figures]] = {}
    for row in measured["rows"]:
        places.setdefault(_of(row), []).append(row)
    rows: list[Figures] = []
    for row in known["rows"]:
        if _of(row) not in names:
            rows.append(row)
        else:
            rows += places.pop(_of(row), [])
    whole = {f"{group}, {file}" for group, file, _ in names}
    left_out = [gone for gone in known["left_out"] if gone["what"] not in whole]
    return {**known, "rows": rows + [row for left in places.values() for row in left], "left_out": left_out}


def _of(row: Figures) -> tuple[str, str, str]:
    return row["group"], row["file"], row["filesystem"]


def _row(group: Group, filesystem: str, row: Row, results: Mapping[str, Result], floor: int) -> Figures:
    mine = results[row.job]
    other = results[row.against] if row.against else None
    each = _each(row, results, row.job)
    ratio = None
    if other is not None and not mine.fails and not other.fails:
        ratio = mine.seconds / other.seconds
    return {
        "group": group.name,
        "file": group.file,
        "filesystem": filesystem,
        "cache": group.cache,
        **_cost(mine, floor),
        "each": each,
        "against": _cost(other, floor) if other is not None else None,
        "ratio": ratio,
        "target": _words(row.target) if row.target else "",
        "met": _met(row.target, mine, ratio, each) if row.target and not mine.fails else None,
        "reader": row.reader,
        "torch": row.torch,
        "modules": " ".join(mine.modules),
    }


def _cost(result: Result, floor: int) -> Figures:
    if result.fails:
        return {"job": result.job, "fails": result.fails}
    seconds = [round(sample.seconds, 4) for sample in result.samples]
    return {
        "job": result.job,
        "seconds": round(result.seconds, 4),
        "runs": seconds,
        # A peak at the floor is only the probe's own memory: the command needed that much or less.
        "peak": result.peak if result.peak > floor * 1.05 else None,
        "disk": result.disk,
        "shared": result.shared,
    }


def _each(row: Row, results: Mapping[str, Result], job: str) -> float | None:
    if row.each is None or results[job].fails or results[row.each.start].fails:
        return None
    return (results[job].seconds - results[row.each.start].seconds) / row.each.files


def _words(target: Target) -> str:
    parts = []
    if target.ratio is not None:
        parts.append(f"<= {target.ratio:.2g}x")
    if target.seconds is not None:
        parts.append(f"<= {target.seconds:g} s")
    if target.each is not None:
        parts.append(f"<= {target.each * 1000:g} ms a file")
    if target.peak is not None:
        parts.append(f"<= {target.peak:g} MB")
    return ", ".join(parts)


def _met(target: Target, mine: Result, ratio: float | None, each: float | None) -> bool:
    bounds = (
        (target.ratio, ratio), (target.seconds, mine.seconds), (target.each, each),
        (target.peak, mine.peak / 1e6),
    )  # fmt: skip
    return all(limit is None or (value is not None and value <= limit) for limit, value in bounds)

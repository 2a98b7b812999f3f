"""Pieces of HTML: visible, inert texts from files, numbers, charts, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from ..base.text import cut, pluralize, shape_text, visible

#: Maximum characters of a value, and of a name.
_VALUE: Final = 300
_NAME: Final = 60


def text(value: str, most: int = _VALUE) -> str:
    """Return a text from a file as markup."""
    return escape(cut(visible(value), most))


def middle(value: str, most: int = _NAME) -> str:
    """Return a name as markup; cut the middle of a long one, because names differ at both ends."""
    clean = visible(value)
    if len(clean) > most:
        clean = f"{clean[: most // 2]}…{clean[-(most - most // 2 - 1) :]}"
    return escape(clean)


def number(value: object) -> str:
    """Return a number in a report with four significant digits; "" for None."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else text(f"{float(str(value)):.4g}")


def chart(counts: Sequence[int]) -> str:
    """Return a histogram as an SVG picture; "" for fewer than two bins."""
    if len(counts) < 2:
        return ""
    most, wide = max(counts), 60 / len(counts)
    bars = "".join(
        f"M{place * wide:g} 20v{-max(20 * count / most, 1):.1f}h{wide - 1:g}V20z"
        for place, count in enumerate(counts)
        if count
    )
    picture = '<svg class=chart width=60 height=20 viewBox="0 0 60 20" fill="currentColor" aria-hidden=true>'
    return f'{picture}<path d="{bars}"/></svg>'


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]], more: int = 0) -> str:
    """Return a table without a style, whose cells are markup; the number of ``more`` rows is shown below."""
    head = f"<tr>{''.join(f'<th>{text(name)}</th>' for name in headings)}</tr>" if headings else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    rest = f"<tr><td>... {more:,} more</td></tr>" if more > 0 else ""
    return f"<table>{head}{body}{rest}</table>"


#: Maximum number of rows shown; the others are counted.
_ROWS: Final = 50
_NUMBERS: Final = ("min", "max", "mean", "std", "zeros", "nans", "infs")
_FIGURES: Final = ("rel_l2", "cosine", "max_abs", "mean_abs", "differing")


class ShownStats(dict[str, Any]):
    """The report of ``stats``, shown as a table in notebooks."""

    def _repr_html_(self) -> str:
        summary, rows = self["summary"], self["tensors"]
        bad = {"NaN in": summary["with_nan"], "Inf in": summary["with_inf"], "all zero:": summary["all_zero"]}
        lines = [
            f"<div>{what} {middle(paths[0])}{f' and {len(paths) - 1:,} more' if paths[1:] else ''}</div>"
            for what, paths in bad.items()
            if paths
        ]
        name = "key" if len({row["state_dict"] for row in rows}) == 1 else "path"
        cells = (
            (
                middle(row[name] or "."),
                text(row["dtype"]),
                shape_text(row["shape"]),
                text(row["reason"]) if row["reason"] else chart((row["histogram"] or {"counts": ()})["counts"]),
                *(number(row[name]) for name in _NUMBERS),
            )
            for row in rows[:_ROWS]
        )
        count = f"{pluralize(summary['tensors'], 'tensor')}, {pluralize(summary['elements'], 'element')}"
        headings = (name, "dtype", "shape", "min … max", *_NUMBERS)
        table = plain_table(headings, cells, len(rows) - _ROWS)
        return f"<div><b>{text(self['path'])}</b>: {count}{''.join(lines)}{table}</div>"


class ShownDiff(dict[str, Any]):
    """The report of ``diff``, shown as tables in notebooks."""

    def _repr_html_(self) -> str:
        parts = [f"<b>{text(self['a'])} and {text(self['b'])}</b>: {text(self['verdict'])}"]
        if not self["same"]:
            parts.append(f"<div>{text(self['stat'], 1000)}</div>")
        for name, items in (("only in A", self["only_in_a"]), ("only in B", self["only_in_b"])):
            rows = [(name, middle(item["path"]), text(item["type"])) for item in items[:_ROWS]]
            parts.append(plain_table((), rows, len(items) - _ROWS) if rows else "")
        changed = [
            (middle(item["path"]), text(item["what"]), text(str(item["a"])), text(str(item["b"])))
            for item in self["changed"][:_ROWS]
        ]
        if changed:
            parts.append(plain_table(("tensor", "what", "A", "B"), changed, len(self["changed"]) - _ROWS))
        values = [
            (
                middle(item["path"]),
                text(item["dtype"]),
                *(number(item[name]) for name in _FIGURES),
                text(item["reason"]),
            )
            for item in self["values"][:_ROWS]
        ]
        if values:
            parts.append(plain_table(("values", "dtype", *_FIGURES, ""), values, len(self["values"]) - _ROWS))
        entries = [
            (middle(item["path"]), *(text(str(item[side].get("value", item[side]["type"]))) for side in "ab"))
            for item in self["entries"][:_ROWS]
        ]
        if entries:
            parts.append(plain_table(("entry", "A", "B"), entries, len(self["entries"]) - _ROWS))
        return f"<div>{''.join(parts)}</div>"

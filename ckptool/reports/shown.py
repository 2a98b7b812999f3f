"""Reports that a notebook shows as tables. They are small and static, and dictionaries like any other."""

from __future__ import annotations

from typing import Any, Final

from ..base.text import pluralize, shape_text
from .html import chart, middle, number, plain_table, text

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

"""The summary of ``inspect`` as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from ..base.errors import CkptoolError
from ..base.text import cut, human_bytes, pluralize, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..reports.inspection import inspection
from ..reports.summary import ENTRY_COLUMNS, entry_rows, facts, headline
from .render import clean

#: Rows of a table that are shown; the others are counted.
_ROWS: Final = 200
_ENTRIES: Final = 30
#: Characters of a cell.
_CELL: Final = 300
_KEY_COLUMNS: Final = ("key", "dtype", "shape", "device", "bytes")


def summary_html(checkpoint: Checkpoint) -> str:
    """Return the summary of a checkpoint: facts, entries, findings, and its tensors in a folded table."""
    try:
        report = inspection(checkpoint)
    except CkptoolError as error:
        return f"<pre>{_text(f'{checkpoint!r}: {error}', 10 * _CELL)}</pre>"
    parts = [f"<b>{_text(headline(report))}</b>", _table((), facts(report), _ROWS, len(facts(report)))]
    if report["entries"]:
        parts.append(_table(ENTRY_COLUMNS, entry_rows(report), _ENTRIES, len(report["entries"])))
    for finding in report["findings"]:
        step = f"<br>&rarr; <code>{_text(finding['next'])}</code>" if finding["next"] else ""
        parts.append(f"<div>{_text(finding['level'])}: {_text(finding['message'])}{step}</div>")
    entries = checkpoint.tolerating().survey.tensors
    rows = (
        (entry.path or ".", tensor.dtype, shape_text(tensor.shape), tensor.location, human_bytes(tensor.own_bytes))
        for entry in entries[:_ROWS]
        for tensor in (entry.tensor,)
    )
    keys = _table(_KEY_COLUMNS, rows, _ROWS, report["tensors"])
    parts.append(f"<details><summary>{pluralize(report['tensors'], 'tensor')}</summary>{keys}</details>")
    return f"<div>{''.join(parts)}</div>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], most: int, total: int) -> str:
    """Return a table of at most so many rows, and how many more there are."""
    head = f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in columns)}</tr>" if columns else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row, _ in zip(rows, range(most))
    )
    more = f"<tr><td>... {total - most:,} more</td></tr>" if total > most else ""
    return f"<table>{head}{body}{more}</table>"


def _text(text: str, size: int = _CELL) -> str:
    return escape(cut(clean(text), size))

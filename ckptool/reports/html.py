"""HTML: the summary of ``inspect`` for notebooks, and pieces for pages: visible, inert texts from files, numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Final

from ..base.errors import CkptoolError
from ..base.text import cut, human_bytes, pluralize, shape_text, visible
from ..checkpoint.checkpoint import Checkpoint
from .inspection import inspection
from .summary import ENTRY_COLUMNS, entry_rows, facts, headline

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


# -- the summary for notebooks

#: Rows shown of a table; the rest are counted.
_ROWS: Final = 200
_ENTRIES: Final = 30
#: Characters shown of an error message.
_ERROR: Final = 3000
_KEY_COLUMNS: Final = ("key", "dtype", "shape", "device", "bytes")


def summary_html(checkpoint: Checkpoint) -> str:
    """Return the summary of a checkpoint: facts, entries, findings, and a folded table of its tensors."""
    try:
        report = inspection(checkpoint)
    except CkptoolError as error:
        return f"<pre>{text(f'{checkpoint!r}: {error}', _ERROR)}</pre>"
    parts = [f"<b>{text(headline(report))}</b>", _table((), facts(report), _ROWS, len(facts(report)))]
    if listed := entry_rows(report):
        parts.append(_table(ENTRY_COLUMNS, listed, _ENTRIES, len(listed)))
    for finding in report["findings"]:
        step = f"<br>&rarr; <code>{text(finding['next'])}</code>" if finding["next"] else ""
        parts.append(f"<div>{text(finding['level'])}: {text(finding['message'])}{step}</div>")
    entries = checkpoint.lenient().survey.tensors
    rows = (
        (entry.path or ".", tensor.dtype, shape_text(tensor.shape), tensor.location, human_bytes(tensor.own_bytes))
        for entry in entries[:_ROWS]
        for tensor in (entry.tensor,)
    )
    keys = _table(_KEY_COLUMNS, rows, _ROWS, report["tensors"])
    parts.append(f"<details><summary>{pluralize(report['tensors'], 'tensor')}</summary>{keys}</details>")
    return f"<div>{''.join(parts)}</div>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], most: int, total: int) -> str:
    head = f"<tr>{''.join(f'<th>{text(name)}</th>' for name in columns)}</tr>" if columns else ""
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in islice(rows, most))
    rest = f"<tr><td>... {total - most:,} more</td></tr>" if total > most else ""
    return f"<table>{head}{body}{rest}</table>"

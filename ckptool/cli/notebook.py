"""The summary of ``inspect`` as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ..base.errors import CkptoolError
from ..base.text import human_bytes, pluralize, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..reports.html import plain_table, text
from ..reports.inspection import inspection
from ..reports.summary import ENTRY_COLUMNS, entry_rows, facts, headline

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
    """Return a table with at most ``most`` rows, and a count of the others out of ``total``."""
    return plain_table(columns, ([text(cell) for cell in row] for row, _ in zip(rows, range(most))), total - most)

"""Pieces of HTML: visible, inert texts from files, numbers, charts, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from ..base.text import cut, visible

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


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]], more: int = 0) -> str:
    """Return a table without a style, whose cells are markup; the number of ``more`` rows is shown below."""
    head = f"<tr>{''.join(f'<th>{text(name)}</th>' for name in headings)}</tr>" if headings else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    rest = f"<tr><td>... {more:,} more</td></tr>" if more > 0 else ""
    return f"<table>{head}{body}{rest}</table>"

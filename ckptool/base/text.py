"""Format numbers and lists for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from math import isfinite
from typing import Final

from .errors import TargetError
from .lazy import regex
from .limits import LIMITS
from .records import NamedTuple


class Brevity(NamedTuple):
    """What is shortened in messages: ``lists`` of names, and ``lines`` on the terminal.

    The library and JSON have every name. The command line shortens both, except with ``--verbose``.
    """

    lists: bool = False
    lines: bool = False


_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_WHOLE: Final = Brevity()
#: The brevity of messages that are made now.
BREVITY: Final = ContextVar("brevity", default=_WHOLE)
#: Characters of all names in a shortened list, and of one name.
_LIST_CHARS: Final = 70
_NAME_CHARS: Final = 80
#: Characters of a message on one line, without its path, and where it may end: before another clause or an aside, or
#: else between parts of a clause.
LINE_CHARS: Final = 240
_CLAUSE: Final = regex(r"[;:] | \(")
_PART: Final = regex(r"[;:,] | \(")
_SHORTENED: Final = " (-v shows all)"

#: Control characters, line separators, bidi marks, lone surrogates and noncharacters.
_UNSAFE = regex("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")


def words(text: str) -> frozenset[str]:
    """Return the words of a text; long sets of names are written this way in the code."""
    return frozenset(text.split())


def human_bytes(size: int) -> str:
    """Format bytes as ``512 bytes``, ``26.1 kB``, ``2.00 GB``: powers of ten, three digits."""
    if size < 1000:
        return "1 byte" if size == 1 else f"{size} bytes"
    value, unit = size / 1000, 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {('kB', 'MB', 'GB', 'TB', 'PB', 'EB')[unit]}"


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: ``4096``, ``500MB``, ``1.5 GB``, ``2GiB``; raise TargetError for other texts."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]i?|)b?(?:ytes)?\s*", text, re.I)
    if not match or match[2].lower() not in _UNITS:
        raise TargetError(f"{text!r} is not a number of bytes", next="write 4096, 500MB, 2GB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def visible(text: str) -> str:
    """Escape everything in a text that could be invisible, or change how the rest is shown."""
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def cut(text: str, size: int = LIMITS.cell_chars) -> str:
    """Truncate a text that is too long for one cell."""
    return text if len(text) <= size else text[: size - 3] + "..."


def key_ends(key: str, most: int, width: Callable[[str], int] = len) -> tuple[str, str] | None:
    """Return the start and the end of a key or a path, of whole segments that together are at most ``most`` wide.

    The last segment comes first, then the first one, then the others from the end. Return None if not even the last
    segment fits.
    """
    separator = next((each for each in "/.-" if each in key), "")
    first, *middle, last = key.split(separator) if separator else (key, key)
    start, end = first + separator, separator + last
    if not separator or width(end) > most:
        return None
    if not middle or width(start) + width(end) > most:
        return "", end
    while middle and width(start) + width(separator + middle[-1] + end) <= most:
        end = separator + middle.pop() + end
    return start, end


def cut_key(key: str, size: int) -> str:
    """Shorten a key or a path in its middle, between segments if that is possible."""
    if len(key) <= size:
        return key
    ends = key_ends(key, size - 3)
    return "...".join(ends) if ends is not None else cut(key, size)


def quoted(text: str) -> str:
    """Quote a text, truncated if it is too long."""
    return repr(cut(text))


def pluralize(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 tensor``, ``2,000 tensors``."""
    if count == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{count:,} {plural}"


def step_words(step: int | None) -> str:
    """Return ``, step 3``, or "" for None."""
    return "" if step is None else f", step {step:,}"


def shape_text(shape: Iterable[int]) -> str:
    """Format a shape as ``64x3x7x7``; a shape without dimensions is ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def join_limited(items: Sequence[str], total: int | None = None, most: int = 5) -> str:
    """Join items as ``a, b and c``. Where lists are shortened, count what does not fit: ``a, b and 7 more``.

    A shortened list has at most ``most`` items. ``total`` is the number of all items, if ``items`` holds only the first
    ones.
    """
    total = len(items) if total is None else total
    if BREVITY.get().lists:
        first = [cut(item) if " " in item else cut_key(item, _NAME_CHARS) for item in items[:most]]
        while len(first) > 1 and sum(map(len, first)) > _LIST_CHARS:
            first.pop()
    else:
        first = [cut(item, LIMITS.path_chars) for item in items[: LIMITS.listed]]
    if total > len(first):
        return f"{', '.join(first)} and {total - len(first):,} more"
    *front, last = first or [""]
    return f"{', '.join(front)} and {last}" if front else last


def shortened(text: str, advice: str = "", path: str = "") -> str:
    """Return a message and its advice on one line, or on two cut lines where lines are shortened.

    The second line is the last clause, which says what helps. A line has at most ``LINE_CHARS`` characters, without the
    ``path``, unless it has a longer part.
    """
    whole = f"{text}; {advice}" if advice else text
    if not BREVITY.get().lines or len(whole) <= LINE_CHARS + len(path):
        return whole
    start, _, last = (text, "", advice) if advice else whole.rpartition("; ")
    if not start or path.startswith(start):
        return _cut_line(whole, len(path))
    indent = " " * (len(start) - len(start.lstrip()) + 2)
    return f"{_cut_line(start, len(path))}\n{_cut_line(indent + last)}"


def _cut_line(text: str, least: int = 0) -> str:
    """Cut a line between its parts, not within parentheses, if it has more than ``LINE_CHARS`` after ``least``."""
    most = least + LINE_CHARS
    if len(text) <= most:
        return text
    most -= len(_SHORTENED)
    for pattern, first in ((_CLAUSE, most * 2 // 3), (_PART, least + LINE_CHARS // 8)):
        ends = [match.start() for match in pattern.finditer(text, first)]
        ends = [end for end in ends if end <= most and text.count("(", 0, end) == text.count(")", 0, end)]
        if ends:
            return text[: ends[-1]] + _SHORTENED
    return text


def shown(most: int) -> int:
    """Return how many rows of a list to show: ``most`` where lists are shortened."""
    return most if BREVITY.get().lists else LIMITS.listed


def json_value(value: object) -> object:
    """Return a value that JSON can hold: without NaN, infinity, or integers too long for Python to print."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > LIMITS.int_digits * 3:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value) if isinstance(value, bytes | complex) else value

"""What a terminal can show: colour, its width, bars, and texts cut to fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Final, NamedTuple

#: Roles of a text, and how they are shown: https://en.wikipedia.org/wiki/ANSI_escape_code#SGR
_STYLES: Final = {"good": "32", "bad": "31", "doubtful": "33", "aside": "2", "command": "36", "head": "1"}
#: The role of each word that judges.
_JUDGEMENTS: Final = {
    word: role
    for role, words in {
        "good": "valid, pass, weights-only, fits, the same",
        "bad": "invalid, fail, error, unreadable, unsafe, does not fit, they differ",
        "doubtful": "warning, unknown, program",
        "aside": "note, not possible, passed over",
    }.items()
    for word in words.split(", ")
}
#: Eighths of a cell, and the character for a whole cell in encodings without them.
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_PLAIN: Final = "#"
#: Cells of a column that are left of a text, however narrow the terminal, and that are enough to know it again.
_LEAST: Final = 8
_READABLE: Final = 12


class Face(NamedTuple):
    """What texts are made for: whether stdout is a terminal, its width and encoding, and words of the environment."""

    terminal: bool
    columns: int
    encoding: str
    environment: tuple[tuple[str, str], ...]


#: What decides how a text looks.
_ENVIRONMENT: Final = ("NO_COLOR", "TERM", "COLUMNS", "GITHUB_ACTIONS")
#: Of another process, for which this one makes texts.
_elsewhere: Face | None = None


def face() -> Face:
    """Return what the texts of this process are made for."""
    words = tuple((name, os.environ[name]) for name in _ENVIRONMENT if name in os.environ)
    return Face(on_terminal(), columns(), _encoding(), words)


@contextmanager
def seen_as(other: Face) -> Iterator[None]:
    """Make texts for another process."""
    global _elsewhere
    before = {name: os.environ.pop(name) for name in _ENVIRONMENT if name in os.environ}
    os.environ.update(other.environment)
    _elsewhere = other
    try:
        yield
    finally:
        _elsewhere = None
        for name in _ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(before)


def on_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return _is_terminal(sys.stdout) if _elsewhere is None else _elsewhere.terminal


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8" if _elsewhere is None else _elsewhere.encoding


def watched() -> bool:
    """Return whether stderr is a terminal, so that a bar is seen."""
    return _is_terminal(sys.stderr)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


def columns() -> int:
    """Return the width of stdout in cells if it is a terminal that tells it, otherwise 0: no limit."""
    if not on_terminal():
        return 0
    if _elsewhere is not None:
        return _elsewhere.columns
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


# -- colour


def coloured(stream: IO[str] | None = None) -> bool:
    """Return whether a stream, by default stdout, takes colour. https://no-color.org"""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return on_terminal() if stream is None else _is_terminal(stream)


def painted(text: str, role: str, stream: IO[str] | None = None) -> str:
    """Return a text, already clean, in the colour of its role; as it is where there is no colour, or no role."""
    return f"\x1b[{_STYLES[role]}m{text}\x1b[0m" if role and text and coloured(stream) else text


def judged(text: str, word: str = "", stream: IO[str] | None = None) -> str:
    """Return a text in the colour of the word that judges, by default itself."""
    return painted(text, _JUDGEMENTS.get((word or text).lower(), ""), stream)


def arrow(old: str, new: str) -> str:
    """Return ``old -> new`` of two clean texts; with colour, what differs between them stands out."""
    if not coloured():
        return f"{old} -> {new}"
    begin = _whole_words(old, new)
    end = _whole_words(old[begin:][::-1], new[begin:][::-1])
    return " -> ".join(
        text[:begin] + painted(text[begin : len(text) - end], role) + text[len(text) - end :]
        for text, role in ((old, "bad"), (new, "good"))
    )


def _whole_words(old: str, new: str) -> int:
    """Return how many characters two texts begin with alike, up to the end of a word of both."""
    count = next((n for n, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    while count and old[count - 1].isalnum() and (old[count : count + 1] + new[count : count + 1])[:1].isalnum():
        count -= 1
    return count


# -- width


def draws(text: str) -> bool:
    """Return whether stdout can show these characters."""
    try:
        text.encode(_encoding())
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    import unicodedata  # for the few texts that are not ASCII

    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.category(char) in ("Mn", "Me", "Cf") for char in text)


def elided(text: str, most: int) -> str:
    """Return a text of at most ``most`` cells: its middle gives way, since keys differ at both ends."""
    if cells(text) <= most:
        return text
    mark = "…" if draws("…") else "..."
    keep = max(most - len(mark), 0)
    while True:
        tail = keep // 2
        result = text[: keep - tail] + mark + text[len(text) - tail :]
        if keep <= 0 or cells(result) <= most:
            return result[:most] if keep <= 0 else result
        keep -= 1


def fitting(widths: Sequence[int], fixed: Collection[int], spare: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return (number, width) of the columns of a table that fits into ``most`` cells, two cells between columns.

    Columns of ``spare`` are left out, the first of them first, until the others can be made narrow enough to be read.
    Then the widest but the ``fixed`` ones are made narrower; the first column, which names what a row is about, gets
    twice the share of others.
    """
    left = list(range(len(widths)))
    for number in spare:
        readable = (widths[n] if n in fixed else min(widths[n], _READABLE if n else 2 * _READABLE) for n in left)
        if sum(readable) + 2 * (len(left) - 1) <= most:
            break
        left.remove(number)
    result = {number: widths[number] for number in left}
    elastic = [number for number in left if number not in fixed]
    for _ in range(sum(result.values()) + 2 * (len(left) - 1) - most):
        widest = max(elastic, key=lambda number: result[number] / (1 if number else 2), default=-1)
        if widest < 0 or result[widest] <= _LEAST:
            break
        result[widest] -= 1
    return list(result.items())


def wrapped(text: str, indent: int) -> str:
    """Return a text, already clean, broken between words to fit the terminal; later lines are indented."""
    most = columns()
    if not most or cells(text) + indent <= most or most - indent < _LEAST:
        return text
    return broken(text, most - indent).replace("\n", f"\n{' ' * indent}")


def broken(text: str, most: int) -> str:
    """Return a text, already clean, broken between words into lines of ``most`` cells where that is possible."""
    from textwrap import fill

    return fill(text, most, break_long_words=False, break_on_hyphens=False)


def bar(share: float, width: int = 10) -> str:
    """Return a bar of up to ``width`` cells for a share from 0 to 1, padded with spaces."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if not draws(_EIGHTHS):
        return (_PLAIN * round(eighths / 8)).ljust(width)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)

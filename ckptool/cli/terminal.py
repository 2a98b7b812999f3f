"""Terminal features: colour, width, texts cut to fit, and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from time import monotonic, time
from typing import IO, Any, Final, TypeAlias

import click

from ..base import lazy
from ..base.addresses import is_folder, is_remote
from ..base.text import human_bytes, key_ends, visible

#: The style of each text role: https://en.wikipedia.org/wiki/ANSI_escape_code#SGR
_STYLES: Final = {"good": "32", "bad": "31", "doubtful": "33", "aside": "2", "command": "36", "head": "1"}
#: The role of each verdict word.
_JUDGEMENTS: Final = {
    word: role
    for role, words in {
        "good": "valid, pass, weights-only, fits, the same",
        "bad": "invalid, fail, error, unreadable, unsafe, does not fit, they differ",
        "doubtful": "warning, unknown, program",
        "aside": "note, not possible, skipped",
    }.items()
    for word in words.split(", ")
}
#: A column never gets narrower than ``_LEAST`` cells. ``_READABLE`` cells of a text are enough to recognise it.
_LEAST: Final = 8
_READABLE: Final = 12


def on_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return _is_terminal(sys.stdout)


def watched() -> bool:
    """Return whether stderr is a terminal that draws, so that somebody sees a progress bar."""
    return _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


def columns() -> int:
    """Return the width of the terminal in cells; 0 (no limit) if stdout is not a terminal or its width is unknown."""
    if not on_terminal():
        return 0
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


# -- colour


def coloured(stream: IO[str] | None = None) -> bool:
    """Return whether to colour a stream, by default stdout. https://no-color.org"""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return on_terminal() if stream is None else _is_terminal(stream)


def painted(text: str, role: str, stream: IO[str] | None = None) -> str:
    """Return a clean text in the colour of its role. It is unchanged without colour, or if the role is ""."""
    return f"\x1b[{_STYLES[role]}m{text}\x1b[0m" if role and text and coloured(stream) else text


def judged(text: str, word: str = "", stream: IO[str] | None = None) -> str:
    """Return a text in the colour of a verdict word; by default the text is that word."""
    return painted(text, _JUDGEMENTS.get((word or text).lower(), ""), stream)


# -- width


def draws(text: str) -> bool:
    """Return whether stdout can show these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def cells(text: str) -> int:
    """Return how many terminal cells a text takes."""
    if text.isascii():
        return len(text)
    import unicodedata  # few texts need it: most are ASCII

    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.category(char) in ("Mn", "Me", "Cf") for char in text)


def elided(text: str, most: int) -> str:
    """Shorten a text to ``most`` cells.

    A key or a path loses whole segments in its middle, because keys differ at both ends, and a sentence loses its last
    words. Only a word that is too long by itself is cut.
    """
    if cells(text) <= most:
        return text
    mark = "…" if draws("…") else "..."
    keep = max(most - len(mark), 0)
    if " " in text:
        words = text.split(" ")
        while len(words) > 1 and cells(" ".join(words)) > keep:
            words.pop()
        if cells(" ".join(words)) <= keep:
            return " ".join(words) + mark
    elif (ends := key_ends(text, keep, cells)) is not None:
        return mark.join(ends)
    while True:
        tail = keep // 2
        result = text[: keep - tail] + mark + text[len(text) - tail :]
        if keep <= 0 or cells(result) <= most:
            return result[:most] if keep <= 0 else result
        keep -= 1


def fitting(widths: Sequence[int], fixed: Collection[int], spare: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return (number, width) of the columns that fit into ``most`` cells, with two cells between columns.

    Columns in ``spare`` are left out, first to last, until the others can be narrowed and still be read. Then the
    widest columns outside ``fixed`` are narrowed. The first column names the subject of a row: it stays whole if two
    thirds of the cells are enough for it, and otherwise gets twice the share.
    """
    left = list(range(len(widths)))
    first = max(2 * _READABLE, most * 2 // 3)
    for number in spare:
        readable = (widths[n] if n in fixed else min(widths[n], _READABLE if n else first) for n in left)
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
    """Wrap a clean text between words to fit the terminal, and indent all lines after the first."""
    most = columns()
    if not most or cells(text) + indent <= most or most - indent < _LEAST:
        return text
    return broken(text, most - indent).replace("\n", f"\n{' ' * indent}")


def broken(text: str, most: int) -> str:
    """Wrap a clean text between words into lines of ``most`` cells. Longer words are not broken."""
    from textwrap import fill

    return fill(text, most, break_long_words=False, break_on_hyphens=False)


# -- progress bars on stderr

#: A function to call with the amount of work just done, or None without a progress bar.
BarUpdate: TypeAlias = "Callable[[int], None] | None"

#: Seconds before a bar appears.
_PATIENCE: Final = 1.0
#: Seconds between two drawings of a bar.
_REDRAWN: Final = 0.1


@contextmanager
def progress_bar(total: int, label: str, wanted: bool = True, unit: str = "bytes") -> Iterator[BarUpdate]:
    """Show a progress bar on stderr once the work has taken a second. Yield a function to call with the work done.

    Yield None if no bar is wanted, there is no work, or stderr is not a terminal. A negative ``total`` is unknown.
    """
    if not wanted or not total or not watched():
        yield None
        return
    known: dict[str, Any] = {"length": total} if total > 0 else {"iterable": count()}
    done = drawn = 0
    begun, last, bar = monotonic(), -_REDRAWN, None
    with ExitStack() as stack:

        def update(step: int) -> None:
            nonlocal done, drawn, last, bar
            done += step
            now = monotonic()
            taken = now - begun
            if bar is None:
                if taken < _PATIENCE or done == total:
                    return
                shown: Any = click.progressbar(
                    **known, label=visible(label), file=sys.stderr, width=0, item_show_func=lambda text: text
                )
                bar = stack.enter_context(shown)
                bar.start = bar.last_eta = time() - taken  # estimate the time left from the true beginning
            if now - last < _REDRAWN and done != total:
                return
            if unit == "bytes":
                of = f" of {human_bytes(total)}" if total > 0 else ""
                rate = f"{human_bytes(done)}{of}, {human_bytes(int(done / taken))}/s"
            else:
                of = f" of {total:,}" if total > 0 else ""
                rate = f"{done:,}{of} {unit}, {done / taken:,.0f}/s"
            bar.update(done - drawn, rate)
            drawn, last = done, now

        yield update


def work_size(path: str) -> int:
    """Return the bytes of a file for its progress bar: 0 for a missing file, a negative number for a remote folder."""
    if is_remote(path):
        return -1 if is_folder(path) else int(lazy.module("remote.source").size_at(path))
    return os.path.getsize(path) if os.path.isfile(path) else 0


@contextmanager
def copying_bar(label: str, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of ``save``, which knows the total only after planning. Yield its callback."""
    with ExitStack() as stack:
        step: BarUpdate = None
        shown = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal step, shown
            if not done:
                step = stack.enter_context(progress_bar(total, label, wanted))
            elif step is not None:
                step(done - shown)
            shown = done

        yield on_progress

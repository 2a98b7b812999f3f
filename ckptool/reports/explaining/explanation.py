"""Find the known error in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple, TypedDict

from ...base.steps import NextStep
from .finders import Details, KnownError
from .known_errors import KNOWN_ERRORS

#: Colour codes, which torch and notebooks put into messages.
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
#: Line breaks that a mail, a forum or a narrow terminal added; not those before a traceback frame.
_WRAP: Final = re.compile(r"[ \t]*\r?\n(?!  File \"|Traceback|\r?\n)[ \t]*")


class Explanation(NamedTuple):
    """A known error found in a text, with the details taken from the text."""

    error: KnownError
    details: Details

    def step(self, path: str) -> NextStep:
        """Return the command that helps, for a file."""
        return self.error.step(path, self.details)


class ExplainReport(TypedDict):
    """The report of ``ckptool explain``: ``name`` is the anchor in docs/errors.md, "" for an unknown error."""

    schema: str
    name: str
    message: str
    why: str
    next: str
    python: str


def explain(text: str, path: str = "") -> ExplainReport | None:
    """Explain an error message, or a traceback with it: its cause, and the command that helps for a file.

    Without a ``path`` the command uses a typical file name. Return None if docs/errors.md does not list the message.

    >>> ckptool.explain("RuntimeError: unexpected EOF, expected 4 more bytes.")["next"]
    'ckptool salvage model.pth -o model.saved.pth'
    """
    found = explanation(text)
    return None if found is None else _report(found, path)


def explanation(text: str) -> Explanation | None:
    """Return the known error in a message or a traceback, or None."""
    plain = _COLOUR.sub("", text)
    wrapped = (_WRAP.sub(between, plain) for between in (" ", ""))
    return next((found for each in (plain, *wrapped) for found in _found(each)), None)


def _found(text: str) -> Iterator[Explanation]:
    for error in KNOWN_ERRORS:
        details = error.find(text)
        if details is not None:
            yield Explanation(error, details)


def _report(found: Explanation, path: str) -> ExplainReport:
    error, details = found
    path = path or error.example
    step = error.step(path, details)
    return ExplainReport(
        schema="ckptool.explain/1",
        name=error.name,
        message=error.message,
        why=error.why_of(details),
        next=step.line or step.advice,
        python=error.python_for(path, details),
    )

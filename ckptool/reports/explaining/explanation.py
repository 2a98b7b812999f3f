"""Find the known error in a text, and answer for the file that it is about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, Literal

from ...base.lazy import regex
from ...base.records import NamedTuple, TypedDict
from ...base.steps import STDIN, Line, NextStep, advised, argument, as_step, command
from ...base.text import cut
from ...edits.matching.state_dict_errors import read_error
from .finders import UNKNOWN, Answer, Details, KnownError
from .known_errors import KNOWN_ERRORS

#: Colour codes, which torch and notebooks put into messages.
_COLOUR: Final = regex(r"\x1b\[[\d;]*m")
#: Line breaks that a mail, a forum or a narrow terminal added; not those before a traceback frame.
_WRAP: Final = regex(r"(?<![ \t])[ \t]*\r?\n(?!  File \"|Traceback|\r?\n)[ \t]*")
#: The first line of an exception, as Python, pytest and torchrun print it.
_RAISED: Final = regex(r"^(?:E\s+|\[rank\d+\]:\s*)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning)\b.*)")
#: The longest message that a report repeats, in characters.
_LONGEST: Final = 240
#: What to do without a file.
_NAME_IT: Final = "Type it again with the path of the checkpoint at the end"
#: Names of checkpoints in a message.
_NAMED: Final = regex(r"""[\w./\\~+-]+\.(?:pth\.tar|pth|pt|ckpt|bin|safetensors|pkl|t7|tar)\b""")


class Explanation(NamedTuple):
    """A known error found in a text, with the details taken from the text."""

    error: KnownError
    details: Details


class ExplainReport(TypedDict):
    """The report of ``ckptool explain``.

    ``name`` is the anchor in docs/errors.md, or "" for a message that it does not list. ``message`` is the user's
    message, shortened. ``path`` is the file, or "". ``cause`` is "file" if the file causes the message, "elsewhere" if
    it has no sign of that, and "unknown" for an unknown message or without a file. ``next`` is the command to type,
    or "".
    """

    schema: str
    name: str
    message: str
    path: str
    cause: Literal["file", "elsewhere", "unknown"]
    why: str
    next: str
    python: str


def explain(text: str, path: str = "") -> ExplainReport:
    """Explain an error message, or a traceback with it: the cause, and the command that helps.

    With a ``path`` the file is opened, and the answer is about its own keys and tensors. Without one the report says
    what would be looked at. A message that docs/errors.md does not list has the name "". If ``text`` is empty,
    the answer is what ``inspect`` finds in the file. Raise UnreadableError if ``path`` leads to no file.

    >>> ckptool.explain("KeyError: 'model'", "training.pth")["next"]
    'ckptool edit training.pth --merge-entry training.pth:state_dict=model --drop state_dict -o training.renamed.pth'
    """
    return explain_log(text, path, "")


def explain_log(text: str, path: str, log: str) -> ExplainReport:
    """Explain a message as ``explain`` does. ``log`` is the file that it was read from, for the next command, or ""."""
    found = explanation(text)
    message = message_in(text, found)
    name = found.error.name if found is not None else ""
    cause: Literal["file", "elsewhere", "unknown"] = "unknown"
    if path:
        from .answers import answer_for  # imported late: it opens files

        error, details = found or (None, {})
        answer = answer_for(path, _COLOUR.sub("", text), error, {**details, "log": log or STDIN})
        cause = answer.cause
    elif found is not None:
        error, details = found
        why = f"{error.why_of(details)} {_NAME_IT}, and explain looks at {error.topic.looks_at}."
        answer = Answer(why, _again(text, message, log), error.python_for(error.example, details))
    else:
        answer = Answer(f"{UNKNOWN} {_NAME_IT}, and explain says what inspect finds.", _again(text, message, log))
    return ExplainReport(
        schema="ckptool.explain/1",
        name=name,
        message=message,
        path=path,
        cause=cause,
        why=advised(answer.why, answer.step),
        next=as_step(answer.step).line,
        python=answer.python,
    )


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


def message_in(text: str, found: Explanation | None) -> str:
    """Return the message in a text, in one line and shortened: the last exception that has the known error.

    Without an exception, it is the first line that has the known error; for an unknown error, the last exception, or
    else the first line.
    """
    lines = [line for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    blocks: list[list[str]] = []
    others: list[str] = []
    for line in lines:
        raised = _RAISED.match(line)
        if raised:
            blocks.append([raised[1]])
        elif line.startswith(("Traceback", "During handling", "The above exception")):
            others.append(line)
        elif blocks:
            blocks[-1].append(line)
        else:
            others.append(line)
    candidates = [" ".join(" ".join(block).split()) for block in reversed(blocks)]
    candidates += [" ".join(line.split()) for line in others]
    if found is not None:
        candidates.sort(key=lambda each: found.error.find(each) is None)  # keeps the order of equal candidates
    return cut(candidates[0], _LONGEST) if candidates else ""


def _again(text: str, message: str, log: str) -> NextStep:
    """Return the command that explains the message for the file that it names; no step if there is no such file."""
    named = next((name for name in _NAMED.findall(text) if os.path.exists(name)), "")
    if not named:
        return NextStep()
    alone, whole = explanation(message), explanation(text)
    enough = alone is not None and whole is not None and alone.error is whole.error and read_error(text) is None
    short = enough or text.strip() == message
    if short and "'" in message and message.isprintable() and not set(message) & set('"$`\\!'):
        return as_step(Line(f'ckptool explain "{message}" {argument(named)}'))  # easier to read than quoted quotes
    return command("explain", message if short else log or STDIN, named)

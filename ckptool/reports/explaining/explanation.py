"""Explain a message: find the known error in the text, ask the file, and make the answer."""

from __future__ import annotations

import os
import re
from typing import Final, Literal

from ...base.errors import CkptoolError
from ...base.findings import FLAT_MESSAGE, FLAT_PARAMETERS
from ...base.records import TypedDict
from ...base.steps import STDIN, Line, NextStep, advised, as_step, command
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.programs import convert_step, program_of
from ...edits.flat_params import flat_state_dicts
from ...formats.opening import open_checkpoint
from ...formats.rank_part import part_of
from ...safety.storages import storage_flaws
from ..edit_steps import edit_step, sanitize_step
from ..inspection import inspection
from ..validate import report_on
from .file_answers import (
    ANSWERS,
    NAMED,
    Answer,
    contents,
    fitting_case,
    global_names,
    line_step,
    runnable,
    signs,
    step_of,
    words,
)
from .known_errors import (
    Case,
    Details,
    KnownError,
    as_python,
    command_line,
    explanation,
    filled,
    load_lines,
    message_in,
    named,
    without_colours,
)

#: The beginning of the answer to a message that is not known.
UNKNOWN: Final = "No explanation is known for this message."
#: What to do without a file.
_NAME_IT: Final = "Type it again with the path of the checkpoint at the end"
#: Steps that change nothing, and one that may drop most of a model.
_LOOKING: Final = ("inspect ", "keys ", "match ", "scan ", "get ", "drop {path} {keys}")
#: Findings of ``inspect`` that do not explain a message by themselves.
_REMARKS: Final = frozenset(("together", "shared", "device-strings", "big-endian"))
#: Findings about devices, and about classes, whose steps one command can combine.
_DEVICES: Final = frozenset(("device", "device-objects", "map-location"))
_CLASSES: Final = frozenset(("weights-only", "module"))
#: Packages that import no module of a project.
_LIBRARIES: Final = frozenset(("torch", "numpy", "collections", "builtins", "__builtin__"))


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
    error, details = found or (None, {})
    message = message_in(text, found)
    if path:
        answer = _for_file(path, without_colours(text), error, {**details, "log": log or STDIN})
    elif error is not None:
        step = "" if error.step.startswith(_LOOKING) else command_line(error.step, error.example, details)
        usual = f" Usually '{step}' helps." if step else ""
        why = f"{filled(error.why, details)}{usual} {_NAME_IT}, and explain looks at {error.topic.looks_at}."
        answer = Answer(why, python=error.python_for(error.example, details), cause="unknown")
    else:
        why = f"{UNKNOWN} {_NAME_IT}, and explain says what inspect finds."
        answer = Answer(why, cause="unknown")
    return ExplainReport(
        schema="ckptool.explain/1",
        name=error.name if error is not None else "",
        message=message,
        path=path,
        cause=answer.cause,
        why=advised(answer.why, answer.step),
        next=as_step(answer.step).line,
        python=answer.python,
    )


# -- the answer for a file ---------------------------------------------------------------------------------------------


def _for_file(path: str, text: str, error: KnownError | None, details: Details) -> Answer:
    """Return the answer for a file; raise UnreadableError without one. ``log`` is the file of the message, or -."""
    unknown = error is None and bool(text.strip())
    details = {**details, "named": "yes" if os.path.basename(path) in text else "no"}
    try:
        checkpoint = open_checkpoint(path)
    except FileNotFoundError:
        raise
    except CkptoolError as unreadable:
        if isinstance(unreadable.__cause__, OSError):
            raise  # there is no such file, or it must not be read
        for case in error.cases if error is not None else ():
            if case.unreadable and re.search(case.unreadable, unreadable.what):
                step = command_line(case.step, path, details) if case.step else ""
                return Answer(f"{path}: {unreadable.what}. {named(case.why, path, details)}", as_step(Line(step)))
        answer = Answer(f"{path}: {unreadable.what}", unreadable.step)
        return _unknown(answer, path, damaged=True) if unknown else answer
    with checkpoint:
        checkpoint = checkpoint.lenient()
        flaws = [*checkpoint.container.problems, *storage_flaws(checkpoint)]
        damaged = any(flaw.level == "error" for flaw in flaws)
        part = part_of(checkpoint)
        if part is not None and part.cut:
            whole = command("inspect", part.folder) if part.folder else part.whole
            answer = Answer(f"{path}: {part.message}", whole)  # an edit of one part alone would be useless
        elif any(flaw.code == FLAT_PARAMETERS for flaw in flaws) or flat_state_dicts(checkpoint):
            answer = Answer(f"{path}: {FLAT_MESSAGE}")
        elif error is None or damaged:
            answer = _by_findings(checkpoint, error, details)  # no edit of a damaged file is possible
        else:
            editable = not any(flaw.effect for flaw in flaws)
            answer = _known(checkpoint, text, error, details, editable=editable)
        if unknown:
            return _unknown(answer, path, damaged=damaged)
        if error is None and answer.cause == "elsewhere":
            answer = answer._replace(why=f"{answer.why}. If a program does not load it, give explain the message too.")
        return answer._replace(python=runnable(checkpoint, answer.python))


def _unknown(answer: Answer, path: str, *, damaged: bool) -> Answer:
    """Return what inspect finds. The step follows only if the file is ``damaged``: the message may need another."""
    findings = answer.why.removeprefix(f"{path}: ").rstrip(".")
    step = as_step(answer.step) if damaged else NextStep()
    end = "" if step.advice else "."  # advice follows
    return Answer(f"{UNKNOWN} inspect says of {path}: {findings}{end}", step, cause="unknown")


def _known(checkpoint: Checkpoint, text: str, error: KnownError, details: Details, *, editable: bool) -> Answer:
    """Answer by the first case that fits, the own function, or findings; without edits if it is not ``editable``."""
    cases = [case for case in error.cases if editable or not case.step]
    case = fitting_case(cases, signs(checkpoint, details), details) if cases else None
    if case is not None:
        return _of_case(case, checkpoint, details)
    own = ANSWERS[error.answer](checkpoint, text, error, details) if error.answer and editable else None
    answer = own or _by_findings(checkpoint, error, details)
    line = as_step(answer.step).line
    if own is None or program_of(checkpoint) is None or not line.startswith("ckptool"):
        return answer
    # No command edits the entries of a program.
    step = convert_step(checkpoint) if checkpoint.state_dicts else as_step("")
    why = f"{checkpoint.path} is a program with its code, not a file of weights"
    return Answer(f"{why}: take the weights out first." if step.commands or not step else f"{why}.", step)


def _of_case(case: Case, checkpoint: Checkpoint, details: Details) -> Answer:
    path, facts = checkpoint.path, words(checkpoint, details)
    step = step_of(case, checkpoint, facts)
    code = {**facts, "load": load_lines(path, facts["place"])}
    python = named(case.python.strip().replace("{path}", as_python(path)), path, code)
    why = named(case.why, path, facts)
    return Answer(why, line_step(step), python, "elsewhere" if case.elsewhere else "file")


def _needs(checkpoint: Checkpoint, error: KnownError | None, name: str) -> bool:
    """Whether the pickles name this, or a model whose own modules may import the missing module."""
    names = global_names(checkpoint)
    if error is not None and error.name == "no-module" and checkpoint.survey.modules:
        return any(each.partition(".")[0] not in _LIBRARIES for each in names)
    return any(name in each for each in names)


def _by_findings(checkpoint: Checkpoint, error: KnownError | None, details: Details) -> Answer:
    """Return the findings of ``inspect`` and ``validate`` that explain the error; all of them without a known one."""
    path, every = checkpoint.path, inspection(checkpoint, judged=False)["findings"]
    errors = [item for item in every if item["level"] == "error"]
    topic = error.topic if error is not None else None
    name = details.get("name", "") if topic is not None and topic.codes >= _CLASSES and not errors else ""
    if topic is not None and name and not name.isdigit() and not _needs(checkpoint, error, name):
        why = f"{path}: {contents(checkpoint)}. It does not name {name}. {topic.absent}."
        return Answer(why, cause="elsewhere")
    if topic is not None:
        mine = [item for item in every if item["code"] in topic.codes]
    else:
        mine = [item for item in every if item["code"] not in _REMARKS and (item["level"] != "note" or item["next"])]
    mine = list({item["message"]: item for item in (*errors, *mine)}.values())
    whole = topic is not None and topic.whole
    if not errors and (whole or not mine):
        validated = report_on(checkpoint, quick=not whole)
        bad = [check["message"] for check in validated["checks"] if check["status"] == "fail"]
        if bad:
            step = Line(validated["next"]) if validated["next"] else validated["advice"]
            return Answer(f"{path}: {'; '.join(bad)}", as_step(step))
    if not mine:
        searched = "Every byte of it was read, and no damage was found" if whole else "It shows no cause of the message"
        rest = ", without findings" if topic is None else f". {searched}. {topic.absent}."
        return Answer(f"{path}: {contents(checkpoint)}{rest}", cause="elsewhere")
    messages = f"{path}: {'; '.join(item['message'].rstrip('.') for item in mine[:NAMED])}."
    step = next((item["next"] for item in mine if item["next"]), "")
    if error is None:
        together = next((item["next"] for item in every if item["code"] == "together"), "")
        return Answer(messages, line_step(together or step))
    own = {item["code"] for item in mine}
    if own <= _DEVICES:
        # A machine that names its number of GPUs has one.
        step = edit_step("remap", path, word="cpu", to="cpu").line
        step = command_line(error.step, path, details) if error.step.startswith("remap ") else step
    elif own <= _CLASSES:
        step = as_step(sanitize_step(checkpoint)).line
    sure = error.topic.sure and not errors
    why = f"{filled(error.why, details)} {messages}" if sure else messages
    return Answer(why, line_step(step), error.python_for(path, details) if sure else "")

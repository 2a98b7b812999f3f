"""The known errors of ``errors.toml``: a pattern, the cause, what to look for in the file, the step, Python lines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...base.lazy import regex
from ...base.steps import Command, NextStep, Setting, is_folder, suggested_output
from ...base.toml import parsed
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.paths import parse_steps
from ...checkpoint.programs import program_of
from ...checkpoint.selection import follow
from ...edits.sanitize.trial import loadable
from ...pickles.nodes import Global
from ...safety.calls import has_acting_call
from ..inspection import inspection
from .finders import TOPICS, Answer, Case, Details, KnownError, as_python, filled, raised, searched

_TABLE: Final = os.path.join(os.path.dirname(__file__), "errors.toml")
#: The path of the file in a step, or with a word, a suffix or both, an unused name next to it: ``{path:cpu.pth}``.
_PATH: Final = regex(r"\{path(?::(\w*)(\.\w+)?)?\}")


def named(text: str, path: str, details: Details) -> str:
    """Return a text with the path, unused names next to it, and the details filled in."""
    names = _PATH.sub(
        lambda match: path if match[1] is None else suggested_output(path, match[1], match[2] or ""), text
    )
    return filled(names, details)


def typed(line: str, path: str, details: Details) -> NextStep:
    """Return the step that a line describes: the command, arguments, ``--option`` with at most one value, ``-o``."""
    words = [named(word, path, details) for word in shlex.split(line)]
    output = words.pop() if "-o" in words else ""
    words = [word for word in words if word != "-o"]
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    settings: list[Setting] = []
    for word in words[first:]:
        if word.startswith("--"):
            settings.append(Setting(word[2:].replace("-", "_")))
        else:
            settings[-1] = settings[-1]._replace(value=word)
    return NextStep((Command(words[0], tuple(words[1:first]), tuple(settings), output),))


def of_case(case: Case, path: str, details: Details, begin: str = "") -> Answer:
    """Return the answer of a case for a file."""
    step = typed(case.step, path, details) if case.step else NextStep()
    python = named(case.python.strip().replace("{path}", as_python(path)), path, details)
    return Answer(begin + named(case.why, path, details), step, python)


def unreadable_case(error: KnownError, reason: str) -> Case | None:
    """Return the case for a file that is not a checkpoint for this reason, or None."""
    return next((case for case in error.cases if case.unreadable and re.search(case.unreadable, reason)), None)


def global_names(checkpoint: Checkpoint) -> list[str]:
    """Return the dotted names of the classes and functions in the pickles of a checkpoint."""
    return [f"{node.module}.{node.name}" for _, node in checkpoint.graph.of_type(Global)]


def fitting_case(error: KnownError, checkpoint: Checkpoint) -> Case | None:
    """Return the first case whose signs a checkpoint has, or None."""
    graph, survey = checkpoint.graph, checkpoint.survey
    codes: set[str] = set()
    if any(case.codes for case in error.cases):
        codes = {item["code"] for item in inspection(checkpoint, judged=False)["findings"]}
    names = [*(entry.path for entry in survey.entries), *(entry.key for entry in survey.tensors)]
    classes = global_names(checkpoint)
    for case in error.cases:
        if (
            not case.unreadable
            and not (case.empty and survey.tensors)
            and (not case.codes or codes & {*case.codes})
            and (not case.formats or checkpoint.format in case.formats)
            and all(any(re.search(key, name) for name in names) for key in case.keys)
            and not any(isinstance(follow(graph, parse_steps(entry)), str) for entry in case.entries)
            and (not case.classes or any(re.search(case.classes, name) for name in classes))
        ):
            return case
    return None


def runnable(checkpoint: Checkpoint, python: str) -> str:
    """Return Python lines that work for the file: nothing where torch.load does not read it, and weights_only=False
    where only that reads it.
    """
    if "torch.load(" not in python:
        return python
    if checkpoint.traits.loader != "torch.load" or program_of(checkpoint) is not None or is_folder(checkpoint.path):
        return ""
    if not checkpoint.survey.modules:
        python = python.replace(").state_dict()", ")")
    if "weights_only" in python or loadable(checkpoint):
        return python
    if has_acting_call(checkpoint.graph):
        return ""
    lines = _LOAD.sub(r"\1, weights_only=False)", python).split("\n")
    first = next(number for number, line in enumerate(lines) if "torch.load(" in line)
    lines[first] += "  # runs what the file says"
    return "\n".join(lines)


#: The call of torch.load in Python lines, up to its last argument.
_LOAD: Final = regex(r"""(torch\.load\((?:"[^"]*"|'[^']*')(?:, map_location=[^()]*)?)\)""")


def with_rows(errors: Sequence[KnownError], answers: Mapping[str, Any]) -> tuple[KnownError, ...]:
    """Return the errors of the table, which are more specific and count first, then ``errors`` with their cases.

    ``answers`` has the functions that a row names as its ``answer``.
    """
    with open(_TABLE, "rb") as file:
        table = parsed(file.read(), _TABLE, "the table of errors")
    cases: dict[str, list[Case]] = {}
    for row in table["case"]:
        for name in row.pop("of"):
            cases.setdefault(name, []).append(_case(row))
    rows = [_error(row, answers) for row in table["error"]]
    return tuple(error._replace(cases=tuple(cases.pop(error.name, ()))) for error in (*rows, *errors))


def _case(row: Mapping[str, Any]) -> Case:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Case(**fields)


def _error(row: dict[str, Any], answers: Mapping[str, Any]) -> KnownError:
    pattern, where, step = row.pop("pattern"), row.pop("where", None), row.pop("step", "inspect {path}")
    return KnownError(
        find=searched(pattern) if where is None else raised(pattern, where),
        step=lambda path, details: typed(step, path, details),
        topic=TOPICS[row.pop("topic", "FILE")],
        alike=tuple(row.pop("alike", ())),
        answer=answers[row.pop("answer")] if "answer" in row else None,
        **row,
    )

"""Golden transcripts: the command line as a user sees it, one file a topic in ``tests/cli/transcripts``.

A transcript is text. A line that begins with ``$ `` is a command, what follows is its output as it came (lines of
stderr begin with ``! ``), and ``[exit N]`` ends it; other lines are remarks. The commands of one file run one after
the other in one folder with copies of the fixtures that they name. ``ckptool`` runs in this process, unless the line
needs a shell, and so does ``python -c``; all else runs in a shell. To record them anew:
``CKPTOOL_UPDATE=1 pytest tests/cli/test_transcripts.py``.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from conftest import FIXTURES, GENERATORS, REAL, ROOT

from ckptool.base import errors
from ckptool.cli import main, runner, validate
from ckptool.cli.main import COMMANDS, FIRST_WORDS
from ckptool.cli.render import say_error

TRANSCRIPTS = Path(__file__).parent / "transcripts"
FILES = sorted(TRANSCRIPTS.glob("*.txt"))
REALS = {item.path.name for item in REAL}
CONVERTING = {"--update-config", "--key", "--to-format", "--allow-loss", "--strict", "--tied"}
CONVERTING |= {"--max-shard-size", "--metadata"}
UPDATE = bool(os.environ.get("CKPTOOL_UPDATE"))

#: What decides how text is laid out, and what a variable of the user's must not change.
ENVIRONMENT = {
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "LC_ALL": "C.UTF-8",
    "CKPTOOL_DEBUG": "",
    "SOURCE_DATE_EPOCH": "1700000000",
}


class Step(NamedTuple):
    """A command, its output with the marks of stderr, and its exit code; None where it was never recorded."""

    command: str
    output: list[str]
    code: int | None

    def lines(self) -> list[str]:
        return [f"$ {self.command}", *self.output, f"[exit {self.code}]"]


def parsed(text: str) -> list[Step | str]:
    """The steps of a transcript, and the other lines as they are."""
    lines = text.splitlines()
    parts: list[Step | str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.startswith("$ "):
            parts.append(line)
            continue
        end = next((n for n in range(at, len(lines)) if lines[n].startswith(("[exit ", "$ "))), len(lines))
        if end < len(lines) and lines[end].startswith("[exit "):
            parts.append(Step(line[2:], lines[at:end], int(lines[end][6:-1])))
            at = end + 1
        else:
            parts.append(Step(line[2:], [], None))
    return parts


class Recorder:
    """The lines of two streams, in the order in which they were written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.out = _Stream("", self.lines)
        self.err = _Stream("! ", self.lines)

    def finished(self) -> list[str]:
        for stream in (self.out, self.err):
            if stream.rest:
                stream.write("<no newline>\n")
        return self.lines


class _Stream(io.StringIO):
    def __init__(self, mark: str, lines: list[str]) -> None:
        super().__init__()
        self.mark, self.lines, self.rest = mark, lines, ""

    def write(self, text: str, /) -> int:
        *whole, self.rest = (self.rest + text).split("\n")
        self.lines += [(self.mark + line).rstrip(" ") if not line else self.mark + line for line in whole]
        return len(text)


class Run(NamedTuple):
    """A transcript as it comes out now, and the classes of the errors that were said in it."""

    text: str
    said: frozenset[type]


@functools.cache
def run(path: Path) -> Run:
    """Run every command of a transcript, in a folder of its own."""
    said: set[type] = set()
    parts = parsed(path.read_text(encoding="utf-8"))
    with _workplace(parts) as environment, _noting(said):
        fresh = [part if isinstance(part, str) else _executed(part.command, environment) for part in parts]
        place = os.path.realpath(Path.cwd())
    lines = [line for part in fresh for line in ([part] if isinstance(part, str) else part.lines())]
    # The name of the folder differs from run to run.
    return Run("\n".join(lines).replace(place, "/PLACE") + "\n", frozenset(said))


@contextmanager
def _workplace(parts: list[Step | str]) -> Iterator[dict[str, str]]:
    """A temporary folder as the current one, with the fixtures that the commands name and ``ckptool`` on the path."""
    words = {word for part in parts if isinstance(part, Step) for word in re.split(r"[\s'\"=/]+", part.command)}
    before, mask, kept = Path.cwd(), os.umask(0o022), dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ckptool-transcript-") as made:
        place, tools = Path(made, "work"), Path(made, "bin")
        place.mkdir()
        tools.mkdir()
        tool = tools / "ckptool"
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckptool "$@"\n', encoding="utf-8")
        tool.chmod(0o755)
        python = tools / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        for name in words:
            if name and (FIXTURES / name).is_file():
                shutil.copy(FIXTURES / name, place / name)
                (place / name).chmod(0o644)
            elif name and (GENERATORS / name).is_file():
                shutil.copy(GENERATORS / name, place / name)
            elif name and (FIXTURES / name).is_dir() and name not in (".", "..", "__pycache__"):
                shutil.copytree(FIXTURES / name, place / name)
            elif name in REALS and (FIXTURES / "real" / name).is_dir():
                shutil.copytree(FIXTURES / "real" / name, place / name)
            elif name in REALS:
                shutil.copy(FIXTURES / "real" / name, place / name)
        os.environ.update(ENVIRONMENT)
        os.chdir(place)
        try:
            yield os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        finally:
            os.chdir(before)
            os.umask(mask)
            os.environ.clear()
            os.environ.update(kept)


@contextmanager
def _noting(said: set[type]) -> Iterator[None]:
    """Note the class of every error that the command line explains."""
    modules = (main, runner, validate)

    def noted(error: errors.CkptoolError) -> None:
        said.add(type(error))
        say_error(error)

    for module in modules:
        vars(module)["say_error"] = noted
    try:
        yield
    finally:
        for module in modules:
            vars(module)["say_error"] = say_error


def _executed(command: str, environment: dict[str, str]) -> Step:
    words = shlex.split(command)
    if words[0] == "ckptool" and not set("|<>*;&$`") & set(re.sub(r"'[^']*'", "", command)):
        recorder = Recorder()
        with redirect_stdout(recorder.out), redirect_stderr(recorder.err):
            code = main.run(words[1:])
        return Step(command, recorder.finished(), code)
    if words[:2] == ["python", "-c"]:  # a process of its own would import torch first
        recorder = Recorder()
        with redirect_stdout(recorder.out), redirect_stderr(recorder.err):
            exec(words[2], {})
        return Step(command, recorder.finished(), 0)
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, timeout=600, check=False)
    recorder = Recorder()
    recorder.out.write(done.stdout.decode("utf-8", "backslashreplace"))
    recorder.err.write(done.stderr.decode("utf-8", "backslashreplace"))
    return Step(command, recorder.finished(), done.returncode)


def recorded() -> list[Step]:
    """All steps of all transcripts."""
    parts = (part for path in FILES for part in parsed(path.read_text(encoding="utf-8")))
    return [part for part in parts if isinstance(part, Step)]


def ckptool_steps() -> list[tuple[str, list[str], Step]]:
    """(command, options, step) of every call of ckptool."""
    calls = []
    for step in recorded():
        words = shlex.split(step.command)
        if words[:1] == ["ckptool"]:
            command, second = [*(word for word in words[1:] if not word.startswith("-")), "", ""][:2]
            command += f" {second}" if command in FIRST_WORDS else ""
            calls.append((command, [word.partition("=")[0] for word in words if word.startswith("-")], step))
    return calls


def _needs_torch(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    marks = ("--load", "--model", "import torch", " --to-dtype ", "--rtol")
    return any(mark in text for mark in marks) and importlib.util.find_spec("torch") is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    if _needs_torch(path):
        pytest.skip("torch is not installed")
    fresh = run(path).text
    if UPDATE:
        path.write_text(fresh, encoding="utf-8")
    old = path.read_text(encoding="utf-8")
    changes = difflib.unified_diff(old.splitlines(), fresh.splitlines(), "recorded", "now", lineterm="", n=1)
    assert fresh == old, "CKPTOOL_UPDATE=1 records it anew\n" + "\n".join(changes)


def test_every_command_has_a_transcript() -> None:
    assert {command for command, _, _ in ckptool_steps()} >= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_has_a_transcript(name: str) -> None:
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    used = {option for called, options, _ in ckptool_steps() if called == name for option in options}
    if used & {"-o", "--output"}:  # what writes also converts
        of_convert = (options for called, options, _ in ckptool_steps() if called in ("convert", "cast"))
        used |= {option for options in of_convert for option in options} & CONVERTING
    missing = [option.opts for option in command.params if option.param_type_name == "option"]
    # test_options.py reads --help-all and holds --json against --format json, test_colour.py runs --no-color on a
    # terminal.
    # test_fleets.py has lists and engines, saving/test_companions.py links.
    used |= {"--help", "--help-all", "--json", "--no-color", "--files-from", "--slice", "--engine", "--jobs"}
    used |= {"--follow-links"}
    if main._REMOTE[0] in command.params:  # tests/remote/test_commands.py runs them against a server
        used |= {option.opts[0] for option in main._REMOTE}
    if main._VERBOSE in command.params:  # test_messages.py runs it on every command
        used.add("--verbose")
    assert [names for names in missing if not used & set(names)] == []


def test_every_exit_code_has_a_transcript() -> None:
    assert {step.code for _, _, step in ckptool_steps()} >= {0, 1, 2, 3, 4, 5}


def test_every_error_class_has_a_transcript() -> None:
    said = frozenset[type]().union(*(run(path).said for path in FILES if not _needs_torch(path)))
    classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.CkptoolError)
    }
    # ChangedError needs somebody who writes to the input at the right moment: see laws/test_atomic.py.
    # ReadBackError needs a bug: see formats/test_readback.py. PickleLimitError needs a crafted file of a megabyte.
    # WorkerDiedError needs a process that is killed: see cli/test_jobs.py. EngineError: see files/test_engines.py.
    special = {errors.ChangedError, errors.ReadBackError, errors.PickleLimitError}
    special |= {errors.WorkerDiedError, errors.EngineError}
    assert classes - said == {errors.CkptoolError, *special}


def test_json_in_transcripts_parses_and_names_its_schema() -> None:
    found = 0
    for command, _, step in ckptool_steps():
        words, lines = shlex.split(step.command), [line for line in step.output if not line.startswith("!")]
        if "--format" not in words or step.code == 2 or command == "get":
            continue
        texts = {"json": ["\n".join(lines)], "jsonl": lines}.get(words[words.index("--format") + 1], [])
        for told in map(json.loads, texts):
            for report in told if isinstance(told, list) else [told]:
                assert (
                    report["schema"].removesuffix("-file/1").removesuffix("/1")
                    == f"ckptool.{command.replace(' ', '-')}"
                )
                found += 1
    assert found > 30


def test_a_bug_is_named_as_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("out of \x1b[31mrange")

    monkeypatch.setattr("ckptool.cli.show.open_checkpoint", broken)
    monkeypatch.delenv("CKPTOOL_DEBUG", raising=False)
    assert main.run(["keys", str(FIXTURES / "bare.pth")]) == 70
    told = capsys.readouterr()
    assert told.out == ""
    assert "a bug in ckptool" in told.err and "ZeroDivisionError" in told.err and "CKPTOOL_DEBUG" in told.err
    assert "\x1b" not in told.err and "Traceback" not in told.err
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main.run(["keys", str(FIXTURES / "bare.pth")])

"""A situation: what a person has, what they type, and what must hold in the end.

The person types the first command, then each command that is printed, as printed. The situation ends well if each
command exits 0, the answer names the cause, and the last output holds. Where nothing is printed to type, the answer
must say in a sentence what helps.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import stand_ins
import torch
from command_line import Said, say
from safetensors.torch import load_file

import ckptool
from ckptool.base.text import BREVITY, Brevity
from ckptool.cli.main import COMMANDS

__all__ = ["DATA", "Fits", "Outcome", "Situation", "error_of", "fits", "holds", "register", "try_out"]

#: The most commands that a person types after the first one.
MOST = 4
#: Commands that only read. Exit code 1 is an answer of theirs: the files differ, or nothing is wrong with the file.
READING = ("diff", "explain", "inspect", "keys", "match", "scan", "stats", "validate")

#: Checks an output. ``None`` stands for nothing written, and the text is what was printed last.
Check = Callable[[str], None]


class Situation(NamedTuple):
    """A situation.

    ``build`` writes the files into the current
    folder and returns the message that the person saw, "" if there was none. ``typed`` are the commands that the
    person begins with, with MESSAGE for the message. ``cause`` is a pattern that each answer has, ``ends`` checks the
    file that the last command wrote, and ``helps`` is a pattern for the sentence that says what helps if no command
    does.
    """

    name: str
    build: Callable[[], str]
    typed: tuple[str, ...]
    cause: str
    ends: Check | None
    helps: str


class Outcome(NamedTuple):
    """What happened: the message, the decisive answer, the commands of each chain, and what is not right ("" if all
    is)."""

    message: str
    says: str
    commands: list[list[str]]
    wrong: str


#: What is known of each situation, by the title of its group and its name: what the person does, and what happened.
DATA = Path(__file__).with_name("situations.json")
_KNOWN = {name: row for rows in json.loads(DATA.read_text(encoding="utf-8")).values() for name, row in rows.items()}


def register(situations: list[Situation]) -> Callable[..., Callable[[Callable[[], str]], Callable[[], str]]]:
    """Return the decorator that adds situations to a list; ``situations.json`` has all but the code of each."""

    def situation(ends: Check | None = None) -> Callable[[Callable[[], str]], Callable[[], str]]:
        def add(build: Callable[[], str]) -> Callable[[], str]:
            name = build.__name__.strip("_").replace("_", "-")
            known = _KNOWN[name][0]
            situations.append(
                Situation(name, build, tuple(known["typed"]), known["cause"], ends, known.get("helps", ""))
            )
            return build

        return add

    return situation


#: Where this machine has its packages, which is not part of a message.
_PLACE = re.compile(r"(?<=')/\S*(?=/(?:pytest|torch)/)|\x1b\[[\d;]*m")
#: The script that runs: pytest, or the worker of xdist.
_SCRIPT = re.compile(r"<module '(?:pytest\.)?__main__' [^>]*>")
#: A set of names, in any order.
_SET = re.compile(r"\{'[^{}:]*'\}")


class NotRight(Exception):
    """What did not go well, in words."""


def try_out(situation: Situation) -> Outcome:
    """Build the files in the current folder, type the commands, and judge."""
    torch.manual_seed(0)
    try:
        message = _same_everywhere(" ".join(situation.build().split()))
    finally:
        stand_ins.put_away()
    built = Path.cwd()
    says, chains, wrong = "", [], ""
    for number, first in enumerate(situation.typed):
        folder = built.with_name(f"{built.name}-{number}")
        shutil.copytree(built, folder)  # each chain begins with the same files
        os.chdir(folder)
        words = [message if word == "MESSAGE" else word for word in shlex.split(first)]
        chains.append([first])
        try:
            said = typed(words)
            answer = _answer(said, words)
            if not says or words[0] == "explain":
                says = answer
            _follow(situation, words, said, chains[-1])
        except NotRight as error:
            wrong = wrong or f"{chains[-1][-1]}: {error}"
        finally:
            os.chdir(built)
    return Outcome(message, says, chains, wrong)


def _same_everywhere(message: str) -> str:
    """Return a message without what differs between two runs and two machines."""
    message = _SCRIPT.sub("<module '__main__' from 'train.py'>", _PLACE.sub("", message))
    return _SET.sub(lambda found: f"{{{', '.join(sorted(found[0][1:-1].split(', ')))}}}", message)


def typed(words: list[str]) -> Said:
    """Run a command line of ckptool, or ``mv``."""
    if words[0] in {name.split()[0] for name in COMMANDS}:
        return say(*words)
    done = subprocess.run(words, capture_output=True, text=True)
    return Said(done.returncode, done.stdout, done.stderr)


def _answer(said: Said, words: list[str]) -> str:
    """Return the answer without tables: the reason that explain gives, or the findings."""
    if words[0] == "explain" and said.code < 2:
        brevity = BREVITY.set(Brevity(lists=True))  # as the command line
        try:
            return ckptool.explain(words[1], words[2] if len(words) > 2 else "")["why"]
        finally:
            BREVITY.reset(brevity)
    lines = [line for line in said.all.splitlines() if line.strip()]
    found = [line for line in lines if re.match(r"ckptool: |error: |warning: |note: ", line)]
    plain = [line.strip() for line in lines if "-> " not in line]
    return " ".join(found or plain[:2] if words[0] != "inspect" else found or plain[-1:])


def _follow(situation: Situation, words: list[str], said: Said, chain: list[str]) -> None:
    """Type what is printed until the situation ends, or raise NotRight."""
    text = said_first = said.all
    # What explain prints first is the person's own message.
    whole = text.partition("\n\n")[2] if words[0] == "explain" and said.code < 2 else text
    if said.out and said.code not in (0, 1) and words[0] in ("inspect", "validate") and os.path.isdir(words[1]):
        raise NotRight(f"exit {said.code}: a file in the folder counts as damaged")
    output = _output(words)
    if output and not _problem(situation, output):
        return  # the first command does what the person wants
    problem = ""
    while True:
        if output:
            problem = _problem(situation, output)
            if not problem:
                break
            text = say("inspect", output).all
            whole += text
        line = next_line(text)
        if not line:
            break
        if len(chain) > MOST:
            raise NotRight(f"no end after {MOST} commands; {problem}")
        if line in chain:
            raise NotRight(f"a circle: '{line}' again")
        chain.append(line)
        for part in line.split(" && "):
            words = shlex.split(part)
            words = words[1:] if words[0] == "ckptool" else words
            said = typed(words)
            if said.code not in ((0, 1) if words[0] in (*READING, "salvage") else (0,)):
                raise NotRight(f"exit {said.code}: {' '.join(said.all.split())[:200]}")
        text = said.all
        whole += text
        output = _output(words) or (words[-1] if words[0] == "mv" else "")
    whole = " ".join(whole.split())
    if not re.search(situation.cause, whole, re.IGNORECASE):
        raise NotRight("the cause is not named")
    if output and problem:
        raise NotRight(problem)
    if output and situation.ends is None:
        raise NotRight("a command writes a file, though no file can help")
    python = textwrap.dedent(said_first.partition("In Python:\n")[2])
    loads = "model.load_state_dict" in python and "weights_only=False" not in python
    if loads and isinstance(situation.ends, Fits):
        situation.ends.by_python(python)
    elif not output and not (situation.helps and re.search(situation.helps, whole, re.IGNORECASE)):
        raise NotRight("no command is printed that helps" if situation.ends else "it is not said what would help")


def next_line(text: str) -> str:
    """Return the command that the person types: the one that does everything, or else the first one."""
    lines = text.splitlines()
    steps = [line.partition("-> ")[2] for line in lines if re.match(r" *-> ", line)]
    together = [number for number, line in enumerate(lines) if "to fix at once what one command can fix" in line]
    if together and "-> " in lines[together[0] + 1]:
        return lines[together[0] + 1].partition("-> ")[2]
    return steps[0] if steps else ""


def _output(words: list[str]) -> str:
    return words[words.index("-o") + 1] if "-o" in words and os.path.exists(words[words.index("-o") + 1]) else ""


def _problem(situation: Situation, output: str) -> str:
    """Return what is wrong with an output, or ""."""
    if situation.ends is None:
        return ""
    try:
        situation.ends(output)
    except Exception as error:
        return f"{output}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


# -- what must hold in the end -----------------------------------------------------------------------------------------


def loaded(output: str) -> Any:
    """Load an output as its reader does, without running anything."""
    if os.path.isdir(output):
        return {key: value for path in Path(output).glob("*.safetensors") for key, value in load_file(path).items()}
    return load_file(output) if output.endswith(".safetensors") else torch.load(output, weights_only=True)


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return all mappings in a value."""
    if isinstance(value, Mapping):
        return [value, *(inner for each in value.values() for inner in mappings(each))]
    return [inner for each in value for inner in mappings(each)] if isinstance(value, list | tuple) else []


def holds(state: Mapping[str, torch.Tensor] | None = None, entry: str | None = None) -> Check:
    """Return the check that an output loads and has a state dict, in ``entry`` or anywhere."""
    wanted = state or stand_ins.STATE

    def check(output: str) -> None:
        value = loaded(output)
        candidates = mappings(value) if entry is None else [value[entry] if entry else value]
        same = [each for each in candidates if each.keys() >= wanted.keys()]
        assert same, f"no state dict with the keys {', '.join(wanted)} in {entry or 'it'}"
        for key, tensor in wanted.items():
            assert torch.equal(torch.as_tensor(same[0][key]), tensor), f"{key} has other values"

    return check


class Fits(NamedTuple):
    """The check that a model loads the output with strict=True.

    ``missing`` are keys that the file never had. With ``extra`` the output may have more keys, which strict=False
    ignores.
    """

    model: Callable[[], torch.nn.Module]
    missing: tuple[str, ...] = ()
    extra: bool = False

    def __call__(self, output: str) -> None:
        problems = []
        for state in mappings(loaded(output)):
            if not any(isinstance(each, torch.Tensor) for each in state.values()):
                continue
            try:
                self.into(self.model(), state)
                return
            except (AssertionError, RuntimeError) as error:
                problems.append(str(error))
        raise AssertionError(problems[0] if problems else "no state dict in it")

    def into(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Load a state dict, and check what torch says of its keys."""
        result = model.load_state_dict(state, strict=False)
        assert not {*result.missing_keys} - {*self.missing}, f"missing: {', '.join(result.missing_keys)}"
        assert self.extra or not result.unexpected_keys, f"unexpected: {', '.join(result.unexpected_keys)}"

    def by_python(self, lines: str) -> None:
        """Run the lines that are printed for Python, with a model of the person."""
        loading = self._replace(extra=True)
        model = self.model()
        methods = {"load_state_dict": lambda _, state, strict=True: loading.into(model, state)}
        own = type("Mine", (), {**methods, "state_dict": lambda _: model.state_dict()})()
        try:
            exec(compile(lines, "<printed>", "exec"), {"torch": torch, "model": own})
        except Exception as error:
            raise NotRight(f"the printed Python: {type(error).__name__}: {error}") from error


#: The name that situations use.
fits = Fits


def error_of(function: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    """Return the error of a call as Python prints it, with classes of other packages out of reach."""
    stand_ins.put_away()
    try:
        function(*arguments, **more)
    except Exception as error:
        module = type(error).__module__
        return f"{'' if module == 'builtins' else module + '.'}{type(error).__qualname__}: {error}"
    raise AssertionError(f"{function} raises nothing")

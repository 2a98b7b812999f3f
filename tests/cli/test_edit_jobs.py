"""Commands that edit several files: the work is plain data that other processes can take, and the outcome is the same
whoever does it."""

from __future__ import annotations

import json
import shlex
import shutil
from itertools import dropwhile
from pathlib import Path

import click
import pytest
from command_line import say
from conftest import FIXTURES

from ckptool.cli.main import COMMANDS, cli

FILES = (
    "args_namespace.pth",
    "bare_module.pth",
    "ddp4_training.pth",
    "gan.pth",
    "hostile_system.pth",
    "model.safetensors",
)
#: Names in examples that are not checkpoints, and their content.
TEXTS = {"names.json": json.dumps({"module.fc.weight": "head.weight"})}


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def _examples(name: str) -> list[list[str]]:
    """Return the examples in the help of a command, as words after the name of the program."""
    lines = [line.strip() for line in (_command(name).epilog or "").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"ckptool {name} ")]


def _writes(name: str) -> bool:
    return any(parameter.name == "output" for parameter in _command(name).params)


#: Every example of a command that edits.
EXAMPLES = [
    words for name in COMMANDS if _writes(name) and name not in ("report", "lock", "get") for words in _examples(name)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        shutil.copy(FIXTURES / name, tmp_path)
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _options(words: list[str]) -> list[str]:
    """Return an example without its inputs, which come first, and without its output."""
    rest = [*dropwhile(lambda word: not word.startswith("-"), words[1:])]
    for name in ("-o", "--output", "--out-dir"):
        if name in rest:
            del rest[rest.index(name) : rest.index(name) + 2]
    rest = [word for word in rest if word not in ("--dry-run", "--in-place")]
    return rest if words[0] != "convert" or "--to-format" in rest else [*rest, "--to-format", "safetensors"]


SEVERAL = sorted(
    {
        (words[0], *_options(words))
        for words in EXAMPLES
        if any(parameter.name == "paths" for parameter in _command(words[0]).params)
        and words[0] not in ("average", "match")
        and not {"--rename-like", "--unflatten", "--model", "--key", "--format"} & {*words}
    }
)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("words", SEVERAL, ids=" ".join)
@pytest.mark.parametrize("style", [[], ["--format", "json"]], ids=["table", "json"])
def test_the_outcome_does_not_depend_on_jobs(words: tuple[str, ...], style: list[str], folder: Path) -> None:
    outcomes = []
    for jobs in ("1", "2"):
        said = say(words[0], *FILES, *words[1:], "--out-dir", "out", "--jobs", jobs, *style)
        outputs = {
            path.relative_to(folder): path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()
        }
        shutil.rmtree(folder / "out", ignore_errors=True)
        outcomes.append((said, outputs))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].code != 70

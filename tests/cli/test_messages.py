"""Messages are one line: lists of names and long prose are shortened, unless ``-v`` or JSON asks for everything."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from command_line import Said, say
from conftest import FIXTURES
from printed_commands import POLICIES

from ckptool.base.text import LINE_CHARS

FILES = [
    *sorted(path for path in FIXTURES.iterdir() if path.name not in ("real", "ranks", "sharded", "MANIFEST.tsv")),
    *sorted(path for path in (FIXTURES / "real").iterdir() if path.name != "MANIFEST.tsv"),
    *sorted(path for path in (FIXTURES / "ranks").iterdir() if path.is_dir()),
    *sorted(path for path in (FIXTURES / "sharded").rglob("*.pth")),
]
CALLS = """
inspect FILE
validate FILE
validate FILE --weights-only --device cpu --dtype float64
validate FILE --quick --prefix module
scan FILE
match FILE target.pth
match target.pth FILE --lenient
sanitize FILE -o made.pth
convert FILE -o made.safetensors
convert FILE -o made.safetensors --strict
convert FILE -o made.dcp
convert FILE -o made.onnx
slim FILE --for inference -o made.pth
drop FILE fc.weight fc.bias
rename FILE fc.wieght head.weight
set FILE epoch=1 -o made.safetensors
extract FILE statedict -o made.pth
merge FILE target.pth -o made.pth
get FILE fc.wieght
"""
#: The end of a line that was shortened, and of a list in it.
SHORTENED = re.compile(r" \(-v shows all\)$|(?<!\()\band [\d,]+ more\b")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "bare.pth", "target.pth")
    for name, text in POLICIES.items():
        Path(name).write_text(text)
    return tmp_path


def messages(said: Said, path: str) -> list[str]:
    """The lines of messages, without paths: no commands, and no rows of tables and trees, which have wide columns."""
    lines = [line for line in said.all.splitlines() if not re.match(r" *-> ", line)]
    lines = [line for line in lines if not re.search(r"\S {2,}\S", line) and not line.startswith("---")]
    return [re.sub(rf"^ckptool: (warning: )?(made\.\w+: )?(\S*{re.escape(path)}\S*: )?", "", line) for line in lines]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.sampled(every=16)
def test_a_message_is_one_line_and_verbose_and_json_have_the_rest(file: Path, here: Path) -> None:
    path = file.name
    os.symlink(file, path)
    for line in CALLS.strip().splitlines():
        words = [path if word == "FILE" else word for word in shlex.split(line)]
        brief, whole = (_lines([*words, *more], path) for more in ((), ("-v",)))
        assert [row for row in brief if len(row.strip()) > LINE_CHARS] == [], words
        listed = [row for row in brief if SHORTENED.search(row) and not row.startswith("skipped: ")]  # -v: a row each
        starts = [re.split("[;,] ", SHORTENED.split(row)[0])[0].rstrip() for row in listed]
        assert [start for start in starts if not any(start in row for row in whole)] == [], words
        assert [row for row in whole if SHORTENED.search(row)] == [], words
        assert SHORTENED.search(say(*words, "--json").out) is None, words
        _tidy(path)


def _lines(words: list[str], path: str) -> list[str]:
    lines = messages(say(*words), path)
    _tidy(path)
    return lines


def _tidy(path: str) -> None:
    for name in set(os.listdir()) - {path, "target.pth", *POLICIES}:
        (shutil.rmtree if os.path.isdir(name) else os.remove)(name)

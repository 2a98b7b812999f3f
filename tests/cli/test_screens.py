"""What a terminal shows: colour and width. Golden screens in colour.

CKPTOOL_UPDATE=1 records them anew. An escape sequence is recorded as its role: ``<bad>INVALID</>``.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import program
from conftest import FIXTURES, ROOT
from hypothesis import given
from hypothesis import strategies as st

from ckptool.cli import terminal
from ckptool.cli.main import COMMANDS, run

SCREENS = ROOT / "tests" / "cli" / "screens"
FILES = ("bare.pth", "gan.pth", "ddp4_training.pth", "zip_wrong_crc.pth", "args_namespace.pth", "lfs_pointer.pth")
CALLS = (
    "inspect gan.pth",
    "get args_namespace.pth .",
    "inspect .",
    "keys ddp4_training.pth --sort bytes",
    "scan .",
    "validate zip_wrong_crc.pth",
    "validate . --quick",
    "diff bare.pth halved.pth",
    "diff before.pth after.pth",
    "match bare.pth gan.pth",
    "rename bare.pth --rename conv1.*=stem.* --dry-run",
    "stats siblings.pth",
    "strip-module nothing.pth -o out.pth",
)
_ROLES = {f"\x1b[{style}m": f"<{role}>" for role, style in terminal._STYLES.items()} | {"\x1b[0m": "</>"}


class Screen(io.StringIO):
    """stdout and stderr at once, as a terminal has them."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).write_bytes((FIXTURES / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert run(["cast", "bare.pth", "--to-dtype", "float16", "-o", "halved.pth", "-q"]) == 0
    generator = torch.Generator().manual_seed(0)
    trained = {f"layers.{n}.attention.weight": torch.randn(4, 8, generator=generator) for n in range(3)}
    torch.save(trained, "before.pth")
    torch.save({name: tensor * 1.25 for name, tensor in trained.items()}, "after.pth")
    siblings = {"embed.weight": torch.randn(6, 4, generator=generator)}
    for n in range(5):
        siblings[f"layers.{n}.attention.weight"] = torch.randn(4, 8, generator=generator) * (n + 1)
        siblings |= {f"layers.{n}.experts.{m}": torch.randn(3, generator=generator) for m in range(2)}
        siblings[f"layers.{n}.norm.weight"] = torch.ones(4)
    siblings["layers.3.attention.weight"][0, 0] = torch.nan
    torch.save(siblings, "siblings.pth")
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def shown(call: str, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    screen = Screen()
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        patch.setattr(terminal, "watched", lambda: False)
        run(call.split())
    return screen.getvalue()


def _options() -> dict[str, str]:
    import click

    from ckptool.cli.main import cli

    found = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found[name] = " ".join(option for item in command.params for option in item.opts)
    return found


OPTIONS = _options()


def test_screen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for call in CALLS:
        text = shown(call, 60, monkeypatch)
        if "\x1b" not in text:
            continue  # the transcripts have its words
        for code, role in _ROLES.items():
            text = text.replace(code, role)
        assert "\x1b" not in text, "escape sequences of other kinds"
        parts.append(f"$ ckptool {call}\n{text}")
    fresh, golden = "\n".join(parts), SCREENS / "60.txt"
    if os.environ.get("CKPTOOL_UPDATE"):
        golden.write_text(fresh, encoding="utf-8")
    assert fresh == golden.read_text(encoding="utf-8"), "CKPTOOL_UPDATE=1 records it anew"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_of_a_table_is_wider_than_the_terminal(width: int, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for call in CALLS:
        lines = shown(call, width, monkeypatch).splitlines()
        for number, line in enumerate(lines):
            if re.fullmatch(r" *-+(  -+)+", line):
                end = next((n for n in range(number, len(lines)) if not lines[n].strip()), len(lines))
                assert max(map(terminal.cells, lines[number - 1 : end])) <= width, (call, lines[number - 1 : end])


def test_colour_changes_no_text(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in CALLS:
        coloured = shown(call, 100, monkeypatch)
        for more in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            with monkeypatch.context() as patch:
                for name, value in more.items():
                    patch.setenv(name, value)
                plain = shown(call, 100, monkeypatch)
            assert plain == re.sub(r"\x1b\[\d*m", "", coloured)


def test_no_color_is_an_option_of_every_command_and_of_the_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("--no-color" in options.split() for options in OPTIONS.values())
    assert "\x1b" in shown("scan bare.pth", 80, monkeypatch)
    for call in ("scan bare.pth --no-color", "scan --no-color nothing.pth"):
        assert "\x1b" not in shown(call, 80, monkeypatch)
        monkeypatch.delenv("NO_COLOR")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    run(["--no-color", "scan", "bare.pth"])
    monkeypatch.delenv("NO_COLOR")
    assert screen.getvalue() == "bare.pth: weights-only\n"


def test_a_pipe_gets_the_full_text_without_colour(here: Path) -> None:
    said = program("keys", "ddp4_training.pth", env={"COLUMNS": "40"})
    assert "module.block.1.num_batches_tracked" in said.out
    assert "\x1b" not in said.all


def test_a_real_terminal(here: Path) -> None:
    """Through a terminal of the system: its width, and its colour."""
    child, screen = pty.fork()
    if child == 0:
        os.environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
        call = (
            f"stty cols 60; {sys.executable} -m ckptool keys ddp4_training.pth; {sys.executable} -m ckptool scan -v ."
        )
        os.execvp("sh", ["sh", "-c", call])
    text = "".join(_read(screen))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, 3)
    assert "module.block.1.num_batches_tracked" in text
    assert "bare.pth: \x1b[32mweights-only\x1b[0m" in text
    assert max(len(line) for line in text.split("\r\n")[:10]) <= 60


def _read(screen: int) -> Iterator[str]:
    while True:
        try:
            data = os.read(screen, 1 << 16)
        except OSError:
            return
        if not data:
            return
        yield data.decode()


@given(st.lists(st.sampled_from(("a", "layers", "12", "attention", "é", "層")), min_size=1), st.sampled_from("./- "))
def test_no_word_is_cut_that_fits(segments: list[str], separator: str) -> None:
    """Whatever the width, what is left of a key or a sentence is whole, if one word and the mark fit."""
    text = separator.join(segments)
    for most in range(max(map(terminal.cells, segments)) + 2, terminal.cells(text) + 1):
        shown = terminal.elided(text, most)
        assert terminal.cells(shown) <= most
        left = [word for part in shown.split("…") for word in part.split(separator) if word]
        assert set(left) <= set(segments) and left, (text, shown)

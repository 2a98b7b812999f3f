"""Completion in real shells: commands by click, files by the shell, keys by the file that was named before them."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES, ROOT

from ckptool.cli.completion import SHELLS
from ckptool.edits.recipes import families

#: A command line, and what completes it; the last word is what was typed of it.
CASES = (
    ("ckptool inspe", ["inspect"]),
    ("ckptool strip-module gan.pth --out-d", ["--out-dir"]),
    ("ckptool keys gan.pth --key net", ["netD", "netG"]),
    ("ckptool diff gan.pth gan.pth --key netG --other-key ne", ["netD", "netG"]),
    ("ckptool get gan.pth netG.module.fc", ["netG.module.fc.bias", "netG.module.fc.weight"]),
    ("ckptool drop bare.pth conv", ["conv1.bias", "conv1.weight"]),
    ("ckptool drop gan.pth it", ["iter"]),
    ("ckptool remap gan.pth --to cp", ["cpu"]),
    ("ckptool edit gan.pth --to mp", ["mps"]),
    ("ckptool cast gan.pth --to-dtype bf", ["bfloat16"]),
    ("ckptool validate gan.pth --dtype float1", ["float16"]),
    ("ckptool convert gan.pth --to-names hf", [name for name in families() if name.startswith("hf")]),
    ("ckptool diff gan.pth gan.pth --ignore dev", ["device"]),
    ("ckptool diff gan.pth gan.pth --ignore device,pre", ["device,prefix"]),
    ("ckptool get missing.pth x", []),
    ("ckptool get pwned.pkl x", []),
)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("gan.pth", "bare.pth"):
        (tmp_path / name).write_bytes((FIXTURES / name).read_bytes())
    (tmp_path / "pwned.pkl").write_bytes(b"cposix\nsystem\n(S'touch pwned'\ntR.")
    program = tmp_path / "bin" / "ckptool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptool "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def environment(here: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMP_", "_CKPTOOL"))}
    return kept | {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(here)}


def script(here: Path, shell: str) -> Path:
    said = say("completion", shell)
    assert (said.code, said.err) == (0, "")
    path = here / f"completion.{shell}"
    path.write_text(said.out, encoding="utf-8")
    return path


def run(here: Path, *call: str) -> str:
    done = subprocess.run(call, cwd=here, env=environment(here), capture_output=True, text=True, check=True)
    return done.stdout


def need(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.mark.parametrize(("line", "completed"), CASES)
def test_bash(line: str, completed: list[str], here: Path) -> None:
    need("bash")
    asked = f"""
        source {script(here, "bash")}
        COMP_WORDS=({line}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _ckptool_completion ckptool; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert sorted(run(here, "bash", "--norc", "-c", asked).split()) == completed
    assert not (here / "pwned").exists()


@pytest.mark.parametrize(("line", "completed"), CASES)
def test_fish(line: str, completed: list[str], here: Path) -> None:
    need("fish")
    out = run(here, "fish", "--no-config", "-c", f"source {script(here, 'fish')}; complete -C '{line}'")
    # After each completion fish has its description.
    assert sorted(answer.split("\t")[0] for answer in out.splitlines()) == completed


@pytest.mark.parametrize(("line", "completed"), [case for case in CASES if len(case[1]) == 1])
def test_zsh(line: str, completed: list[str], here: Path) -> None:
    """zsh completes only what is typed: the line is typed, then a tab, and Ctrl-A echo makes it print itself."""
    need("zsh")
    start = here / ".zshrc"
    start.write_text(f"PS1='READY '; autoload -Uz compinit; compinit -u; source {script(here, 'zsh')}\n")
    child, screen = pty.fork()
    if child == 0:
        os.chdir(here)
        os.execvpe("zsh", ["zsh", "-i", "-d"], environment(here) | {"TERM": "dumb", "ZDOTDIR": str(here)})
    try:
        until(screen, "READY ")
        os.write(screen, f"{line}\t".encode())
        until(screen, completed[0])
    finally:
        os.close(screen)
        os.kill(child, 9)
        os.waitpid(child, 0)


def until(screen: int, wanted: str) -> None:
    text, end = "", time.monotonic() + 300
    while wanted not in text:
        ready, _, _ = select.select([screen], [], [], max(end - time.monotonic(), 0))
        assert ready, f"it does not say {wanted!r}: {text!r}"
        text += os.read(screen, 4096).decode(errors="replace")


def test_files_are_left_to_the_shell(here: Path) -> None:
    variables = {"_CKPTOOL_COMPLETE": "bash_complete", "COMP_WORDS": "ckptool inspect ga", "COMP_CWORD": "2"}
    call = [sys.executable, "-m", "ckptool"]
    done = subprocess.run(call, cwd=here, env=environment(here) | variables, capture_output=True, text=True, check=True)
    assert done.stdout == "file,ga\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    said = say("completion", shell)
    assert "_CKPTOOL_COMPLETE" in said.out

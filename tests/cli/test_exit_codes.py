"""Exit codes that depend on the moment: inputs that change while they are read, and ^C at any time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import program
from conftest import FIXTURES, ROOT

import ckptool.files.sources
from ckptool.cli.main import run

READING = (["inspect"], ["keys"], ["stats"], ["validate"], ["hash"], ["get", "conv1.weight"])


@pytest.fixture
def shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that has fewer bytes than it had when it was opened."""
    path = tmp_path / "model.pth"
    shutil.copy(FIXTURES / "bare.pth", path)
    opened = ckptool.files.sources.open_file

    def longer(name: str) -> tuple[int, SimpleNamespace | os.stat_result]:
        fd, status = opened(name)
        if name != str(path):
            return fd, status
        fields = {field: getattr(status, field) for field in dir(status) if field.startswith("st_")}
        return fd, SimpleNamespace(**fields | {"st_size": status.st_size + 5000})

    monkeypatch.setattr(ckptool.files.sources, "open_file", longer)
    return path


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_an_input_that_shrinks_cannot_be_read(
    command: list[str], shorter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command[0], str(shorter), *command[1:]]) == 3
    told = capsys.readouterr()
    assert "it shrank while it was read" in told.err
    assert "try again" in told.err


# -- ^C -----------------------------------------------------------------------------------------------

#: Sends itself ^C when a module is looked for.
AT_IMPORT = """
import os, signal, sys
from ckptool.__main__ import main

wanted = sys.argv.pop(1)

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
main()
"""
#: Says when its first handler is in place. Before that, ^C interrupts this script and not ckptool.
STARTING = """
import os, signal
from ckptool.__main__ import main

set_handler = signal.signal

def first(number, handler):
    signal.signal = set_handler
    set_handler(number, handler)
    os.write(2, b".")

signal.signal = first
main()
"""


@pytest.mark.parametrize(
    "module", ["click", "click.core", "ckptool.cli.main", "ckptool.cli.show", "ckptool.formats.opening"]
)
def test_interrupted_at_an_import(module: str) -> None:
    assert program(module, "inspect", FIXTURES / "bare.pth", code=AT_IMPORT) == (130, "", "")


def test_interrupted_at_any_moment() -> None:
    chance = random.Random(7)
    codes = set()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(12):
        words = [sys.executable, "-c", STARTING, "inspect", str(FIXTURES / "bare.pth")]
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert process.stderr.read(1) == b"."
            time.sleep(chance.uniform(0, 0.15))
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=600)
        assert err == b""
        codes.add(process.returncode)
    assert codes <= {0, 130}
    assert 130 in codes


#: An import that turns any exception into one of its own, as the extension modules of torch do.
SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
except BaseException as error:
    raise ImportError("initialization failed") from error
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_not_a_missing_torch(tmp_path: Path, name: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SWALLOWS.format(name=name))
    words = ["average", *[FIXTURES / "bare.pth"] * 2, "-o", tmp_path / "mean.pth"]
    said = program(*words, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert said == (128 + getattr(signal, name), "", "")
    assert not (tmp_path / "mean.pth").exists()


def test_the_module_and_the_command_begin_at_the_same_place() -> None:
    assert "ckptool = ckptool.__main__:main" in (ROOT / "setup.cfg").read_text()
    said = program("--version")
    assert (said.code, said.out.split()[0]) == (0, "ckptool")

"""Outputs whose bytes are computed while they are written: whole or not at all, as any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from conftest import FIXTURES, ROOT
from output_checks import saved

import ckptool
from ckptool import Checkpoint
from ckptool.base.errors import CkptoolError, RefusedError
from ckptool.cli.main import run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def litter(folder: Path, *known: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path not in known)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    big = torch.randn(4000)
    state = {"a.w": torch.randn(1_000_003), "b.w": big[7:20], "c.w": torch.randn(3), "d.n": torch.tensor(3)}
    return saved({"state_dict": state, "note": "/data/secret/x", "epoch": 3}, tmp_path / "in.pth")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "outputs"
    made.mkdir()
    return made


#: Command lines of all commands that lay a file out anew or compute; IN and OTHER stand for files.
COMMANDS: dict[str, list[str]] = {
    "rename": ["rename", "IN", "--rename", "a.*=x.*"],
    "slim": ["slim", "IN", "--dedupe"],
    "cast": ["cast", "IN", "--to-dtype", "bfloat16"],
    "merge": ["merge", "IN", "OTHER"],
    "average": ["average", "IN", "OTHER"],
    "redact": ["redact", "IN", "--redact", "all"],
    "drop": ["drop", "IN", "a.*"],
    "keep": ["edit", "IN", "--keep", "state_dict"],
    "extract": ["extract", "IN", "state_dict"],
    "edit": ["edit", "IN", "--slim", "--to-dtype", "float16", "--to-dtype", "float32", "--strip-prefix", "a"],
}


def arguments(name: str, path: Path, tmp_path: Path) -> list[str]:
    other = tmp_path / "other.pth"
    if not other.exists():
        loaded = oracle.load(path)
        loaded["state_dict"] = {key: value + 1 for key, value in loaded["state_dict"].items()}
        if name == "average":
            # Views of the same form: the sum above is contiguous.
            loaded = oracle.load(path)
        torch.save(loaded, other)
    return [str(path) if part == "IN" else str(other) if part == "OTHER" else part for part in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_tells_what_the_run_does_and_writes_nothing(
    name: str, model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out.pth"
    command = [*arguments(name, model, tmp_path), "-o", str(out), "--format", "json"]
    assert run([*command, "--dry-run"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert litter(folder) == []
    assert run(command) == 0
    done = json.loads(capsys.readouterr().out)
    assert told.pop("dry_run") is True and done.pop("dry_run") is False
    assert told == done
    assert out.stat().st_size == done["output_bytes"] and litter(folder, out) == []
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert run(["validate", str(out)]) == 0


# -- what goes wrong halfway ----------------------------------------------------------------------------------


def failing(path: Path, out: Path, edit: Callable[[Checkpoint], Checkpoint]) -> CkptoolError:
    with ckptool.open(path) as checkpoint, pytest.raises(CkptoolError) as caught:
        ckptool.save(edit(checkpoint), out)
    return caught.value


@pytest.mark.parametrize("large", [False, True], ids=["at once", "ahead"])
def test_a_refusal_halfway_leaves_nothing(large: bool, tmp_path: Path, folder: Path) -> None:
    """With many bytes to compute another thread does it ahead."""
    state = {f"w{n}": torch.ones(900_000 if large else 9) for n in range(4)} | {"last.w": torch.tensor([1e30])}
    path = saved(state, tmp_path / "in.pth")
    error = failing(path, folder / "out.pth", lambda c: ckptool.cast(c, "float16", no_overflow=True))
    assert isinstance(error, RefusedError) and "last.w" in str(error) and error.exit_code == 4
    assert litter(folder) == []
    assert run(["cast", str(path), "--to-dtype", "float16", "--no-overflow", "-o", str(folder / "out.pth")]) == 4
    assert litter(folder) == []


@pytest.mark.parametrize("edit", ["cast", "slim", "average", "merge"])
def test_a_source_that_shrinks_leaves_nothing(edit: str, model: Path, folder: Path, tmp_path: Path) -> None:
    other = saved(oracle.load(model), tmp_path / "other.pth")
    with ckptool.open(other) as foreign:

        def shrinking(checkpoint: Checkpoint) -> Checkpoint:
            if edit == "cast":
                result = ckptool.cast(checkpoint, "float64")
            elif edit == "slim":
                result = ckptool.slim(checkpoint)
            elif edit == "average":
                result = ckptool.average([checkpoint, foreign])
            else:
                result = ckptool.merge(checkpoint, foreign)
            victim = other if edit in ("average", "merge") else model
            os.truncate(victim, victim.stat().st_size // 2)
            return result

        error = failing(model, folder / "out.pth", shrinking)
    assert error.exit_code in (3, 5) and litter(folder) == []


# -- large files ----------------------------------------------------------------------------------------------


def sparse(path: Path, count: int, each: int) -> Path:
    """A checkpoint whose storages are holes in the file: it takes no room on the disk."""
    with torch.serialization.skip_data():
        torch.save({f"w{n}.weight": torch.empty(each) for n in range(count)}, path)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_during_a_cast_leaves_nothing(number: signal.Signals, tmp_path: Path, folder: Path) -> None:
    path = sparse(tmp_path / "in.pth", 8, 16 << 20)
    command = [
        sys.executable,
        "-m",
        "ckptool",
        "cast",
        str(path),
        "--to-dtype",
        "float64",
        "-o",
        str(folder / "out.pth"),
    ]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, preexec_fn=default_signals)
    while process.poll() is None and not any(name.stat().st_size > 4 << 20 for name in folder.iterdir()):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + number, err
    assert litter(folder) == [] and b"Traceback" not in err


def default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


def high_water(code: str, *told: str) -> int:
    """The most memory that a program held, in bytes."""
    tail = "\nimport re\nprint(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    done = subprocess.run(
        [sys.executable, "-c", code + tail, *told], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_cast_takes_the_memory_of_torch_and_a_little(tmp_path: Path) -> None:
    path = sparse(tmp_path / "in.pth", 2, 64 << 20)
    code = "import sys; from ckptool.cli.main import run; assert run(sys.argv[1:]) == 0"
    cast = ["cast", str(path), "--to-dtype", "bfloat16", "-o", str(tmp_path / "out.pth"), "-q"]
    assert high_water(code, *cast) < high_water("import torch") + (64 << 20)
    assert (tmp_path / "out.pth").stat().st_size < 260 << 20


def test_what_is_of_that_dtype_already_is_not_computed() -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        assert not ckptool.cast(checkpoint, "float32").edited

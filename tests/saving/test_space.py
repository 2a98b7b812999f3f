"""A disk without room: refused before the first byte, with what is needed and what is free."""

from __future__ import annotations

import errno
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.base.errors import OutputError
from ckptool.cli.main import run
from ckptool.files.sources import FileSource, Plan, Span
from ckptool.files.write import space
from ckptool.files.write.space import shortage

Disk = Callable[..., None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Give every filesystem so many free bytes."""

    def free(available: int, total: int = 1 << 40, block: int = 1, reserved: int = 0) -> None:
        status = list(os.statvfs("."))
        status[1], status[2], status[3], status[4] = block, total // block, available + reserved, available
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(status))

    return free


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.pth"
    torch.save({"model": OrderedDict([("module.w", torch.randn(100_000)), ("module.b", torch.randn(10))])}, path)
    return path


def test_it_is_refused_before_the_first_byte(
    disk: Disk, checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_can_share", lambda *of: False)
    before = sorted(checkpoint.parent.iterdir())
    disk(19_000)
    assert run(["strip-module", str(checkpoint), "-o", str(out)]) == 5
    err = capsys.readouterr().err
    assert "it needs 402 kB, and 19.0 kB are free; --in-place needs" in err and os.strerror(errno.ENOSPC) in err
    assert sorted(checkpoint.parent.iterdir()) == before
    out.write_bytes(b"old")
    assert run(["strip-module", str(checkpoint), "-o", str(out), "--force"]) == 5
    assert out.read_bytes() == b"old"


def test_the_hint_is_true(
    disk: Disk, checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_can_share", lambda *of: False)
    disk(19_000)
    run(["strip-module", str(checkpoint), "-o", str(out)])
    words = capsys.readouterr().err.split("--in-place needs ")[1].split()
    size = checkpoint.stat().st_size
    assert run(["strip-module", str(checkpoint), "--in-place"]) == 0
    grown = checkpoint.stat().st_size - size
    assert abs(float(words[0]) * {"kB": 1000, "bytes": 1}[words[1]] - grown) <= 512 + grown * 0.01


def test_a_dry_run_says_it_too(
    disk: Disk, checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_can_share", lambda *of: False)
    disk(19_000)
    assert run(["strip-module", str(checkpoint), "-o", str(out), "--dry-run"]) == 0
    assert "there is no room: it needs 402 kB, and 19.0 kB are free" in capsys.readouterr().out
    run(["strip-module", str(checkpoint), "-o", str(out), "--dry-run", "--format", "json"])
    assert "19.0 kB are free" in json.loads(capsys.readouterr().out)["shortage"]
    disk(1 << 30)
    run(["strip-module", str(checkpoint), "-o", str(out), "--dry-run", "--format", "json"])
    assert "shortage" not in json.loads(capsys.readouterr().out)


def test_in_place_needs_room_as_well(disk: Disk, checkpoint: Path) -> None:
    before = checkpoint.read_bytes()
    disk(100)
    with ckptool.open(checkpoint) as opened, pytest.raises(OutputError, match="100 bytes are free"):
        ckptool.save_in_place(ckptool.strip_module(opened))
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("nonsense", [{"total": 0}, {"block": 0}])
def test_a_filesystem_that_does_not_say_is_not_believed(
    nonsense: dict[str, int], disk: Disk, checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = list(os.statvfs("."))
    status[1], status[2], status[3], status[4] = nonsense.get("block", 1), nonsense.get("total", 1 << 30), 0, 0
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(status))
    assert run(["strip-module", str(checkpoint), "-o", str(out)]) == 0


def test_shared_blocks_and_holes_need_no_room(
    disk: Disk, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "input"
    path.write_bytes(os.urandom(1 << 20))
    disk(10_000)
    source = _source(path)
    try:
        plan = Plan((b"x" * 4096, Span(source, 0, 1 << 20), b"y" * 100))
        monkeypatch.setattr(space, "_can_share", lambda *of: True)
        assert shortage(plan, str(out)) is None
        monkeypatch.setattr(space, "_can_share", lambda *of: False)
        short = shortage(plan, str(out))
        assert short is not None and short.needed == (1 << 20) + 4196
        # Not at the same place within a block.
        monkeypatch.setattr(space, "_can_share", lambda *of: True)
        assert shortage(plan._replace(pieces=(b"x" * 100, *plan.pieces[1:])), str(out)) is not None
    finally:
        source.close()
    with path.open("r+b") as file:
        file.truncate(0)
        file.truncate(1 << 20)
    source = _source(path)
    try:
        if source.sparse:
            monkeypatch.setattr(space, "_can_share", lambda *of: False)
            assert shortage(Plan((Span(source, 0, 1 << 20),)), str(out)) is None
    finally:
        source.close()


def _source(path: Path) -> Any:
    descriptor = os.open(path, os.O_RDONLY)
    return FileSource(str(path), descriptor, os.fstat(descriptor))

"""drop --in-place --reclaim: the space of what was dropped goes back to the disk, once the edit is on it."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.base.errors import OutputError, RefusedError
from ckptool.cli.main import run
from ckptool.files.write import in_place, space


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A checkpoint of which most is the optimizer."""
    if not space.can_reclaim(str(tmp_path / "x")):
        pytest.skip("files here cannot get holes")
    path = tmp_path / "training.pth"
    generator = torch.Generator().manual_seed(0)
    state = OrderedDict((f"l{n}.w", torch.randn(3000, generator=generator)) for n in range(4))
    torch.save({"model": state, "optimizer": {"m": [torch.randn(50_000, generator=generator) for _ in range(3)]}}, path)
    return path


def test_what_stays_is_what_torch_loads_and_the_rest_takes_no_space(
    training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, blocks, size = torch.load(training)["model"], training.stat().st_blocks, training.stat().st_size
    assert run(["drop", str(training), "optimizer", "--in-place", "--reclaim"]) == 0
    said = capsys.readouterr()
    assert not said.err and "given back to the disk: there is no undo" in said.out
    assert "ckptool undo" not in said.out
    after = torch.load(training)
    assert list(after) == ["model"] and all(torch.equal(after["model"][key], value) for key, value in before.items())
    assert (blocks - training.stat().st_blocks) * 512 > 550_000 and training.stat().st_size > size
    assert run(["validate", str(training), "--strict"]) == 0
    assert ckptool.diff(training, training)["same"]


def test_there_is_no_undo(training: Path) -> None:
    run(["drop", str(training), "optimizer", "--in-place", "--reclaim", "-q"])
    dropped = training.read_bytes()
    for original in (False, True):
        with pytest.raises(RefusedError, match="cannot be undone"):
            ckptool.undo(training, original=original)
    assert training.read_bytes() == dropped
    assert ckptool.history(training)["versions"][-1]["edit"].startswith("[reclaimed] drop")
    # A later edit is undone as ever.
    with ckptool.open(training) as checkpoint:
        ckptool.save_in_place(ckptool.add_module(checkpoint, "module."))
    assert ckptool.undo(training)["left"] == 1
    assert training.read_bytes() == dropped


def test_a_dry_run_and_no_reclaim_leave_everything(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = training.read_bytes()
    assert run(["drop", str(training), "optimizer", "--in-place", "--reclaim", "--dry-run"]) == 0
    assert "would be given back to the disk: there is no undo" in capsys.readouterr().out
    assert training.read_bytes() == before
    assert run(["drop", str(training), "optimizer", "--in-place", "-q"]) == 0
    ckptool.undo(training)
    assert training.read_bytes() == before
    assert run(["drop", str(training), "optimizer", "--reclaim", "-o", str(training) + ".out"]) == 2


def test_nothing_that_stays_changes(training: Path) -> None:
    before = training.read_bytes()
    with ckptool.open(training) as checkpoint:
        edited = ckptool.drop(checkpoint, ["optimizer"])
        gone = [record.span for record in checkpoint.container.records() if record.size == 200_000]
        gone = list(space.whole_blocks(gone))
        ckptool.save_in_place(edited, reclaim=True)
    after = training.read_bytes()[: len(before)]
    changed = [at for at in range(0, len(before), 512) if before[at : at + 512] != after[at : at + 512]]
    assert len(gone) == 3 and changed
    for at in changed:
        assert any(span.offset <= at and at + 512 <= span.offset + span.size for span in gone), at


def test_a_hole_is_made_only_after_the_edit_is_on_the_disk(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, punch = os.fsync, space._punch

    def noted(fd: int) -> None:
        calls.append("fsync")
        fsync(fd)

    def punched(fd: int, begin: int, size: int) -> bool:
        calls.append("punch")
        if os.fstat(fd).st_size > 8192:  # not the probe
            assert list(torch.load(training)) == ["model"]
        return punch(fd, begin, size)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(space, "_punch", punched)
    with ckptool.open(training) as checkpoint:
        ckptool.save_in_place(ckptool.drop(checkpoint, ["optimizer"]), reclaim=True)
    assert calls[0] == "punch" and calls[1:4] == ["fsync"] * 3 and calls[-1] == "fsync"
    assert calls[4:-1].count("punch") == 3


@pytest.mark.parametrize("at", ["append", "punch"])
def test_whatever_fails_the_file_loads(at: str, training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = training.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with ckptool.open(training) as checkpoint:
        edited = ckptool.drop(checkpoint, ["optimizer"])
        if at == "append":
            monkeypatch.setattr(in_place, "write_at", full)
            with pytest.raises(OutputError):
                ckptool.save_in_place(edited, reclaim=True)
            assert training.read_bytes() == before
        else:
            monkeypatch.setattr(space, "can_reclaim", lambda path: True)
            monkeypatch.setattr(space, "_punch", lambda fd, begin, size: size == 4096)
            assert ckptool.save_in_place(edited, reclaim=True).reclaimed == 0
            with pytest.raises(RefusedError):
                ckptool.undo(training)
            assert list(torch.load(training)) == ["model"]


def test_where_there_are_no_holes_it_is_refused_before_anything_changes(
    training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = training.read_bytes()
    monkeypatch.setattr(space, "_punch", lambda fd, begin, size: False)
    with ckptool.open(training) as checkpoint, pytest.raises(RefusedError, match="cannot be given back"):
        ckptool.save_in_place(ckptool.drop(checkpoint, ["optimizer"]), reclaim=True)
    assert training.read_bytes() == before


def test_storages_that_something_else_uses_stay(tmp_path: Path) -> None:
    if not space.can_reclaim(str(tmp_path / "x")):
        pytest.skip("files here cannot get holes")
    path, shared = tmp_path / "tied.pth", torch.randn(50_000)
    torch.save({"model": {"w": shared[:100]}, "optimizer": {"m": shared}}, path)
    with ckptool.open(path) as checkpoint:
        assert ckptool.save_in_place(ckptool.drop(checkpoint, ["optimizer"]), reclaim=True).reclaimed is None
    assert ckptool.undo(path)["undone"], "nothing was given back"
    assert torch.equal(torch.load(path)["model"]["w"], shared[:100])

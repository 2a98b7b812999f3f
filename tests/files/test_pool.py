"""Folders of more files than a process may open: few are open at a time, and each is the one that it was."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from command_line import Said, program
from conftest import ROOT
from dcp_folders import write_ranks
from safetensors.torch import save_file

import ckptool
from ckptool.base.errors import ChangedError
from ckptool.base.limits import LIMITS
from ckptool.files import folders as pool

resource = pytest.importorskip("resource")

RANKS = 90
DESCRIPTORS = 64


def run(*arguments: str) -> Said:
    """The program, which may open so many files."""

    def fewer() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    return program(*arguments, preexec_fn=fewer, cwd=ROOT)


@pytest.fixture(scope="module")
def dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {"module.weight": torch.arange(RANKS * 3.0).reshape(RANKS, 3), "module.bias": torch.ones(RANKS), "epoch": 3}
    return write_ranks(tmp_path_factory.mktemp("dcp") / "saved", state, RANKS)


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("hf"), request.param, RANKS)


def write_shards(folder: Path, suffix: str, count: int) -> Path:
    import json

    stem = "model" if suffix == "safetensors" else "pytorch_model"
    places = {}
    for number in range(count):
        name = f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}"
        state = {f"module.{number:03d}.weight": torch.full((3,), float(number))}
        (save_file if suffix == "safetensors" else torch.save)(state, folder / name)
        places |= dict.fromkeys(state, name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def every_command(folder: Path, out: Path, single: str) -> None:
    """Read, check, compare and edit it with few descriptors."""
    for arguments in (
        ("keys", str(folder)),
        ("inspect", str(folder)),
        ("validate", str(folder)),
        ("stats", str(folder)),
        ("diff", str(folder), str(folder)),
        ("strip-module", str(folder), "-o", str(out / "stripped")),
        ("add-module", str(folder), "--key", "nothing", "-o", str(out / "x")),
        ("convert", str(folder), "-o", str(out / f"whole{single}")),
        ("diff", str(folder), str(out / f"whole{single}"), "--ignore", "container"),
    ):
        found = run(*arguments)
        wanted = 2 if "nothing" in arguments else 0
        assert found.code == wanted, (arguments, found.err)
        assert "Too many open files" not in found.all


def test_a_dcp_folder_needs_few_descriptors(dcp: Path, tmp_path: Path) -> None:
    every_command(dcp, tmp_path, ".pth")
    loaded = torch.load(tmp_path / "whole.pth")
    assert torch.equal(loaded["module"]["weight"], torch.arange(RANKS * 3.0).reshape(RANKS, 3))


def test_folders_of_shards_need_few_descriptors(shards: Path, tmp_path: Path) -> None:
    every_command(shards, tmp_path, ".safetensors" if next(shards.glob("*.safetensors"), None) else ".pth")


def test_a_limited_number_of_files_is_open(dcp: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else pytest.skip("no /proc")
    with ckptool.open(dcp) as one, ckptool.open(dcp) as two:
        for checkpoint in (one, two):
            assert len(list(checkpoint.container.records()))
            assert len(os.listdir("/proc/self/fd")) <= before + LIMITS.open_files
    assert len(os.listdir("/proc/self/fd")) <= before


def test_threads_read_each_the_right_file(tmp_path: Path) -> None:
    """A descriptor that another thread closes, and the system gives to another file, would give its bytes."""
    ranks = LIMITS.open_files * 3
    folder = write_ranks(tmp_path / "saved", {"w": torch.arange(ranks * 1000).reshape(ranks, 1000)}, ranks)
    with ckptool.open(folder) as checkpoint:
        span = checkpoint.container.stored("w").span
        wanted = torch.arange(ranks * 1000).numpy().tobytes()
        wrong: list[int] = []

        def read(start: int) -> None:
            for step in range(ranks * 4):
                at = (start + step * 7919 * 8) % (len(wanted) - 16)
                if span.source.read(span.offset + at, 16) != wanted[at : at + 16]:
                    wrong.append(at)

        threads = [threading.Thread(target=read, args=(8000 * number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def replaced(path: Path) -> None:
    data = path.read_bytes()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(data)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grown(path: Path) -> None:
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, touched, grown, Path.unlink])
def test_a_file_that_changed_before_it_is_opened_again_is_refused(change: object, tmp_path: Path) -> None:
    ranks = LIMITS.open_files * 2
    folder = write_ranks(tmp_path / "saved", {"w": torch.arange(ranks * 10).reshape(ranks, 10)}, ranks)
    with ckptool.open(folder) as checkpoint:
        change(folder / "__0_0.distcp")  # type: ignore[operator]
        with pytest.raises(ChangedError, match=r"changed|opened again"):
            for record in checkpoint.container.records():
                record.span.source.read(record.span.offset, record.span.size)
        with pytest.raises(ChangedError):
            ckptool.save(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_opened_by_a_relative_path_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = LIMITS.open_files * 2
    folder = write_ranks(tmp_path / "saved", {"w": torch.arange(ranks * 10).reshape(ranks, 10)}, ranks)
    monkeypatch.chdir(tmp_path)
    with ckptool.open(folder.name) as checkpoint:
        monkeypatch.chdir("/")
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], torch.arange(ranks * 10).reshape(ranks, 10))


def test_garbage_is_collected_while_a_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector closes files that nobody uses, in the middle of any allocation of the pool."""
    monkeypatch.setattr(pool, "LIMITS", LIMITS._replace(open_files=60))
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    kept: list[object] = []
    thresholds = gc.get_threshold()
    try:
        for after in range(1, 160, 9):
            gc.disable()
            for _ in range(60):
                cycle: list[object] = [pool.PooledFile(str(path), *pool.open_file(str(path)))]
                cycle.append(cycle)
            # Tuples of Python's free list are no allocations.
            kept.append([(number, number) for number in range(3000)])
            gc.set_threshold(gc.get_count()[0] + after, *thresholds[1:])
            gc.enable()
            with closing(pool.PooledFile(str(path), *pool.open_file(str(path)))) as opened:
                gc.disable()
                assert opened.read(0, 3) == b"abc"
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()

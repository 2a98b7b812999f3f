"""Law 4 for outputs that are folders: the old one or the whole new one, whatever happens, and no litter."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool.base.errors import OutputError, RefusedError
from ckptool.files.sources import Computed, FolderPlan, Plan, Span, open_source
from ckptool.files.write import output
from ckptool.files.write.output import write_folder

NEW = {"model-1-of-2.safetensors": b"one" * 99, "model-2-of-2.safetensors": b"two", "x.index.json": b"{}"}
OLD = {"pytorch_model.bin": b"old" * 1000}


def folder_of(content: dict[str, bytes], path: Path) -> Path:
    path.mkdir()
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


def content_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def plan_of(content: dict[str, bytes]) -> FolderPlan:
    return FolderPlan(tuple((name, Plan((data,))) for name, data in content.items()))


def failing(at: int, error: BaseException) -> FolderPlan:
    """A folder whose file ``at`` fails in the middle."""

    def chunks() -> object:
        yield b"12"
        raise error

    files = list(plan_of(NEW).files)
    files[at] = (files[at][0], Plan((Computed(4, chunks, ()),)))  # type: ignore[arg-type]
    return FolderPlan(tuple(files))


def test_a_new_folder(tmp_path: Path) -> None:
    written = write_folder(plan_of(NEW), str(tmp_path / "out"), (), mode=0o640)
    assert content_of(tmp_path / "out") == NEW and os.listdir(tmp_path) == ["out"]
    assert written.size == sum(map(len, NEW.values()))
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o640}


def by_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system does it."""


def by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a filesystem that cannot exchange two names."""
    monkeypatch.setattr(output, "_exchange_atomically", lambda one, other: False)


@pytest.mark.parametrize("way", [by_system, by_names])
def test_an_old_folder_is_replaced_on_demand_alone(
    way: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way(monkeypatch)
    out = folder_of(OLD, tmp_path / "out")
    out.chmod(0o750)
    with pytest.raises(RefusedError, match="exists"):
        write_folder(plan_of(NEW), str(out), ())
    assert content_of(out) == OLD
    write_folder(plan_of(NEW), str(out), (), force=True, parts=lambda path: OLD)
    assert content_of(out) == NEW and os.listdir(tmp_path) == ["out"] and out.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("other", ["notes.txt", "config.json", "sub"])
def test_a_folder_of_other_things_is_never_replaced(other: str, tmp_path: Path) -> None:
    out = folder_of(OLD, tmp_path / "out")
    (out / other).mkdir() if other == "sub" else (out / other).write_bytes(b"mine")
    with pytest.raises(RefusedError, match=other):
        write_folder(plan_of(NEW), str(out), (), force=True, parts=lambda path: OLD)
    assert set(os.listdir(out)) == {*OLD, other} and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)])
def test_a_failure_leaves_what_was(at: int, force: bool, error: BaseException, tmp_path: Path) -> None:
    out = folder_of(OLD, tmp_path / "out") if force else tmp_path / "out"
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)) as caught:
        write_folder(failing(at, error), str(out), (), force=force, parts=lambda path: OLD)
    assert os.listdir(tmp_path) == (["out"] if force else [])
    assert not force or content_of(out) == OLD
    if isinstance(error, OSError):
        assert str(out) in str(caught.value) and "No space left" in str(caught.value)


def test_what_appears_meanwhile_is_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def chunks() -> object:
        folder_of(OLD, out)
        yield b"new"

    with pytest.raises(RefusedError, match="exists"):
        write_folder(FolderPlan((("model.safetensors", Plan((Computed(3, chunks, ()),))),)), str(out), ())  # type: ignore[arg-type]
    assert content_of(out) == OLD and os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes to be killed that way")
@pytest.mark.parametrize("force", [False, True])
def test_the_next_run_takes_away_what_a_killed_one_left(force: bool, tmp_path: Path) -> None:
    out = folder_of(OLD, tmp_path / "out") if force else tmp_path / "out"

    def chunks() -> object:
        os.kill(os.getpid(), signal.SIGKILL)
        yield b""

    pid = os.fork()
    if not pid:
        files = FolderPlan((*plan_of(NEW).files, ("x.bin", Plan((Computed(1, chunks, ()),)))))  # type: ignore[arg-type]
        try:
            write_folder(files, str(out), (), force=force, parts=lambda path: OLD)
        finally:
            os._exit(1)  # whatever happens, it must not go on with the tests
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert len(os.listdir(tmp_path)) == 1 + force
    write_folder(plan_of(NEW), str(out), (), force=force, parts=lambda path: OLD)
    assert content_of(out) == NEW and os.listdir(tmp_path) == ["out"]


def test_a_run_that_is_alive_keeps_its_folder(tmp_path: Path) -> None:
    """Even where locks are refused to one of the two."""
    out = tmp_path / "out"

    def chunks() -> object:
        output.remove_leftovers(str(tmp_path), "out")
        yield b"new"

    write_folder(FolderPlan((("model.safetensors", Plan((Computed(3, chunks, ()),))),)), str(out), ())  # type: ignore[arg-type]
    assert content_of(out) == {"model.safetensors": b"new"}


def test_an_input_in_the_folder_is_not_overwritten(tmp_path: Path) -> None:
    out = folder_of(OLD, tmp_path / "out")
    source = open_source(str(out / "pytorch_model.bin"))
    with pytest.raises(RefusedError, match="folder of an input"):
        write_folder(
            FolderPlan((("x.bin", Plan((Span(source, 0, 3),))),)),
            str(out),
            (source,),
            force=True,
            parts=lambda path: OLD,
        )
    source.close()
    assert content_of(out) == OLD

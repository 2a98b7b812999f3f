"""Edits in place that meet an error, a kill or a reader at any instant: the file is the former version or the new."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ROOT, WHOLE
from in_place_edits import archive_of, checkpoint_of, each_size, in_place, read, to_one

import ckptool
from ckptool.base.errors import MalformedError, OutputError, RefusedError
from ckptool.cli.main import run

CALLS = ("open", "lseek", "write", "fsync", "ftruncate")


class Spy:
    """Stands between ckptool and the calls that write: ``at`` is called before or after each."""

    def __init__(self, patch: pytest.MonkeyPatch, at: Callable[[str, str], None], most: int = 1 << 30) -> None:
        self.calls: list[str] = []
        for name in CALLS:
            patch.setattr(os, name, self.armed(name, getattr(os, name), at, most))

    def armed(self, name: str, real: Any, at: Callable[[str, str], None], most: int) -> Any:
        def call(*arguments: Any, **how: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_RDWR:
                return real(*arguments, **how)
            if name == "lseek" and arguments[2] != os.SEEK_SET:
                return real(*arguments, **how)
            self.calls.append(name)
            at(name, "before")
            if name == "write":
                arguments = (arguments[0], bytes(arguments[1][:most]))
            result = real(*arguments, **how)
            at(name, "after")
            return result

        return call


@pytest.mark.sampled(every=5)
@each_size
@pytest.mark.parametrize("most", [1, 100, 4096, 1 << 30])
def test_a_reader_at_every_instant(size: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of(tmp_path / "in.pth", size)
    whole = path.read_bytes()
    seen: list[int] = []
    count = 0

    def look(name: str, when: str) -> None:
        nonlocal count
        count += 1
        grown = path.stat().st_size % 4096  # while the file grows it is looked at more often
        if when == "after" and (name != "write" or most > 1 or count % 997 == 0 or (grown and count % 11 == 0)):
            seen.append(read(path))

    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = to_one(checkpoint)
        spy = Spy(patch, look, most)
        ckptool.save_in_place(edited)
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 1 == read(path)
    assert spy.calls.count("fsync") == (3 if size == "small" else 7)
    assert "ftruncate" not in spy.calls
    with monkeypatch.context() as patch:
        Spy(patch, lambda name, when: seen.append(read(path)) if when == "after" else None)
        ckptool.undo(path)
    assert seen[-1] == 0 and path.read_bytes() == whole


def test_the_last_step_is_one_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of(tmp_path / "in.pth", "small")
    states: list[bytes] = []
    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = to_one(checkpoint)
        Spy(patch, lambda name, when: states.append(path.read_bytes()) if name == "fsync" else None)
        ckptool.save_in_place(edited)
    former, last = states[-3], states[-1]
    differ = [at for at in range(len(last)) if former[at] != last[at]]
    assert differ == [len(last) - 22] and last[differ[0]] == ord("P")


class Failure(NamedTuple):
    error: BaseException
    code: int


FAILURES = {
    **{errno.errorcode[code]: Failure(OSError(code, os.strerror(code)), 5) for code in
       (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT)},
    "KeyboardInterrupt": Failure(KeyboardInterrupt(), 130),
}  # fmt: skip


@pytest.mark.sampled(every=5)
@each_size
@pytest.mark.parametrize("stuck", [False, True], ids=["", "stuck"])
@pytest.mark.parametrize("name", FAILURES)
def test_an_error_at_every_call(
    name: str,
    stuck: bool,
    size: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``stuck``: the truncation back fails as well."""
    path = checkpoint_of(tmp_path / "in.pth", size)
    whole = path.read_bytes()
    for deadline in range(1, 99):
        count, called = 0, ""

        def fail(what: str, when: str, deadline: int = deadline) -> None:
            nonlocal count, called
            count += 1
            if count == deadline:
                called = f"{what} {when}"
                raise FAILURES[name].error
            if called and stuck and what == "ftruncate":
                raise OSError(errno.EIO, "it is stuck")

        with monkeypatch.context() as patch:
            Spy(patch, fail)
            code = run(["edit", str(path), "--set", "n=1", "--in-place", "-q"])
        said = capsys.readouterr().err
        if not called:
            assert code == 0 and deadline > 20
            break
        if called == "open after":  # this test then lost a descriptor, and nothing was written
            assert code == FAILURES[name].code and path.read_bytes() == whole
            continue
        assert code == (5 if "cannot be taken back" in said else FAILURES[name].code), called
        assert stuck or "cannot be taken back" not in said
        assert "Traceback" not in said and (str(path) in said) is (code == 5)
        if path.read_bytes() == whole:
            continue
        assert stuck, called
        assert path.read_bytes().startswith(whole) and "cannot be taken back" in said
        finished = read(path)
        assert ("may be the new one already" in said) or not finished
        unfinished = ckptool.history(path)["versions"][-1]
        # What is written in part has no note yet: then the bytes are of nobody.
        if unfinished["version"]:
            assert unfinished["finished"] is bool(finished) and f"ckptool undo {path}" in said
            assert ckptool.undo(path)["output_bytes"] == len(whole)
        os.truncate(path, len(whole))
    else:
        pytest.fail("it never ends")
    assert path.read_bytes()[: len(whole)] == whole


KILLER = """
import os, shutil, sys
import ckptool

source, folder, step = sys.argv[1:]
most = 1 << 30
whole = open(source, "rb").read()

def edit(deadline):
    count = [0]
    def armed(name):
        real = getattr(os, name)
        def call(*arguments, **how):
            for when in ("before", "after"):
                count[0] += 1
                if count[0] == deadline:
                    os._exit(9)
                if when == "before":
                    result = real(*arguments, **how)
            return result
        return call
    with ckptool.open(source) as checkpoint:
        edited = ckptool.set(checkpoint, "n", 1)
        for name in ("open", "fstat", "lseek", "write", "fsync", "close", "ftruncate"):
            setattr(os, name, armed(name))
        if sys.argv[0]:
            ckptool.save_in_place(edited)
    os._exit(0)

for deadline in range(1, 200, int(step)):
    child = os.fork()
    if not child:
        edit(deadline)
    _, status = os.waitpid(child, 0)
    shutil.copyfile(source, os.path.join(folder, f"{deadline:03}.pth"))
    with open(source, "rb+") as file:
        file.truncate(len(whole))
    assert open(source, "rb").read() == whole
    if os.waitstatus_to_exitcode(status) == 0:
        break
else:
    sys.exit("it never ends")
"""


@each_size
def test_killed_at_every_call(size: str, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "in.pth", size)
    whole = path.read_bytes()
    folder = tmp_path / "states"
    folder.mkdir()
    step = 1 if WHOLE else 3
    command = [sys.executable, "-c", KILLER, str(path), str(folder), str(step)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    states = sorted(folder.iterdir())
    assert len(states) >= 25 // step
    seen = [_check_state(state, whole) for state in states]
    assert seen[0] == "former" and seen[-1] == "new" and "unfinished" in seen
    order = ["former", "unfinished", "new"]
    assert [order.index(state) for state in seen] == sorted(order.index(state) for state in seen)


def _check_state(path: Path, whole: bytes) -> str:
    """The promise for a file whose edit was killed: what torch and ckptool say of it, and the way back."""
    n = read(path)
    data = path.read_bytes()
    assert data.startswith(whole)
    found = ckptool.history(path)["versions"]
    if data == whole:
        assert n == 0 and len(found) == 1
        return "former"
    assert len(found) == 2 and found[-1]["finished"] is bool(n)
    assert ckptool.inspect(path)["entries"][0]["value"] == n
    report = ckptool.validate(path)
    assert report["valid"], report
    if not n:
        assert "unfinished-edit" in {note["code"] for check in report["checks"] for note in check["notes"]}
        with pytest.raises(RefusedError, match="not finished") as caught:
            in_place(path, to_one)
        assert f"ckptool undo {path}" in (caught.value.next or "")
        out = path.with_suffix(".out.pth")
        with ckptool.open(path) as checkpoint:  # an output does without what is not finished
            ckptool.save(to_one(checkpoint), out)
        assert read(out) == 1 and len(ckptool.history(out)["versions"]) == 1 and b"ckptool1" not in out.read_bytes()
        out.unlink()
    assert ckptool.undo(path)["undone"][0]["finished"] is bool(n)
    assert path.read_bytes() == whole
    in_place(path, to_one)
    assert read(path) == 1
    return "new" if n else "unfinished"


def test_an_undo_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of(tmp_path / "in.pth", "small")
    whole = path.read_bytes()
    in_place(path, to_one)
    edited = path.read_bytes()

    def stuck(*_: object) -> None:
        raise OSError(errno.EIO, "it is stuck")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", stuck)
        with pytest.raises(OutputError, match="it is stuck"):
            ckptool.undo(path)
    assert path.read_bytes() == edited
    ckptool.undo(path)
    assert path.read_bytes() == whole


def test_a_copy_that_was_cut(tmp_path: Path) -> None:
    """A few bytes short, it is the former version or called damaged; never something else."""
    path = checkpoint_of(tmp_path / "in.pth", "small")
    size = path.stat().st_size
    in_place(path, to_one)
    whole = path.read_bytes()
    for lost in (1, 21, 22, 23, 97, 98, 99, 140, 300, 511, 512, 1000, 5000, len(whole) - size):
        path.write_bytes(whole[:-lost])
        try:
            assert archive_of(path).read(archive_of(path).records[0], 1 << 20)
        except MalformedError:
            continue
        assert read(path) == 0
        out = tmp_path / f"{lost}.pth"
        assert run(["salvage", str(path), "-o", str(out), "-q"]) in (0, 1)
        assert torch.equal(torch.load(out)["weight"], torch.arange(40.0))

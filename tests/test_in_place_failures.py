"""Edits in place that meet an error, a kill, a loss of power or a reader at any instant: the former version or the new."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ROOT
from in_place import archive_of, in_place, mapped
from outputs import saved

import ckptool
from ckptool.cli.main import run
from ckptool.errors import MalformedError, OutputError, RefusedError
from ckptool.source import BytesSource
from ckptool.zips import read_archive

CALLS = ("open", "lseek", "write", "fsync", "ftruncate")
SIZES = {"small": 3000, "large": 300_000}  # of the pickle: the second is longer than readers search for an end
each_size = pytest.mark.parametrize("size", SIZES)


def checkpoint_of(path: Path, size: str, **how: Any) -> Path:
    value = {"n": 0, "text": "t" * SIZES[size], "weight": torch.arange(40.0), "more": torch.ones(3)}
    return saved(value, path, **how)


def to_one(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return ckptool.set_entry(checkpoint, "n", 1)


def read(path: Path) -> int:
    """Which version torch reads, 0 or 1; its tensors are right."""
    for loaded in (torch.load(path, weights_only=True), mapped(path)):
        assert torch.equal(loaded["weight"], torch.arange(40.0)) and torch.equal(loaded["more"], torch.ones(3))
    return int(loaded["n"])


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


@each_size
@pytest.mark.parametrize("stuck", [False, True], ids=["", "stuck"])
@pytest.mark.parametrize("name", FAILURES)
def test_an_error_at_every_call(
    name: str, stuck: bool, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
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
            code = run(["set", str(path), "n=1", "--in-place", "-q"])
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

source, folder = sys.argv[1:]
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
        edited = ckptool.set_entry(checkpoint, "n", 1)
        for name in ("open", "fstat", "lseek", "write", "fsync", "close", "ftruncate"):
            setattr(os, name, armed(name))
        if sys.argv[0]:
            ckptool.save_in_place(edited)
    os._exit(0)

for deadline in range(1, 200):
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
    command = [sys.executable, "-c", KILLER, str(path), str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    states = sorted(folder.iterdir())
    assert len(states) >= 25
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


# -- the loss of power ---------------------------------------------------------------------------------------


class Disk:
    """What a run did to a file, from one fsync to the next: the bytes that were safe, and the writes since."""

    def __init__(self, data: bytes) -> None:
        self.epochs: list[tuple[bytes, list[tuple[int, bytes]]]] = [(data, [])]
        self.data = bytearray(data)

    def write(self, at: int, data: bytes) -> None:
        self.data.extend(bytes(max(at + len(data) - len(self.data), 0)))
        self.data[at : at + len(data)] = data
        self.epochs[-1][1].append((at, data))

    def sync(self) -> None:
        self.epochs.append((bytes(self.data), []))

    def states(self, grain: int, chance: random.Random, most: int) -> Iterator[bytes]:
        """Disks after a loss of power: any subset of the units of ``grain`` bytes, and any size on the way."""
        for safe, writes in self.epochs:
            image = bytearray(safe)
            sizes = {len(safe)}
            units: set[int] = set()
            for at, data in writes:
                image.extend(bytes(max(at + len(data) - len(image), 0)))
                image[at : at + len(data)] = data
                sizes.add(len(image))
                units |= set(range(at // grain, -(-(at + len(data)) // grain)))
            sizes |= {size for size in range(-(-len(safe) // grain) * grain, len(image), grain)}
            for kept in _subsets(sorted(units), chance, most):
                state = bytearray(safe.ljust(len(image), b"\0"))
                for unit in kept:
                    state[unit * grain : (unit + 1) * grain] = image[unit * grain : (unit + 1) * grain]
                for size in sorted({len(safe), len(image), *chance.sample(sorted(sizes), min(5, len(sizes)))}):
                    yield bytes(state[:size])


def _subsets(units: list[int], chance: random.Random, most: int) -> Iterator[set[int]]:
    if 2 ** len(units) <= most:
        yield from ({unit for n, unit in enumerate(units) if bits >> n & 1} for bits in range(2 ** len(units)))
        return
    yield set()
    yield set(units)
    yield from ({unit} for unit in [*units[:8], *units[-8:]])
    yield from ({*units} - {unit} for unit in [*units[:8], *units[-8:]])
    for _ in range(most):
        yield {unit for unit in units if chance.random() < chance.choice((0.1, 0.5, 0.9))}


@each_size
@pytest.mark.parametrize("grain", [512, 4096])
@pytest.mark.parametrize("before", [0, 1])
def test_a_loss_of_power_at_every_instant(
    size: str, grain: int, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Former or new whatever reached the disk; ``before`` are edits that the file has already."""
    path = checkpoint_of(tmp_path / "in.pth", size)
    for _ in range(before):
        in_place(path, lambda c: ckptool.set_entry(c, "of_before", 1))
    former = contents(path.read_bytes())
    disk = Disk(path.read_bytes())
    place = 0
    real_write, real_seek, real_sync = os.write, os.lseek, os.fsync

    def seek(fd: int, at: int, how: int) -> int:
        nonlocal place
        place = real_seek(fd, at, how)
        return place

    def write(fd: int, data: Any) -> int:
        nonlocal place
        disk.write(place, bytes(data))
        place += len(data)
        return real_write(fd, data)

    def sync(fd: int) -> None:
        disk.sync()
        real_sync(fd)

    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = to_one(checkpoint)
        for name, function in (("lseek", seek), ("write", write), ("fsync", sync)):
            patch.setattr(os, name, function)
        ckptool.save_in_place(edited)
    assert bytes(disk.data) == path.read_bytes()
    new = contents(path.read_bytes())
    chance = random.Random(f"{size}{grain}{before}")
    seen: set[str] = set()
    tried = 0
    lost = tmp_path / "lost.pth"
    for state in disk.states(grain, chance, 1500):
        tried += 1
        found = contents(state)
        assert found in (former, new)
        last = state.startswith(disk.epochs[-1][0])
        assert last <= (found == new)
        if chance.random() < (1 if tried < 60 else 0.03):
            lost.write_bytes(state)
            assert read(lost) == (found == new)
            whole = disk.epochs[0][0]
            if found == former and len(ckptool.history(lost)["versions"]) > before + 1:
                seen.add("unfinished")
                ckptool.undo(lost)
                assert lost.read_bytes() == whole
            elif found == former and state != whole:
                seen.add("behind")  # it grew, and nothing in there tells of an edit: nothing leads there either
                with pytest.raises(RefusedError, match="bytes stand behind the archive"):
                    in_place(lost, to_one)
    assert tried >= (8 if (size, grain) == ("small", 4096) else 1000) and "unfinished" in seen


def contents(data: bytes) -> dict[str, bytes]:
    """Every record of an archive, as our reader finds it, which finds the directory as torch does."""
    archive = read_archive(BytesSource(data))
    return {record.name: archive.read(record, 1 << 20) for record in archive.records}


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

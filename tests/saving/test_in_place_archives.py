"""Edits in place of unusual archives: large, foreign, with comments, and with notes that somebody wrote by hand."""

from __future__ import annotations

import json
import os
import random
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, WHOLE, examples
from in_place_edits import MARK, by_offsets, copied, in_place, mapped

import ckptool
from ckptool.base.errors import CkptoolError, RefusedError
from ckptool.cli.main import run
from ckptool.files.sources import BytesSource, open_source
from ckptool.files.zips.reader import read_archive
from ckptool.files.zips.versions import versions


def wrapped(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return ckptool.wrap(checkpoint, "w")


def rewritten(path: Path, out: Path, **how: Any) -> Path:
    """The records of a fixture as zipfile writes them, in another order or with more around them."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        names = how.get("order", lambda names: names)(old.namelist())
        for name in names:
            info = zipfile.ZipInfo(name)
            info.extra = how.get("extra", b"") if name == names[-1] else b""
            info.comment = how.get("of_entry", b"")
            new.writestr(info, old.read(name))
        new.comment = how.get("comment", b"")
    return out


def pickle_last(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: name.endswith("data.pkl"))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"order": pickle_last},
        {"extra": b"\x99\x99\x04\x00abcd"},
        {"extra": b"\x99\x99" + (60_000).to_bytes(2, "little") + bytes(60_000)},
        {"of_entry": b"a comment of an entry"},
    ],
    ids=["plain", "pickle-last", "extra", "much-extra", "entry-comments"],
)
def test_archives_by_other_writers(how: dict[str, Any], tmp_path: Path) -> None:
    path = rewritten(FIXTURES / "bare.pth", tmp_path / "in.pth", **how)
    whole = path.read_bytes()
    told = {note["code"] for check in ckptool.validate(path)["checks"] for note in check["notes"]}
    for number in range(3):
        in_place(path, lambda c, number=number: ckptool.wrap(c, f"w{number}"))  # type: ignore[misc]
        loaded = oracle.load(path)
        for inner in range(number, -1, -1):
            loaded = loaded[f"w{inner}"]
        assert oracle.difference(loaded, oracle.load(FIXTURES / "bare.pth")) == ""
        assert oracle.difference(oracle.load(path), mapped(path)) == ""
        assert oracle.difference(oracle.load(path), by_offsets(path)) == ""
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        codes = {note["code"] for check in ckptool.validate(path)["checks"] for note in check["notes"]}
        assert codes <= told | {"edited-in-place", "earlier-version"}
    assert ckptool.undo(path, original=True)["left"] == 0
    assert path.read_bytes() == whole


def test_no_room_for_a_note(tmp_path: Path) -> None:
    extra = b"\x99\x99" + (65_000).to_bytes(2, "little") + bytes(65_000)
    path = rewritten(FIXTURES / "bare.pth", tmp_path / "in.pth", extra=extra)
    whole = path.read_bytes()
    with pytest.raises(RefusedError, match="a note does not fit in"):
        for _ in range(9):
            in_place(path, wrapped)
    assert ckptool.undo(path, original=True) and path.read_bytes() == whole


@pytest.mark.parametrize("more", ["comment", "trailing"])
def test_what_stands_behind_the_archive_refuses(more: str, tmp_path: Path) -> None:
    path = rewritten(FIXTURES / "bare.pth", tmp_path / "in.pth", comment=b"a comment" if more == "comment" else b"")
    if more == "trailing":
        path.write_bytes(path.read_bytes() + b"more")
    whole = path.read_bytes()
    with pytest.raises(RefusedError, match="bytes follow the archive"):
        in_place(path, wrapped)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("more", [b"more", bytes(5000), bytes(61_000)], ids=["text", "zeros", "many-zeros"])
def test_bytes_behind_an_edit(more: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever appended them, or if power was lost while the file grew: nothing is cut off unasked."""
    path = copied(FIXTURES / "bare.pth", tmp_path)
    in_place(path, wrapped)
    whole = path.read_bytes()
    path.write_bytes(whole + more)
    assert oracle.load(path)["w"]
    listed = ckptool.history(path)
    assert listed["bytes"] == len(whole + more) and [v["bytes"] for v in listed["versions"]] == [3740, len(whole)]
    with pytest.raises(RefusedError, match="follow the last edit in place, and would be cut off"):
        ckptool.undo(path)
    with pytest.raises(RefusedError, match="bytes follow the archive") as caught:
        in_place(path, wrapped)
    notes = [note for check in ckptool.validate(path)["checks"] for note in check["notes"]]
    unsearched = {"not-checked"} if more.strip(b"\0") else set()
    assert {note["code"] for note in notes if note["level"] != "note"} == {"trailing-bytes"} | unsearched
    assert path.read_bytes() == whole + more
    step = caught.value.next or ""
    assert ("as left by a power loss" in step) is (not more.strip(b"\0"))
    if "truncate" in step:
        subprocess.run(["sh", "-c", step.partition(": ")[2].removesuffix(" removes them")], check=True)
        assert ckptool.undo(path)["output_bytes"] == 3740
        assert path.read_bytes() == (FIXTURES / "bare.pth").read_bytes()


def test_more_than_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "large.pth"
    with torch.serialization.skip_data():
        sizes = [4 << 30, 100, 3000]
        torch.save({f"t{n}": torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)}, path)
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(end - 65536)
        tail = file.read()
    for number in range(2):
        appended = in_place(path, lambda c, number=number: ckptool.wrap(c, f"w{number}"))  # type: ignore[misc]
        assert appended < 10_000
        loaded = mapped(path)[f"w{number}"] if not number else mapped(path)["w1"]["w0"]
        assert [tensor.numel() for tensor in loaded.values()] == sizes
        meta = torch.load(path, map_location="meta")
        meta = meta["w0"] if not number else meta["w1"]["w0"]
        archive = read_archive(open_source(path))
        for key, tensor in zip(("data/0", "data/1", "data/2"), meta.values()):
            record = archive.find(key)
            assert record and tensor.untyped_storage()._checkpoint_offset == archive.payload(record).offset
    assert path.stat().st_blocks * 512 < 1 << 20, "holes stay holes"
    assert len(ckptool.history(path)["versions"]) == 3
    assert ckptool.undo(path, original=True)["output_bytes"] == end == path.stat().st_size
    with path.open("rb") as file:
        file.seek(end - 65536)
        assert file.read() == tail


@pytest.mark.sampled
@pytest.mark.parametrize("large", [False, True] if WHOLE else [True])
def test_the_last_step_byte_by_byte_where_32_bits_do_not_suffice(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former version is found through its zip64 end record until the last byte, and then the new one."""
    path = tmp_path / "in.pth"
    if large:
        with torch.serialization.skip_data():
            torch.save({"n": 0, "t": torch.empty(5 << 30, dtype=torch.uint8)}, path)
    else:
        torch.save({"n": 0} | {str(number): torch.empty(0) for number in range(66_000)}, path)
    former = pickle_at(path)
    real_write, seen = os.write, []

    def write(fd: int, data: Any) -> int:
        if len(data) > 98:
            return real_write(fd, data)
        if large or len(data) == 96 or 20 < len(data) < 24:  # the last step
            seen.append(pickle_at(path))
        if len(data) in (98, 42, 22, 21) and large:
            assert torch.load(path, mmap=True)["n"] == (0 if seen[-1] == former else 1)
        return real_write(fd, data[:1])

    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = ckptool.set(checkpoint, "n", 1)
        patch.setattr(os, "write", write)
        ckptool.save_in_place(edited)
    assert torch.load(path, mmap=True)["n"] == 1
    switched, new = seen.index(pickle_at(path)), pickle_at(path)
    assert seen == [former] * switched + [new] * (len(seen) - switched) and switched


def pickle_at(path: Path) -> int:
    """Where the pickle is that readers find."""
    record = read_archive(open_source(path)).find("data.pkl")
    assert record is not None
    return record.header


# -- notes that nobody of us wrote ---------------------------------------------------------------------------


def with_note(path: Path, note: bytes, *, length: int | None = None, unfinished: bool = False) -> bytes:
    """The file with these bytes in the place of its note."""
    data = path.read_bytes()
    old = int.from_bytes(data[-108:-106], "little")
    assert data[-106:-98] == MARK
    size = (len(note) if length is None else length) & 0xFFFF
    middle = note[-1024:].rjust(old, b" ") + size.to_bytes(2, "little") + MARK
    end = data[-98:-22] + (b"\0" if unfinished else b"P") + data[-21:]
    return data[: len(data) - 98 - len(middle)] + middle + end


def crc(data: bytes, was: int) -> int:
    return zlib.crc32(data[max(was - 98, 0) : max(was, 0)])


NOTES = {
    "empty": b"",
    "no JSON": b"\xff\xfe nonsense",
    "other JSON": b'{"was": 3}',
    "short": b"[1, 2]",
    "deep": b"[" * 250,
    "wrong types": b'["1", 2, "x", 3]',
    "booleans": b'[true, false, "x", true]',
    "floats": b'[1e3, 2.0, "x", NaN]',
    "digits": b"[" + b"9" * 240 + b', 1, "x", 0]',
    "negative": b'[-4096, 0, "x", 0]',
    "zero": b'[0, 0, "x", 0]',
    "huge": b'[9223372036854775808, 0, "x", 0]',
    "itself": b'[%d, 0, "x", 0]',
}


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize("name", NOTES)
def test_nonsense_in_a_note(
    name: str, unfinished: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = copied(FIXTURES / "bare.pth", tmp_path)
    in_place(path, wrapped)
    note = NOTES[name]
    forged = with_note(path, note % path.stat().st_size if b"%d" in note else note, unfinished=unfinished)
    path.write_bytes(forged)
    assert len(ckptool.history(path)["versions"]) == 1
    assert ckptool.undo(path)["undone"] == []
    for command in (["undo", "--list"], ["undo"], ["inspect"], ["validate"], ["keys"]):
        assert run([*command, str(path)]) in (0, 1, 3)
        said = capsys.readouterr()
        assert "Traceback" not in said.err and "a bug" not in said.err
    assert path.read_bytes() == forged


@pytest.mark.parametrize("was", [99, 500, 3000, 3739])
def test_a_former_version_that_is_no_archive(was: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The note leads somewhere, the checksum fits: nothing is cut off that would leave no archive."""
    path = copied(FIXTURES / "bare.pth", tmp_path)
    in_place(path, wrapped)
    data = path.read_bytes()
    note = json.dumps([was, crc(data, was), "a \x1b[31m name\n\u202e", 10**17]).encode()
    path.write_bytes(forged := with_note(path, note))
    assert run(["undo", "--list", str(path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\u202e" not in said
    assert run(["undo", "--list", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"][-1]["time"] is None
    assert run(["undo", str(path)]) == 4
    assert "cannot be read, so nothing is cut off" in capsys.readouterr().err
    assert path.read_bytes() == forged
    assert run(["validate", str(path)]) in (0, 1)


def test_chains_end(tmp_path: Path) -> None:
    """A former version always ends before the one that tells of it: no chain is a circle."""
    data = b""
    for number in range(3000):
        text = json.dumps([len(data), crc(data, len(data)), "x", number]).encode()
        data += text + len(text).to_bytes(2, "little") + MARK + bytes(98)
    found = versions(BytesSource(data))
    assert 2990 < len(found) <= 3001
    assert [version.size for version in found] == sorted({version.size for version in found}, reverse=True)
    path = tmp_path / "chain.pth"
    path.write_bytes(data)
    with pytest.raises(CkptoolError):
        ckptool.open(path)
    with pytest.raises(RefusedError, match="nothing is cut off"):
        ckptool.undo(path)


def test_a_forged_unfinished_edit_is_not_another_file(tmp_path: Path) -> None:
    """What we read is what torch reads, whatever a note says: the end record decides."""
    path, other = copied(FIXTURES / "bare.pth", tmp_path), tmp_path / "other.pth"
    in_place(path, lambda c: ckptool.set(ckptool.wrap(c, "w"), "evil", 1))
    former = path.read_bytes()
    in_place(path, wrapped)
    other.write_bytes(with_note(path, json.dumps([3740, crc(former, 3740), "x", 0]).encode(), unfinished=True))
    loaded = oracle.load(other)
    with ckptool.open(other) as checkpoint:
        assert [entry["key"] for entry in ckptool.inspect(other)["entries"]] == list(loaded)
        assert checkpoint.container.problems


def test_a_dangerous_pickle_in_a_former_version_is_named(tmp_path: Path) -> None:
    """A clean version over one whose pickle is dangerous: with ``undo`` the former one comes back."""
    clean, path = copied(FIXTURES / "bare.pth", tmp_path), tmp_path / "mixed.pth"
    with zipfile.ZipFile(path, "w") as mixed, zipfile.ZipFile(clean) as good:
        with zipfile.ZipFile(FIXTURES / "hostile_system.pth") as evil:
            pickle = evil.read(next(name for name in evil.namelist() if name.endswith("data.pkl")))
        for name in good.namelist():
            mixed.writestr(name, pickle if name.endswith("data.pkl") else good.read(name))
    assert not ckptool.validate(path)["valid"]
    with ckptool.open(clean) as whole, ckptool.open(path) as checkpoint:
        assert ckptool.save_in_place(checkpoint.changed(whole.graph, [])).appended
    assert oracle.difference(oracle.load(path), oracle.load(clean)) == ""
    report = ckptool.validate(path)
    assert not report["valid"]
    told = json.dumps(report)
    assert "former version" in told and "system" in told


@pytest.mark.sampled
def test_flipped_bits_in_what_was_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No command fails at it, and where the note is still whole ``undo`` gives the former bytes."""
    path = copied(FIXTURES / "bare.pth", tmp_path)
    former = path.read_bytes()
    in_place(path, wrapped)
    whole = path.read_bytes()
    chance = random.Random(7)
    bits = [chance.randrange(len(former) * 8, len(whole) * 8) for _ in range(examples(150))]
    bits += [chance.randrange((len(whole) - 512) * 8, len(whole) * 8) for _ in range(examples(250))]
    back = 0
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        for command in (
            ["undo", "--list"],
            ["validate", "-q"],
            ["inspect"],
            ["edit", "--wrap", "x", "--in-place", "-q"],
            ["undo", "-q"],
        ):
            path.write_bytes(flipped)
            code = run([command[0], str(path), *command[1:]])
            said = capsys.readouterr()
            assert code in (0, 1, 3, 4), (bit, command, said.err)
            assert "Traceback" not in said.err and path.read_bytes().startswith(former)
        back += path.read_bytes() == former
        assert path.read_bytes() in (former, bytes(flipped))
    assert back > len(bits) // 2

"""Archives that two readers could see differently, one lie in each: what fails, what warns, what torch makes of it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import FIXTURES
from hostile_files import (
    FLOATS,
    ROOT,
    SYSTEM,
    TENSOR,
    End,
    Entry,
    altered,
    archive,
    by_key,
    dumped,
    entries,
    legacy,
    named,
    notes,
    plain,
    report_of,
    storage,
    tensor,
    with_record,
    with_status,
)
from saying import say

import ckptool
from ckptool.values.elements import stored_bytes

LOADS, REFUSES, EITHER = "loads", "refuses", "either"
FIRST, OTHER = dumped({"w": TENSOR}), dumped({"other": TENSOR})
EXTRA = Entry(f"{ROOT}/extra.bin", b"more")
CRC = zlib.crc32(FLOATS)


class Case(NamedTuple):
    """``code`` is that of a note that must be there; ``torch`` what torch.load(weights_only=True) does."""

    code: str
    data: bytes
    torch: str = LOADS


def twice(first: bytes, second: bytes, name: str = f"{ROOT}/data.pkl") -> bytes:
    found = entries(pickled=first)
    return archive([found.pop("data.pkl"), Entry(name, second), *found.values()])


def without(*names: str) -> bytes:
    return archive(entry for short, entry in entries().items() if short not in names)


def with_end(end: End) -> bytes:
    return archive(entries().values(), end)


def overlapping() -> bytes:
    """The bytes of one storage are within those of another, header and all."""
    name = f"{ROOT}/data/1"
    flags = 0x0800
    sizes = {"flags": flags, "crc": CRC, "packed": 16, "size": 16}
    inner = archive([Entry(name, FLOATS, local=sizes, descriptor=b"", extra=b"FB\x03\x00ZZZ")])[: 37 + len(name) + 16]
    value = {"big": tensor((len(inner) // 4,), of=storage("0", len(inner) // 4)), "w": tensor(of=storage("1"))}
    found = list(entries(value, {"0": inner}).values())
    at = archive(found).index(inner)
    return archive([*found, Entry(name, FLOATS, ghost=True, listed={"flags": flags, "header": at})])


def concatenated(shift: bool) -> bytes:
    """Two archives; the offsets of the second count from its own start, or with ``shift`` from that of the file."""
    first = plain()
    return first + archive(entries({"v": TENSOR}).values(), shift=len(first) if shift else 0)


def nested_storage() -> bytes:
    inner = plain()
    inner += bytes(-len(inner) % 4)
    count = len(inner) // 4
    return plain({"w": tensor((count,), of=storage("0", count))}, {"0": inner})


def nonzero_offset() -> bytes:
    end = with_end(End())
    return with_end(End(offset=len(end) - 30, zip64={"offset": end.index(b"PK\x01\x02")}))


def short_end64() -> bytes:
    data = plain()
    at = data.index(b"PK\x06\x06") + 4
    return data[:at] + b"\x28" + data[at + 1 :]


def descriptor(crc: int, size: int) -> bytes:
    return altered("data/0", descriptor=struct.pack("<4s3I", b"PK\x07\x08", crc, size, size))


def no_descriptor(**told: int) -> bytes:
    """The storage's sizes stand in its local header, as Python's zipfile writes them, and one of them is a lie."""
    sizes = {"flags": 0x0800, "crc": CRC, "packed": 16, "size": 16} | told
    return altered("data/0", local=sizes, listed={"flags": 0x0800}, descriptor=b"")


EMPTY = {"method": 8, "size": 0, "crc": 0}
FAILURES = {
    "two data.pkl": Case("duplicate-record", twice(FIRST, OTHER)),
    "two data.pkl alike": Case("duplicate-record", twice(OTHER, OTHER)),
    "two storages of one key": Case("duplicate-record", with_record(Entry(f"{ROOT}/data/0", FLOATS[::-1]))),
    "data.pkl and DATA.PKL": Case("case-twin", twice(FIRST, OTHER, f"{ROOT}/DATA.PKL")),
    "a root that differs in case": Case("case-twin", with_record(Entry("SEED/data/0", FLOATS[::-1])), EITHER),
    "a second root": Case("second-root", with_record(Entry("other/data.pkl", OTHER)), REFUSES),
    "a record in no folder": Case("second-root", with_record(Entry("loose", b"x")), REFUSES),
    "two archives, offsets from each start": Case("second-archive", concatenated(False)),
    "two archives, offsets from the file": Case("unlisted-record", concatenated(True), EITHER),
    "half an archive behind the end": Case("second-archive", plain() + plain()[:200]),
    "a record that is not listed": Case(
        "unlisted-record", with_record(Entry(f"{ROOT}/evil.pkl", OTHER, unlisted=True))
    ),
    "a record that is not listed, the last": Case(
        "unlisted-record", archive([*entries().values(), Entry(f"{ROOT}/evil.pkl", OTHER, unlisted=True)])
    ),
    "a record within another": Case("overlap", overlapping()),
    "two names for one record": Case(
        "overlap", with_record(Entry(f"{ROOT}/twin.pkl", FIRST, ghost=True, listed={"header": 0}))
    ),
    "local name": Case("local-name", altered("data/0", local_name=f"{ROOT}/data/9".encode())),
    "local name a path": Case("local-name", altered("data/0", local_name=b"../../etc/passwd")),
    "local name of data.pkl": Case("local-name", altered("data.pkl", local_name=b"seed/data.txt")),
    "local method": Case("local-header", altered("data/0", local={"method": 8}), EITHER),
    "local checksum": Case("local-header", altered("data/0", local={"crc": 0x12345678})),
    "local size": Case("local-header", altered("data/0", local={"size": 8})),
    "local compressed size": Case("local-header", altered("data/0", local={"packed": 8})),
    "local size, not deferred": Case("local-header", no_descriptor(size=8)),
    "local compressed size, not deferred": Case("local-header", no_descriptor(packed=8)),
    "local checksum, not deferred": Case("local-header", no_descriptor(crc=8)),
    "local size zero, not deferred": Case("local-header", no_descriptor(crc=0, packed=0, size=0)),
    "descriptor's checksum": Case("descriptor", descriptor(1, 16)),
    "descriptor's size": Case("descriptor", descriptor(CRC, 8)),
    "no local header": Case("no-local-header", with_record(replace(EXTRA, listed={"header": 7}))),
    "no local header for a record that torch reads": Case(
        "malformed", altered("version", listed={"header": 7}), REFUSES
    ),
    "another disk": Case("other-disk", altered("data/0", listed={"disk": 3}), EITHER),
    "stored in fewer bytes": Case("stored-size", altered("data/0", listed={"packed": 8}), EITHER),
    "method 12": Case("bad-method", altered("data/0", method=12), REFUSES),
    "encrypted": Case("encrypted", altered("data/0", listed={"flags": 0x0809}, local={"flags": 0x0809}), REFUSES),
    "flags of a strong encryption": Case("special-flags", altered("data/0", listed={"flags": 0x0848}), REFUSES),
    "flags of a patch": Case("special-flags", altered("data/0", listed={"flags": 0x0828}), REFUSES),
    "flags of a masked header": Case("special-flags", altered("version", listed={"flags": 0x2808}), REFUSES),
    "attributes of a folder": Case("folder-attribute", altered("version", listed={"external": 0x10}), EITHER),
    "attributes of a folder on a storage": Case(
        "folder-attribute", altered("data/0", listed={"external": 0x10}), EITHER
    ),
    "the size of the zip64 end record": Case("end-records", short_end64(), REFUSES),
    "extra fields with a rest": Case("local-header", altered("data/0", extra=b"FB\x01\x00ZZZ")),
    "an extra field longer than its place": Case("local-header", altered("data/0", extra=b"FB\xff\x00ZZ")),
    "counts here and in all": Case("end-count", with_end(End(here=3)), EITHER),
    "counts in the two end records": Case("end-records", with_end(End(count=4, zip64={"here": 5, "count": 5}))),
    "offsets in the two end records": Case("end-records", nonzero_offset()),
    "in no part at all": Case("end-records", with_end(End(disks=0)), REFUSES),
    "several parts": Case("end-records", with_end(End(disks=2)), EITHER),
    "bytes in front": Case("malformed", b"#!/bin/sh\n" + archive(entries().values(), shift=10), REFUSES),
    "name absolute": Case("name-absolute", with_record(Entry("/etc/passwd", b"x")), REFUSES),
    "name absolute, with a drive": Case("name-absolute", with_record(Entry("C:/autoexec.bat", b"x")), REFUSES),
    "name with ..": Case("name-parent", with_record(Entry(f"{ROOT}/../../etc/passwd", b"x"))),
    "name with a backslash": Case("name-backslash", with_record(Entry(f"{ROOT}/data\\0", b"x"))),
    "name with NUL": Case("name-nul", with_record(Entry(f"{ROOT}/data/0\0.txt", b"x")), EITHER),
    "name that is not marked as UTF-8": Case(
        "name-flag", with_record(Entry(f"{ROOT}/café", b"x", listed={"flags": 8}, local={"flags": 8}))
    ),
    "a version of zip that is to come": Case("version-needed", altered("version", listed={"version": 64}), LOADS),
    "an empty storage that does not inflate": Case(
        "unreadable-record", with_record(Entry(f"{ROOT}/empty", b"\xff\xff", listed=EMPTY, local=EMPTY)), EITHER
    ),
    "name not UTF-8": Case("name-encoding", with_record(Entry(b"seed/caf\xe9", b"x")), REFUSES),
    "name with an empty part": Case("name-empty", with_record(Entry(f"{ROOT}//data/0", b"x"))),
    "byteorder nonsense": Case("bad-byteorder", altered("byteorder", data=b"middle"), REFUSES),
    "version 99": Case("bad-version", altered("version", data=b"99\n"), REFUSES),
    "version 0": Case("bad-version", altered("version", data=b"0\n"), REFUSES),
    "version nonsense": Case("bad-version", altered("version", data=b"three\n"), REFUSES),
    "no version": Case("no-version", without("version"), REFUSES),
    "no folder": Case("no-folder", archive(replace(e, name=k) for k, e in entries().items()), REFUSES),
    "an archive in a record": Case("nested-archive", with_record(Entry(f"{ROOT}/inner.pth", plain()))),
    "an archive in a storage": Case("nested-archive", nested_storage()),
    "wrong checksum of a storage": Case("checksum", (FIXTURES / "zip_wrong_crc.pth").read_bytes()),
    "wrong checksum of data.pkl": Case("checksum", altered("data.pkl", listed={"crc": 77})),
    "wrong checksum of another record": Case("checksum", altered("byteorder", listed={"crc": 77})),
    "a storage that is not there": Case("missing-storage", without("data/0"), REFUSES),
    "a storage shorter than said": Case("storage-size", plain(storages={"0": FLOATS[:8]}), REFUSES),
    "a storage longer than said": Case("storage-size", plain(storages={"0": FLOATS * 2}), REFUSES),
    "deflated storages": Case("deflated", altered("data/0", method=8), LOADS),
    "deflated, and the stream is damaged": Case(
        "unreadable-record", altered("data/0", listed={"method": 8}, local={"method": 8}), EITHER
    ),
    "deflated, and inflates to more": Case(
        "unreadable-record", altered("data/0", method=8, data=bytes(99), listed={"size": 16}), EITHER
    ),
}


def takes(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("case", by_key(FAILURES))
def test_a_lie_in_the_structure_fails(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, case.data)
    if case.torch != EITHER and takes(path) is not (case.torch == LOADS):
        raise RuntimeError("torch does not do what the table says")
    assert (report["status"], case.code in notes(report, "error")) == ("invalid", True), notes(report)


WARNINGS = {
    "deflated data.pkl": Case("deflated", altered("data.pkl", method=8)),
    "bytes behind the end": Case("trailing-bytes", plain() + b"x" * 1000),
    "a comment": Case("comment", with_end(End(comment=b"hello"))),
    "a comment that announces more": Case("trailing-bytes", plain()[:-2] + b"\x09\x00" + b"short"),
    "an entry for a folder": Case("directory-entry", with_record(Entry(f"{ROOT}/data/"))),
    "a record that nothing uses": Case("unreferenced-record", with_record(EXTRA)),
    "a storage that nothing uses": Case("unreferenced-record", plain(storages={"0": FLOATS, "1": FLOATS})),
    "bytes after STOP": Case("after-stop", plain(pickled=FIRST + b"rest")),
    "bytes after STOP of another pickle": Case(
        "after-stop", with_record(Entry(f"{ROOT}/more.pkl", dumped(1) + b"rest"))
    ),
    "bytes between records": Case("dead-bytes", altered("version", before=b"dead")),
    "bytes before the directory": Case("dead-bytes", with_end(End(gap=b"dead"))),
    "local time": Case("local-header", altered("data/0", local={"time": 99})),
    "padding that is not padding": Case("padding", altered("data/0", extra=b"FB\x02\x00ab")),
    "a record's case": Case("record-case", altered("data.pkl", name=f"{ROOT}/Data.PKL")),
}


@pytest.mark.parametrize("case", by_key(WARNINGS))
def test_what_is_only_odd_warns(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, case.data)
    assert (report["status"], report["failures"], case.code in notes(report, "warning")) == ("valid", 0, True)
    assert (say("validate", path).code, say("validate", path, "--strict").code) == (0, 1)
    assert takes(path)


def test_the_plain_archive_is_valid(tmp_path: Path) -> None:
    """Every other test here says that one change makes the difference."""
    report = report_of(tmp_path / "seed.pth", plain())
    assert (report["status"], report["coverage"], notes(report)) == ("valid", "complete", set())
    assert say("validate", tmp_path / "seed.pth", "--strict").code == 0


# -- what cannot be checked -------------------------------------------------------------------------------------


def test_checksums_of_zero_are_not_computed(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(4)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    report = report_of(path, path.read_bytes())
    assert (report["status"], report["coverage"], report["not_checked"]) == ("valid", "partial", ["checksums"])
    assert with_status(report, "not possible") == ["checksums"]
    assert (say("validate", path).code, say("validate", path, "--strict").code) == (0, 1)
    words = say("validate", path).out
    assert "not computed" in words
    assert "agree with" not in words


def test_one_checksum_of_zero_does_not_pass_for_verified(tmp_path: Path) -> None:
    data = altered("data/0", listed={"crc": 0}, descriptor=struct.pack("<4s3I", b"PK\x07\x08", 0, 16, 16))
    report = report_of(tmp_path / "seed.pth", data)
    assert (report["status"], with_status(report, "not possible")) == ("valid", ["checksums"])


def test_a_legacy_file_cannot_be_verified(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, legacy())
    assert (report["status"], with_status(report, "not possible")) == ("valid", ["checksums"])
    assert (say("validate", path).code, say("validate", path, "--strict").code) == (0, 1)
    assert takes(path)


# -- the table of readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL"])
def test_two_pickles_are_both_looked_at_and_never_edited(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "seed.pth", tmp_path / "out.pth"
    good, evil = dumped({"module.w": TENSOR}), dumped({"model": {"module.w": TENSOR}, "x": SYSTEM})
    for first, second in ((good, evil), (evil, good)):
        report = report_of(path, twice(first, second, f"{ROOT}/{name}"))
        assert "posix.system" in named(report)
        # Which one torch would load nobody knows.
        assert with_status(report, "not possible") == ["weights-only"]
        edited = say("strip-module", path, "-o", out)
        assert (edited.code, out.exists()) == (4, False)


def test_two_archives_are_both_looked_at(tmp_path: Path) -> None:
    evil = archive(entries({"v": TENSOR}, pickled=dumped(SYSTEM)).values())
    for first, second in ((plain(), evil), (evil, plain())):
        report = report_of(tmp_path / "seed.pth", first + second)
        assert report["status"] == "invalid"
        assert "posix.system" in named(report)


def test_of_two_archives_torch_reads_the_first_and_zipfile_the_second(tmp_path: Path) -> None:
    """The disagreement that makes it a failure."""
    path = tmp_path / "seed.pth"
    path.write_bytes(concatenated(False))
    assert list(torch.load(path, weights_only=True)) == ["w"]
    with zipfile.ZipFile(io.BytesIO(concatenated(False))) as found:
        assert found.read(f"{ROOT}/data.pkl") == dumped({"v": TENSOR})
    assert say("keys", path, "--names").out.split() == ["w"]


def test_the_directory_names_a_record_not_its_local_header(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    path.write_bytes(altered("data/0", local_name=f"{ROOT}/data/9".encode()))
    assert torch.load(path, weights_only=True)["w"].tolist() == [1, 2, 3, 4]
    assert say("keys", path, "--names").code == 0


def test_byteorder_big_swaps(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    found = entries(storages={"0": struct.pack(">4f", 1, 2, 3, 4)})
    report = report_of(path, altered("byteorder", found, data=b"big"))
    assert (report["status"], notes(report)) == ("valid", set())
    assert torch.load(path, weights_only=True)["w"].tolist() == [1, 2, 3, 4]
    saved = say("salvage", path, "-o", tmp_path / "out.pth")
    assert saved.code == 0, saved.err
    assert torch.load(tmp_path / "out.pth", weights_only=True)["w"].tolist() == [1, 2, 3, 4]


def test_a_deflated_storage_is_garbage_to_mmap(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    path.write_bytes(altered("data/0", method=8))
    assert torch.load(path, weights_only=True)["w"].tolist() == [1, 2, 3, 4]
    assert torch.load(path, weights_only=True, mmap=True)["w"].tolist() != [1, 2, 3, 4]
    assert "mmap" in say("validate", path).out


def test_a_short_record_gives_the_neighbours_bytes_to_mmap(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, plain(storages={"0": FLOATS[:8]}))
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
    assert torch.load(path, weights_only=True, mmap=True)["w"].tolist()[:2] == [1, 2]
    assert {"sizes"} <= set(with_status(report, "fail"))


def test_two_dtypes_on_one_key(tmp_path: Path) -> None:
    """Torch takes the class of the first mention for the bytes: fine when the sizes agree, and said."""
    value = {"w": TENSOR, "n": tensor(of=storage(cls="IntStorage"))}
    report = report_of(tmp_path / "seed.pth", plain(value))
    assert takes(tmp_path / "seed.pth")
    assert notes(report), "nothing is said about one storage under two dtypes"


def test_70000_bytes_behind_the_end_are_too_many_for_torch(tmp_path: Path) -> None:
    report = report_of(tmp_path / "seed.pth", plain() + b"x" * 70_000)
    assert report["status"] == "invalid"
    assert not takes(tmp_path / "seed.pth")


def test_extra_values_on_the_stack_warn(tmp_path: Path) -> None:
    data = plain(pickled=b"\x80\x02K\x01" + FIRST[2:])
    report = report_of(tmp_path / "seed.pth", data)
    assert (report["status"], "odd-pickle" in notes(report, "warning")) == ("valid", True)


@pytest.mark.parametrize("name", ["zip_two_folders", "zip_no_version", "zip_leading", "zip_no_folder"])
def test_what_torch_refuses_and_zipfile_takes_fails(name: str) -> None:
    path = FIXTURES / f"{name}.pth"
    assert say("validate", path).code == 1
    assert not takes(path)
    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None


@pytest.mark.parametrize("method", [0, 8])
@pytest.mark.parametrize("called", [f"{ROOT}/data/0", f"{ROOT}/DATA/0", "data/0"])
@pytest.mark.parametrize("edit", ["repack", "torch", "safetensors", "legacy", "merge", "dcp"])
def test_every_writer_knows_what_is_deflated(edit: str, called: str, method: int, tmp_path: Path) -> None:
    """However a storage is called and found, the bytes that are written are those that torch reads."""
    floats = struct.pack("<1000f", *range(1000))
    found = entries({"w": tensor((1000,), of=storage("0", 1000))}, {"0": floats})
    if not called.startswith(ROOT):
        found = {short: replace(entry, name=short) for short, entry in found.items()}
    found["data/0"] = replace(found["data/0"], name=called, method=method)
    path, other = tmp_path / "seed.pth", tmp_path / "other.pth"
    out = tmp_path / {"safetensors": "out.safetensors", "dcp": "out"}.get(edit, "out.pth")
    path.write_bytes(archive(found.values()))
    other.write_bytes(plain({"v": TENSOR}))
    arguments = {"repack": ["repack", path], "merge": ["merge", other, path]}.get(edit)
    done = say(*(arguments or ["convert", path, "--to-format", edit]), "-o", out)
    assert (done.code, say("validate", out).code) == (0, 0), done.err
    with ckptool.open(out) as checkpoint:
        (key,) = [key for key, storage in checkpoint.survey.reader.storages.items() if storage.nbytes == len(floats)]
        assert b"".join(stored_bytes(checkpoint, key)) == floats

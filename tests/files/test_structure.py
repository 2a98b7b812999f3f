"""Archives that two readers could see differently, one lie in each: what fails, what warns, what torch makes of it."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ambiguous_archives import EITHER, EXTRA, FAILURES, FIRST, LOADS, Case, twice, with_end
from command_line import say
from crafted_files import (
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
    named,
    notes,
    plain,
    report_of,
    storage,
    tensor,
    with_record,
    with_status,
)

import ckptool
from ckptool.values.elements import storage_reader


def takes(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.sampled(every=2)
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
        assert report["safety"]["verdict"] in ("unsafe", "unknown")


def test_a_deflated_storage_is_garbage_to_mmap(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    path.write_bytes(altered("data/0", method=8))
    assert torch.load(path, weights_only=True)["w"].tolist() == [1, 2, 3, 4]
    assert torch.load(path, weights_only=True, mmap=True)["w"].tolist() != [1, 2, 3, 4]
    assert "mmap" in say("validate", path).out


def test_two_dtypes_on_one_key(tmp_path: Path) -> None:
    """Torch takes the class of the first mention for the bytes: fine when the sizes agree, and said."""
    value = {"w": TENSOR, "n": tensor(of=storage(cls="IntStorage"))}
    report = report_of(tmp_path / "seed.pth", plain(value))
    assert takes(tmp_path / "seed.pth")
    assert notes(report), "nothing is said about one storage under two dtypes"


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
    arguments = {"repack": ["edit", "--repack", path], "merge": ["merge", other, path]}.get(edit)
    done = say(*(arguments or ["convert", path, "--to-format", edit]), "-o", out)
    assert (done.code, say("validate", out).code) == (0, 0), done.err
    with ckptool.open(out) as checkpoint:
        (key,) = [key for key, storage in checkpoint.survey.reader.storages.items() if storage.nbytes == len(floats)]
        assert b"".join(storage_reader(checkpoint, key).stored()) == floats

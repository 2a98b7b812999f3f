"""``repack``: a clean file in torch's own layout, whatever the input was, that torch maps."""

from __future__ import annotations

import struct
from pathlib import Path

import oracle
import pytest
import torch
from conftest import by_name, corpus_files, needs_corpus
from in_place_edits import MARK, archive_of, by_offsets, complaints, copied, in_place, mapped
from output_checks import CRASHES, VIEWS, WHOLE, faked, on_meta, saved, works

import ckptool

#: Not as torch 2.7 and later write a file with their defaults, although ``.format_version`` is there.
OTHER = ("align1.pth", "align4096.pth", "no_crc.pth", "big_endian.pth", "py2_zip.pth", "zip_pickle_last.pth")


def repacked(path: Path, out: Path) -> Path:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.repack(checkpoint), out, force=True)
    return out


def layout(path: Path) -> list[tuple[str, int, int, int]]:
    """Every record in the order of the file: its name in the folder, bytes, padding, and where its payload is."""
    archive = archive_of(path)
    found = []
    for record in sorted(archive.records, key=lambda record: record.header):
        local = archive.local(record)
        name = record.name.partition("/")[2]
        found.append((name, record.size, struct.unpack("<H", local.raw[28:30])[0], local.payload))
    return found


def check_clean(out: Path) -> None:
    """What holds for every repacked file."""
    found = layout(out)
    names = [name for name, *_ in found]
    keys = [name for name in names if name.startswith("data/")]
    assert names == ["data.pkl", ".format_version", ".storage_alignment", "byteorder", *keys, "version",
                     ".data/serialization_id"]  # fmt: skip
    assert keys == [f"data/{number}" for number in range(len(keys))]
    assert all(payload % 64 == 0 for *_, payload in found)
    assert all(record.method == 0 for record in archive_of(out).records)
    assert MARK not in out.read_bytes() and len(ckptool.history(out)["versions"]) == 1
    # "global": torch takes no nested tensors since 2.15.
    assert not complaints(out) - {"weights-only", "unknown-global", "global"}


@pytest.mark.parametrize("item", WHOLE, ids=by_name)
def test_every_file_comes_out_clean(item: object, out: Path, tmp_path: Path) -> None:
    path: Path = item.path  # type: ignore[attr-defined]
    repacked(path, out)
    check_clean(out)
    loaded = oracle.load(out)
    if path.name not in VIEWS:
        assert oracle.difference(oracle.load(path), loaded) == ""
    assert oracle.difference(loaded, mapped(out)) == ""
    assert oracle.difference(loaded, by_offsets(out)) == ""
    for mode in (on_meta, faked) if path.name not in CRASHES else ():
        assert works(mode, out) or not works(mode, path)
    again = repacked(out, tmp_path / "again.pth")
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.sampled(every=5)
@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_real_checkpoints_come_out_clean(path: Path, out: Path) -> None:
    try:
        loaded = oracle.load(path)
        repacked(path, out)
    except Exception as error:
        pytest.skip(f"torch or ckptool does not read it: {str(error)[:60]}")
    check_clean(out)
    assert oracle.difference(loaded, oracle.load(out)) == ""
    assert oracle.difference(loaded, mapped(out)) == ""
    assert oracle.difference(loaded, by_offsets(out)) == ""


@pytest.mark.parametrize("item", WHOLE, ids=by_name)
def test_files_as_torch_writes_them_come_out_byte_for_byte(item: object, out: Path) -> None:
    path: Path = item.path  # type: ignore[attr-defined]
    with ckptool.open(path) as checkpoint:
        newest = checkpoint.container.writer == "torch 2.7 or later"
    if not newest or path.name in OTHER or path.name.startswith("zip_"):
        pytest.skip("another layout")
    assert repacked(path, out).read_bytes() == path.read_bytes()


OBJECTS = {
    "plain": lambda: {"a": torch.arange(5.0), "b": torch.ones(1000), "n": 3},
    "shared": lambda: (lambda t: {"x": t, "y": t[2:], "z": torch.zeros(0)})(torch.arange(40.0)),
    "odd": lambda: {f"k{n}": torch.full((n,), n, dtype=torch.uint8) for n in range(130)},
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("end", ["wrap", "set", "drop"])
def test_the_layout_is_that_of_a_fresh_torch_save(name: str, end: str, out: Path, tmp_path: Path) -> None:
    """Edited in place twice and repacked: as torch.save lays out the same object in a file of the same name."""
    value = OBJECTS[name]()
    path = saved(value, tmp_path / "model.pth")
    first = next(iter(value))
    edits = {
        "wrap": (lambda c: ckptool.wrap(c, "w"), lambda: {"w": value}),
        "set": (lambda c: ckptool.set(c, "added", 7), lambda: {**value, "added": 7}),
        "drop": (lambda c: ckptool.drop(c, first), lambda: {k: v for k, v in value.items() if k != first}),
    }
    edit, expected = edits[end]
    in_place(path, lambda c: ckptool.set(c, "other", 1))
    in_place(path, lambda c: ckptool.drop(c, "other"))
    in_place(path, edit)
    repacked(path, out)
    (tmp_path / "fresh").mkdir()
    fresh = saved(expected(), tmp_path / "fresh" / "model.pth")
    theirs, ours = layout(fresh), layout(out)
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    # Another text of the same object may be longer by a few bytes: then everything behind it is, by whole steps.
    if ours[0][1] == theirs[0][1]:
        assert ours == theirs
    else:
        steps = {there[3] - here[3] for here, there in zip(ours[1:], theirs[1:])}
        assert len(steps) == 1 and steps.pop() % 64 == 0
        assert [row[1] for row in ours[1:]] == [row[1] for row in theirs[1:]]
    assert oracle.difference(oracle.load(out), oracle.load(fresh)) == ""


@pytest.mark.parametrize("item", [item for item in WHOLE if item.container == "torch-zip"], ids=by_name)
def test_a_file_edited_in_place_and_a_clean_one_repack_alike(item: object, tmp_path: Path) -> None:
    """Taken back by its opposite, an edit in place leaves no trace in a repacked file."""
    source: Path = item.path  # type: ignore[attr-defined]
    if source.name == "zip_trailing.pth":
        pytest.skip("refused")
    path = copied(source, tmp_path)
    in_place(path, lambda c: ckptool.wrap(c, "w"))
    in_place(path, lambda c: ckptool.extract(c, "w"))
    one, other = repacked(path, tmp_path / "one.pth"), repacked(source, tmp_path / "other.pth")
    assert oracle.difference(oracle.load(one), oracle.load(other)) == ""
    assert [row[:1] for row in layout(one)] == [row[:1] for row in layout(other)]
    check_clean(one)

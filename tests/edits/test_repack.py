"""``repack``: a clean file in torch's own layout, whatever the input was, that torch maps."""

from __future__ import annotations

import struct
from pathlib import Path

import oracle
import pytest
from conftest import by_name
from in_place_edits import MARK, archive_of, by_offsets, complaints, copied, in_place, mapped
from output_checks import CRASHES, VIEWS, WHOLE, faked, on_meta, works

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
        found.append((name, record.size, struct.unpack("<H", local[28:30])[0], record.header + len(local)))
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


@pytest.mark.parametrize("item", WHOLE, ids=by_name)
def test_files_as_torch_writes_them_come_out_byte_for_byte(item: object, out: Path) -> None:
    path: Path = item.path  # type: ignore[attr-defined]
    with ckptool.open(path) as checkpoint:
        newest = checkpoint.container.writer == "torch 2.7 or later"
    if not newest or path.name in OTHER or path.name.startswith("zip_"):
        pytest.skip("another layout")
    assert repacked(path, out).read_bytes() == path.read_bytes()


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

"""Outputs are laid out so that a filesystem can share their blocks with the input, on every filesystem alike."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES
from zip_copies import rewritten

import ckptool
from ckptool.files.sources import FILESYSTEM_BLOCK, Plan, Span, open_source
from ckptool.files.write.output import write_file
from ckptool.files.zips.reader import read_archive

#: Archives whose records torch laid out itself.
OURS = ("bare.pth", "ddp4_training.pth", "shared_views.pth", "dtypes_untyped.pt", "torch16.pth", "torch17.pth")


def payloads(path: Path) -> dict[str, tuple[int, int]]:
    """Where each storage is, and its bytes, by its key."""
    archive = read_archive(open_source(path))
    data = f"{archive.root}/data/"
    return {
        record.name[len(data) :]: (archive.payload(record).offset, record.size)
        for record in archive.records
        if record.name.startswith(data)
    }


def moved(source: Path, out: Path) -> Counter[int]:
    """By how many bytes the storages moved, and how many bytes did."""
    before, after = payloads(source), payloads(out)
    assert before.keys() == after.keys()
    shifts: Counter[int] = Counter()
    for key, (place, size) in before.items():
        shifts[after[key][0] - place] += size
    return shifts


def edited(source: Path, out: Path, prefix: str, *, strip: bool = False) -> Path:
    with ckptool.open(source) as checkpoint:
        changed = ckptool.strip_module(checkpoint, prefix) if strip else ckptool.add_module(checkpoint, prefix)
        ckptool.save(changed, out)
    return out


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("length", [1, 10, 40, 200, 900])
def test_all_storages_move_by_one_number_of_blocks(name: str, length: int, out: Path) -> None:
    shifts = moved(FIXTURES / name, edited(FIXTURES / name, out, "p" * length))
    assert len(shifts) == 1
    assert next(iter(shifts)) % FILESYSTEM_BLOCK == 0


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("length", [1, 10, 40, 200, 900])
def test_the_way_back_ends_at_the_same_bytes(name: str, length: int, out: Path, tmp_path: Path) -> None:
    there = edited(FIXTURES / name, out, "p" * length)
    back = edited(there, tmp_path / "back.pth", "p" * length, strip=True)
    assert back.read_bytes() == (FIXTURES / name).read_bytes()


@pytest.mark.parametrize("name", OURS)
def test_only_the_record_before_the_storages_is_padded(name: str, out: Path) -> None:
    edited(FIXTURES / name, out, "a.longer.prefix")
    archive = read_archive(open_source(out))
    records = sorted(archive.records, key=lambda record: record.header)
    first = next(i for i, record in enumerate(records) if "/data/" in record.name)
    generous = [
        number
        for number, record in enumerate(records)
        if int.from_bytes(archive.local(record)[28:30], "little") >= 64 + 4
    ]
    assert set(generous) <= {first - 1}


@pytest.mark.parametrize("mode", ["plain", "mmap", "meta", "offsets", "fake"])
def test_a_padded_file_loads_in_every_mode(mode: str, out: Path) -> None:
    edited(FIXTURES / "bare.pth", out, "module.")
    expected = {f"module.{name}": tensor for name, tensor in oracle.load(FIXTURES / "bare.pth").items()}
    if mode == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            loaded: Any = torch.load(out)
        assert [tensor.shape for tensor in loaded.values()] == [tensor.shape for tensor in expected.values()]
    elif mode == "meta":
        loaded = torch.load(out, map_location="meta")
        assert list(loaded) == list(expected)
        places = payloads(out)
        for number, tensor in enumerate(loaded.values()):
            assert tensor.untyped_storage()._checkpoint_offset == places[str(number)][0]
    else:
        with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": mode == "offsets"}):
            loaded = torch.load(out, mmap=mode != "plain")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("length", [1, 10, 40, 200, 900])
def test_archives_by_other_writers_move_by_blocks_too(length: int, out: Path, tmp_path: Path) -> None:
    foreign = rewritten(FIXTURES / "bare.pth", tmp_path / "foreign.pth", lambda name, data: data)
    edited(foreign, out, "p" * length)
    shifts = moved(foreign, out)
    assert len(shifts) == 1 and next(iter(shifts)) % FILESYSTEM_BLOCK == 0
    assert zipfile.ZipFile(out).testzip() is None
    assert len(oracle.load(out)) == len(oracle.load(foreign))
    back = edited(out, tmp_path / "back.pth", "p" * length, strip=True)
    assert back.read_bytes() == foreign.read_bytes()


# -- beyond 4 GiB, where a header says where it stands ------------------------------------------------------------


def large(path: Path, sizes: list[int]) -> Path:
    """Tensors of these sizes in bytes, as holes."""
    with torch.serialization.skip_data():
        torch.save({f"t{number}": torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}, path)
    return path


#: Bytes of the first tensor: the headers behind it stand just before 4 GiB, or they cross it when they move.
CROSSING = [(4 << 30) - 30_000, (4 << 30) - 9_000, (4 << 30) - 4_000, (4 << 30) - 2_500, (4 << 30) + 100]


@pytest.mark.parametrize("first", CROSSING)
@pytest.mark.parametrize("length", [1, 300])
def test_beyond_4_gib(first: int, length: int, out: Path, tmp_path: Path) -> None:
    source = large(tmp_path / "large.pth", [first, 100, 0, 3000, 100, 1 << 20])
    edited(source, out, "p" * length)
    shifts = moved(source, out)
    assert sum(size for shift, size in shifts.items() if shift % FILESYSTEM_BLOCK == 0) >= first
    assert out.stat().st_blocks * 512 < 1 << 20, "holes stay holes"
    torch_sees = torch.load(out, mmap=True)
    assert [tensor.numel() for tensor in torch_sees.values()] == [first, 100, 0, 3000, 100, 1 << 20]
    places = payloads(out)
    for number, tensor in enumerate(torch.load(out, map_location="meta").values()):
        if tensor.numel():
            assert tensor.untyped_storage()._checkpoint_offset == places[str(number)][0]
    back = edited(out, tmp_path / "back.pth", "p" * length, strip=True)
    with open(back, "rb") as one, open(source, "rb") as other:
        for place in (0, first - 4000):
            one.seek(place), other.seek(place)
            assert one.read(2 << 20) == other.read(2 << 20)
    assert back.stat().st_size == source.stat().st_size


# -- copying ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="the system has no copy_file_range")
def test_copies_begin_where_a_block_begins(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the kernel copies what it could share."""
    source = tmp_path / "big.pth"
    torch.save({"a": torch.randn(300, 1000), "b": torch.randn(500, 1000)}, source)
    calls: list[tuple[int, int, int]] = []
    real = os.copy_file_range

    def watched(src: int, dst: int, count: int, offset_src: int, offset_dst: int) -> int:
        calls.append((offset_src, offset_dst, count))
        return real(src, dst, count, offset_src, offset_dst)

    monkeypatch.setattr(os, "copy_file_range", watched)
    edited(source, out, "module.")
    assert calls
    whole = [(offset, at) for offset, at, count in calls if count >= FILESYSTEM_BLOCK]
    assert whole and all(offset % FILESYSTEM_BLOCK == 0 and at % FILESYSTEM_BLOCK == 0 for offset, at in whole)
    assert sum(count for _, _, count in calls) > 3_000_000


def test_holes_stay_holes(tmp_path: Path) -> None:
    source, out = tmp_path / "holes.pth", tmp_path / "out.pth"
    large(source, [50 << 20, 10, 50 << 20])
    with source.open("r+b") as file:
        file.seek(20 << 20)
        file.write(b"not a hole")
    edited(source, out, "module.")
    assert out.stat().st_blocks * 512 < 1 << 20
    before, after = payloads(source)["0"][0], payloads(out)["0"][0]
    assert out.read_bytes()[after : after + (50 << 20)] == source.read_bytes()[before : before + (50 << 20)]


def test_a_file_that_ends_with_a_hole_has_all_its_bytes(tmp_path: Path) -> None:
    source = tmp_path / "tail.pth"
    source.write_bytes(b"data")
    os.truncate(source, 1 << 20)
    file = open_source(source)
    write_file(Plan((b"", Span(file, 0, file.size))), str(tmp_path / "out.pth"), [file])
    assert (tmp_path / "out.pth").read_bytes() == source.read_bytes()


def test_a_system_that_cannot_tell_holes_gets_all_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = large(tmp_path / "holes.pth", [5 << 20])
    monkeypatch.delattr(os, "SEEK_DATA")
    monkeypatch.delattr(os, "SEEK_HOLE")
    edited(source, tmp_path / "out.pth", "module.")
    before, after = payloads(source)["0"][0], payloads(tmp_path / "out.pth")["0"][0]
    data = (tmp_path / "out.pth").read_bytes()
    assert data[after : after + (5 << 20)] == source.read_bytes()[before : before + (5 << 20)]

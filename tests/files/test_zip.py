"""The zip reader reads what torch reads, refuses what is ambiguous, and moves records as torch would place them."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from conftest import FIXTURES, WHOLE

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.files.sources import BytesSource, Plan, Span, open_source
from ckptool.files.zips.layout import plan_rewrite
from ckptool.files.zips.reader import read_archive


def content(plan: Plan) -> bytes:
    return b"".join(
        piece if isinstance(piece, bytes) else piece.source.read(piece.offset, piece.size) for piece in plan.pieces
    )


def with_pickle(path: Path, grow: int) -> bytes:
    """The archive after its data.pkl grew by some bytes behind STOP."""
    archive = read_archive(open_source(path))
    record = archive.find("data.pkl")
    assert record is not None
    return content(plan_rewrite(archive, {record.name: archive.read(record, 1 << 20) + bytes(grow)}))


@pytest.mark.parametrize(
    "name", ["bare.pth", "align4096.pth", "align1.pth", "no_crc.pth", "torch16.pth", "torch17.pth"]
)
@pytest.mark.parametrize("grow", [0, 1, 63, 64, 100, 5000])
def test_records_move_as_torch_would_place_them(name: str, grow: int, out: Path) -> None:
    data = with_pickle(FIXTURES / name, grow)
    out.write_bytes(data)
    assert oracle.difference(oracle.load(FIXTURES / name), oracle.load(out)) == ""
    grid = {"align4096.pth": 4096, "align1.pth": 1}.get(name, 64)
    archive = read_archive(open_source(out))
    for record in archive.records:
        local = archive.local(record)
        assert (record.header + len(local)) % grid == 0
        # The least padding that reaches the grid, in a field that torch calls FB.
        assert local.rstrip(b"Z")[-4:-2] == b"FB" or b"FB" in local
        assert struct.unpack("<H", local[28:30])[0] == len(local) - 30 - len(record.name)
    assert zipfile.ZipFile(out).testzip() is None or name == "no_crc.pth"


def test_no_contents_is_one_span_over_the_whole_file() -> None:
    for name in ("bare.pth", "zip_gaps.pth", "zip_trailing.pth", "zip_two_pickles.pth"):
        source = open_source(FIXTURES / name)
        assert plan_rewrite(read_archive(source), {}).pieces == (Span(source, 0, source.size),)


def test_dead_bytes_between_records_do_not_come_along(out: Path) -> None:
    with ckptool.open(FIXTURES / "zip_gaps.pth") as checkpoint:
        ckptool.save(ckptool.remap(checkpoint, {"cpu": "cuda:0"}), out)
    assert out.stat().st_size < (FIXTURES / "zip_gaps.pth").stat().st_size + 100
    assert oracle.difference(oracle.load(FIXTURES / "zip_gaps.pth"), oracle.load(out)) == ""


def test_what_stands_behind_the_archive_comes_along(out: Path) -> None:
    with ckptool.open(FIXTURES / "zip_trailing.pth") as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), out)
    assert out.read_bytes()[-1000:] == (FIXTURES / "zip_trailing.pth").read_bytes()[-1000:]


@pytest.mark.parametrize("edit", [ckptool.repack, ckptool.sanitize, lambda found: ckptool.convert(found, "torch")])
def test_what_is_laid_out_anew_can_be_mapped(edit: Callable[[Checkpoint], Checkpoint], out: Path) -> None:
    assert ckptool.validate(FIXTURES / "zip_deflated.pth")["status"] == "invalid"
    with ckptool.open(FIXTURES / "zip_deflated.pth") as checkpoint:
        ckptool.save(edit(checkpoint), out)
    assert ckptool.validate(out)["status"] == "valid"
    mapped = torch.load(out, weights_only=True, mmap=True)
    assert oracle.difference(oracle.load(FIXTURES / "zip_deflated.pth"), mapped) == ""


def test_deflated_storages_stay_deflated(out: Path) -> None:
    with ckptool.open(FIXTURES / "zip_deflated.pth") as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), out)
    methods = {info.filename.rpartition("/")[2]: info.compress_type for info in zipfile.ZipFile(out).infolist()}
    assert methods["0"] == zipfile.ZIP_DEFLATED
    assert zipfile.ZipFile(out).testzip() is None


@pytest.mark.sampled
def test_sixty_five_thousand_records(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "many.pth"
    tensor = torch.arange(66_006.0)
    torch.save({f"module.t{i}": tensor[i : i + 1].clone() for i in range(66_006)}, path)
    with ckptool.open(path) as checkpoint:
        assert len(checkpoint.survey.tensors) == 66_006
        ckptool.save(ckptool.strip_module(checkpoint), out)
    loaded = torch.load(out, weights_only=True, mmap=True)
    assert len(loaded) == 66_006 and loaded["t66005"].item() == 66_005.0
    if not WHOLE:
        return  # test_lossless.py adds and strips in small files
    back = tmp_path / "back.pth"
    with ckptool.open(out) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), back)
    assert back.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 21, 22, 100])
def test_a_head_without_a_directory_is_malformed(size: int) -> None:
    with pytest.raises(MalformedError):
        read_archive(BytesSource(b"PK\x03\x04" + bytes(size)))


def test_a_lie_about_the_number_of_entries_allocates_nothing() -> None:
    data = bytearray((FIXTURES / "bare.pth").read_bytes())
    at = data.rfind(b"PK\x06\x06")
    data[at + 24 : at + 40] = struct.pack("<QQ", 2**40, 2**40)
    with pytest.raises(MalformedError, match="entries do not fit"):
        read_archive(BytesSource(bytes(data)))


# -- the root folder of an output ------------------------------------------------------------------------------
# A file laid out anew does not take over a root folder whose name cannot be written.


@pytest.mark.parametrize("root", [b"\xff\xfe\xfd\xfc", b"a\\bc", b"a\nbc"])
def test_the_root_folder_of_an_output_has_a_plain_name(root: bytes, tmp_path: Path) -> None:
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes((FIXTURES / "bare.pth").read_bytes().replace(b"bare/", root + b"/"))
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.drop(checkpoint, ["conv1.*"]), out)
    assert ckptool.validate(out)["valid"]
    assert len(torch.load(out, weights_only=True)) == 7

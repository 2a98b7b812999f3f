"""The members of tar archives, against Python's tarfile; and the tar archives that torch.load takes."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_tar_files import typical

import ckptool
from ckptool.base.errors import CkptoolError, MalformedError
from ckptool.files.sources import BytesSource
from ckptool.files.tars import is_header, members, resolve_member

_NAMES = ("pickle", "storages", "./pickle", "a/b", "d/", "x" * 90 + "/" + "y" * 80, "é")
_TYPES = (b"0", b"0", b"0", b"\0", b"7", b"1", b"2", b"5", b"6", b"Z")
_VALUES = (0, 0x20, 0x30, 0x37, 0x80, 0xFF, *b"xgLK1S+-_o")


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Archives of every dialect, with links, folders, pax headers and long names, of which some bytes are changed."""
    style = draw(st.sampled_from((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=style) as file:
        for _ in range(draw(st.integers(1, 4))):
            info = tarfile.TarInfo(draw(st.sampled_from(_NAMES)))
            info.type = draw(st.sampled_from(_TYPES))
            if info.type in (b"1", b"2"):
                info.linkname = draw(st.sampled_from(("pickle", "e", "d/e")))
            elif info.type not in (b"5", b"6"):
                info.size = draw(st.integers(0, 1500))
            if style == tarfile.PAX_FORMAT and draw(st.booleans()):
                field = draw(st.sampled_from(("path", "size", "comment", "linkpath", "mtime", "GNU.sparse.name")))
                info.pax_headers = {field: draw(st.sampled_from(("pickle", "100", "q/", "-5", "1_0")))}
            file.addfile(info, io.BytesIO(bytes(info.size)))
    data = bytearray(out.getvalue())
    for _ in range(draw(st.integers(0, 2))):
        at = 512 * draw(st.integers(0, len(data) // 512 - 1))
        where = st.one_of(st.just(156), st.integers(100, 159), st.integers(345, 350), st.integers(0, 511))
        data[at + draw(where)] = draw(st.sampled_from(_VALUES))
        if draw(st.integers(0, 7)):
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data[: draw(st.integers(0, len(data)))] if not draw(st.integers(0, 9)) else data)


def _by_tarfile(data: bytes) -> tuple[list[tuple[object, ...]] | None, bool]:
    """The members, None where it does not open the file; and whether it came to their end."""
    try:
        file = tarfile.open(fileobj=io.BytesIO(data), mode="r:")  # noqa: SIM115
    except (tarfile.TarError, ValueError, RecursionError):
        return None, False
    whole = True
    try:
        file.getmembers()
    except (tarfile.TarError, ValueError, RecursionError):
        whole = False
    return [
        (
            info.name,
            info.offset_data,
            info.size,
            (info.isreg() or info.type not in tarfile.SUPPORTED_TYPES) and info.sparse is None,
            info.linkname if info.islnk() or info.issym() else "",
        )
        for info in file.members
    ], whole


@settings(max_examples=examples(400))
@given(archives())
def test_members_are_those_of_tarfile(data: bytes) -> None:
    """Where a member is not odd and the archive is not damaged, by name, place, size and kind."""
    expected, whole = _by_tarfile(data)
    if any(data[:512]) and expected is not None:
        assert is_header(data[:512])  # what tarfile opens never passes for something else
    try:
        found = list(members(BytesSource(data)))
    except MalformedError:
        return
    if whole and expected is not None and not any(member.odd for member in found):
        assert [(item.name, item.begin, item.size, item.plain, item.link) for item in found] == expected


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(st.sampled_from(("pickle", "e", "d/e", "d/pickle")), st.sampled_from("012")), min_size=1, max_size=6
    ),
    st.lists(st.sampled_from(("pickle", "e", "d/e", "nothing")), min_size=6, max_size=6),
)
def test_the_member_of_a_name_is_that_of_tarfile(entries: list[tuple[str, str]], targets: list[str]) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:") as file:
        for number, ((name, kind), target) in enumerate(zip(entries, targets)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind.encode(), target if kind != "0" else ""
            info.size = number + 1 if kind == "0" else 0
            file.addfile(info, io.BytesIO(bytes(info.size)))
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as file:
        try:
            stream = file.extractfile("pickle")
            size = None if stream is None else len(stream.read())
        except (KeyError, RecursionError):
            size = None
    member = resolve_member(list(members(BytesSource(out.getvalue()))), "pickle")
    assert (member.size if member else None) == size


# -- what torch.load takes for a tar archive -----------------------------------------------------------


class _Prints:
    def __reduce__(self) -> object:
        return print, ("run by torch.load",)


_RUNS = pickle.dumps(_Prints(), 2)
_PLAIN = {"pickle": b"\x80\x02}.", "storages": b"\x80\x02K\0.\x80\x02].", "tensors": b"\x80\x02K\0."}


def _tar(parts: list[tuple[str, bytes, str]]) -> bytes:
    """Members: (name, content, type); the content of a link is where it leads."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as file:
        for name, data, kind in parts:
            info = tarfile.TarInfo(name)
            info.type = kind.encode()
            if kind in "12":
                info.linkname = data.decode()
                file.addfile(info)
            else:
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return out.getvalue()


_FILES = [(name, data, "0") for name, data in _PLAIN.items()]
_HOSTILE = {
    "last": [*_FILES, ("pickle", _RUNS, "0")],
    "far behind": [*_FILES, *[(f"x{number}", b"", "0") for number in range(40)], ("pickle", _RUNS, "0")],
    "hard link": [("e", _RUNS, "0"), *_FILES, ("pickle", b"e", "1")],
    "link of a link": [("e", _RUNS, "0"), ("f", b"e", "2"), *_FILES[1:], ("pickle", b"f", "1")],
    "symbolic link": [*_FILES, ("pickle", b"e", "2"), ("e", _RUNS, "0")],
    "only a link": [*_FILES[1:], ("e", _RUNS, "0"), ("pickle", b"e", "2")],
    "another type": [*_FILES, ("pickle", _RUNS, "Z")],
    "alone": [*_FILES[1:], ("pickle", _RUNS, "0")],
    "protocol 0": [*_FILES[1:], ("pickle", pickle.dumps(_Prints(), 0), "0")],
    "first of two": [("pickle", _RUNS, "0"), *_FILES],
    "beside them": [*_FILES, ("more.bin", _RUNS, "0")],
    "folder": [*_FILES, ("d/pickle", _RUNS, "0")],
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_every_pickle_of_the_archive_is_audited(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.pth"
    path.write_bytes(_tar(_HOSTILE[name]))
    report = ckptool.validate(path)
    assert "print" in [item["name"] for item in report["globals"]]
    assert capsys.readouterr().out == ""
    torch.load(path, weights_only=False)
    if name in ("first of two", "beside them", "folder"):
        assert capsys.readouterr().out == ""
    else:
        assert "run by torch.load" in capsys.readouterr().out
    assert not report["valid"]


@pytest.mark.parametrize("name", ["os.system", "this.c", "torch.FloatTeosor", "torch.nn.Tensor", "torch.FloatStorage"])
def test_classes_of_tensors_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """Torch imports what a member names, whether it is used or not."""
    path = tmp_path / "t.pth"
    data = typical(path).read_bytes()
    module, _, cls = name.rpartition(".")
    one, other = b"ctorch\nFloatTensor\n", b"c%b\n%b\n" % (module.encode(), cls.encode())
    assert one in data
    with tarfile.open(path) as file:
        parts = [(info.name, stream.read(), "0") for info in file if (stream := file.extractfile(info)) is not None]
    path.write_bytes(_tar([(item, content.replace(one, other), kind) for item, content, kind in parts]))
    report = ckptool.validate(path)
    assert not report["valid"]
    assert name.startswith("torch") or cls in [item["name"] for item in report["globals"]]


def test_what_is_behind_the_archive_is_said_to_be_unsearched(tmp_path: Path) -> None:
    path = tmp_path / "t.pth"
    for rest in (_RUNS, _tar([("pickle", _RUNS, "0")])):
        path.write_bytes(_tar(_FILES) + rest)
        report = ckptool.validate(path)
        assert "after the end of the archive" in str(report["checks"]) and "not-checked" in str(report["checks"])
        assert ckptool.scan(path)["verdict"] == "unknown"


@pytest.mark.parametrize("change", ["signed sum", "size below zero", "pax size", "damaged", "prefix"])
def test_where_programs_differ_it_is_not_valid(change: str, tmp_path: Path) -> None:
    data = bytearray(typical(tmp_path / "plain.tar").read_bytes())
    at = next(item.begin - 512 for item in members(BytesSource(bytes(data))) if item.name == "tensors")
    if change == "damaged":
        data[at + 10] ^= 1
    elif change == "pax size":
        info = tarfile.TarInfo("tensors")
        info.size = 1
        info.pax_headers = {"size": "-1"}
        data[at:at] = info.tobuf(tarfile.PAX_FORMAT)
    else:
        if change == "prefix":
            data[at + 257 : at + 265] = b"ustar  \0"
            data[at + 345 : at + 347] = b"d\0"
        elif change == "size below zero":
            data[at + 124 : at + 136] = b"\xff" * 12
        else:
            data[at + 400] = 0xE9
        total = sum(data[at : at + 512]) - sum(data[at + 148 : at + 156]) + 256
        data[at + 148 : at + 156] = b"%06o\0 " % (total - 256 * (change == "signed sum"))
    path = tmp_path / "odd.tar"
    path.write_bytes(data)
    if change == "signed sum":  # every program takes either sum
        assert torch.load(path, weights_only=False)["epoch"] == 3
    assert ckptool.validate(path)["valid"] == (change == "signed sum")


# -- of two formats at once ------------------------------------------------------------------------------


def _two_formats(head: bytes, rest: bytes, archive: bytes) -> bytes:
    """A first header of tar that begins as another format does, whose content is the rest of that file."""
    block = bytearray(512)
    block[: len(head)] = head
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148] = b"%011o\0" % len(rest), b"00000000000\0"
    block[156:157], block[257:265] = b"0", b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + rest + bytes(-len(rest) % 512) + archive


def _legacy_parts() -> tuple[bytes, bytes]:
    """A legacy file whose system info is a string that runs over the header of tar."""
    head = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03." + b"\x80\x02X"
    return head + struct.pack("<I", 512 - len(head) - 4), b"." + b"\x80\x02}." + b"\x80\x02]."


@pytest.mark.parametrize("parts", [_HOSTILE["alone"], _FILES, [("other", b"abc", "0")]])
def test_legacy_and_tar_at_once(parts: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "two.pth"
    path.write_bytes(_two_formats(*_legacy_parts(), _tar(parts)))
    report = ckptool.validate(path)
    assert not report["valid"]
    assert "at once" in str(report["checks"])
    with pytest.raises(RuntimeError, match=r"legacy \.tar format"):
        torch.load(path, weights_only=True)
    with pytest.raises(CkptoolError, match="at once"), ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "out.pth")


def test_safetensors_and_tar_at_once(tmp_path: Path) -> None:
    """The header of tar is within a string of the JSON; the rest of the archive is the bytes of a tensor."""
    archive = _tar(_HOSTILE["alone"])
    more = b'"},"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(archive), len(archive))
    rest = more + b" " * (512 - len(more))
    block = bytearray(b" " * 512)
    block[:30] = struct.pack("<Q", 504 + 512) + b'{"__metadata__":{"x":"'
    block[124:136], block[156:157] = b"%011o " % len(rest), b"0"
    block[148:156] = b"%06o  " % sum(block)
    path = tmp_path / "two.safetensors"
    path.write_bytes(bytes(block) + rest + archive)
    assert list(safetensors.torch.load_file(path)) == ["t"]
    with tarfile.open(path, "r:") as file:
        assert "pickle" in file.getnames()
    assert not ckptool.validate(path)["valid"]


def test_zip_and_tar_at_once(tmp_path: Path) -> None:
    """The header of tar is within the extra field of the first record; torch reads the zip, tarfile the tar."""
    torch.save({"a": torch.ones(2)}, tmp_path / "seed.pth")
    out = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "seed.pth") as seed, zipfile.ZipFile(out, "w") as file:
        for number, name in enumerate(seed.namelist()):
            info = zipfile.ZipInfo(name)
            size = 512 - 30 - len(name)
            info.extra = b"FB" + struct.pack("<H", size - 4) + bytes(size - 4) if not number else b""
            file.writestr(info, seed.read(name))
    data = out.getvalue()
    two = bytearray(_two_formats(data[:100], data[512:], _tar(_HOSTILE["alone"])))
    path = tmp_path / "two.pth"
    path.write_bytes(two)
    assert list(torch.load(path, weights_only=True)) == ["a"]
    with tarfile.open(path, "r:") as archive:
        assert "pickle" in archive.getnames()
    report = ckptool.validate(path)
    assert not report["valid"]
    assert "at once" in str(report["checks"])

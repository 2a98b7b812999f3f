"""Archives of which each reader makes something else: what ckptool calls valid, torch's own reader reads likewise."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from conftest import examples
from crafted_files import (
    FLOATS,
    ROOT,
    TENSOR,
    Entry,
    altered,
    archive,
    by_key,
    dumped,
    entries,
    plain,
    report_of,
    storage,
    tensor,
    with_record,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.base.errors import CkptoolError
from ckptool.files.sources import open_source
from ckptool.formats.torch.zip_reader import read

PICKLE = dumped({"w": TENSOR})
#: Names under the folder that a reader may find in the place of another.
NAMES = ("data.pkl", "DATA.PKL", "data/0", "Data/0", "data/\u00e9", "data/\u00c9", "version", "byteorder", "data/0\0x")
NAMES += (".data/version", ".storage_alignment", ".format_version", "data.p\u212al", "data/0/", "data\\0", "x" * 510)
CONTENTS = (PICKLE, FLOATS, FLOATS[::-1], b"3\n", b" 4 ", b"99\n", b"little", b"big", b"64", b"xx", b"", b"0", b"-1")


class Listed:
    """A record as the directory tells: 32-bit fields and extra fields are free."""

    def __init__(self, name: str, data: bytes, wide: list[tuple[int, ...]], full: int, attributes: int, method: int):
        self.name, self.data, self.wide, self.full = name.encode(), data, wide, full
        self.attributes, self.method = attributes, method


def built(records: list[Listed], rest: bytes = b"", trailing: bytes = b"") -> bytes:
    body, directory = bytearray(), bytearray()
    for record in records:
        at, crc, size = len(body), zlib.crc32(record.data), len(record.data)
        packed = record.data
        if record.method:
            squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed = squeeze.compress(record.data) + squeeze.flush()
        sizes = (crc, len(packed), size)
        body += struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0, record.method, 0, 0, *sizes, len(record.name), 0)
        body += record.name + packed
        true = (size, len(packed), at)
        extra = b""
        for shift in record.wide:
            values = [max(value + more, 0) for value, more, bit in zip(true, shift, (1, 2, 4)) if record.full & bit]
            extra += struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
        told = [0xFFFFFFFF if record.full & bit else value for value, bit in zip(true, (1, 2, 4))]
        entry = (0, 0, 0, record.method, 0, 0, crc, told[1], told[0], len(record.name), len(extra), 0, 0, 0)
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *entry, record.attributes, told[2]) + record.name + extra
    directory += rest
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(records), len(records), len(directory), len(body), 0)
    return bytes(body + directory + end + trailing)


shifts = st.lists(st.tuples(*[st.sampled_from((0, 0, 0, 0, 1, -1, 30))] * 3), min_size=1, max_size=2)
odd = st.builds(
    Listed,
    st.sampled_from(NAMES).map(lambda name: f"{ROOT}/{name}") | st.sampled_from(("other/x", "loose", f"{ROOT}x/y")),
    st.sampled_from(CONTENTS),
    shifts,
    st.sampled_from((0, 0, 1, 2, 4, 7)),
    st.sampled_from((0, 0, 0, 0, 0x10)),
    st.sampled_from((0, 0, 8)),
)
usual = {"data.pkl": PICKLE, "data/0": FLOATS, "byteorder": b"little", "version": b"3\n"}


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    records = [Listed(f"{ROOT}/{name}", data, [], 0, 0, 0) for name, data in usual.items()]
    gone = draw(st.sampled_from((-1, -1, 0, 1, 2, 3)))
    if gone >= 0:
        del records[gone]
    for record in draw(st.lists(odd, max_size=2)):
        records.insert(draw(st.integers(0, len(records))), record)
    rest = draw(st.sampled_from((b"", b"", b"PK\1\2")))
    return built(records, rest, draw(st.sampled_from((b"", b"", bytes(9), b"PK\5\6" + bytes(18)))))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readers") / "seed.pth"


@settings(max_examples=examples(150))
@given(data=archives())
def test_what_is_valid_is_read_by_torch_likewise(data: bytes, path: Path) -> None:
    report = report_of(path, data)
    if report["status"] != "valid":
        return
    reader = torch._C.PyTorchFileReader(str(path))
    for mapped in (False, True):
        torch.load(path, weights_only=False, mmap=mapped)
    source = open_source(path)
    container = read(source)
    for record in container.archive.records:
        short = record.name.removeprefix(f"{ROOT}/")
        assert reader.get_record(short) == container.archive.read(record, 1 << 20)
    source.close()


@settings(max_examples=examples(150))
@given(data=archives(), names=st.lists(st.sampled_from(NAMES), max_size=4))
def test_names_lead_to_the_records_that_torch_finds(data: bytes, names: list[str], path: Path) -> None:
    path.write_bytes(data)
    source = open_source(path)
    try:
        archive = read(source).archive
        reader = torch._C.PyTorchFileReader(str(path))
    except (CkptoolError, RuntimeError, ValueError):  # an error of torch may quote what is no text
        return
    finally:
        source.close()
    if any(oddity.ambiguous for oddity in archive.oddities):
        return
    for name in names:
        if "\0" not in name:
            assert reader.has_record(name) is (archive.find(name) is not None)


def with_trailing(size: int) -> bytes:
    return plain() + b"x" * size


@pytest.mark.parametrize("size", [0, 3, 4070, 65_530, 65_557, 69_000, 69_540, 69_570, 69_600, 80_000])
def test_the_end_is_looked_for_as_far_as_torch_looks(size: int, path: Path) -> None:
    report = report_of(path, with_trailing(size))
    try:
        torch.load(path, weights_only=True)
        loads = True
    except (RuntimeError, OSError):
        loads = False
    assert (report["status"] == "valid") is loads


LOOKUPS = {
    "a Kelvin sign is no k": (altered("data.pkl", name=f"{ROOT}/data.p\u212al"), False),
    "e with an accent, small and large": (plain({"w": tensor(of=storage("\u00c9"))}, {"\u00e9": FLOATS}), False),
    "a key with a NUL": (plain({"w": tensor(of=storage("0\0x"))}), True),
    "an alignment that is no number": (with_record(Entry(f"{ROOT}/.storage_alignment", b"xx")), False),
    "an alignment with blanks": (with_record(Entry(f"{ROOT}/.storage_alignment", b" 64\n")), True),
    "another version in .data": (with_record(Entry(f"{ROOT}/.data/version", b"99\n")), False),
    "a folder with a long name": (archive(entries(root="r" * 511).values()), False),
    "a folder with the longest name": (archive(entries(root="r" * 500).values()), True),
}


@pytest.mark.parametrize("case", by_key(LOOKUPS))
def test_valid_is_only_what_torch_loads(case: tuple[bytes, bool], path: Path) -> None:
    data, loads = case
    report = report_of(path, data)
    try:
        torch.load(path, weights_only=True)
        done = True
    except (RuntimeError, ValueError):
        done = False
    assert done is loads
    assert loads or report["status"] != "valid"

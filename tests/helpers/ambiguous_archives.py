"""Archives that two readers could see differently, one lie in each."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import NamedTuple

from conftest import FIXTURES
from crafted_files import (
    FLOATS,
    ROOT,
    TENSOR,
    End,
    Entry,
    altered,
    archive,
    dumped,
    entries,
    plain,
    storage,
    tensor,
    with_record,
)

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

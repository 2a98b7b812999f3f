"""Archives and pickles made by hand, with every field open to a lie, and the questions put to ckptool about them."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from _pytest.mark import ParameterSet

from ckptool.reports.validate import validation_report

ROOT = "seed"
#: Four floats under the key "0", unless a test says otherwise.
FLOATS = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)

# -- pickles ----------------------------------------------------------------------------------------------------


class Code(NamedTuple):
    """Opcodes that leave one object on the stack."""

    raw: bytes


def put(value: object) -> bytes:
    """The opcodes of a plain object, without a memo."""
    if isinstance(value, Code):
        return value.raw
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return _int(value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(put, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(put, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(put(key) + put(item) for key, item in value.items()) + b"u"
    raise TypeError(type(value))


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name(module: str, attribute: str) -> Code:
    """GLOBAL."""
    return Code(f"c{module}\n{attribute}\n".encode())


def call(function: Code, *arguments: object) -> Code:
    """REDUCE."""
    return Code(function.raw + put(tuple(arguments)) + b"R")


def dumped(value: object) -> bytes:
    """A whole pickle, protocol 2."""
    return b"\x80\x02" + put(value) + b"."


def storage(key: str = "0", numel: int = 4, cls: str = "FloatStorage", location: str = "cpu") -> Code:
    """A persistent id as torch.save writes it."""
    return Code(put(("storage", name("torch", cls), key, location, numel)) + b"Q")


def ordered() -> Code:
    return Code(b"ccollections\nOrderedDict\n)R")


def tensor(
    shape: Sequence[int] = (4,),
    stride: Sequence[int] = (1,),
    offset: int = 0,
    of: Code | None = None,
    function: str = "_rebuild_tensor_v2",
    more: Sequence[object] = (),
) -> Code:
    """A call of one of the dense rebuild functions; ``more`` are arguments behind the usual six."""
    held = of or storage()
    return call(name("torch._utils", function), held, offset, tuple(shape), tuple(stride), False, ordered(), *more)


SYSTEM = call(name("posix", "system"), "true")
TENSOR = tensor()

# -- archives ---------------------------------------------------------------------------------------------------

_LOCAL = "<4s5H3I2H"
_ENTRY = "<4s6H3I5H2I"


@dataclass(frozen=True)
class Entry:
    """A record. ``local`` and ``listed`` overrule fields of its local header and of the directory's entry by name;
    ``before`` are bytes in front of its header, ``descriptor`` replaces the one that torch writes; an ``unlisted``
    record is not in the directory, a ``ghost`` nowhere else."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    local: Mapping[str, int] = field(default_factory=dict)
    listed: Mapping[str, int] = field(default_factory=dict)
    local_name: bytes | None = None
    before: bytes = b""
    descriptor: bytes | None = None
    unlisted: bool = False
    ghost: bool = False
    extra: bytes = b""

    @property
    def raw_name(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()

    @property
    def packed(self) -> bytes:
        if self.method != 8:
            return self.data
        squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
        return squeeze.compress(self.data) + squeeze.flush()


@dataclass(frozen=True)
class End:
    """What the end records say; None is the truth. ``gap`` stands before the directory, ``comment`` behind all."""

    count: int | None = None
    here: int | None = None
    size: int | None = None
    offset: int | None = None
    zip64: Mapping[str, int] = field(default_factory=dict)
    gap: bytes = b""
    comment: bytes = b""
    with_zip64: bool = True
    disks: int = 1


def archive(entries: Iterable[Entry], end: End = End(), shift: int = 0) -> bytes:
    """An archive as torch writes it, but for what the entries say. ``shift`` is added to all offsets."""
    body, directory, count = bytearray(), bytearray(), 0
    for entry in entries:
        at = len(body)
        body += entry.before
        header, packed, crc = len(body) + shift, entry.packed, zlib.crc32(entry.data)
        flags = 0x0808 if packed else 0x0800
        local = {"version": 0, "flags": flags, "method": entry.method, "time": 0, "date": 0}
        local |= {"crc": 0, "packed": 0, "size": 0} | dict(entry.local)
        local_name = entry.raw_name if entry.local_name is None else entry.local_name
        body += struct.pack(_LOCAL, b"PK\x03\x04", *local.values(), len(local_name), len(entry.extra))
        body += local_name + entry.extra + packed
        if packed:
            usual = struct.pack("<4s3I", b"PK\x07\x08", crc, len(packed), len(entry.data))
            body += usual if entry.descriptor is None else entry.descriptor
        if entry.ghost:
            del body[at:]
        if entry.unlisted:
            continue
        count += 1
        listed = {"made": 0, "version": 0, "flags": flags, "method": entry.method, "time": 0, "date": 0, "crc": crc}
        listed |= {"packed": len(packed), "size": len(entry.data)}
        tail = {"disk": 0, "internal": 0, "external": 0, "header": header}
        told = {**listed, **tail} | dict(entry.listed)
        first, last = [told[key] for key in listed], [told[key] for key in tail]
        directory += struct.pack(_ENTRY, b"PK\x01\x02", *first, len(entry.raw_name), 0, 0, *last) + entry.raw_name
    body += end.gap
    return bytes(body + directory) + _ends(count, len(body) + shift, len(directory), end)


def _ends(count: int, at: int, size: int, end: End) -> bytes:
    there = at + size
    count = count if end.count is None else end.count
    here = count if end.here is None else end.here
    at = at if end.offset is None else end.offset
    size = size if end.size is None else end.size
    raw = b""
    if end.with_zip64:
        wide = {"here": here, "count": count, "size": size, "offset": at} | dict(end.zip64)
        raw = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, *wide.values())
        raw += struct.pack("<4sIQI", b"PK\x06\x07", 0, there, end.disks)
    plain = (min(here, 0xFFFF), min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF))
    return raw + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *plain, len(end.comment)) + end.comment


def entries(
    value: object = None, storages: Mapping[str, bytes] | None = None, pickled: bytes | None = None, root: str = ROOT
) -> dict[str, Entry]:
    """The records of an ordinary checkpoint by their short names, in torch's order."""
    value = {"w": TENSOR} if value is None else value
    storages = {"0": FLOATS} if storages is None else storages
    held = {"data.pkl": dumped(value) if pickled is None else pickled, "byteorder": b"little"}
    held |= {f"data/{key}": data for key, data in storages.items()}
    held |= {"version": b"3\n", ".data/serialization_id": b"0" * 40}
    return {short: Entry(f"{root}/{short}", data) for short, data in held.items()}


def plain(value: object = None, storages: Mapping[str, bytes] | None = None, pickled: bytes | None = None) -> bytes:
    """An ordinary checkpoint."""
    return archive(entries(value, storages, pickled).values())


def altered(short: str, found: Mapping[str, Entry] | None = None, **fields: Any) -> bytes:
    """An ordinary checkpoint but for one record."""
    held = dict(found or entries())
    held[short] = replace(held[short], **fields)
    return archive(held.values())


def with_record(entry: Entry, before: str = "version") -> bytes:
    """An ordinary checkpoint with one record more."""
    found: list[Entry] = []
    for short, item in entries().items():
        found += [entry, item] if short == before else [item]
    return archive(found)


def legacy(value: object = None, storages: Mapping[str, tuple[int, bytes]] | None = None, **parts: bytes) -> bytes:
    """A file of the old format; ``parts`` replace one of its five pickles by name, ``tail`` stands behind all."""
    value = (
        {"w": tensor(of=Code(put(("storage", name("torch", "FloatStorage"), "0", "cpu", 4, None)) + b"Q"))}
        if (value is None)
        else value
    )
    storages = {"0": (4, FLOATS)} if storages is None else storages
    told = {
        "magic": pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        "version": pickle.dumps(1001, 2),
        "system": pickle.dumps({"protocol_version": 1001, "little_endian": True}, 2),
        "object": dumped(value),
        "keys": pickle.dumps(list(storages), 2),
        "tail": b"",
    } | parts
    tail = told.pop("tail")
    body = b"".join(struct.pack("<q", count) + data for count, data in storages.values())
    return b"".join(told.values()) + body + tail


T = TypeVar("T")


def by_key(cases: Mapping[str, T]) -> list[ParameterSet]:
    """The cases as parameters with their names."""
    return [pytest.param(case, id=key) for key, case in cases.items()]


# -- questions --------------------------------------------------------------------------------------------------


def report_of(path: Path, data: bytes) -> dict[str, Any]:
    """The report of ``validate`` on some bytes."""
    path.write_bytes(data)
    return validation_report(str(path))


def notes(report: Mapping[str, Any], level: str = "") -> set[str]:
    """The codes of what was found, of one level or of all."""
    return {
        note["code"] for check in report["checks"] for note in check["notes"] if not level or note["level"] == level
    }


def with_status(report: Mapping[str, Any], status: str) -> list[str]:
    """The names of the checks that ended so."""
    return [check["name"] for check in report["checks"] if check["status"] == status]


def named(report: Mapping[str, Any]) -> dict[str, str]:
    """The word for each global, by the name that Python 3 resolves it to."""
    return {item["mapped"]: item["word"] for item in report["globals"]}

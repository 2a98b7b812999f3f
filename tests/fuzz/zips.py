"""Mutations of zip archives: records, twin fields, zip64, names, checksums, several archives in one file."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .opcodes import WIDE, bytewise
from .pickles import mutated_pickle


@dataclass
class Record:
    """A record, as the local header and the directory are to tell of it: what is None is as it should be."""

    name: bytes
    data: bytes
    method: int = 0
    packed: bytes | None = None
    local: dict[str, int] = field(default_factory=dict)
    central: dict[str, int] = field(default_factory=dict)
    local_name: bytes | None = None
    local_extra: bytes = b""
    extra: bytes = b""
    comment: bytes = b""
    listed: bool = True
    there: bool = True
    descriptor: bool = False


@dataclass
class Archive:
    records: list[Record]
    prefix: bytes = b""
    between: bytes = b""
    comment: bytes = b""
    suffix: bytes = b""
    end: dict[str, int] = field(default_factory=dict)
    zip64: bool = False
    end64: dict[str, int] = field(default_factory=dict)
    align: int = 64
    relative: bool = False


def read(data: bytes) -> Archive | None:
    """The archive that zipfile sees; None where it sees none."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return Archive(
                [
                    Record(info.filename.encode("utf-8", "replace"), archive.read(info), info.compress_type)
                    for info in archive.infolist()
                ]
            )
    except Exception:
        # An archive that an earlier mutation broke; zipfile has many ways to say so.
        return None


def write(archive: Archive) -> bytes:
    """The bytes of an archive."""
    out = bytearray(archive.prefix)
    base = len(archive.prefix) if archive.relative else 0
    directory = bytearray()
    count = 0
    for record in archive.records:
        packed = record.packed
        if packed is None:
            packed = _deflated(record.data) if record.method == 8 else record.data
        name = record.name if record.local_name is None else record.local_name
        facts = {"version": 0, "flags": 8 if record.descriptor else 0, "method": record.method, "time": 0}
        facts |= {"crc": zlib.crc32(record.data), "packed": len(packed), "size": len(record.data)}
        facts |= {"attr": 0, "offset": len(out) - base, "disk": 0}
        local = facts | record.local
        if record.descriptor:
            local |= {"crc": 0, "packed": 0, "size": 0} | record.local
        extra = record.local_extra
        if archive.align and not extra:
            pad = -(len(out) + 34 + len(name)) % archive.align
            extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
        if record.there:
            out += b"PK\x03\x04" + _fields(local, "version:2 flags:2 method:2 time:4 crc:4 packed:4 size:4")
            out += struct.pack("<HH", len(name) & 0xFFFF, len(extra) & 0xFFFF) + name + extra + packed
            if record.descriptor:
                out += b"PK\x07\x08" + _fields(facts, "crc:4 packed:4 size:4")
        if record.listed:
            sizes = [len(part) & 0xFFFF for part in (record.name, record.extra, record.comment)]
            central = facts | record.central
            directory += b"PK\x01\x02" + _fields(central, "version:2 version:2 flags:2 method:2 time:4")
            directory += _fields(central, "crc:4 packed:4 size:4") + struct.pack("<HHH", *sizes)
            directory += _fields(central, "disk:2 disk:2 attr:4 offset:4") + record.name + record.extra + record.comment
            count += 1
    out += archive.between
    begin = len(out) - base
    out += directory
    facts = {"disk": 0, "here": count, "count": count, "length": len(directory), "begin": begin}
    facts["comment"] = len(archive.comment)
    if archive.zip64:
        end = len(out) - base
        facts64 = facts | {"record": 44, "version": 45} | archive.end64
        form = "record:8 version:2 version:2 disk:4 disk:4 count:8 count:8 length:8 begin:8"
        out += b"PK\x06\x06" + _fields(facts64, form) + b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1)
    facts |= archive.end
    out += b"PK\x05\x06" + _fields(facts, "disk:2 disk:2 here:2 count:2 length:4 begin:4 comment:2") + archive.comment
    return bytes(out) + archive.suffix


def _fields(facts: dict[str, int], form: str) -> bytes:
    parts = [item.partition(":") for item in form.split()]
    return b"".join(
        (facts[name] & (1 << 8 * int(width)) - 1).to_bytes(int(width), "little") for name, _, width in parts
    )


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def mutated_zip(data: bytes, chance: random.Random) -> bytes:
    """A zip archive after one mutation."""
    way = chance.random()
    archive = read(data) if way > 0.06 else None
    if archive is None or not archive.records:
        return bytewise(data, chance)
    if way < 0.6:
        _inside(archive, chance)
    else:
        chance.choice(_WAYS)(archive, chance)
    return write(archive)


def mutated_object(data: bytes, chance: random.Random) -> bytes:
    """A zip archive in which nothing is wrong but the pickle of the object."""
    archive = read(data)
    records = [record for record in archive.records if record.name.endswith(b"data.pkl")] if archive else []
    if archive is None or not records:
        return bytewise(data, chance)
    records[0].data = mutated_pickle(records[0].data, chance)
    return write(archive)


def _inside(archive: Archive, chance: random.Random) -> None:
    """The pickle of the object, or sometimes other content, under a right checksum."""
    pickles = [record for record in archive.records if record.name.endswith((b"data.pkl", b".pkl"))]
    if pickles and chance.random() < 0.93:
        record = chance.choice(pickles)
        record.data = mutated_pickle(record.data, chance)
        return
    record = chance.choice(archive.records)
    others = (record.data[:-1], record.data + b"\x00" * 4, b"\xff" * len(record.data))
    record.data = chance.choice((b"", b"1", b"99\n", b"little", b"big", b"64", *others))


_NAMES = (
    *(b"version", b".data/version", b"byteorder", b".storage_alignment", b"data.pkl", b"DATA.PKL", b"data/0"),
    *(b"data/00", b"constants.pkl", b"code/x.py", b".format_version", b".data/serialization_id", b"data/"),
    *(b"data.p\xe2\x84\xaal", b"attributes.pkl"),
)


def _root(archive: Archive) -> bytes:
    return archive.records[0].name.partition(b"/")[0]


def _names(archive: Archive, chance: random.Random) -> None:
    record = chance.choice(archive.records)
    root, _, rest = record.name.partition(b"/")
    record.name = chance.choice(
        (
            *(record.name.upper(), root.upper() + b"/" + rest, root + b"//" + rest, b"/" + record.name),
            *(b"./" + record.name, record.name.replace(b"/", b"\\"), record.name + b"\x00", record.name + b"/", rest),
            *(b"other/" + rest, root + b"/" + chance.choice(_NAMES), chance.choice(archive.records).name),
            *(record.name.replace(b"k", b"\xe2\x84\xaa"), root + b"/../" + record.name, b"", record.name + b" "),
            *(b"\xff" + record.name, b"r" * chance.choice((400, 507, 512, 600)) + b"/" + rest),
        )
    )


def _local_name(archive: Archive, chance: random.Random) -> None:
    record = chance.choice(archive.records)
    record.local_name = chance.choice(
        (record.name.upper(), chance.choice(archive.records).name, b"", record.name + b"x", record.name[:-1] + b"y")
    )


def _roots(archive: Archive, chance: random.Random) -> None:
    """Another name of the folder, for all records."""
    new = chance.choice((b"a", b"data", b"archive", b"\xc3\xa9", b"x" * 500, b"a.b", b"A", b"a b", b"code", b".data"))
    for record in archive.records:
        record.name = new + b"/" + record.name.partition(b"/")[2]


def _more(archive: Archive, chance: random.Random) -> None:
    """A record more: a twin of one, or one with a name that means something."""
    record = chance.choice(archive.records)
    way = chance.randrange(6)
    if way == 0:
        new = replace(record)
    elif way == 1:
        new = replace(record, data=chance.choice((record.data[::-1], chance.choice(archive.records).data)))
    elif way == 2:
        new = replace(record, name=record.name.swapcase())
    elif way == 3:
        new = replace(record, data=mutated_pickle(record.data, chance))
    else:
        content = chance.choice((b"", b"3\n", b"2", b"99\n", b"little", b"big", b"64", b"1", b"\x80\x02N."))
        new = Record(_root(archive) + b"/" + chance.choice(_NAMES), content)
    archive.records.insert(chance.randrange(len(archive.records) + 1), new)


def _fewer(archive: Archive, chance: random.Random) -> None:
    if len(archive.records) > 1:
        del archive.records[chance.randrange(len(archive.records))]


def _order(archive: Archive, chance: random.Random) -> None:
    chance.shuffle(archive.records)


_FIELDS = ("version", "flags", "method", "time", "crc", "packed", "size", "attr", "offset", "disk")


def _twin_fields(archive: Archive, chance: random.Random) -> None:
    """A field that is another number in the local header, in the directory, or in both."""
    record = chance.choice(archive.records)
    name = chance.choice(_FIELDS)
    near = {"size": len(record.data), "packed": len(record.data), "crc": zlib.crc32(record.data)}.get(name, 0)
    others = (near + 1, max(near - 1, 0), near ^ 0x10, near + 64)
    value = chance.choice((*others, 0, 1, 8, 0x800, 0xFFFFFFFF, 0xFFFF, *WIDE[:6]))
    if name == "flags":
        value = 1 << chance.randrange(16)
    if name == "method":
        value = chance.choice((0, 8, 9, 12, 14, 93, 99))
    which = chance.randrange(3)
    if which != 0:
        record.local[name] = value
    if which != 1:
        record.central[name] = value


def _share(archive: Archive, chance: random.Random) -> None:
    """Two records of the directory with one payload."""
    one, other = chance.choice(archive.records), chance.choice(archive.records)
    offset = _offset(archive, other)
    one.central |= {"offset": offset, "size": len(other.data), "packed": len(other.data), "crc": zlib.crc32(other.data)}
    one.there = chance.random() < 0.5


def _offset(archive: Archive, wanted: Record) -> int:
    before = archive.records[: archive.records.index(wanted)]
    whole = write(replace(archive, records=before, comment=b"", suffix=b"", between=b"", zip64=False))
    listed = sum(46 + len(r.name) + len(r.extra) + len(r.comment) for r in before if r.listed)
    return len(whole) - 22 - listed


def _deflate(archive: Archive, chance: random.Random) -> None:
    record = chance.choice(archive.records)
    record.method = 0 if record.method == 8 else 8
    way = chance.randrange(6)
    if way == 0:
        record.packed = _deflated(record.data) + b"\x00\x01"
    elif way == 1:
        record.packed = _deflated(record.data)[:-1]
    elif way == 2:
        record.packed = record.data


def _zip64(archive: Archive, chance: random.Random) -> None:
    """Extra fields of zip64: right, wrong, twice, in one place only."""
    record = chance.choice(archive.records)
    size = len(record.data)
    packed = size if record.method == 0 else len(_deflated(record.data))
    offset = _offset(archive, record)
    right = (size, packed, offset)
    wrong = ((packed, size, offset), (size + 1, packed, offset), (size, packed, offset + 1), (offset,))
    values = chance.choice((right, right[:2], right[:1], *wrong))
    one = struct.pack("<HH", 1, 8 * len(values)) + struct.pack(f"<{len(values)}Q", *values)
    sizes, offsets = (0, size, 1 << 40), (0, offset, _offset(archive, archive.records[0]))
    other = struct.pack("<HHQQQ", 1, 24, chance.choice(sizes), packed, chance.choice(offsets))
    both = (one + other, other + one, one + one)
    extra = chance.choice((one, one, other, *both, one[:-1], b"XX\x04\x00abcd" + one, one + b"\x00"))
    which = chance.randrange(4)
    if which != 0:
        record.extra = extra
        for name in ("size", "packed", "offset")[: chance.choice((0, 1, 2, 3, 3))]:
            record.central[name] = 0xFFFFFFFF
    if which == 0 or which == 3:
        record.local_extra = extra
        record.local |= {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF} if chance.random() < 0.5 else {}


def _extras(archive: Archive, chance: random.Random) -> None:
    record = chance.choice(archive.records)
    name = record.name
    unicode_path = struct.pack("<HHBI", 0x7075, 5 + len(name) + 1, 1, zlib.crc32(name)) + name + b"x"
    odd = (b"\x01\x00", b"\x01\x00\xff\xff", b"UT\x05\x00\x03abcd", b"x" * 3, b"FB\x00\x00", b"\x99\x01\x07\x00abcdefg")
    extra = chance.choice((unicode_path, *odd))
    if chance.random() < 0.5:
        record.extra += extra
    else:
        record.local_extra += extra


def _hidden(archive: Archive, chance: random.Random) -> None:
    """In the file and not in the directory, or the other way round; or behind a data descriptor."""
    record = chance.choice(archive.records)
    way = chance.randrange(3)
    if way == 0:
        record.listed = False
    elif way == 1:
        record.there = False
    else:
        record.descriptor = True


def _around(archive: Archive, chance: random.Random) -> None:
    junk = (b"x", b"PK\x05\x06" + bytes(18), b"PK\x03\x04", bytes(100), b"\x80\x02N.", b"x" * 1000)
    _put(archive, chance.choice(junk), chance)


def _second(archive: Archive, chance: random.Random) -> None:
    """Another archive before, behind, or within this one."""
    others = [
        replace(record, data=mutated_pickle(record.data, chance)) if record.name.endswith(b".pkl") else record
        for record in archive.records
    ]
    _put(archive, write(Archive(others)), chance)


def _put(archive: Archive, data: bytes, chance: random.Random) -> None:
    """Put bytes before the records, between them and the directory, behind the archive, or into a comment."""
    way = chance.randrange(6)
    if way <= 1:
        archive.prefix, archive.relative = data, way == 1
    elif way == 5:
        chance.choice(archive.records).comment = data[:60000]
    else:
        setattr(archive, ("between", "comment", "suffix")[way - 2], data[:60000])


def _ends(archive: Archive, chance: random.Random) -> None:
    """Fields of the end records."""
    count = sum(record.listed for record in archive.records)
    archive.zip64 = chance.random() < 0.6
    if chance.random() < 0.5:
        name = chance.choice(("disk", "here", "count", "length", "begin", "comment"))
        archive.end[name] = chance.choice((count - 1, count + 1, 0, 1, 0xFFFF, 0xFFFFFFFF))
    if archive.zip64:
        if chance.random() < 0.5:
            archive.end |= {"here": 0xFFFF, "count": 0xFFFF, "length": 0xFFFFFFFF, "begin": 0xFFFFFFFF}
        if chance.random() < 0.6:
            name = chance.choice(("record", "version", "disk", "count", "length", "begin"))
            archive.end64[name] = chance.choice((count - 1, count + 1, 0, 1, 45, 1 << 40, (1 << 64) - 1))


def _aligned(archive: Archive, chance: random.Random) -> None:
    archive.align = chance.choice((0, 1, 4, 16, 64, 4096))


_WAYS: tuple[Callable[[Archive, random.Random], None], ...] = (
    *(_names, _names, _local_name, _roots, _more, _more, _more, _fewer, _order, _twin_fields, _twin_fields),
    *(_twin_fields, _share, _deflate, _zip64, _zip64, _extras, _hidden, _around, _around, _second, _ends, _aligned),
)

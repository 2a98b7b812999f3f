"""Mutations of the tar of torch before 0.1.10: members, links, names, checksums, order; and what is in them."""

from __future__ import annotations

import io
import random
import struct
import tarfile
from dataclasses import dataclass, replace

from .opcodes import WIDE, bytewise
from .pickles import mutated_pickle
from .terms import pickles_in


@dataclass
class Member:
    name: str
    data: bytes
    type: bytes = tarfile.REGTYPE
    link: str = ""
    form: int = tarfile.USTAR_FORMAT
    pax: tuple[tuple[str, str], ...] = ()


def read(data: bytes) -> list[Member] | None:
    """The members that tarfile sees; None where it sees none."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            found = []
            for info in archive:
                stream = archive.extractfile(info) if info.isreg() else None
                found.append(Member(info.name, stream.read() if stream else b"", info.type, info.linkname))
            return found or None
    except Exception:
        # A tar that an earlier mutation broke; tarfile has many ways to say so.
        return None


def write(members: list[Member]) -> bytes:
    out = io.BytesIO()
    for member in members:
        info = tarfile.TarInfo(member.name)
        info.type, info.linkname, info.pax_headers = member.type, member.link, dict(member.pax)
        info.size = len(member.data) if member.type not in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE) else 0
        out.write(info.tobuf(member.form, "utf-8", "surrogateescape"))
        if info.size:
            out.write(member.data + bytes(-len(member.data) % 512))
    return out.getvalue() + bytes(1024)


def mutated_tar(data: bytes, chance: random.Random) -> bytes:
    """A tar after one mutation."""
    way = chance.random()
    members = read(data) if way > 0.08 else None
    if members is None:
        return bytewise(data, chance)
    if way < 0.5:
        return _inside(data, members, chance)
    if way < 0.6:
        return _header(data, chance)
    _members(members, chance)
    try:
        return write(members)
    except (ValueError, UnicodeError):
        return bytewise(data, chance)


def _inside(data: bytes, members: list[Member], chance: random.Random) -> bytes:
    """What a member holds: its pickles, the numbers between them, more or fewer bytes."""
    there = [at for at, member in enumerate(members) if member.data]
    if not there:
        return bytewise(data, chance)
    at = chance.choice(there)
    names = ("pickle", "tensors", "storages", "sys_info")
    wanted = chance.choices(names, (5, 3, 3, 1))[0]
    at = next((i for i in there if members[i].name == wanted), at)
    old = members[at].data
    way = chance.randrange(10)
    if members[at].name in ("tensors", "storages") and way < 8:
        new = _stream(old, chance)
    elif way < 9:
        new = mutated_pickle(old, chance)
    else:
        new = bytewise(old, chance)
    members[at] = replace(members[at], data=new)
    return write(members)


def _stream(old: bytes, chance: random.Random) -> bytes:
    """A count, and pickles with numbers between them: one of the pickles, or one of the numbers."""
    ranges: list[tuple[int, int]] = []
    for at in range(len(old)):
        # The count first; later ones are found by their PROTO, whatever is between.
        if old[at : at + 2] == b"\x80\x02" and (not ranges or at >= ranges[-1][1]):
            ranges += [(at + begin, at + end) for begin, end in pickles_in(old[at:], 1)]
    if ranges and chance.random() < 0.5:
        begin, end = chance.choice(ranges)
        return old[:begin] + mutated_pickle(old[begin:end], chance) + old[end:]
    gaps = [end for _, end in ranges[1:]] or [0]
    at = chance.choice(gaps) + chance.choice((0, 0, 4, 8, 12, 16, 20, 24))
    width, form = chance.choice(((4, "<i"), (8, "<q")))
    near = int.from_bytes(old[at : at + width], "little") & 0xFFFF
    value = chance.choice((0, 1, 2, 3, -1, near + 1, near - 1, near * 2, 1 << 20, 0x7FFFFFFF))
    return old[:at] + struct.pack(form, value) + old[at + width :]


#: Where the fields of a header begin, and how wide they are; and types of members.
_FIELDS = (
    *((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (148, 8), (156, 1), (157, 100), (257, 6)),
    *((263, 2), (329, 8), (345, 155)),
)
_TYPES = (b"L", b"x", b"g", b"S", b"K")


def _header(data: bytes, chance: random.Random) -> bytes:
    """A field of one header, with a checksum that is right all the same, or not."""
    headers = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    if not headers:
        return bytewise(data, chance)
    at = chance.choice(headers)
    block = bytearray(data[at : at + 512])
    begin, width = chance.choice(_FIELDS)
    odd = (b"", b"pickle", b"storages", b"tensors", b"1\x00", b"5", b"-1", b" 12 ", b"0x10", b"8", *_TYPES)
    filled = (b"0" * width, b"7" * width, b" " * width, b"\x80" + bytes(width - 1), b"\xff" * width)
    value = chance.choice((*odd, *filled, b"%o" % chance.choice(WIDE)))
    block[begin : begin + width] = value[:width].ljust(width, b"\x00")
    if begin != 148 and chance.random() < 0.8:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\x00 " % sum(block)
    return data[:at] + bytes(block) + data[at + 512 :]


_NAMES = (
    *("pickle", "storages", "tensors", "sys_info", "./pickle", "pickle/", "a/pickle", "PICKLE", "/pickle"),
    *("../pickle", "\u00e9", "x" * 120),
)


def _members(members: list[Member], chance: random.Random) -> None:
    at = chance.randrange(len(members))
    member = members[at]
    way = chance.randrange(13)
    if way == 0:
        members.append(member)
    elif way == 1:
        members.insert(chance.randrange(len(members) + 1), replace(member, data=mutated_pickle(member.data, chance)))
    elif way == 2:
        members.append(replace(member, data=mutated_pickle(member.data, chance)))
    elif way == 3:
        del members[at]
        if not members:
            members.append(member)
    elif way == 4:
        chance.shuffle(members)
    elif way == 5:
        members[at] = replace(member, name=chance.choice(_NAMES))
    elif way == 6:
        kind = chance.choice((tarfile.LNKTYPE, tarfile.SYMTYPE))
        target = chance.choice((member.name + "_", "e", members[0].name, "../x"))
        members[at] = replace(member, name=target)
        members.append(Member(member.name, b"", kind, target))
    elif way == 7:
        target = chance.choice(members).name
        members.append(Member(member.name, b"", chance.choice((tarfile.LNKTYPE, tarfile.SYMTYPE)), target))
    elif way == 8:
        members[at:at] = [Member(f"x{number}", b"") for number in range(chance.choice((1, 12, 16, 40)))]
    elif way == 9:
        types = (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, tarfile.AREGTYPE, b"S", b"Z", b"D")
        members[at] = replace(member, type=chance.choice(types))
    elif way == 10:
        size = ("size", str(len(member.data) // 2))
        pax = chance.choice((("path", chance.choice(_NAMES)), size, ("linkpath", "pickle"), ("mtime", "x")))
        members[at] = replace(member, form=tarfile.PAX_FORMAT, pax=(pax,))
    elif way == 11:
        name = chance.choice((member.name, "d/" * 60 + member.name))
        members[at] = replace(member, form=tarfile.GNU_FORMAT, name=name)
    else:
        members.insert(at, Member(chance.choice(_NAMES), chance.choice((b"", b"x", member.data))))

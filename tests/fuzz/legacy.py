"""Mutations of the legacy format of torch.save: magic, version, sys_info, object, keys, storages."""

from __future__ import annotations

import random
import struct

from .opcodes import bytewise
from .pickles import mutated_pickle
from .terms import const, dumps, pickles_in

_MAGIC = 0x1950A86A20F9469CFC6C


def mutated_legacy(data: bytes, chance: random.Random) -> bytes:
    """A legacy file after one mutation: of one of its five pickles, of a size, of the order of its parts."""
    ranges = pickles_in(data, 5)
    way = chance.random()
    if way < 0.07 or len(ranges) < 5:
        return bytewise(data, chance)
    parts = [data[begin:end] for begin, end in ranges]
    rest = data[ranges[-1][1] :]
    if way < 0.78:
        number = chance.choices(range(5), (1, 1, 1, 20, 6))[0]
        parts[number] = mutated_pickle(parts[number], chance)
    elif way < 0.82:
        parts = _parts(parts, chance)
    else:
        rest = _storages(rest, chance)
    return b"".join(parts) + rest


def _parts(parts: list[bytes], chance: random.Random) -> list[bytes]:
    way = chance.randrange(5)
    at = chance.randrange(5)
    if way == 0:
        parts.insert(at, parts[at])
    elif way == 1:
        del parts[at]
    elif way == 2:
        parts[at] = dumps(const(chance.choice((_MAGIC, 1001, 1000, 1002, 0, -1))), chance.choice((0, 1, 2, 4)))
    elif way == 3:
        parts[0] = dumps(const(chance.choice((_MAGIC, _MAGIC + 1))), chance.choice((0, 1, 2, 3, 4, 5)))
    else:
        parts[at] = parts[at] + chance.choice((b"N.", b"\x00", b"x"))
    return parts


def _storages(rest: bytes, chance: random.Random) -> bytes:
    """The size in front of a storage, the bytes behind it, their end."""
    at = 0
    heads = []
    while at + 8 <= len(rest) and len(heads) < 100:
        heads.append(at)
        count = struct.unpack_from("<q", rest, at)[0]
        if not 0 <= count < len(rest):
            break
        # Of four bytes each, mostly: what comes out wrong is a mutation as good as any.
        at += 8 + 4 * count
    if not heads:
        return bytewise(rest, chance)
    at = chance.choice(heads)
    count = struct.unpack_from("<q", rest, at)[0]
    way = chance.randrange(8)
    if way < 3:
        new = chance.choice((count + 1, count - 1, 0, -1, count * 2, count // 2, 1 << 40, (1 << 63) - 1))
        return rest[:at] + struct.pack("<q", max(min(new, (1 << 63) - 1), -(1 << 63))) + rest[at + 8 :]
    if way == 3:
        return rest[: chance.randrange(len(rest) + 1)]
    if way == 4:
        return rest + chance.choice((b"x", bytes(8), rest[-20:]))
    if way == 5:
        return rest[:at] + rest[at : at + 12] + rest[at:]
    if way == 6:
        return rest[:at] + rest[at + 8 :]
    return bytewise(rest, chance)

"""Mutations of safetensors: the header's JSON, its text, lengths, offsets, duplicates, the data behind it."""

from __future__ import annotations

import json
import random
from typing import Any

from .opcodes import WIDE, bytewise

_DTYPES = (
    *("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64", "F8_E4M3"),
    *("F8_E5M2", "F8_E8M0", "C64", "F4", "F6_E2M3", "f32", "X", "", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
)
_NUMBERS = (-1, 0, 1, 2, 3, 7, 8, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
_VALUES: tuple[Any, ...] = (None, True, False, "", "x", 1.0, 1.5, -0.0, [], {}, [1], "1", 1e20)


def mutated_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A file after one mutation; the length in front of the header is right again, mostly."""
    if chance.random() < 0.06:
        return bytewise(data, chance)
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    way = chance.random()
    if way < 0.1:
        rest = chance.choice((rest + b"\x00", rest[:-1], b"", rest + rest, bytewise(rest, chance)))
    elif way < 0.25:
        header = mutated_json(header, chance)
    else:
        try:
            table = json.loads(header, object_pairs_hook=_Pairs)
            header = _written(_changed(table, chance, len(rest)), chance)
        except (ValueError, RecursionError, TypeError, AttributeError):
            header = mutated_json(header, chance)
    length = len(header)
    if chance.random() < 0.06:
        length = chance.choice((length + 1, max(length - 1, 0), 0, 2, *WIDE, len(header) + len(rest)))
    return (length & (1 << 64) - 1).to_bytes(8, "little") + header + rest


class _Pairs(list):  # type: ignore[type-arg]
    """An object of JSON as pairs: keys may come twice."""


def _written(value: Any, chance: random.Random) -> bytes:
    text = _text(value).encode("utf-8", "surrogatepass")
    return text + b" " * (-len(text) % 8 if chance.random() < 0.8 else chance.choice((0, 1, 3)))


def _text(value: Any) -> str:
    if isinstance(value, _Pairs):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{_text(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _tensor(dtype: str, shape: Any, offsets: Any) -> _Pairs:
    return _Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", offsets)])


def _changed(table: Any, chance: random.Random, size: int) -> Any:
    pairs = [at for at, (key, _) in enumerate(table) if key != "__metadata__"]
    if not pairs:
        table.append(("new", _tensor("F32", [0], [0, 0])))
        return table
    at = chance.choice(pairs)
    key, info = table[at]
    facts = dict(info)
    way = chance.randrange(20)
    if way == 0:
        table.append((key, info))
    elif way == 1:
        table.append((key, table[chance.choice(pairs)][1]))
    elif way == 2:
        odd = ("", "__metadata__", "a\x00b", "\u00e9", "x" * 300, "a.b", 'a"b', "\ud800", "\x7f", "\u202e", "0")
        new = chance.choice((*odd, key.upper()))
        table[at] = (new, info)
    elif way == 3:
        facts["dtype"] = chance.choice(_DTYPES)
    elif way in (4, 5):
        shape = list(facts.get("shape", []))
        place = chance.randrange(len(shape) + 1)
        how = chance.randrange(4)
        if how == 0:
            shape.insert(place, chance.choice((0, 1, 2, 2**32, 2**63, -1, 1.0, True, None)))
        elif how == 1:
            shape = shape[:place]
        elif shape:
            shape[place % len(shape)] = chance.choice((*_NUMBERS, *_VALUES))
        facts["shape"] = shape
    elif way in (6, 7, 8):
        begin, end = (*facts.get("data_offsets", [0, 0]), 0, 0)[:2]
        near = ([begin + 1, end], [begin, end + 1], [begin, end - 1], [begin, size], [end, begin], [0, end - begin])
        odd = ([begin], [begin, begin], [begin, end, end], [-1, end], [begin + 4, end + 4], [float(begin), float(end)])
        numbers = [chance.choice(_NUMBERS), chance.choice(_NUMBERS)]
        facts["data_offsets"] = chance.choice((*near, *odd, numbers, chance.choice(_VALUES)))
    elif way == 9:
        texts = ([("format", "pt")], [("format", "tf")], [("a", "b"), ("a", "c")], [("a", 1)], [])
        odd_texts = ([("\u202e", "\x1b[2J")], [("format", None)])
        metadata = chance.choice((*map(_Pairs, (*texts, *odd_texts)), None, [], "x"))
        table.insert(chance.choice((0, len(table))), ("__metadata__", metadata))
    elif way == 10:
        chance.shuffle(table)
    elif way == 11:
        del table[at]
    elif way == 12:
        shape, places = chance.choice(([0], [], [1], [0, 2**40])), chance.choice(([size] * 2, [0, 0], [size, size + 4]))
        table.append(("new", _tensor(chance.choice(_DTYPES), shape, places)))
    elif way == 13:
        more = (("extra", 1), ("dtype", "F32"), ("dtype", "I32"), ("data_offsets", [0, 4]))
        info.append(chance.choice((*more, ("shape", facts.get("shape")))))
    elif way == 14:
        del info[chance.randrange(len(info))]
    elif way == 15:
        info.reverse()
    elif way == 16:
        table[at] = (key, chance.choice((*_VALUES, [_Pairs()])))
    elif way == 17:
        other = chance.choice(pairs)
        table[at], table[other] = (key, table[other][1]), (table[other][0], info)
    elif way == 18:
        table.append(("alias", info))
    else:
        name = chance.choice(("dtype", "shape", "data_offsets"))
        facts[name] = chance.choice((*_VALUES, *_NUMBERS))
    if way in (3, 4, 5, 6, 7, 8, 19):
        table[at] = (key, _Pairs(facts.items()))
    return table


def mutated_json(data: bytes, chance: random.Random) -> bytes:
    """JSON as text: numbers, strings, punctuation, what strict readers refuse."""
    if not data:
        return b"{}"
    at = chance.randrange(len(data))
    bits = (
        *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u0000", b"\\ud800", b"\\u00e9", b"NaN", b"Infinity", b"-"),
        *(b"0", b"1e3", b".5", b"//", b"\xff", b"\xef\xbb\xbf", b" ", b"\x00", b"\n", b"\t", b"null", b"true"),
        *(b"1_0", b"01", b"'", b"\\x41", b"\\/"),
    )
    way = chance.randrange(7)
    if way == 0:
        return data[:at] + chance.choice(bits) + data[at:]
    if way == 1:
        return data[:at] + chance.choice(bits) + data[at + 1 :]
    if way == 2:
        return chance.choice((b" ", b"\n", b"\xef\xbb\xbf", b"[", b"\x00")) + data
    if way == 3:
        return data + chance.choice((b" ", b"\x00", b"x", b"\n", b"{}"))
    if way == 4:
        return data[:at] + data[at + 1 :]
    if way == 5:
        depth = chance.choice((10, 127, 128, 200, 5000))
        return data[:1] + b'"deep":' + b"[" * depth + b"]" * depth + b"," + data[1:]
    return bytewise(data, chance)

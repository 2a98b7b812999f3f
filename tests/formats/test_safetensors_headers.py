"""Headers that a mutation could make: what the library refuses is refused, and what both take is the same."""

from __future__ import annotations

import struct
from random import Random

import pytest
from safetensors import SafetensorError, deserialize

from ckptool.base.errors import CkptoolError
from ckptool.files.sources import BytesSource
from ckptool.formats.safetensors import reader as safetensors_reader

BITS = {"F32": 32, "F16": 16, "I64": 64, "U8": 8, "BOOL": 8, "C64": 64, "F4": 4, "F6_E2M3": 6, "f32": 8, "X": 8, "": 8}
NUMBERS = (
    *(
        "0",
        "1",
        "4",
        "8",
        "-0",
        "-1",
        "1.0",
        "4e0",
        "00",
        "01",
        "1e400",
        "18446744073709551615",
        "18446744073709551616",
    ),
    *(
        "18446744073709551615",
        "4294967296",
        "9223372036854775808",
        "true",
        "null",
        '"4"',
        "NaN",
        "-Infinity",
        " 4",
        "[]",
        "{}",
    ),
)
VALUES = (*NUMBERS, '"x"', r'"\ud800"', '{"a":1,"a":2}', "[[[]]]", "[" * 130 + "]" * 130, r'"\u00"')
NAMES = ("a", "A", "", "é", r"\u0061", r"\ud800", r"\ud83d\ude00", "__metadata__", r"a\u0000", r"\/", r"\x", "a\tb")
BLANKS = ("", " ", "\n", "\t", "\r", "\u00a0", "\x0b", "\ufeff")
TEXTS = (
    "{}",
    '{"format":"pt"}',
    "null",
    '{"a":1}',
    '{"a":null}',
    '{"a":"b","a":"c"}',
    "[]",
    r'{"a":"\ud800"}',
    '{"":""}',
)


def header(random: Random) -> tuple[bytes, int]:
    """A header with a few flaws, and the bytes that its tensors take."""

    def rarely(share: float = 0.03) -> bool:
        return random.random() < share

    def blank() -> str:
        return random.choice(BLANKS) if rarely() else ""

    entries, at = [], 0
    for number in range(random.randint(0, 4)):
        dtype = random.choice(list(BITS)[: None if rarely(0.1) else 4])
        shape = [random.choice([0, 1, 2, 3]) for _ in range(random.randint(0, 2))]
        if rarely():
            shape = [random.choice([0, 1 << 32, 1 << 63, 1 << 64]) for _ in range(random.randint(1, 3))]
        size = BITS[dtype]
        for part in shape:
            size *= part
        begin, end = at, at + (size // 8 if size < 1000 else random.randint(0, 8))
        begin, end = (value + (random.choice([-1, 1, 4]) if rarely() else 0) for value in (begin, end))
        at = max(at, end)
        sizes = ",".join(random.choice(NUMBERS) if rarely() else str(part) for part in shape)
        bounds = ("," + blank()).join(random.choice(NUMBERS) if rarely() else str(bound) for bound in (begin, end))
        fields = [f'"dtype":"{dtype}"', f'"shape":[{sizes}]', f'"data_offsets":{blank()}[{bounds}]']
        fields += [f'"{random.choice(["extra", "dtype", "shape"])}":{random.choice(VALUES)}'] if rarely() else []
        if rarely():
            fields.pop(random.randrange(len(fields)))
        random.shuffle(fields)
        name = random.choice(NAMES) if rarely(0.15) else f"t{number}"
        value = random.choice(VALUES) if rarely() else "{" + ("," + blank()).join(fields) + "}"
        entries.append(f'{blank()}"{name}"{blank()}:{blank()}{value}')
    if rarely(0.3):
        entries.insert(random.randint(0, len(entries)), f'"__metadata__":{random.choice(TEXTS)}')
    text = blank() + "{" + ",".join(entries) + ("," if rarely() else "") + "}" + " " * random.choice([0, 0, 3])
    text += random.choice(["\n", "\0", "x", "{}", "//"]) if rarely() else ""
    raw = bytearray(text.encode())
    if rarely(0.05):
        raw[random.randrange(len(raw))] = random.randrange(256)
    return bytes(raw), max(at, 0)


def made(random: Random) -> bytes:
    raw, size = header(random)
    length = len(raw) + (random.choice([-1, 1, 8, 1 << 32, 1 << 63]) if random.random() < 0.03 else 0)
    body = bytes(random.randrange(2) for _ in range(size + (random.choice([-1, 1]) if random.random() < 0.05 else 0)))
    return struct.pack("<Q", length) + raw + body


@pytest.mark.parametrize("seed", range(3))
def test_it_reads_what_the_library_reads(seed: int) -> None:
    """Stricter it is on purpose alone: where another reader reads otherwise, or torch has no such dtype."""
    random, same, refused = Random(seed), 0, 0
    for _ in range(700):
        data = made(random)
        try:
            found = safetensors_reader.read(BytesSource(data, "x.safetensors")).entries.values()
            ours = {entry.name: (entry.shape, data[entry.begin : entry.end]) for entry in found}
        except CkptoolError as error:
            ours, why = None, error.what
        try:
            theirs = {name: (tuple(item["shape"]), bytes(item["data"])) for name, item in deserialize(data)}
        except (SafetensorError, MemoryError):
            assert ours is None, data
            refused += 1
            continue
        if ours is None:
            assert any(words in why for words in ("twice", "must be an object", "torch")), (why, data)
            continue
        assert ours == theirs, data
        same += 1
    assert same > 100 and refused > 100

"""Headers that a mutation could make: what the library refuses is refused, and what both take is the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError, deserialize, safe_open

import ckptool
from ckptool.base.errors import CkptoolError, MalformedError
from ckptool.base.limits import LIMITS
from ckptool.files.sources import BytesSource
from ckptool.formats.safetensors import header as safetensors_header
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


# -- what the library refuses is refused -----------------------------------------------------------------------
# -0 where a whole number must be; and in fields that it does not know numbers out of range, lone surrogates, and
# nesting that is too deep for it.


def file_of(path: Path, header: str, data: bytes = b"abcd") -> Path:
    raw = header.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(offsets: str = "[0,4]", shape: str = "[1]", more: str = "") -> str:
    return f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}{more}}}}}'


REFUSED = {
    "minus-zero-offset": entry("[-0,4]"),
    "minus-zero-shape": entry("[0,0]", "[-0]"),
    "float-out-of-range": entry(more=',"x":1e999'),
    "integer-out-of-range": entry(more=',"x":' + "9" * 400),
    "deep-number": entry(more=',"x":[{"y":[-1e400]}]'),
    "half-character": entry(more=',"x":"\\ud800"'),
    "half-character-in-a-name": entry(more=',"x":[{"\\udc00":1}]'),
    "too-deep": entry(more=',"x":' + "[" * 126 + "]" * 126),
    "too-deep-objects": entry(more=',"x":' + '{"x":' * 126 + "1" + "}" * 126),
}
TAKEN = {
    "unknown-field": entry(more=',"x":{"y":[1,-0,"-0",1e308,null]}'),
    "as-deep-as-may-be": entry(more=',"x":' + "[" * 125 + "]" * 125),
    "whole-character": entry(more=',"x":"\\ud83d\\ude00"'),
    "minus-zero-in-a-name": entry().replace('"a"', '"layer-0"'),
}


@pytest.mark.parametrize("header", REFUSED.values(), ids=REFUSED)
def test_headers_that_the_library_refuses_are_refused(header: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.safetensors", header, b"" if '"data_offsets":[0,0]' in header else b"abcd")
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(MalformedError):
        ckptool.open(path)


@pytest.mark.parametrize("header", TAKEN.values(), ids=TAKEN)
def test_headers_that_the_library_takes_are_taken(header: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.safetensors", header)
    with safe_open(path, "pt") as opened, ckptool.open(path) as checkpoint:
        assert [item.key for item in checkpoint.survey.tensors] == list(opened.keys())


# -- shapes of many dimensions ---------------------------------------------------------------------------------
# The product of 100,000 large numbers takes a minute. The library takes a shape of a million ones; here it is
# refused, as every way to use it is slow.


@pytest.mark.parametrize("size", [(1 << 64) - 1, 1, 0])
def test_a_shape_of_many_dimensions_is_refused_before_it_is_multiplied(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[int] = []
    real = safetensors_header.prod
    monkeypatch.setattr(safetensors_header, "prod", lambda shape: (factors.append(len(shape)), real(shape))[1])

    def write(count: int) -> Path:
        entry = {"dtype": "U8", "shape": [size] * count, "data_offsets": [0, size]}
        header = json.dumps({"a": entry}).encode()
        path = tmp_path / "m.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(min(size, 1)))
        return path

    with pytest.raises(MalformedError, match="dimensions"):
        ckptool.open(write(100_000))
    assert max(factors, default=0) <= LIMITS.dimensions
    if size < 2:
        assert ckptool.keys(write(LIMITS.dimensions))["tensors"]


@pytest.mark.parametrize("spaces", [{}, {"separators": (",", ":")}], ids=["spaces", "compact"])
@pytest.mark.parametrize("metadata", [None, {}, {"a": "\u00e9"}, ...], ids=["null", "empty", "a text", "none"])
def test_an_edit_keeps_the_order_of_tensors_and_writes_the_header_of_the_library(
    metadata: Any, spaces: dict[str, Any], tmp_path: Path
) -> None:
    """Other writers list tensors out of byte order, do not pad, and put the metadata last."""
    header: dict[str, Any] = {}
    for place, key in zip((2, 0, 1), ("b.weight", "a.\u00fc", "c")):
        header[key] = {"data_offsets": [place * 8, place * 8 + 8], "dtype": "F32", "shape": [2]}
    text = json.dumps(header if metadata is ... else {**header, "__metadata__": metadata}, **spaces).encode()
    path, there, back = (tmp_path / f"{step}.safetensors" for step in ("in", "there", "back"))
    path.write_bytes(len(text).to_bytes(8, "little") + text + struct.pack("<6f", *range(6)))
    ckptool.save(ckptool.add_module(path), there)
    ckptool.save(ckptool.strip_module(there), back)
    for written, prefix in ((there, "module."), (back, "")):
        loaded = {key: value.tolist() for key, value in safetensors.torch.load_file(written).items()}
        assert loaded == {f"{prefix}{key}": value.tolist() for key, value in safetensors.torch.load_file(path).items()}
        assert written.read_bytes()[-24:] == path.read_bytes()[-24:]
        assert int.from_bytes(written.read_bytes()[:8], "little") % 8 == 0

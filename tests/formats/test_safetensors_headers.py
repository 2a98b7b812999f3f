"""Headers that a mutation could make: what the library refuses is refused, and what both take is the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError, safe_open

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.base.limits import LIMITS
from ckptool.formats.safetensors import header as safetensors_header

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

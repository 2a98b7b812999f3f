"""Headers that were valid here and that safetensors itself does not read: -0 where a whole number must be, and fields
that it does not know with numbers out of range, half characters, or lists in each other that are too deep for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

import ckptool
from ckptool.base.errors import MalformedError


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
def test_refused(header: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.safetensors", header, b"" if '"data_offsets":[0,0]' in header else b"abcd")
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(MalformedError):
        ckptool.open(path)


@pytest.mark.parametrize("header", TAKEN.values(), ids=TAKEN)
def test_taken(header: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.safetensors", header)
    with safe_open(path, "pt") as opened, ckptool.open(path) as checkpoint:
        assert [item.key for item in checkpoint.survey.tensors] == list(opened.keys())

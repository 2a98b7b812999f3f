"""A header of 2 MB with one shape of 100,000 large numbers took a minute: their product was made before it was judged.
The library takes a shape of a million ones; here it is refused, as every way to use it is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.base.limits import LIMITS
from ckptool.formats.safetensors import header as safetensors_header


@pytest.mark.parametrize("size", [(1 << 64) - 1, 1, 0])
def test_many_dimensions(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

"""The elements of a view: the same bytes as torch's, whatever its strides, in whatever pieces they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from zip_copies import deflated

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.checkpoint.tensors import is_contiguous
from ckptool.values import elements as elements_module
from ckptool.values.elements import elements, filling, in_storage_order, storage_reader, tensor_size

DTYPES = (torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128)


@pytest.fixture(params=[(64, 128), (16, 1), (1 << 20, 1 << 20)], ids=["small", "tiny", "whole"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Pieces and windows of a few bytes: what else would take tensors of hundreds of megabytes."""
    chunk, window = request.param
    monkeypatch.setattr(elements_module, "_CHUNK", chunk)
    monkeypatch.setattr(elements_module, "_WINDOW", window)
    yield chunk


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    stride = [draw(st.integers(0, 12)) for _ in shape]
    offset = draw(st.integers(0, 5))
    size = offset + sum(max(length - 1, 0) * step for length, step in zip(shape, stride)) + 1
    dtype = draw(st.sampled_from(DTYPES))
    return torch.arange(size).to(dtype).as_strided(shape, stride, offset)


@pytest.mark.parametrize("compressed", [False, True])
@settings(max_examples=examples(150))
@given(tensor=views(), step=st.integers(1, 300))
def test_memory_is_filled_with_the_elements(compressed: bool, tensor: torch.Tensor, step: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save(tensor, path)
    with ckptool.open(deflated(path, path.with_suffix(".zip")) if compressed else path) as checkpoint:
        (entry,) = checkpoint.survey.tensors
        reader = storage_reader(checkpoint, entry.tensor.storage)
        reader.cache.checksums = expected = {}
        whole = b"".join(elements(reader, entry.tensor))
        reader.cache.checksums = found = {}
        fill = filling(reader, entry.tensor)
        assert (fill is None) == (compressed or not tensor.is_contiguous() or not tensor.numel())
        if fill is not None:
            memory, got = memoryview(bytearray(step)), bytearray()
            while size := fill(memory):
                got += memory[:size]
            assert got == whole and fill(memory) == 0 and found == expected


@pytest.mark.parametrize("compressed", [False, True])
@settings(max_examples=examples(150))
@given(tensor=views())
def test_elements_are_those_of_torch(compressed: bool, tensor: torch.Tensor, pieces: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save(tensor, path)
    width = tensor.element_size()
    with ckptool.open(deflated(path, path.with_suffix(".zip")) if compressed else path) as checkpoint:
        (entry,) = checkpoint.survey.tensors
        found = list(elements(storage_reader(checkpoint, entry.tensor.storage), entry.tensor))
        assert b"".join(found) == tensor.contiguous().numpy().tobytes()
        assert all(piece and len(piece) % width == 0 for piece in found)
        if not is_contiguous(entry.tensor):
            assert all(len(piece) <= max(pieces, width) for piece in found)
        assert tensor_size(entry.tensor) == tensor.numel() * width
        stored, times = in_storage_order(entry.tensor)
        assert 0 in tensor.shape or [*stored.stride] == sorted(stored.stride, reverse=True)
        again = b"".join(elements(storage_reader(checkpoint, stored.storage), stored)) * times
    one, other = (
        torch.frombuffer(bytearray(data), dtype=tensor.dtype) if data else None for data in (again, b"".join(found))
    )
    if one is None or other is None:
        assert one is other
    elif not tensor.is_complex():
        assert torch.equal(one.sort().values, other.sort().values)
    else:
        assert math.isclose(one.real.sum(), other.real.sum())


@pytest.mark.parametrize(
    "change", [{"stride": (-1, 1)}, {"stride": (1,)}, {"offset": -1}, {"dtype": "float9"}, {"offset": 1}]
)
def test_what_cannot_be_is_malformed(change: dict[str, object], tmp_path: Path) -> None:
    torch.save(torch.zeros(2, 3), tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        tensor = checkpoint.survey.tensors[0].tensor._replace(**change)  # type: ignore[arg-type]
        assert filling(storage_reader(checkpoint, tensor.storage), tensor) is None
        with pytest.raises(MalformedError):
            list(elements(storage_reader(checkpoint, tensor.storage), tensor))

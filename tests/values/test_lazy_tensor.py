"""Tensors that are read on demand, against torch: shape and dtype, slices, NumPy, DLPack, and what is read for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import FIXTURES, LOADABLE, Fixture, by_name, corpus_files, examples, needs_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from process_probe import probe
from random_tensors import any_tensor

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.files.sources import FileSource

pytestmark = pytest.mark.filterwarnings("ignore")

#: Torch reads another pickle of it than the one that counts.
WHOLE = [item for item in LOADABLE if item.path.name != "zip_two_pickles.pth"]
every = pytest.mark.parametrize("item", WHOLE, ids=by_name)
relaxed = settings(max_examples=examples(200))


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor's elements in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    numbers: list[int] = torch.empty(len(plain), dtype=plain.dtype).copy_(plain).view(torch.uint8).tolist()
    return numbers


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (mine.dtype, mine.shape, bits(mine)) == (theirs.dtype, theirs.shape, bits(theirs))


def is_plain(tensor: torch.Tensor) -> bool:
    special = tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta"
    return tensor.layout is torch.strided and not special and "bits" not in str(tensor.dtype)


def compare(path: Path) -> None:
    """Every tensor that keys lead to is what torch loads, by DLPack, by ``as_tensor`` and by NumPy."""
    loaded = oracle.load(path)
    with ckptool.open(path) as checkpoint:
        for entry in checkpoint.survey.tensors:
            here = oracle.at(loaded, entry.path)
            if here is None or not is_plain(here) or here.numel() > 1 << 20:
                continue
            value = ckptool.get(checkpoint, entry.path or ".")
            assert (value.dtype, value.shape, value.ndim) == (str(here.dtype)[6:], here.shape, here.dim())
            assert (value.numel, value.nbytes) == (here.numel(), here.nbytes)
            assert same(torch.from_dlpack(value), here) and same(torch.as_tensor(value), here)
            try:
                theirs = here.detach().resolve_conj().resolve_neg().numpy()
            except TypeError:
                with pytest.raises((TypeError, RefusedError), match=r"torch\.as_tensor|NumPy does not have"):
                    np.asarray(value)
                continue
            mine = np.asarray(value)
            assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
            assert (mine.flags.writeable and mine.flags.owndata is False) or mine.size == 0


@every
def test_every_tensor_of_every_fixture(item: Fixture) -> None:
    compare(item.path)


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_every_tensor_of_every_real_checkpoint(path: Path) -> None:
    oracle.skip_unless_read(path)
    compare(path)


@relaxed
@given(tensor=any_tensor())
def test_any_tensor(tensor: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"a": tensor, "tied": tensor, "part": tensor[..., :1] if tensor.dim() else tensor}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        for key, part in oracle.load(tmp_path / "a.pth").items():
            value = checkpoint[key]
            assert same(torch.as_tensor(value), part)
            assert value.nbytes == part.nbytes
            assert (
                (len(value), [row.shape for row in value]) == (len(part), [row.shape for row in part])
                if (part.dim())
                else (value.shape == ())
            )


@st.composite
def an_index(draw: st.DrawFn) -> Any:
    number = st.integers(-5, 5)
    bound = st.one_of(st.none(), number)
    part = st.one_of(
        number, st.builds(slice, bound, bound, st.one_of(st.none(), st.integers(1, 3))), st.none(), st.just(...)
    )
    return draw(st.one_of(part, st.lists(part, max_size=4).filter(lambda parts: parts.count(...) < 2).map(tuple)))


@relaxed
@given(tensor=any_tensor(), first=an_index(), second=an_index())
def test_any_slice_of_any_tensor(tensor: torch.Tensor, first: Any, second: Any, tmp_path: Path) -> None:
    torch.save({"a": tensor}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        mine: Any = checkpoint["a"]
        theirs = tensor
        for index in (first, second):
            try:
                theirs = theirs[index]
            except IndexError:
                with pytest.raises(IndexError):
                    mine[index]
                return
            mine = mine[index]
            assert mine.shape == theirs.shape
            assert same(torch.as_tensor(mine), theirs)
            if theirs.numel() == 1:
                number = theirs.item()
                assert mine.item() == number or number != number


def test_slices_are_as_in_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(24).reshape(4, 6), "s": torch.tensor(2.5)}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        value = checkpoint["a"]
        assert value[1].tolist() == [6, 7, 8, 9, 10, 11] and value[np.int64(-1), 5].item() == 23
        assert value[1:3, ::2].tolist() == [[6, 8, 10], [12, 14, 16]] and int(value[0, 1]) == 1
        assert [row.tolist() for row in value[:2, :2]] == [[0, 1], [6, 7]]
        assert value[None, ..., 0].shape == (1, 4) and bool(value[0, 1]) and not value[0, 0]
        assert value.path == value[0].path == "a"
        for index in ("a", 1.0, True, [0, 1], torch.tensor([0]), torch.tensor([0, 1])):
            with pytest.raises(TypeError, match="indices are integers"):
                value[index]
        with pytest.raises(IndexError, match="one"):
            value[..., ...]
        with pytest.raises(ValueError, match="positive"):
            value[::-1]
        with pytest.raises(ValueError, match="24 elements"):
            value.item()
        with pytest.raises(TypeError, match="no len"):
            len(checkpoint["s"])


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.arange(1 << 20).reshape(1024, 1024)}, tmp_path / "a.pth")
    read, real = [0], FileSource.read

    def counting(self: FileSource, offset: int, size: int) -> bytes:
        data = real(self, offset, size)
        read[0] += len(data)
        return data

    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        value = checkpoint["a"]
        monkeypatch.setattr(FileSource, "read", counting)
        assert (value.shape, value.dtype, value.device, value.nbytes) == ((1024, 1024), "int64", "cpu", 8 << 20)
        assert repr(value) and repr(checkpoint) and value[5:7].shape == (2, 1024)
        assert read == [0]
        assert np.asarray(value[5:7])[1, 3] == 6 * 1024 + 3
        assert 2 * 1024 * 8 <= read[0] < 2 * 1024 * 8 + 200  # and the header of the record
        assert value[1023, 1000:].numel == 24 and torch.as_tensor(value[1023, 1000:])[0] == 1023 * 1024 + 1000
        assert read[0] < 2 * 1024 * 8 + 24 * 8 + 400


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "complex32", "float4_e2m1fn_x2"])
def test_a_dtype_that_numpy_lacks_names_torch(name: str, tmp_path: Path) -> None:
    tensor = torch.arange(16, dtype=torch.uint8).view(getattr(torch, name))
    torch.save({"a": tensor}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        value = checkpoint["a"]
        with pytest.raises(TypeError, match=rf"NumPy has no {name}: use torch.as_tensor"):
            np.asarray(value)
        assert same(torch.as_tensor(value), tensor) and same(torch.from_dlpack(value), tensor)
        if name != "float4_e2m1fn_x2":
            wide = torch.complex64 if name == "complex32" else torch.float32
            asked = np.asarray(value, dtype=str(wide)[6:])
            assert np.array_equal(asked, tensor.to(wide).numpy(), equal_nan=True)


def test_numpy_is_asked_as_it_asks(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([[1.5, -2.5]])}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        value = checkpoint["a"]
        assert np.array(value, dtype="int64").tolist() == [[1, -2]]
        assert np.from_dlpack(value).tolist() == [[1.5, -2.5]] and np.mean(value) == -0.5
        with pytest.raises(ValueError, match="copy"):
            np.asarray(value, copy=False)
        first, second = np.asarray(value), np.asarray(value)
        first[0, 0] = 7
        assert second[0, 0] == 1.5 and np.asarray(value)[0, 0] == 1.5


@pytest.mark.parametrize(("name", "key"), [("sparse.pt", "coo"), ("quantized.pt", "qint8"), ("nested.pt", "ragged")])
def test_what_is_no_array_is_refused(name: str, key: str) -> None:
    with ckptool.open(FIXTURES / name) as checkpoint:
        value = checkpoint[key]
        for ask in (np.asarray, torch.as_tensor, torch.from_dlpack):
            with pytest.raises((RefusedError, TypeError)):
                ask(value)
        with pytest.raises(TypeError, match="has no slices"):
            value[0]


def test_a_tensor_on_meta_has_a_shape_and_no_values() -> None:
    with ckptool.open(FIXTURES / "meta.pt") as checkpoint:
        value = checkpoint["shape_only"]
        assert value.shape and value.device == "meta" and value.nbytes
        with pytest.raises(RefusedError, match="no values"):
            torch.as_tensor(value)


def test_shape_and_numbers_need_neither_torch_nor_numpy() -> None:
    found = probe(
        "import ckptool\n"
        f"value = ckptool.open({str(FIXTURES / 'bare.pth')!r})['conv1.weight']\n"
        "print(value.shape, value.dtype, value.nbytes, value[0, 0].tolist() == value.tolist()[0][0])\n"
    )
    assert (found.out, found.wanted) == ("(4, 3, 1, 1) float32 48 True\n", [])

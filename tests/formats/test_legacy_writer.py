"""The legacy format as an output, against ``torch.save(_use_new_zipfile_serialization=False)`` and ``torch.load``."""

from __future__ import annotations

import io
import re
from pathlib import Path

import oracle
import pytest
import torch
from conftest import CORPUS, FIXTURES, LOADABLE, Fixture, by_name, corpus_files, needs_corpus

import ckptool
from ckptool.base.errors import MalformedError, RefusedError, TargetError


def legacy(path: Path, out: Path, allow: tuple[str, ...] = ()) -> Path:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "legacy", allow_loss=allow), out, force=True)
    return out


def back(path: Path, out: Path) -> Path:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), out, force=True)
    return out


def plain_keys(data: bytes) -> bytes:
    """The file with its keys, 14 or 15 digits, called by their order."""
    seen: dict[bytes, bytes] = {}
    return re.sub(rb"X.\0\0\0(\d{8,15})(?=q|r)", lambda m: seen.setdefault(m[1], b"%d" % len(seen)), data, flags=re.S)


@pytest.mark.parametrize("item", LOADABLE, ids=by_name)
def test_what_torch_loads_is_the_same(item: Fixture, tmp_path: Path) -> None:
    out = tmp_path / "legacy.pth"
    try:
        legacy(item.path, out)
    except RefusedError as error:
        if "ambiguous" not in str(error):
            data = item.path.read_bytes()
            assert "tensors of some dtypes" in str(error)
            assert b"UntypedStorage" in data or b"_rebuild_nested_tensor" in data
        return
    except MalformedError as error:
        assert item.path.name == "zip_wrong_crc.pth" and "checksum" in str(error)
        return
    assert not oracle.difference(oracle.load(item.path), oracle.load(out))
    assert ckptool.inspect(out)["format"] == "torch-legacy"
    back(out, tmp_path / "zip.pth")
    # Views of storages, which only the legacy format has, become plain tensors in a zip.
    if item.path.name != "py2_views.pth":
        assert not oracle.difference(oracle.load(item.path), oracle.load(tmp_path / "zip.pth"))
        again = legacy(tmp_path / "zip.pth", tmp_path / "again.pth")
        assert not oracle.difference(oracle.load(out), oracle.load(again))
    assert ckptool.validate(out)["valid"] or not ckptool.validate(item.path)["valid"]


def test_as_torch_writes_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    shared = torch.randn(6, 4)
    value = {
        "epoch": 3,
        "state_dict": torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict(),
        "views": [shared, shared.t(), shared[2:], shared],
        "long": torch.arange(5),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    expected, new = io.BytesIO(), tmp_path / "new.pth"
    torch.save(value, expected, _use_new_zipfile_serialization=False)
    torch.save(value, new)
    out = legacy(new, tmp_path / "out.pth").read_bytes()
    # Torch writes storages in the order of their addresses: those may differ, all before them is the same.
    before = [data[: data.rindex(b"\x80\x02]q")] for data in (out, expected.getvalue())]
    assert len(out) == len(expected.getvalue())
    assert plain_keys(before[0]) == plain_keys(before[1])
    one = tmp_path / "one.pth"
    torch.save({"w": shared}, one)
    buffer = io.BytesIO()
    torch.save({"w": shared}, buffer, _use_new_zipfile_serialization=False)
    assert plain_keys(legacy(one, tmp_path / "x.pth").read_bytes()) == plain_keys(buffer.getvalue())


def test_what_cannot_be_loaded_is_left_out_when_that_is_allowed(tmp_path: Path) -> None:
    value = {"w": torch.ones(3), "q": torch.ones(3).to(torch.float8_e4m3fn), "u": torch.ones(2, dtype=torch.uint16)}
    torch.save(value, tmp_path / "in.pth")
    with pytest.raises(RefusedError, match=r"that torch loads cannot hold tensors of some dtypes: q and u") as caught:
        legacy(tmp_path / "in.pth", tmp_path / "out.pth")
    assert caught.value.next.startswith("torch's usual format (.pth) holds them")
    found = oracle.load(legacy(tmp_path / "in.pth", tmp_path / "out.pth", ("dtypes",)))
    assert not oracle.difference(found, {"w": value["w"]})


def test_texts_have_no_place(tmp_path: Path) -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint, pytest.raises(TargetError, match="no header for metadata"):
        ckptool.convert(checkpoint, "legacy", metadata={"a": "b"})


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_real_ones(path: Path, tmp_path: Path) -> None:
    try:
        expected = oracle.load(path)
    except Exception:
        pytest.skip("torch does not load it")
    if not path.read_bytes().startswith(b"PK"):
        pytest.skip("no zip")
    assert not oracle.difference(expected, oracle.load(legacy(path, tmp_path / "out.pth"))), CORPUS

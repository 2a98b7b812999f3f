"""Conversions of odd tensors: values that came out others, folders that nobody could load, losses that nobody told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.formats.safetensors.writer import losses


def converted(value: Any, target: str, folder: Path, *, legacy: bool = False, **how: Any) -> Path:
    source, out = folder / "in.pth", folder / "out"
    torch.save(value, source, _use_new_zipfile_serialization=not legacy)
    with ckptool.open(source) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, target, **how), out)
    return out


def loaded_dcp(folder: Path) -> Any:
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return found


def noted() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    return tensor


def odd() -> dict[str, torch.Tensor]:
    """Tensors that are more than their elements."""
    return {
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "noted": noted(),
    }


def test_shards_of_torch_keep_what_tensors_are(tmp_path: Path) -> None:
    out = converted(
        {**odd(), "tied": (both := odd())["sparse"], "again": both["sparse"]}, "torch", tmp_path, max_shard_size=1
    )
    back = tmp_path / "back.pth"
    with ckptool.open(out) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), back)
    whole = {}
    for file in sorted(out.glob("*.bin")):
        whole |= oracle.load(file)
    again = oracle.load(back)
    assert oracle.difference({name: whole[name] for name in again}, again) == ""
    before = oracle.load(tmp_path / "in.pth")
    assert oracle.difference(before, {name: again[name] for name in before}) == ""


def test_objects_of_legacy_files_in_a_dcp_folder(tmp_path: Path) -> None:
    value = {"state": (torch.arange(4.0)[1:], torch.ones(2)), "note": noted()}
    assert oracle.difference(value, loaded_dcp(converted(value, "dcp", tmp_path, legacy=True))) == ""


@pytest.mark.parametrize(
    "value",
    [[noted()], [[noted()], torch.ones(1)], [{}, noted()], [{"b": {}}, torch.ones(1), {}]],
    ids=["one", "inner", "empty", "holes"],
)
def test_lists_of_what_dcp_holds_as_objects(value: list[Any], tmp_path: Path) -> None:
    assert oracle.difference({"x": value}, loaded_dcp(converted({"x": value}, "dcp", tmp_path))) == ""


@pytest.mark.parametrize("other", [lambda t: (t,), lambda t: torch.sparse_coo_tensor([[0, 1]], t), lambda t: t.conj()])
def test_what_objects_of_a_dcp_folder_share_is_told(other: Any, tmp_path: Path) -> None:
    tensor = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RefusedError, match="share memory: a and b"):
        converted({"a": tensor, "b": other(tensor)}, "dcp", tmp_path)


def kinds(value: dict[str, Any], folder: Path, **how: Any) -> dict[str, tuple[str, ...]]:
    torch.save(value, folder / "in.pth")
    with ckptool.open(folder / "in.pth") as checkpoint:
        return {loss.kind: loss.where for loss in losses(checkpoint, checkpoint.state_dicts[0], **how)}


def test_safetensors_lack_what_tensors_are(tmp_path: Path) -> None:
    value = odd() | {"int4": torch.empty(2, dtype=torch.complex128), "buffer": torch.nn.Buffer(torch.ones(1))}
    found = kinds(value, tmp_path)
    assert found["layouts"] == ("sparse", "nested", "meta")
    assert found["dtypes"] == ("quantized", "int4")
    assert found["attributes"] == ("noted", "buffer")
    assert found["requires-grad"] == ("parameter",)


def test_a_parameter_with_attributes_loses_them_in_safetensors(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = 1
    assert kinds({"a": parameter}, tmp_path) == {"requires-grad": ("a",), "attributes": ("a",)}


def test_views_that_are_copied_are_told(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    value = {"a": whole, "b": whole, "c": whole[1:], "d": torch.ones(1)}
    assert kinds(value, tmp_path, tied="keep-first") == {"sharing": ("a", "c")}
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        changes = ckptool.convert(checkpoint, "safetensors", tied="keep-first").changes
    assert "without that tensors share memory: a and c" in changes[-1].notes


def test_a_float8_tensor_and_its_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).to(torch.float8_e5m2)
    for first, second in ((tensor, tensor.view(torch.uint8)), (tensor.view(torch.uint8), tensor)):
        value = {"a.weight": first, "b.weight": second}
        out = converted(value, "safetensors", tmp_path, tied="clone")
        found = load_file(out)
        assert (
            oracle.difference({name: tensor.clone() for name, tensor in value.items()}, {n: found[n] for n in value})
            == ""
        )
        report = ckptool.diff(tmp_path / "in.pth", out, ignore=["container", "sharing", "order"])
        assert report["same"]
        out.unlink()


def test_what_the_legacy_format_lacks_goes_out_of_folders_too(tmp_path: Path) -> None:
    out = converted({"a": torch.ones(2, dtype=torch.uint16), "b": torch.ones(2)}, "torch", tmp_path, max_shard_size=1)
    old = tmp_path / "old.pth"
    with ckptool.open(out) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "legacy", allow=["dtypes"]), old)
    assert oracle.difference({"b": torch.ones(2)}, oracle.load(old)) == ""


def test_diff_knows_values_that_were_turned_round(tmp_path: Path) -> None:
    value = {"a.conj": odd()["conj"], "b.neg": odd()["neg"], "c.plain": torch.ones(2)}
    out = converted(value, "safetensors", tmp_path, allow=["strides"])
    report = ckptool.diff(tmp_path / "in.pth", out)
    assert report["values"] == []
    assert {(item["path"], item["what"]) for item in report["changed"]} == {
        ('["a.conj"]', "conj"),
        ('["b.neg"]', "neg"),
        ('["b.neg"]', "stride"),
    }
    torch.save({**value, "a.conj": odd()["conj"].resolve_conj() + 1}, tmp_path / "other.pth")
    assert [item["path"] for item in ckptool.diff(tmp_path / "other.pth", out)["values"]] == ['["a.conj"]']


def test_what_leads_to_the_state_dict_is_not_lost(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(1)}
    assert kinds({"runs": [{"model": state}]}, tmp_path) == {}
    assert kinds({"runs": [{"model": state, "epoch": 1}], "x": 2}, tmp_path) == {"entries": ("x", "runs[0].epoch")}


@pytest.mark.parametrize("shards", [0, 1])
def test_names_that_no_header_holds(shards: int, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="half a surrogate pair"):
        converted({"a\ud800": torch.ones(1), "b": torch.ones(1)}, "safetensors", tmp_path, max_shard_size=shards)
    assert not (tmp_path / "out").exists()


def test_a_header_that_nobody_would_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.formats.safetensors.writer.MAX_HEADER", 1000)
    with pytest.raises(RefusedError, match="reads none of more than 1,000"):
        converted({"a" * 1000: torch.ones(1)}, "safetensors", tmp_path)

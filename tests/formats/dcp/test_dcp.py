"""DCP folders: read as torch reads them, from any number of ranks, and written so that torch reads them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES, LOADABLE, Fixture, by_name, examples
from dcp_ranks import ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.checkpoint.tensors import contiguous_strides
from ckptool.files.sources import BytesSource
from ckptool.formats.pieces import Chunk, ChunkedSource, RowSource, misfit

FOLDER = FIXTURES / "dcp4"


def by_torch(folder: Path, tmp_path: Path) -> Any:
    """The object that torch makes of a folder."""
    out = tmp_path / f"{folder.name}.by_torch.pt"
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


def by_us(path: Path, tmp_path: Path) -> Any:
    """The object in the torch file that we make of a folder."""
    out = tmp_path / f"{path.name}.by_us.pt"
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), out)
    assert ckptool.validate(out)["status"] == "valid"
    return torch.load(out, weights_only=False)


def to_dcp(path: Path, out: Path, *allow: str) -> Path:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "dcp", allow_loss=allow), out)
    return out


def shown(value: Any) -> str:
    """Names and values, whatever the order of the names: a program that loads has keys of its own kind and order."""
    return repr(_shown(value))


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(key), _shown(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_shown(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else []
    return value


# -- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcp4", "real/megatron_core", "real/lightning_sharded"])
def test_it_is_what_torch_makes_of_it(name: str, tmp_path: Path) -> None:
    assert oracle.difference(by_us(FIXTURES / name, tmp_path), by_torch(FIXTURES / name, tmp_path)) == ""


def test_another_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    ranks("save", str(folder), "3")
    ours = by_us(folder, tmp_path)
    assert oracle.difference(ours, by_torch(folder, tmp_path)) == ""
    assert shown(ours) == shown(by_torch(FOLDER, tmp_path))
    assert ckptool.validate(folder)["status"] == "valid"


def test_ranks_with_metadata_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    ranks("alone", str(folder), "2")
    assert not (folder / ".metadata").exists()
    with ckptool.open(folder) as checkpoint:
        assert "2 ranks, each with its own metadata" in checkpoint.container.writer
    assert shown(by_us(folder, tmp_path)) == shown(by_torch(FOLDER, tmp_path))


# -- pieces -----------------------------------------------------------------------------------------------------


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and boxes that fill it: each dimension is cut somewhere."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        at = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in pairwise(at)]
    return shape, boxes


@settings(max_examples=examples(200))
@given(cut(), st.sampled_from((1, 2, 4)), st.data())
def test_pieces_read_as_the_whole(made: tuple[tuple[int, ...], list[Any]], width: int, data: st.DataObject) -> None:
    shape, boxes = made
    whole = torch.randint(0, 255, (*shape, width), dtype=torch.uint8)
    chunks = []
    for offsets, sizes in boxes:
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].contiguous()
        chunks.append(Chunk((offsets, sizes), BytesSource(b"xx" + part.numpy().tobytes()), 2))
    source = ChunkedSource(shape, width, chunks, "t")
    wanted = whole.numpy().tobytes()
    assert source.read(0, source.size) == wanted
    begin = data.draw(st.integers(0, len(wanted)))
    size = data.draw(st.integers(0, len(wanted)))
    assert source.read(begin, size) == wanted[begin : begin + size]
    assert misfit(shape, boxes) is None
    assert misfit(shape, boxes[1:]) == (boxes[0], [])
    assert misfit(shape, [*boxes, boxes[0]]) == (boxes[0], [boxes[0]] * 2)


@settings(max_examples=examples(100))
@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 5)] * 3), st.sampled_from((1, 2, 4, 8)))
def test_a_turned_piece_reads_row_by_row(order: list[int], shape: tuple[int, int, int], width: int) -> None:
    base = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    turned = base.permute(order)
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    data = base.to(dtype).numpy().tobytes()
    source = RowSource(BytesSource(data), 0, tuple(turned.shape), turned.stride(), width, "t")
    source._most = 2
    wanted = turned.to(dtype).contiguous().numpy().tobytes()
    assert source.read(0, source.size) == wanted
    assert source.read(3, 11) == wanted[3:14]
    assert contiguous_strides(shape) == base.stride()


# -- writing ----------------------------------------------------------------------------------------------------


def test_from_four_ranks_to_two(tmp_path: Path) -> None:
    one = tmp_path / "one.pt"
    with ckptool.open(FOLDER) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), one)
    folder = to_dcp(one, tmp_path / "again")
    ranks("load", str(folder), "2", str(tmp_path / "loaded.pt"))
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=False)
    assert shown(loaded) == shown(by_torch(FOLDER, tmp_path))


#: What differs by itself when torch flattens and nests it: keys that are no texts, empty dicts, objects of these kinds.
_SOME = ("wrapped.pth", "lightning.ckpt", "ddp4_training.pth", "dtypes_typed.pt", "big_endian.pth")
_SOME += ("legacy_wrapped.pth", "protocol5.pth", "zip_deflated.pth", "shared_views.pth", "tied.pth", "cuda0.pth")
_SOME += ("fsdp_wrapped.pth", "conj_neg.pt", "parameter.pt", "rng_states.pt", "gan.pth")


@pytest.mark.parametrize("item", [item for item in LOADABLE if item.path.name in _SOME], ids=by_name)
def test_what_is_written_is_what_torch_would_write(item: Fixture, tmp_path: Path) -> None:
    ours = to_dcp(item.path, tmp_path / "ours", "all")
    assert ckptool.validate(ours)["status"] == "valid"
    loaded = by_torch(ours, tmp_path)
    assert oracle.difference(loaded, by_us(ours, tmp_path)) == ""
    source = torch.load(item.path, map_location="cpu", weights_only=False)
    plain = tmp_path / "plain.pt"
    torch.save(source, plain)
    torch_save_to_dcp(plain, tmp_path / "theirs")
    theirs = by_torch(tmp_path / "theirs", tmp_path)
    assert shown(loaded) == shown(theirs)


def test_an_edit_of_a_folder_gives_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "edited"
    with ckptool.open(FOLDER) as checkpoint:
        ckptool.save(ckptool.drop(checkpoint, ["optimizer"]), out)
    wanted = by_torch(FOLDER, tmp_path)
    del wanted["optimizer"]
    assert oracle.difference(by_torch(out, tmp_path), wanted) == ""


def test_what_one_rank_had_is_no_whole_tensor(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"only one rank's part.*: \[\"layers\.0\.weight\"\]"):
        to_dcp(FIXTURES / "dtensor.pt", tmp_path / "out")


def test_keys_that_are_no_texts_are_a_loss(tmp_path: Path) -> None:
    torch.save({"state": {0: torch.ones(2)}, "none": {}}, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match=r"keys that are not strings: state\[0\] and none"):
        to_dcp(tmp_path / "x.pt", tmp_path / "out")
    out = to_dcp(tmp_path / "x.pt", tmp_path / "out", "containers")
    assert list(by_torch(out, tmp_path)) == ["state"]


def test_entries_under_keys_without_a_name_are_left_out_on_demand(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), (1, 2): torch.zeros(3), "inner": {b"k": 1, "kept": torch.ones(1), frozenset(): 2}}
    torch.save(state, tmp_path / "in.pth")
    with pytest.raises(RefusedError, match="keys that are tuples") as caught:
        to_dcp(tmp_path / "in.pth", tmp_path / "out")
    assert "allow" not in str(caught.value.next)  # a tensor would be left out
    torch.save({**state, (1, 2): 3}, tmp_path / "plain.pth")
    with pytest.raises(RefusedError, match="keys that are tuples") as caught:
        to_dcp(tmp_path / "plain.pth", tmp_path / "out")
    assert "allow_loss='keys'" in caught.value.next
    out = to_dcp(tmp_path / "in.pth", tmp_path / "out", "keys")
    assert oracle.difference(by_torch(out, tmp_path), {"w": torch.ones(2), "inner": {"kept": torch.ones(1)}}) == ""


def test_conjugate_and_negative_tensors_have_the_values_of_dcp(tmp_path: Path) -> None:
    """DCP saves tensors with their lazy flags; to load one resolves them."""
    numbers = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6 + 0j]])
    state = {
        "conj": numbers.conj(),
        "turned": numbers.t().conj(),
        "neg": torch._neg_view(torch.tensor([1.0, -2.0, 0.0])),
        "both": torch._neg_view(numbers.conj()),
    }
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    wanted = {name: torch.empty_like(tensor).resolve_conj().resolve_neg() for name, tensor in state.items()}
    dcp.load(wanted, checkpoint_id=tmp_path / "in", no_dist=True)
    with ckptool.open(tmp_path / "in") as checkpoint:
        for name, tensor in wanted.items():
            assert ckptool.get(checkpoint, name).tolist() == tensor.tolist()
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    assert ckptool.validate(tmp_path / "in")["status"] == "valid"


# -- A model at the root of a checkpoint, beside the state of its optimizer and other entries, is its state dict.


MODELS = {
    "dcp_beside": {"embed.weight", "layers.0.wq.weight", "layers.0.norm_weight"},
    "dcp_flat": {"embed.weight", "layers.0.wq.weight", "layers.0.norm_weight"},
    "real/megatron_core": {"decoder.w", "decoder.b"},
}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(name: str, tmp_path: Path) -> Path:
    """The same object in a file of torch.save, as torch makes it of the folder."""
    out = tmp_path / "saved.pth"
    dcp_to_torch_save(FIXTURES / name, out)
    return out


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def keys(path: Path) -> set[str]:
    with ckptool.open(path) as checkpoint:
        (state_dict,) = checkpoint.state_dicts
        assert state_dict.path == ""
        return {entry.key for entry in checkpoint.survey.tensors_in([""])}


def test_the_model_is_the_state_dict(name: str, saved: Path) -> None:
    assert keys(FIXTURES / name) == keys(saved) == MODELS[name]


def test_it_becomes_safetensors_and_the_rest_is_named(name: str, saved: Path, tmp_path: Path) -> None:
    whole = load(saved)
    out = tmp_path / "out.safetensors"
    for path in (FIXTURES / name, saved):
        with ckptool.open(path) as checkpoint:
            with pytest.raises(RefusedError, match="entries outside the state dict"):
                ckptool.convert(checkpoint, "safetensors", strict=True)
            beside = ckptool.convert(checkpoint, "safetensors", allow_loss=["entries"]).changes[-1].notes[0]
            assert next(key for key in whole if key not in MODELS[name]) in beside
            ckptool.save(ckptool.convert(checkpoint, "safetensors", key="."), out, force=True)
        made = load_file(out)
        assert made.keys() == MODELS[name]
        assert all(torch.equal(made[key], whole[key]) for key in made)


def test_an_edit_of_keys_leaves_the_rest_alone(name: str, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "renamed.pth"
    with ckptool.open(saved) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), out)
    expected = {f"module.{key}" if key in MODELS[name] else key: value for key, value in load(saved).items()}
    assert oracle.difference(load(out), expected) == ""
    assert ckptool.diff(saved, out, ignore=["prefix"])["same"]


def test_a_model_below_the_root_comes_first(tmp_path: Path) -> None:
    """A tensor with a dot in its name beside a state dict is a value like any other."""
    path = tmp_path / "nested.pth"
    torch.save({"model": {"a.weight": torch.ones(2)}, "best.weight": torch.ones(1), "epoch": 3, "note": ""}, path)
    with ckptool.open(path) as checkpoint:
        assert [item.path for item in checkpoint.state_dicts] == ["model"]


@pytest.mark.parametrize(
    "value",
    [
        {"optimizer.state.exp_avg.w.weight": torch.ones(2), "epoch": 1, "rng/shard_0_1": [1]},
        {"loss.best": torch.ones(()), "epoch": 3, "note": "x", "lr": 0.1},
        {"w/a.weight": torch.ones(2), "w.weight": torch.ones(2), "a": 1, "b": 2, "c": 3},
        {1: torch.ones(2), "w.weight": torch.ones(2), "a": 1, "b": 2, "c": 3},
    ],
    ids=["no model", "no parameter", "paths", "numbers"],
)
def test_other_roots_are_none(tmp_path: Path, value: object) -> None:
    path = tmp_path / "other.pth"
    torch.save(value, path)
    with ckptool.open(path) as checkpoint:
        assert checkpoint.state_dicts == []

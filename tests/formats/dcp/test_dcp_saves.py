"""DCP folders as programs save them: state dicts of models and optimizers, several writers, older versions of torch,
extensions, and saves that were not finished. torch is the oracle."""

from __future__ import annotations

import io
import pickle
import shlex
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import say
from conftest import FIXTURES
from dcp_folders import archive
from dcp_ranks import ranks
from safetensors.torch import load_file
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata as dcp_types
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_bytesio
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import ckptool
from ckptool.base.errors import MalformedError, RefusedError
from ckptool.formats.dcp import folder as dcp_folder

FOLDER = FIXTURES / "dcp4"


def same_as_torch(folder: Path, tmp_path: Path) -> Any:
    """What we make of a folder is what torch makes of it; that."""
    dcp_to_torch_save(folder, tmp_path / "theirs.pt")
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "ours.pt")
    ours, theirs = (torch.load(tmp_path / name, weights_only=False) for name in ("ours.pt", "theirs.pt"))
    assert oracle.difference(ours, theirs) == ""
    assert ckptool.validate(folder)["status"] == "valid"
    return ours


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


class App(Stateful):
    """What the tutorials save."""

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*trained())
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nobody loads it")


def training() -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained())
    return {"model": model, "optimizer": optimizer, "step": 7}


def plain() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "a.b": torch.arange(3), "c": {"d": 1}}


def objects() -> dict[str, Any]:
    weight = torch.arange(4.0)
    return {"pair": (weight, weight), "set": {"inner": {1, 2}}, "none": [None, [1, (2, "x")]], "od": OrderedDict()}


def several() -> dict[str, Any]:
    return {f"w{n}": torch.full((n + 1, 2), float(n)) for n in range(9)} | {"epoch": 3}


#: What is saved, and the options of ``dcp.save``.
SAVES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Path], dict[str, Any]]]] = {
    "a model and its optimizer": (training, lambda path: {}),
    "a stateful object": (lambda: {"app": App()}, lambda path: {}),
    "objects": (objects, lambda path: {}),
    "not flattened": (plain, lambda path: {"planner": DefaultSavePlanner(False, False)}),
    "files of threads": (several, lambda path: {"storage_writer": dcp.FileSystemWriter(path, thread_count=3)}),
    "a file for each item": (several, lambda path: {"storage_writer": dcp.FileSystemWriter(path, False)}),
}


@pytest.mark.parametrize("name", SAVES)
def test_what_torch_saves(name: str, tmp_path: Path) -> None:
    make, options = SAVES[name]
    dcp.save(make(), checkpoint_id=tmp_path / "in", **options(tmp_path / "in"))
    same_as_torch(tmp_path / "in", tmp_path)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8, torch.uint16]
DTYPES += [torch.bool, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_and_empty_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    one = torch.tensor([1.0, 0.0, 2.0]).to(dtype)
    state = {"scalar": one[0].clone(), "row": one, "empty": one[:0].clone(), "plane": one[:0].reshape(0, 3).clone()}
    dcp.save(state, checkpoint_id=tmp_path / "in")
    assert oracle.difference(same_as_torch(tmp_path / "in", tmp_path), state) == ""


# -- older versions -----------------------------------------------------------------------------------------------


def older(folder: Path, out: Path, change: Callable[[Any], None]) -> Path:
    shutil.copytree(folder, out)
    metadata = pickle.loads((out / ".metadata").read_bytes())
    change(metadata)
    (out / ".metadata").write_bytes(pickle.dumps(metadata))
    return out


def without_fields(metadata: Any) -> None:
    """Of torch 2.1: no storage_meta, no version, and no transforms."""
    for name in ("storage_meta", "version"):
        metadata.__dict__.pop(name, None)
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)


def with_properties_of_sharded_tensors(metadata: Any) -> None:
    """Before torch 2.3."""
    without_fields(metadata)
    for value in metadata.state_dict_metadata.values():
        if hasattr(value, "properties"):
            value.properties = sharded.TensorProperties(dtype=value.properties.dtype)


@pytest.mark.parametrize("change", [without_fields, with_properties_of_sharded_tensors])
def test_metadata_of_older_versions(change: Callable[[Any], None], tmp_path: Path) -> None:
    folder = older(FOLDER, tmp_path / "in", change)
    same_as_torch(folder, tmp_path)
    with ckptool.open(folder) as checkpoint:
        assert list(checkpoint.container.problems) == []


def test_metadata_of_torch_1_13(tmp_path: Path) -> None:
    """Its package has another name; torch knows it no more in the pickle of an object."""
    folder = older(FOLDER, tmp_path / "in", with_properties_of_sharded_tensors)
    data = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), protocol=2)
    data = data.replace(b"torch.distributed.checkpoint.", b"torch.distributed._shard.checkpoint.")
    (folder / ".metadata").write_bytes(data)
    with ckptool.open(folder) as checkpoint, ckptool.open(FOLDER) as wanted:
        assert list(checkpoint.container.problems) == []
        assert [entry.path for entry in checkpoint.survey.tensors] == [entry.path for entry in wanted.survey.tensors]
    assert ckptool.diff(folder, FOLDER)["same"]


class Named:
    """A member of an enumeration as Python 3.11.0 pickles it; or something else that getattr gives."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def test_members_of_an_enumeration_by_name(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    good = Named(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    folder = older(FOLDER, tmp_path / "in", lambda metadata: setattr(metadata, "extra", good))
    with ckptool.open(folder) as checkpoint:
        assert list(checkpoint.container.problems) == []
    for number, bad in enumerate((Named(_MEM_FORMAT_ENCODING, "__class__"), Named(torch.Size, "__class__"))):
        folder = older(FOLDER, tmp_path / str(number), lambda metadata, bad=bad: setattr(metadata, "extra", bad))
        with pytest.raises(MalformedError, match=r"builtins\.getattr"):
            ckptool.open(folder)


# -- not finished -------------------------------------------------------------------------------------------------


def test_a_rank_without_its_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    ranks("alone", str(folder), "2")
    (folder / "__1.metadata").unlink()
    with ckptool.open(folder) as checkpoint:
        messages = [problem.message for problem in checkpoint.container.problems]
        assert "there is __1_0.distcp, and no __1.metadata to say what is in it" in messages
        with pytest.raises((MalformedError, RefusedError)):
            ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "out.pt")
    assert ckptool.validate(folder)["status"] == "invalid"


# -- ranks with metadata of their own: each may have a piece that others have as well ---------------------------------


def write_alone(folder: Path, states: list[dict[str, torch.Tensor]]) -> Path:
    """A folder in which each rank has whole tensors of its own, as ``use_collectives=False`` saves replicas."""
    folder.mkdir()
    for rank, state in enumerate(states):
        listed, places, data = {}, {}, b""
        for name, value in state.items():
            offset, part = torch.Size([0] * value.dim()), archive(value)
            chunk = dcp_types.ChunkStorageMetadata(offset, value.shape)
            listed[name] = dcp_types.TensorStorageMetadata(
                dcp_types.TensorProperties(dtype=value.dtype), value.shape, [chunk]
            )
            places[dcp_types.MetadataIndex(name, offset, 0)] = _StorageInfo(f"__{rank}_0.distcp", len(data), len(part))
            data += part
        (folder / f"__{rank}_0.distcp").write_bytes(data)
        found = dcp_types.Metadata(listed, {name: (name,) for name in state}, places, version="1.0.0")
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(found))
    return folder


@pytest.mark.parametrize("at_once", [0, 500])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_pieces_that_ranks_have_unlike_are_not_joined(
    rank: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_folder, "_MOST_COPIES", at_once)
    state = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5), "norm.running_mean": torch.randn(5)}
    states = [{name: value.clone() for name, value in state.items()} for _ in range(3)]
    folder = write_alone(tmp_path / "good", states)
    ckptool.save(ckptool.convert(folder, "torch"), tmp_path / "good.pth")
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "good.pth").items())
    states[rank]["norm.running_mean"] += 1  # may be the rank's own
    assert ckptool.validate(write_alone(tmp_path / "own", states))["valid"]
    states[rank]["b.weight"][2] += 1
    folder = write_alone(tmp_path / "bad", states)
    assert not ckptool.validate(folder)["valid"]
    with pytest.raises(MalformedError, match=r"'b.weight' in __[12]_0.distcp.* is not the same as in __0_0.distcp"):
        ckptool.save(ckptool.convert(folder, "torch"), tmp_path / "bad.pth")
    assert not (tmp_path / "bad.pth").exists()


def buffered(value: object) -> io.BytesIO:
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


#: What layers keep as ``_extra_state``: Transformer Engine a buffer or a tensor of bytes, others anything.
EXTRA_STATES: dict[str, Callable[[], Any]] = {
    "a buffer": lambda: buffered({"scale": torch.ones(2)}),
    "an empty buffer": io.BytesIO,
    "bytes": lambda: b"abc",
    "a byte array": lambda: bytearray(b"abc"),
    "nothing": lambda: None,
    "a tensor": lambda: torch.arange(5, dtype=torch.uint8),
    "an empty tensor": lambda: torch.empty(0, dtype=torch.uint8),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "a dict with a tensor": lambda: {"scale": torch.ones(3), "steps": 3},
    "a list with a tensor": lambda: [torch.ones(3)],
}


class ExtraStatesAsBytes(DefaultSavePlanner):
    """A planner that saves every ``_extra_state`` as an object, as Megatron-LM does, even if it is a tensor."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        others = [item for item in plan.items if "_extra_state" not in item.index.fqn]
        extra = [
            _create_write_item_for_bytesio(name, value)
            for name, value in self.state_dict.items()
            if "_extra_state" in name
        ]
        self.plan = SavePlan([*extra, *others])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        name = write_item.index.fqn
        return buffered(self.state_dict[name]) if "_extra_state" in name else super().resolve_data(write_item)


def tensors_in(value: object) -> int:
    """Count the tensors of a loaded checkpoint. What a buffer holds counts as its bytes."""
    if isinstance(value, torch.Tensor):
        return 1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(tensors_in, inner))


@pytest.mark.parametrize("name", ["{}._extra_state", "{}._extra_state/shard_0_1", "a/{}._extra_state/shard_0.0_1.2"])
@pytest.mark.parametrize("kind", EXTRA_STATES)
def test_an_extra_state_is_what_torch_loads(kind: str, name: str, tmp_path: Path) -> None:
    """It is listed as a tensor only if torch loads a tensor there."""
    key = name.format("model.decoder.layers.0.self_attention.core_attention")
    state = {key: EXTRA_STATES[kind](), "model.decoder.layers.0.weight": torch.ones(2, 3)}
    folder = tmp_path / "folder"
    dcp.save(state, checkpoint_id=folder, planner=ExtraStatesAsBytes(flatten_state_dict=False), no_dist=True)
    loaded = same_as_torch(folder, tmp_path)
    assert type(loaded[key]) is type(state[key])
    with ckptool.open(folder) as checkpoint:
        assert len(checkpoint.survey.tensors) == tensors_in(loaded)


# -- What ``inspect`` says of a DCP folder as a save: who wrote it, at which step, whether it is whole, and what to do.


RANKS = FIXTURES / "ranks"
#: Folders with the framework and the step in the first line, and the state dict in their object.
FOLDERS = {
    RANKS / "torchtitan/step-2": ("for torchtitan: 2 ranks", 2, ""),
    RANKS / "dcp_zstd": ("1.0.0: 2 ranks", 2, "model"),
    RANKS / "megatron_dist_tp2": ("for Megatron-LM (2 tensor-parallel ranks): 2 ranks", 2, ""),
    RANKS / "megatron_dist_pp2": ("for Megatron-LM (2 pipeline-parallel ranks): 2 ranks", 2, ""),
    FIXTURES / "real/megatron_core": ("for Megatron-LM: 2 ranks", 3, ""),
    FIXTURES / "real/lightning_sharded": ("for Lightning: 2 ranks", 1, "state_dict"),
}


@pytest.mark.parametrize("name", FOLDERS, ids=lambda path: path.name)
def test_it_says_what_it_is_and_how_to_make_one_file_of_it(name: Path, tmp_path: Path) -> None:
    words, step, key = FOLDERS[name]
    folder = shutil.copytree(name, tmp_path / "run")
    report = ckptool.inspect(folder)
    assert words in report["writer"] and report["writer"].endswith(f", step {step}, all there")
    assert (report["world_size"], report["step"], report["complete"]) == (2, step, True)
    (command,) = (finding["next"] for finding in report["findings"] if finding["code"] == "in-pieces")
    assert say(*shlex.split(command)[1:]).code == 0
    with ckptool.open(folder) as checkpoint:
        weights = {entry.key for entry in checkpoint.survey.tensors_in([key])}
    assert weights and load_file(tmp_path / "run.safetensors").keys() == weights


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({"train_state": {"step": torch.tensor(7, dtype=torch.int32)}}, 7),
        ({"global_step": 8, "step": 1}, 8),
        ({"step": torch.tensor(9)}, 9),
        ({"step": torch.tensor([9])}, None),
        ({"step": torch.tensor(9.0)}, None),
        ({"step": "nine"}, None),
        ({"step": True}, None),
        ({"epoch": 4}, None),
    ],
    ids=str,
)
def test_a_step_is_a_whole_number(state: dict[str, object], step: int | None, tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.zeros(2, 2)}, **state}, checkpoint_id=tmp_path / "run", no_dist=True)
    report = ckptool.inspect(tmp_path / "run")
    assert report.get("step") == step
    assert ("step" in report["writer"]) == (step is not None)
    dcp_to_torch_save(tmp_path / "run", tmp_path / "whole.pth")
    assert torch.load(tmp_path / "whole.pth").keys() == {"model", *state}

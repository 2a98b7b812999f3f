"""Tensors that are spread over ranks, in files of torch.save: what one rank had, against torch itself.

The files in fixtures/files/sharded are what single ranks of four saved (fixtures/generators/make_sharded.py); every
value follows from its name, so that a part can be compared with the whole that it is a part of.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from conftest import FIXTURES, GENERATORS, examples, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptool
from ckptool.base.errors import CkptoolError, RefusedError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.selection import select_entries
from ckptool.checkpoint.sharding import Placement, is_sharded, ranges_of, sharding, sharding_summary
from ckptool.cli import main
from ckptool.edits.sharded import local_parts
from ckptool.pickles.nodes import Global, List, Node
from ckptool.reports.inspection import inspection
from ckptool.reports.keys import keys_report
from ckptool.values.elements import elements, storage_reader

sys.path.append(str(GENERATORS))

from _save import t

SHARDED = FIXTURES / "sharded"
FILES = sorted(SHARDED.glob("*.pth"))
every = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
WHOLE = {
    "0.weight": ("0.weight", (8, 6)),
    "0.bias": ("0.bias", (8,)),
    "2.weight": ("2.weight", (3, 8)),
    "2.bias": ("2.bias", (3,)),
    "line.weight": ("line", (6, 2)),
    "grid.weight": ("grid", (4, 6)),
    "whole.weight": ("whole", (3, 3)),
    "parameter": ("parameter", (4, 2)),
    "rows.weight": ("rows", (10, 4)),
    "columns.weight": ("columns", (3, 8)),
    "blocks.weight": ("blocks", (6, 6)),
    "local.weight": ("local", (8, 3)),
}


def listed(path: Path, **how: Any) -> dict[str, dict[str, Any]]:
    return {item["key"]: item for item in ckptool.keys(path, **how)["tensors"]}


def whole(key: str, dtype: str = "float32") -> torch.Tensor | None:
    """The tensor that all ranks have together."""
    name, shape = WHOLE.get(key.removeprefix("module."), ("", ()))
    return t(name, *shape).to(getattr(torch, dtype)) if name else None


def run(*words: str | Path) -> tuple[int, str]:
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        code = main.run([str(word) for word in words])
    return code, told.getvalue()


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process as one rank of four, without the others; the parameter is its number."""
    dist.init_process_group("fake", rank=request.param, world_size=4, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- which part it is -------------------------------------------------------------------------------------------------


@every
def test_a_part_has_the_values_of_the_whole_at_its_indices(path: Path) -> None:
    with ckptool.open(path) as checkpoint:
        compared = 0
        for entry in checkpoint.survey.tensors:
            found = sharding(checkpoint.survey.reader, entry.ref, entry.tensor)
            full = whole(entry.key, entry.tensor.dtype)
            if found is None or full is None:
                continue
            if path.stem.startswith("fsdp2"):
                full = full.add(full * 2, alpha=-0.1)  # a step was made
            assert entry.tensor.shape == full.shape
            for part in found.parts:
                assert part.ranges is not None
                tensor = checkpoint.survey.reader.tensor(part.ref)
                assert tensor is not None
                data = b"".join(elements(storage_reader(checkpoint, tensor.storage), tensor))
                expected = full
                for dim, ranges in enumerate(part.ranges):
                    index = torch.tensor([at for begin, end in ranges for at in range(begin, end)], dtype=torch.int64)
                    expected = expected.index_select(dim, index)
                assert data == expected.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                compared += 1
        assert compared or path.stem.startswith("fsdp1_local")


def test_what_is_told_of_a_dtensor() -> None:
    item = listed(SHARDED / "fsdp_tp.rank2.pth")["2.weight"]
    assert item["sharding"] == "DTensor"
    assert (item["shape"], item["local_shape"]) == ([3, 8], [1, 4])
    assert item["placements"] == ["Shard(0)", "Shard(1)"]
    assert item["mesh"] == {"device": "cpu", "names": ["dp", "tp"], "shape": [2, 2], "ranks": 4}
    assert item["rank"] == 2
    assert item["parts"] == [{"shape": [1, 4], "offsets": [2, 0], "ranges": [[[2, 3]], [[0, 4]]]}]


def test_what_is_told_of_a_sharded_tensor() -> None:
    item = listed(SHARDED / "sharded_tensors.rank0.pth")["blocks.weight"]
    assert (item["sharding"], item["shape"], item["local_shape"], item["bytes"]) == ("ShardedTensor", [6, 6], None, 72)
    assert [part["offsets"] for part in item["parts"]] == [[0, 0], [0, 3]]
    assert (item["placements"], item["mesh"]["ranks"], item["rank"]) == (["Enumerable"], 4, 0)
    none = listed(SHARDED / "sharded_tensors.rank2.pth")["blocks.weight"]
    assert (none["parts"], none["local_shape"], none["bytes"]) == ([], None, 0)


placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 1)),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 1), st.integers(1, 4)),
)


@given(
    st.tuples(st.integers(0, 13), st.integers(0, 13)),
    st.lists(st.tuples(st.integers(1, 5), placements), min_size=1, max_size=3),
    st.data(),
)
@settings(max_examples=examples(300))
def test_the_indices_are_those_that_torch_computes(
    shape: tuple[int, int], cuts: list[tuple[int, Any]], data: st.DataObject
) -> None:
    mesh = tuple(size for size, _ in cuts)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in mesh)
    told = [Placement("", getattr(one, "dim", -1), getattr(one, "split_factor", 1)) for _, one in cuts]
    found = ranges_of(shape, mesh, place, told)
    assert found is not None
    local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(place), [one for _, one in cuts])
    assert tuple(sum(end - begin for begin, end in each) for each in found) == tuple(local)
    # A part that is empty in one dimension is nowhere: torch and we name different places for it.
    if 0 not in local:
        assert tuple(each[0][0] for each in found) == tuple(offset)
    for dim in (0, 1):
        indices = torch.arange(shape[dim])
        for (size, one), at in zip(cuts, place):
            if getattr(one, "dim", -1) == dim:
                flat = type(one)(0, split_factor=one.split_factor) if isinstance(one, _StridedShard) else Shard(0)
                indices = flat._split_tensor(indices, size, with_padding=False)[0][at]
        assert [at for begin, end in found[dim] for at in range(begin, end)] == indices.tolist()


# -- findings ---------------------------------------------------------------------------------------------------------


def test_tensors_on_one_rank_are_whole() -> None:
    report = ckptool.inspect(FIXTURES / "dtensor.pt")
    assert (report["sharding"]["tensors"], report["sharding"]["partial"]) == (2, 0)
    (found,) = [item for item in report["findings"] if item["code"] == "shards"]
    assert (found["level"], "each of them whole" in found["message"]) == ("note", True)


# -- torch takes what edits make --------------------------------------------------------------------------------------


def dtensors_of(path: Path) -> dict[str, DTensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.load(path, weights_only=True)
    return {name: value for name, value in loaded.items() if isinstance(value, DTensor)}


def test_strip_module_on_dtensors(tmp_path: Path) -> None:
    with ckptool.open(SHARDED / "tp.rank3.pth") as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), tmp_path / "x.pth")
    before, after = dtensors_of(SHARDED / "tp.rank3.pth"), dtensors_of(tmp_path / "x.pth")
    assert [f"module.{name}" for name in after] == list(before) != []
    for name, value in after.items():
        old = before[f"module.{name}"]
        assert torch.equal(value.to_local(), old.to_local())
        assert (value.shape, value.placements) == (old.shape, old.placements)


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@pytest.mark.parametrize("group", [1], indirect=True)
def test_edited_sharded_tensors_load_in_their_group(group: None, tmp_path: Path) -> None:
    path = SHARDED / "fsdp1_sharded.rank1.pth"
    with ckptool.open(path) as checkpoint:
        edited = ckptool.add_module(checkpoint)
        ckptool.save(ckptool.cast(edited, "float16"), tmp_path / "x.pth")
        ckptool.save(ckptool.convert(edited, "legacy", allow_loss="shards"), tmp_path / "legacy.pth")
    before = torch.load(path, weights_only=False)
    after = torch.load(tmp_path / "x.pth", weights_only=False)
    legacy = torch.load(tmp_path / "legacy.pth", weights_only=False)
    assert list(after) == [f"module.{name}" for name in before] == list(legacy)
    for name, old in before.items():
        new = after[f"module.{name}"]
        assert (new.size(), new.dtype, new.metadata().tensor_properties.dtype) == (
            old.size(),
            torch.float16,
            torch.float16,
        )
        assert new.metadata().shards_metadata == old.metadata().shards_metadata
        for kept, shard, same in zip(old.local_shards(), new.local_shards(), legacy[f"module.{name}"].local_shards()):
            assert torch.equal(kept.tensor.half(), shard.tensor)
            assert torch.equal(kept.tensor, same.tensor)


def test_cast_names_the_dtype_everywhere(tmp_path: Path) -> None:
    path = SHARDED / "dtensors.rank3.pth"
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.cast(checkpoint, "float16"), tmp_path / "x.pth")
    before, after = dtensors_of(path), dtensors_of(tmp_path / "x.pth")
    for name, value in after.items():
        meta = value._spec.tensor_meta
        assert meta is not None
        assert value.dtype == value.to_local().dtype == meta.dtype == torch.float16
        assert torch.equal(value.to_local(), before[name].to_local().half())
        assert hash(value._spec) == hash(value._spec.__class__(value._spec.mesh, value.placements, meta))


# -- devices ----------------------------------------------------------------------------------------------------------


def test_remap_with_strings_reaches_meshes_and_back(tmp_path: Path) -> None:
    path = SHARDED / "fsdp_tp.rank1.pth"
    assert run("remap", path, "--map", "cpu=cuda:1", "--strings", "-o", tmp_path / "gpu.pth")[0] == 0
    item = listed(tmp_path / "gpu.pth")["0.weight"]
    assert (item["location"], item["mesh"]["device"]) == ("cuda:1", "cuda")
    code, told = run("remap", tmp_path / "gpu.pth", "--to", "cpu", "--strings", "-o", tmp_path / "cpu.pth")
    assert (code, "now of 'cpu'" in told) == (0, True)
    before, after = dtensors_of(path), dtensors_of(tmp_path / "cpu.pth")
    for name, value in after.items():
        assert value.device_mesh.device_type == "cpu"
        assert value.device_mesh == before[name].device_mesh
        assert torch.equal(value.to_local(), before[name].to_local())
    assert ckptool.diff(path, tmp_path / "cpu.pth")["same"]


@pytest.mark.parametrize("group", [0], indirect=True)
def test_remap_moves_the_places_of_shards(group: None, tmp_path: Path) -> None:
    path = SHARDED / "sharded_tensors.rank0.pth"
    assert run("remap", path, "--map", "cpu=meta", "-o", tmp_path / "x.pth")[0] == 0
    loaded = torch.load(tmp_path / "x.pth", weights_only=False)
    placed = [shard.placement.device() for shard in loaded["rows.weight"].metadata().shards_metadata]
    assert placed == [torch.device("meta")] * 4


# -- local parts ------------------------------------------------------------------------------------------------------


@every
def test_plain_tensors_of_the_parts(path: Path, tmp_path: Path) -> None:
    code, told = run("sanitize", path, "-o", tmp_path / "x.pth")
    assert (code, "plain tensors of what one rank had" in told) == (4, True)
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.sanitize(local_parts(checkpoint)), tmp_path / "x.pth")
    loaded = torch.load(tmp_path / "x.pth", weights_only=True)
    loaded = loaded.get("model", loaded)
    for key, item in listed(path).items():
        names = [key] if len(item.get("parts", [0])) == 1 else [f"{key}.part{n}" for n in range(len(item["parts"]))]
        assert [list(loaded.pop(name).shape) for name in names] == [
            part["shape"] for part in item.get("parts", [{"shape": item["shape"]}])
        ]
    assert not loaded
    assert "sharding" not in ckptool.inspect(tmp_path / "x.pth")


def test_a_name_of_a_part_that_is_taken(tmp_path: Path) -> None:
    with ckptool.open(SHARDED / "sharded_tensors.rank0.pth") as checkpoint:
        taken = ckptool.rename(checkpoint, {"plain": "blocks.weight.part1"})
        with pytest.raises(RefusedError, match=r"a key 'blocks\.weight\.part1' already"):
            local_parts(taken)


@pytest.mark.parametrize("suffix", [".safetensors", ".dcp"])
@pytest.mark.parametrize("name", ["fsdp_tp.rank1", "sharded_tensors.rank0", "sharded_tensors.rank2"])
def test_converting_parts_is_a_loss_of_its_own(name: str, suffix: str, tmp_path: Path) -> None:
    path, out = SHARDED / f"{name}.pth", tmp_path / f"x{suffix}"
    code, told = run("convert", path, "-o", out)
    assert (code, "the files of all ranks together are the checkpoint" in told) == (4, True)
    assert "ckptool convert" not in told
    assert not out.exists()
    code, told = run("convert", path, "-o", out, "--allow-loss", "shards")
    assert code == 0, told
    made = {item["key"]: item["shape"] for item in ckptool.keys(out)["tensors"]}
    expected: dict[str, list[int]] = {}
    for key, item in listed(path).items():
        parts = [part["shape"] for part in item.get("parts", [item])]
        expected |= {key: parts[0]} if len(parts) == 1 else {f"{key}.part{n}": part for n, part in enumerate(parts)}
    assert made == expected


# -- values -----------------------------------------------------------------------------------------------------------


def test_the_same_values_at_another_place_are_another_fingerprint(tmp_path: Path) -> None:
    path = SHARDED / "sharded_tensors.rank0.pth"
    with ckptool.open(path) as checkpoint:
        before = checkpoint.graph
        entry = next(entry for entry in checkpoint.survey.tensors if entry.key == "local.weight")
        ckptool.save(ckptool.convert(checkpoint, "legacy", allow_loss="shards"), tmp_path / "same.pth")
        found = sharding(checkpoint.survey.reader, entry.ref, entry.tensor)
        assert found is not None
        # The offsets of its one shard, (0, 0), a row further down.
        lists = [
            ref
            for ref, node in enumerate(before.nodes)
            if type(node) is List and [before.nodes[item] for item in node.items] == [0, 0]
        ]
        one = next(ref for ref, node in enumerate(before.nodes) if node == 1 and type(node) is int)
        shifted = before.edited({ref: List([one, one]) for ref in lists}, [])
        ckptool.save(checkpoint.changed(shifted, []), tmp_path / "moved.pth")
    prints = [ckptool.hash(name)["content"] for name in (path, tmp_path / "same.pth", tmp_path / "moved.pth")]
    assert prints[0] == prints[1] != prints[2]


def test_two_ranks_differ_in_what_they_are_and_have() -> None:
    report = ckptool.diff(SHARDED / "fsdp_tp.rank1.pth", SHARDED / "fsdp_tp.rank2.pth")
    assert not report["same"]
    text = json.dumps(report)
    assert "mesh.rank" in text
    assert "mesh.coordinate" in text
    assert "local_tensor" in text
    assert "_hash" not in text


@pytest.mark.parametrize("name", ["fsdp2.rank3", "tp.rank3", "sharded_tensors.rank0"])
def test_salvage_leaves_out_what_lacks_a_part_and_keeps_what_is_empty(name: str, tmp_path: Path) -> None:
    data = (SHARDED / f"{name}.pth").read_bytes()
    outcomes = set()
    for end in range(len(data) - 1500, len(data), 64):
        path, out = tmp_path / f"{end}.pth", tmp_path / f"{end}.saved.pth"
        path.write_bytes(data[:end])
        code, told = run("salvage", path, "-o", out)
        assert (code in (0, 1) and out.exists()) or "nothing can be saved" in told or "tensors whole" in told, told
        outcomes.add(code)
        if out.exists():
            assert {item["name"] for item in ckptool.validate(out)["checks"] if item["status"] == "fail"} <= {"shards"}
            items = ckptool.keys(SHARDED / f"{name}.pth", all=True)["tensors"]
            before = {item["path"]: item for item in items}
            with ckptool.open(out) as checkpoint:
                for entry in checkpoint.survey.tensors:
                    found = sharding(checkpoint.survey.reader, entry.ref, entry.tensor)
                    parts = [] if found is None else [list(part.shape) for part in found.parts]
                    assert parts == [part["shape"] for part in before[entry.path].get("parts", [])]
    assert {0, 1} & outcomes


# -- files that nobody wrote ------------------------------------------------------------------------------------------


EDITS: tuple[Callable[[Checkpoint], Checkpoint], ...] = (
    local_parts,
    lambda it: ckptool.remap(it, {"cpu": "cuda:0"}, strings=True),
    lambda it: ckptool.cast(it, "float16"),
    lambda it: ckptool.sanitize(local_parts(it), drop_unknown=True),
    lambda it: ckptool.convert(it, "safetensors", allow_loss=("all",)),
    lambda it: ckptool.convert(it, "dcp", allow_loss=("all",)),
    lambda it: ckptool.slim(it),
)


def tried(checkpoint: Checkpoint) -> None:
    """Everything that looks at sharded tensors; what is wrong with them is told, and not as a bug."""
    looks: tuple[Callable[[Checkpoint], object], ...] = (
        lambda it: keys_report(it, select_entries(it, everything=True)),
        inspection,
    )
    for look in looks:
        with contextlib.suppress(CkptoolError):
            look(checkpoint)
    for edit in EDITS:
        try:
            made = edit(checkpoint)
            keys_report(made, select_entries(made, everything=True))
        except CkptoolError:
            pass


BAD: list[Node] = [None, 1 << 70, -1, (), "x" * 100_000]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", ["fsdp_tp.rank1", "sharded_tensors.rank0"])
@pytest.mark.parametrize("number", range(len(BAD)), ids=[type(bad).__name__ for bad in BAD])
def test_damage_at_any_place_is_no_bug(name: str, number: int) -> None:
    """Each of ``BAD`` at every fifth place, together at all of them; each at all places in ``make torture``."""
    with ckptool.open(SHARDED / f"{name}.pth") as checkpoint:
        graph = checkpoint.graph
        places = [ref for ref, node in enumerate(graph.nodes) if ref != graph.root and not isinstance(node, Global)]
        for ref in sample(places, len(BAD), first=number):
            tried(checkpoint.changed(graph.edited({ref: BAD[number]}, []), []))


def test_a_wrapper_of_another_kind_is_not_spread() -> None:
    with ckptool.open(FIXTURES / "subclass.pt") as checkpoint:
        assert not any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors)
        assert sharding_summary(checkpoint.survey.reader, checkpoint.survey.tensors) is None

"""Folders as huggingface_hub and transformers write them, in and out; both libraries are the oracle."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import MalformedError, UnreadableError
from ckptool.cli.main import run
from ckptool.reports.validate import validation_report

hub = pytest.importorskip("huggingface_hub")

Edit = Callable[[ckptool.Checkpoint], ckptool.Checkpoint]
SIZE = "6KB"


class Model(torch.nn.Module):
    """Some layers, and weights that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 10)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(10, 40) for _ in range(5))
        self.norm = torch.nn.BatchNorm1d(10)
        self.head = torch.nn.Linear(10, 40, bias=False)
        self.head.weight = self.embed.weight


def tensors() -> dict[str, torch.Tensor]:
    """Several shards of 6 kB: a scalar, an empty tensor, several dtypes."""
    torch.manual_seed(0)
    made = {f"layers.{n}.{k}": torch.randn(*s) for n in range(5) for k, s in (("weight", (20, 30)), ("bias", (20,)))}
    made |= {"steps": torch.tensor(7), "empty": torch.zeros(0, 3), "half": torch.randn(30, 3).bfloat16()}
    return made


@pytest.fixture(params=["safetensors", "bin"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that huggingface_hub wrote, of three shards."""
    return written(tmp_path / "in", tensors(), safe=request.param == "safetensors")


def written(path: Path, state: dict[str, torch.Tensor], *, safe: bool = True, size: str = SIZE) -> Path:
    path.mkdir()
    hub.save_torch_state_dict(state, path, max_shard_size=size, safe_serialization=safe)
    return path


def index_of(folder: Path) -> Path:
    return next(folder.glob("*.index.json"))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index of a folder."""
    index = json.loads(index_of(folder).read_text())
    change(index)
    index_of(folder).write_text(json.dumps(index))


def problems(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with ckptool.open(folder) as checkpoint:
        for problem in checkpoint.container.problems:
            found[problem.code] = f"{found.get(problem.code, '')}{problem.message}\n"
    return found


def as_torch(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """What a folder holds, as torch loads the file that is made of it."""
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), out, force=True)
    return dict(oracle.load(out))


# -- in --------------------------------------------------------------------------------------------------------


def test_a_folder_is_one_checkpoint_in_the_order_of_its_index(folder: Path, tmp_path: Path) -> None:
    assert len(list(folder.iterdir())) > 3
    expected = tensors()
    found = as_torch(folder, tmp_path / "x.pth")
    assert list(found) == list(json.loads(index_of(folder).read_text())["weight_map"])
    assert oracle.difference({name: found[name] for name in expected}, expected) == ""
    assert problems(folder) == {}
    assert validation_report(str(folder))["status"] == "valid"
    assert run(["inspect", str(folder)]) == run(["keys", str(folder)]) == run(["validate", str(folder)]) == 0


# -- what is wrong with a folder -------------------------------------------------------------------------------


def second(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if "00002-of" in path.name)


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (lambda index, name: index["weight_map"].update(ghost=name), "incomplete", "ghost"),
        (lambda index, name: index["weight_map"].pop("half"), "not-in-index", "half"),
        (lambda index, name: index["metadata"].update(total_size=1), "total-size", "total_size"),
    ],
)
def test_an_index_that_is_not_true_is_told(
    change: Callable[[dict[str, Any], str], object], code: str, word: str, folder: Path
) -> None:
    changed(folder, lambda index: change(index, second(folder).name))
    assert word in problems(folder)[code]
    with ckptool.open(folder) as checkpoint:
        assert "half" in {entry.key for entry in checkpoint.survey.tensors}


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "in", tensors())
    path = second(folder)
    other = next(folder.glob("*00001-of*"))
    name = next(iter(load_file(other)))
    save_file({**load_file(path), name: torch.zeros(2)}, path)
    assert name in problems(folder)["tensor-twice"]
    with ckptool.open(folder) as checkpoint:
        kept = next(entry.tensor for entry in checkpoint.survey.tensors if entry.key == name)
    assert list(kept.shape) == list(tensors()[name].shape)


@pytest.mark.parametrize("told", ["no index", {}, {"metadata": None}, {"metadata": []}, {"metadata": "x"}])
def test_shards_that_transformers_does_not_load_without_more_in_the_index(
    folder: Path, tmp_path: Path, told: dict[str, Any] | str
) -> None:
    index = index_of(folder)
    if told == "no index":
        index.unlink()
    else:
        assert isinstance(told, dict)
        index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"], **told}))
    report = ckptool.validate(folder)
    assert report["status"] == "invalid" and index.name in problems(folder)["no-index"]
    words = shlex.split(report["next"])
    assert words[:2] == ["ckptool", "edit"] and "--repack" in words
    assert run([*words[1:-1], str(tmp_path / "out")]) == 0
    assert ckptool.validate(tmp_path / "out")["status"] == "valid"
    modeling, sharded = (pytest.importorskip(f"transformers.{name}") for name in ("modeling_utils", "utils.hub"))
    files, _ = sharded.get_checkpoint_shard_files(str(tmp_path / "out"), str(index_of(tmp_path / "out")))
    assert {name for file in files for name in modeling.load_state_dict(file)} == tensors().keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("[]", "weight_map"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "twice"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not the name of a file in its folder"),
        ('{"weight_map": {"a": "/etc/model.safetensors"}}', "not the name of a file in its folder"),
        ('{"weight_map": {"a": "sub/model.safetensors"}}', "not the name of a file in its folder"),
        ('{"weight_map": {"a": "..\\\\model.safetensors"}}', "not the name of a file in its folder"),
        ('{"weight_map": {"a": ""}}', "not the name of a file in its folder"),
        ('{"weight_map": {"a": "config.json"}}', "not a .safetensors file"),
        ('{"weight_map": {}}', "names no shard"),
        ("[" * 100_000, "not JSON"),
        ("\ud800", "not JSON"),
    ],
)
def test_a_broken_or_hostile_index_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(MalformedError, match=words):
        ckptool.open(tmp_path)
    assert run(["inspect", str(tmp_path)]) == 3
    assert run(["validate", str(tmp_path)]) == 1


def test_a_bin_shard_with_other_objects_is_not_half_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "in", tensors(), safe=False)
    torch.save({"layers.2.weight": torch.zeros(2), "epoch": 3}, second(folder))
    assert "'epoch' is not a tensor" in problems(folder)["incomplete"]


# -- out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["1KB", "3KB", "6KB", "2.5KB", "1GB"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_shards_are_those_of_huggingface_hub(size: str, safe: bool, tmp_path: Path) -> None:
    state = tensors() if safe else {**tensors(), **{f"model.{k}": v for k, v in Model().state_dict().items()}}
    expected = written(tmp_path / "expected", state, safe=safe, size=size)
    torch.save(state, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        edited = ckptool.convert(checkpoint, "safetensors" if safe else "torch", max_shard_size=size)
        ckptool.save(edited, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in expected.iterdir()
    )
    for path in expected.iterdir():
        ours = tmp_path / "out" / path.name
        if path.suffix == ".bin":
            assert oracle.difference(oracle.load(path), oracle.load(ours)) == ""
        else:
            assert path.read_bytes() == ours.read_bytes(), path.name


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_huggingface_hub_loads_what_is_written(safe: bool, tmp_path: Path) -> None:
    model, other = Model(), Model()
    torch.save(model.state_dict(), tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        target = "safetensors" if safe else "torch"
        edited = ckptool.convert(checkpoint, target, tied="keep-first" if safe else "", max_shard_size="3KB")
        ckptool.save(edited, tmp_path / "out")
    hub.load_torch_model(other, tmp_path / "out", strict=not safe, safe=safe)
    mine, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with ckptool.open(tmp_path / "out") as checkpoint:
        assert not [item for item in checkpoint.container.problems if item.level != "note"]


EDITS: dict[str, Edit] = {
    "add-module": ckptool.add_module,
    "drop": lambda checkpoint: ckptool.drop(checkpoint, ["half"]),
    "cast": lambda checkpoint: ckptool.cast(checkpoint, "float16"),
    "none": lambda checkpoint: checkpoint,
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_folder_stays_one_of_as_many_shards(name: str, folder: Path, tmp_path: Path) -> None:
    with ckptool.open(folder) as checkpoint:
        ckptool.save(EDITS[name](checkpoint), tmp_path / "out")
    whole = tmp_path / "whole.pth"
    torch.save(tensors(), whole)
    with ckptool.open(whole) as checkpoint:
        ckptool.save(EDITS[name](checkpoint), tmp_path / "edited.pth")
    found, expected = as_torch(tmp_path / "out", tmp_path / "x.pth"), dict(oracle.load(tmp_path / "edited.pth"))
    assert oracle.difference({key: found[key] for key in expected}, expected) == ""
    if name in ("add-module", "none"):
        assert len(list((tmp_path / "out").iterdir())) == len(list(folder.iterdir()))
    if name == "none":
        assert all(path.read_bytes() == (tmp_path / "out" / path.name).read_bytes() for path in folder.iterdir())
    with ckptool.open(tmp_path / "out") as checkpoint:
        assert checkpoint.format == ("hf-torch" if index_of(folder).name.startswith("py") else "hf-safetensors")
        assert not checkpoint.container.problems


def test_a_real_load_of_a_folder_is_that_of_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oracle.difference({k: ckptool.load(folder)[k] for k in tensors()}, tensors()) == ""
    assert run(["inspect", str(folder), "--load"]) == 0
    assert f"yes: {len(tensors())} tensors on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("key", [("a.weight",), 7, None])
def test_a_shard_with_a_key_that_is_not_a_string_is_refused(key: object, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), key: torch.ones(3)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnreadableError, match="is not a string"):
        ckptool.open(tmp_path)


@pytest.mark.parametrize("gone", ["every shard", "one shard"])
def test_a_complete_set_of_shards_beside_a_stale_index_is_read_and_repacked(
    folder: Path, gone: str, tmp_path: Path
) -> None:
    """The index of an older save names files that are not there."""
    before = ckptool.hash(folder)["content"]

    def stale(index: dict[str, Any]) -> None:
        names = dict.fromkeys(index["weight_map"].values())
        old = {name: name.replace("-of-00003", "-of-00007") for name in names}
        if gone == "one shard":
            old = {**{name: name for name in names}, second(folder).name: old[second(folder).name]}
        index["weight_map"] = {key: old[file] for key, file in index["weight_map"].items()}

    changed(folder, stale)
    assert "is complete" in problems(folder)["stale-index"]
    assert not validation_report(str(folder))["valid"]
    said = say("inspect", folder)
    command = shlex.split(said.all.rpartition("-> ")[2].splitlines()[0])
    repacked = tmp_path / "repacked"
    assert "--repack" in command and say(*command[1:-1], repacked).code == 0
    assert ckptool.validate(str(repacked))["valid"] and ckptool.hash(repacked)["content"] == before


def test_a_shard_that_the_index_does_not_name_is_read_for_its_tensors(folder: Path, tmp_path: Path) -> None:
    before = ckptool.hash(folder)["content"]

    def wrong(index: dict[str, Any]) -> None:
        first, *_ = names = [*dict.fromkeys(index["weight_map"].values())]
        index["weight_map"] = {key: first if file == names[-1] else file for key, file in index["weight_map"].items()}

    changed(folder, wrong)
    assert "names the wrong shard" in problems(folder)["stale-index"]
    repacked = tmp_path / "repacked"
    assert say("edit", folder, "--repack", "-o", repacked).code == 0
    assert ckptool.validate(str(repacked))["valid"] and ckptool.hash(repacked)["content"] == before


def test_shards_of_two_saves_without_a_complete_set_are_refused(folder: Path) -> None:
    second(folder).rename(folder / second(folder).name.replace("-of-00003", "-of-00004"))
    assert "incomplete" in problems(folder) and "stale-index" not in problems(folder)

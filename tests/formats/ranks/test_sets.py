"""Several sets of rank files in one folder, and rank files named one by one or by a pattern."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from helpers.rank_files import save_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptool
from ckptool.base.errors import CkptoolError, MalformedError
from ckptool.base.steps import suggested_output
from ckptool.formats.fsdp.meshes import matching, of_one_save, pattern_of

WEIGHT, MOMENT = torch.arange(35.0).reshape(7, 5), torch.arange(35.0).reshape(7, 5) / 7
#: Names of the files of a model and of its optimizer, as scripts choose them.
NAMES = (
    ("model_{}.pt", "optimizer_{}.pt"),
    ("model_{}.pt", "optim_{}.bin"),
    ("model-rank{}.pth", "optim-rank{}.pth"),
    ("model_rank{}.pt", "optimizer_{}.pt"),
    ("model_world_size_3_rank_{}.pt", "optimizer_{}.pt"),
    ("ckpt.{}.pt", "opt.{}.pt"),
    ("step_10_part_{}.pt", "step_10_optim_part_{}.pt"),
    ("weights-{}-of-3.pt", "states-{}-of-3.pt"),
)


def spread(value: torch.Tensor, world: int) -> Any:
    return distribute_tensor(value, init_device_mesh("cpu", (world,)), [Shard(0)], src_data_rank=None)


def model(world: int = 3, value: torch.Tensor = WEIGHT) -> Callable[[int], object]:
    return lambda rank: {"weight": spread(value, world)}


def optimizer(world: int = 3) -> Callable[[int], object]:
    def state(rank: int) -> object:
        own = {0: {"step": torch.tensor(2.0), "exp_avg": spread(MOMENT, world)}}
        return {"state": own, "param_groups": [{"lr": 0.1, "params": [0]}]}

    return state


def schedule(rank: int) -> object:
    return {"last_epoch": 4, "param_groups": []}


@pytest.fixture(params=NAMES, ids=lambda names: names[0])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """A folder with the model and the optimizer of one save, and the names of their files."""
    one, other = request.param
    save_ranks(tmp_path / "saved", 3, model(), one)
    return save_ranks(tmp_path / "saved", 3, optimizer(), other), one, other


def loaded(path: str | Path, out: Path) -> Any:
    ckptool.save(ckptool.convert(path, "torch"), out, force=True)
    return torch.load(out)


def files(folder: Path, name: str, world: int = 3) -> list[str]:
    return [str(folder / name.format(rank)) for rank in range(world)]


def test_the_model_and_the_optimizer_of_one_save_are_one_checkpoint(
    pair: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder, *_ = pair
    assert ckptool.validate(folder)["valid"]
    whole = loaded(folder, tmp_path / "one.pth")
    assert len(whole) == 2
    values = {"weight": WEIGHT, "exp_avg": MOMENT}
    (weights,) = (value for value in whole.values() if "weight" in value)
    (states,) = (value for value in whole.values() if "state" in value)
    assert torch.equal(weights["weight"], values["weight"])
    assert torch.equal(states["state"][0]["exp_avg"], values["exp_avg"])
    report = ckptool.inspect(folder)
    assert {entry["key"] for entry in report["entries"]} == whole.keys()
    assert not [finding for finding in report["findings"] if finding["code"] == "other-files"]


def test_every_set_is_an_entry_and_other_files_are_named(tmp_path: Path) -> None:
    """Six sets, and files that are none: nothing in the folder is skipped without a word."""
    names = [f"{kind}_{number}_" + "{}.pt" for kind in ("model", "ema", "old") for number in ("a", "b")]
    for number, name in enumerate(names):
        save_ranks(tmp_path / "saved", 2, model(2, WEIGHT + number), name)
    folder = save_ranks(tmp_path / "saved", 2, schedule, "schedule_{}.pt")
    torch.save(WEIGHT, folder / "full.pt")
    for number in range(2):
        torch.save(WEIGHT + number, folder / f"data_{number}.pt")
    with ckptool.open(folder) as checkpoint:
        assert set(checkpoint) == {name[:-6] for name in (*names, "schedule_{}.pt")}
    assert ckptool.validate(folder)["valid"]
    other = next(item for item in ckptool.inspect(folder)["findings"] if item["code"] == "other-files")
    assert "data_*.pt (2 files) and full.pt" in other["message"]
    assert say(*shlex.split(str(other["next"]))[1:]).code == 0
    said = {command: say(command, folder, "-v").all for command in ("inspect", "validate", "hash")}
    for name in names:
        assert all(f"{name[:-6]} ({name.replace('{}', '*')})" in text for text in (said["inspect"], said["hash"]))
    assert "7 sets of rank files" in said["validate"] and "data_*.pt (2 files) and full.pt" in said["hash"]
    hashes = {str(ckptool.hash(folder, key=name[:-6])["content"]) for name in names}
    assert len(hashes) == len(names)


def test_files_named_one_by_one_are_one_input(pair: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, one, other = pair
    for given in (files(folder, one), [*files(folder, other), *files(folder, one)]):
        out = tmp_path / "out.pth"
        said = say("convert", *given, "-o", out, "--force")
        assert said.code == 0 and "not copied" not in said.all, said.all
        whole = torch.load(out)
        weights = whole if len(given) == 3 else next(value for value in whole.values() if "weight" in value)
        assert torch.equal(weights["weight"], WEIGHT)
        for command in ("inspect", "keys", "validate", "hash", "stats", "lock"):
            said = say(command, *given)
            assert said.code == 0, said.all
            assert str(given[0]) not in said.all
        pattern = pattern_of(given)
        folder_of, names = matching(pattern)
        assert set(map(folder_of.join, names)) == set(given)
        assert ckptool.hash(pattern)["content"] == ckptool.hash(out)["content"]
        assert say("convert", pattern, "-o", out, "--force").code == 0
        assert "*" not in suggested_output(pattern, "cpu") and "{" not in suggested_output(pattern, "cpu")


def test_some_files_of_a_set_are_refused_as_one_output(pair: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, one, _ = pair
    given = files(folder, one)
    said = say("convert", *given[:2], "-o", tmp_path / "out.pth")
    assert said.code == 2 and "need --out-dir" in said.err and not (tmp_path / "out.pth").exists()
    assert say("inspect", *given[:2]).code == 0  # each by itself


def test_other_files_are_as_many_inputs(tmp_path: Path) -> None:
    """Files that are whole, ranks of several saves, and edits of the files themselves."""
    for number in range(2):
        torch.save({"weight": WEIGHT + number}, tmp_path / f"epoch_{number}.pth")
    whole = [str(tmp_path / f"epoch_{number}.pth") for number in range(2)]
    assert pattern_of(whole) == "" and say("convert", *whole, "-o", tmp_path / "out.pth").code == 2
    assert say("hash", *whole).out.count("\n") == 2
    folder = save_ranks(tmp_path / "saved", 2, model(2), "model_{}.pt")
    ranks = files(folder, "model_{}.pt", 2)
    assert not of_one_save(str(folder / "model_0.pt")) and not of_one_save(str(folder / "none_*.pt"))
    assert pattern_of([ranks[0], whole[0]]) == "" and pattern_of([ranks[0], ranks[0]]) == ""
    said = say("remap", *ranks, "--to", "cpu", "--out-dir", tmp_path / "each")
    assert said.code == 0 and len(list((tmp_path / "each").iterdir())) == 2
    assert say("scan", *ranks).out.count("model_") == 2
    with pytest.raises(CkptoolError):
        ckptool.open(folder / "none_*.pt")


def test_rank_files_of_two_runs_are_told_apart_by_their_names(tmp_path: Path) -> None:
    save_ranks(tmp_path / "saved", 2, model(2), "model_world_size_2_rank_{}.pt")
    folder = save_ranks(tmp_path / "saved", 3, model(3), "model_world_size_3_rank_{}.pt")
    with pytest.raises(MalformedError, match="of 2 and 3 ranks") as caught:
        ckptool.open(folder)
    (step,) = caught.value.step.commands
    assert say(*shlex.split(str(step))[1:]).code == 0
    for path in folder.iterdir():  # each file leads to those of its run
        (one,) = (item for item in ckptool.inspect(path)["findings"] if item["code"] == "shards")
        said = say(*shlex.split(str(one["next"]))[1:])
        assert said.code == 0 and "all there" in said.out, (one["next"], said.all)

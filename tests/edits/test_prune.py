"""drop and keep with --prune-optimizer: what is left goes into an optimizer over the smaller model, state by state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from output_checks import edited, saved
from torch import nn

import ckptool
from ckptool import Checkpoint
from ckptool.base.errors import RefusedError

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, *, middle: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        if middle:
            self.middle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        return self.head(self.norm(self.middle(x) if hasattr(self, "middle") else x))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def plain(cls: Any, **how: Any) -> Make:
    return lambda model: cls(model.parameters(), **how)


def named(cls: Any, **how: Any) -> Make:
    return lambda model: cls(model.named_parameters(), **how)


def two_groups(model: Any) -> torch.optim.Optimizer:
    decay = [(name, value) for name, value in model.named_parameters() if value.ndim > 1]
    rest = [(name, value) for name, value in model.named_parameters() if value.ndim <= 1]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decay}], lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "SGD": plain(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD without states": plain(torch.optim.SGD, lr=0.1),
    "Adam": plain(torch.optim.Adam, amsgrad=True),
    "AdamW": plain(torch.optim.AdamW),
    "AdamW, two groups": two_groups,
    "Adafactor": plain(torch.optim.Adafactor),
    "RMSprop": plain(torch.optim.RMSprop, centered=True),
    "Adagrad": plain(torch.optim.Adagrad),
    "Rprop": plain(torch.optim.Rprop),
    "NAdam": named(torch.optim.NAdam),
    "Adam, named": named(torch.optim.Adam),
    "Adafactor, named": named(torch.optim.Adafactor),
}


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[value] for name, value in model.named_parameters() if value in optimizer.state}


def pruned(training: Any, folder: Path, edit: Callable[[Checkpoint], Checkpoint]) -> Any:
    return edited(saved(training, folder / "in.pth"), folder / "out.pth", edit)


def drop(*globs: str) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: ckptool.drop(checkpoint, globs, prune_optimizer=True)


@pytest.mark.parametrize("how", ["drop", "keep"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_what_stays(name: str, how: str, tmp_path: Path) -> None:
    make, model = OPTIMIZERS[name], Net()
    optimizer = make(model)
    trained(model, optimizer)
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    keep = ["epoch", "optimizer", "model", 'model["stem.*', "norm.*", "head.*"]
    edit = drop("middle.*") if how == "drop" else lambda c: ckptool.keep(c, keep, prune_optimizer=True)
    found = pruned(training, tmp_path, edit)
    small = Net(middle=False)
    small.load_state_dict(found["model"], strict=True)
    again = make(small)
    again.load_state_dict(found["optimizer"])
    expected = states(model, optimizer)
    for gone in ("middle.weight", "middle.bias"):
        expected.pop(gone, None)
    assert oracle.difference(copy.deepcopy(expected), copy.deepcopy(states(small, again))) == ""
    kept = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups]
    assert kept == [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in again.param_groups
    ]
    trained(small, again, 1)


def test_a_state_dict_of_a_wrapped_model(tmp_path: Path) -> None:
    """The keys have a prefix that the names in the optimizer lack: then the order tells."""
    model = Net()
    optimizer = torch.optim.Adam(model.named_parameters())
    trained(model, optimizer)
    training = {"state_dict": nn.DataParallel(model).state_dict(), "optimizer": optimizer.state_dict()}
    found = pruned(training, tmp_path, drop("module.head.*"))["optimizer"]
    assert found["param_groups"][0]["params"] == list(range(6))
    assert found["param_groups"][0]["param_names"] == list(dict(model.named_parameters()))[:6]
    assert oracle.difference(dict(list(optimizer.state_dict()["state"].items())[:6]), found["state"]) == ""


def test_names_in_place_of_numbers(tmp_path: Path) -> None:
    """As FullyShardedDataParallel writes it."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    plainly = optimizer.state_dict()
    names = list(dict(model.named_parameters()))
    group = {**plainly["param_groups"][0], "params": names}
    sharded = {"state": {names[n]: state for n, state in plainly["state"].items()}, "param_groups": [group]}
    found = pruned({"model": model.state_dict(), "optim": sharded}, tmp_path, drop("middle.*"))["optim"]
    left = [name for name in names if not name.startswith("middle.")]
    assert found["param_groups"][0]["params"] == left
    assert oracle.difference({name: sharded["state"][name] for name in left}, found["state"]) == ""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.middle(self.embed(x)))


@pytest.mark.parametrize("make", [plain(torch.optim.Adam), named(torch.optim.Adam)], ids=["plain", "named"])
def test_tied_parameters(make: Make, tmp_path: Path) -> None:
    model = Tied()
    optimizer = make(model)
    trained(model, optimizer)
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = oracle.load(saved(training, tmp_path / "before.pth"))["optimizer"]["state"]
    # embed.weight, middle.weight, middle.bias, head.bias; the first one is head.weight, too.
    found = pruned(training, tmp_path, drop("head.*"))["optimizer"]
    assert oracle.difference({n: before[n] for n in range(3)}, found["state"]) == ""
    found = pruned(training, tmp_path, drop("middle.*"))["optimizer"]
    assert oracle.difference({0: before[0], 1: before[3]}, found["state"]) == ""
    with pytest.raises(RefusedError, match=r"embed\.weight.*head\.weight"):
        pruned(training, tmp_path, drop("embed.*"))


# -- who is whose -------------------------------------------------------------------------------------------


def training_of(**models: nn.Module) -> dict[str, Any]:
    """Several models, each with an optimizer of its own."""
    made: dict[str, Any] = {}
    for name, model in models.items():
        optimizer = torch.optim.Adam(model.parameters())
        trained(model, optimizer)
        made |= {name: model.state_dict(), f"optimizer_{name}": optimizer.state_dict()}
    return made


def test_the_optimizer_of_another_model_stays(tmp_path: Path) -> None:
    training = training_of(one=Net(), two=nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1)))
    found = pruned(training, tmp_path, lambda c: ckptool.drop(c, ["head.*"], key="one", prune_optimizer=True))
    assert len(found["optimizer_one"]["state"]) == 6
    assert oracle.difference(training["optimizer_two"], found["optimizer_two"]) == ""


def test_two_models_of_one_shape_are_refused(tmp_path: Path) -> None:
    training = training_of(one=Net(), two=Net())
    with pytest.raises(RefusedError, match="it is unknown which"):
        pruned(training, tmp_path, lambda c: ckptool.drop(c, ["head.*"], key="one", prune_optimizer=True))
    # Where both lose the same, it does not matter.
    found = pruned(training, tmp_path, drop("head.*"))
    assert [len(found[name]["state"]) for name in ("optimizer_one", "optimizer_two")] == [6, 6]


def test_two_groups_without_names_are_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD([{"params": model.head.parameters()}, {"params": model.stem.parameters()}], lr=0.1)
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(RefusedError, match="2 groups of parameters and no names"):
        pruned(training, tmp_path, drop("head.*"))


def test_an_optimizer_over_other_shapes_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(list(model.parameters())[::-1])
    trained(model, optimizer)
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(RefusedError, match="do not fit the keys in their order"):
        pruned(training, tmp_path, drop("head.*"))


def test_frozen_parameters_are_refused(tmp_path: Path) -> None:
    """There are fewer parameters than tensors, and no names."""
    model = Net()
    optimizer = torch.optim.Adam([*model.middle.parameters(), *model.head.parameters()])
    trained(model, optimizer)
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(RefusedError, match="4 parameters without names"):
        pruned(training, tmp_path, drop("head.*"))


def test_without_the_option_the_optimizer_stays(tmp_path: Path) -> None:
    training = training_of(model=Net())
    found = pruned(training, tmp_path, lambda c: ckptool.drop(c, ["head.*"]))
    assert oracle.difference(training["optimizer_model"], found["optimizer_model"]) == ""


def test_an_optimizer_that_is_dropped_as_well_is_not_asked(tmp_path: Path) -> None:
    training = training_of(one=Net(), two=Net())
    found = pruned(training, tmp_path, drop("head.*", "optimizer_*"))
    assert list(found) == ["one", "two"]

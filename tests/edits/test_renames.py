"""rename, and every edit of names with a choice of keys, against the naive edit on what torch loads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import Fixture
from naive_edits import without_metadata
from output_checks import at, edited, every, saved
from torch import nn

import ckptool
from ckptool import Checkpoint
from ckptool.base.errors import RefusedError, TargetError
from ckptool.base.globs import Globs
from ckptool.checkpoint.paths import parse_path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Rename = Callable[[str], str]


def states(path: Path) -> list[list[str | int]]:
    """The paths of the state dicts that an edit is about."""
    with ckptool.open(path) as checkpoint:
        return [parse_path(item.path) for item in checkpoint.state_dicts if item.confidence == "high"]


def names(path: Path) -> list[str]:
    loaded = oracle.load(path)
    return [name for steps in states(path) for name in at(loaded, steps)]


def same(path: Path, out: Path, edit: Callable[[Checkpoint], Checkpoint], rename: Rename) -> None:
    """Is the edit what renaming by hand is?"""
    expected = oracle.rename(oracle.load(path), states(path), rename)
    assert oracle.difference(without_metadata(expected), without_metadata(edited(path, out, edit))) == ""


# -- each way, on every file --------------------------------------------------------------------------------


def dotted(path: Path) -> list[str]:
    found = [name for name in names(path) if "." in name]
    if not found:
        pytest.skip("it has no key with a dot")
    return found


@every
def test_by_glob(item: Fixture, out: Path) -> None:
    head = dotted(item.path)[0].partition(".")[0]

    def rename(name: str) -> str:
        return "new.x-" + name[len(head) + 1 :] if name.startswith(head + ".") else name

    same(item.path, out, lambda c: ckptool.rename(c, glob=(f"{head}.*", "new.x-*")), rename)


@every
def test_by_regex(item: Fixture, out: Path) -> None:
    dotted(item.path)
    found = (r"(\w)\.(\w+)$", r"\2.\1_\2")
    same(item.path, out, lambda c: ckptool.rename(c, regex=found), lambda name: re.sub(*found, name, count=1))


@every
def test_by_table(item: Fixture, out: Path) -> None:
    table = {name: f"t{number}.{name}" for number, name in enumerate(dict.fromkeys(dotted(item.path)[::2]))}
    same(item.path, out, lambda c: ckptool.rename(c, table), lambda name: table.get(name, name))


@every
def test_by_the_order_of_another(item: Fixture, out: Path, tmp_path: Path) -> None:
    paths = states(item.path)
    loaded = at(oracle.load(item.path), paths[0]) if len(paths) == 1 else {}
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not tensors or any(value.is_nested for value in tensors.values()):
        pytest.skip("it has no state dict, or several")
    table = {name: f"layer{number}.weight" for number, name in enumerate(tensors)}
    other = saved({table[name]: torch.zeros(value.shape) for name, value in tensors.items()}, tmp_path / "other.pth")
    with ckptool.open(other) as like:
        same(item.path, out, lambda c: ckptool.rename(c, like=like, by_order=True), lambda name: table.get(name, name))


@every
def test_add_with_a_choice_of_keys(item: Fixture, out: Path) -> None:
    if item.path.name == "collision.pth":
        pytest.skip("refused: two keys would be one")

    def rename(name: str) -> str:
        return "module." + name if name.endswith("weight") and "bn" not in name else name

    same(item.path, out, lambda c: ckptool.add_module(c, include=["*weight"], exclude=["*bn*"]), rename)


@every
def test_remap_with_a_choice_of_keys(item: Fixture, out: Path) -> None:
    only = Globs(["*weight"], ["*bn*"])
    with ckptool.open(item.path) as checkpoint:
        reader = checkpoint.survey.reader
        entries = [entry for entry in checkpoint.survey.tensors if only.match(entry.key, entry.path)]
        chosen = {part.storage for entry in entries for part in reader.parts(entry.tensor)}
        keys = [storage.key for _, storage in reader.uses()]
        ckptool.save(ckptool.remap(checkpoint, "cuda:5", **only.patterns), out)
    before, after = oracle.tags(item.path), oracle.tags(out)
    assert {"cuda:5" if new != old else "" for old, new in zip(before, after)} <= {"", "cuda:5"}
    if len(before) == len(keys):
        moved = [key in chosen and tag not in ("cpu", "meta") for key, tag in zip(keys, before)]
        assert after == ["cuda:5" if now else tag for now, tag in zip(moved, before)]


# -- what a user may get wrong ------------------------------------------------------------------------------


def test_a_table_is_taken_at_its_word(tmp_path: Path) -> None:
    path = saved({"a.w": torch.ones(1), "b.w": torch.zeros(2)}, tmp_path / "in.pth")
    with ckptool.open(path) as checkpoint:
        with pytest.raises(RefusedError, match=r"there is no key 'c\.w'"):
            ckptool.rename(checkpoint, {"a.w": "x.w", "c.w": "y.w"})
        with pytest.raises(RefusedError, match=r"'a\.w' and 'b\.w' would both be called 'b\.w'"):
            ckptool.rename(checkpoint, {"a.w": "b.w"})
        with pytest.raises(TargetError, match="wildcards"):
            ckptool.rename(checkpoint, glob=("*.w", "w"))
        with pytest.raises(TargetError):
            ckptool.rename(checkpoint)


# -- what follows the names ---------------------------------------------------------------------------------


class Counted(nn.Module):
    """A module with a version of its own, and one below it."""

    _version = 7

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)


class Model(nn.Module):
    _version = 3

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Identity()))
        self.add_module(second, Counted())


def versions(model: nn.Module, state: Any) -> dict[str, Any]:
    """The version that each module with keys of its own sees in load_state_dict(strict=True)."""
    seen: dict[str, Any] = {}
    handles = []
    for name, module in model.named_modules():

        def note(module: Any, state: Any, prefix: str, metadata: dict[str, Any], *_: Any, name: str = name) -> None:
            seen[name] = metadata.get("version")

        if list(module.parameters(recurse=False)):
            handles.append(module.register_load_state_dict_pre_hook(note))
    model.load_state_dict(state, strict=True)
    for handle in handles:
        handle.remove()
    return seen


ANEW: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "glob": lambda c: ckptool.rename(ckptool.rename(c, glob=("a.*", "stem.*")), glob=("b.*", "body.*")),
    "regex": lambda c: ckptool.rename(ckptool.rename(c, regex=("^a", "stem")), regex=(r"^b(\.|$)", r"body\1")),
    "table": lambda c: ckptool.rename(
        c, {e.key: re.sub("^b", "body", re.sub("^a", "stem", e.key)) for e in c.survey.tensors}
    ),
    "like": lambda c: ckptool.rename(
        c, {e.key: n for e, n in zip(c.survey.tensors, Model("stem", "body").state_dict())}
    ),
}


@pytest.mark.parametrize("way", ANEW)
def test_every_module_sees_its_version(way: str, tmp_path: Path, out: Path) -> None:
    path = saved(Model("a", "b").state_dict(), tmp_path / "in.pth")
    found = edited(path, out, ANEW[way])
    wanted = {"stem.0": 1, "stem.1": 2, "body": 7, "body.norm": 2}
    assert versions(Model("stem", "body"), found) == wanted


def test_a_choice_of_keys_splits_a_module(tmp_path: Path, out: Path) -> None:
    path = saved(nn.Sequential(nn.BatchNorm1d(2)).state_dict(), tmp_path / "in.pth")
    found = edited(path, out, lambda c: ckptool.add_module(c, "new", include=["*.weight", "*.bias"]))
    assert found._metadata["0"] == found._metadata["new.0"] == {"version": 2}


def named_training() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_names_in_optimizers_follow(tmp_path: Path, out: Path) -> None:
    _, training = named_training()
    path = saved(training, tmp_path / "in.pth")
    found = edited(path, out, lambda c: ckptool.rename(c, glob=("0.*", "first.*")))
    (group,) = found["optimizer"]["param_groups"]
    assert group["param_names"] == list(found["model"]) == ["first.weight", "first.bias", "1.weight", "1.bias"]


def test_an_optimizer_that_may_belong_to_another_model_stays(tmp_path: Path, out: Path) -> None:
    """The averaged weights have the names of the weights; who renames the ones does not rename the others."""
    _, training = named_training()
    path = saved(training | {"ema": copy.deepcopy(training["model"])}, tmp_path / "in.pth")
    found = edited(path, out, lambda c: ckptool.rename(c, glob=("0.*", "first.*"), key="ema"))
    assert found["optimizer"]["param_groups"][0]["param_names"] == list(found["model"])

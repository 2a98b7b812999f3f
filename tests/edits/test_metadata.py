"""``_metadata`` follows the keys, as torch itself would have written it: real modules, torch's own functions."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import LOADABLE, Fixture, by_name
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as consume

import ckptool
from ckptool.checkpoint.paths import parse_path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Versioned(nn.Module):
    """A module whose version tells it apart from what torch gives to every other."""

    _version = 7

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 1)
        self.norm = nn.BatchNorm2d(2)  # version 2
        self.module = nn.Linear(2, 2)  # a name like the wrapper's
        self.empty = nn.Identity()  # no key, but an entry of its own
        self.scale = nn.Parameter(torch.ones(1))


MODELS = {
    "versioned": Versioned(),
    "sequential": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "one-layer": nn.BatchNorm1d(3),
    "nested": nn.ModuleDict({"a": Versioned(), "b": nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])}),
}
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def edited(state: Any, edit: str, folder: Path, **how: Any) -> Any:
    """A state dict, saved by torch, edited by ckptool, loaded by torch."""
    source, out = folder / "in.pth", folder / "out.pth"
    torch.save(state, source)
    with ckptool.open(source) as checkpoint:
        ckptool.save(getattr(ckptool, edit)(checkpoint, **how), out, force=True)
    return oracle.load(out)


def parallel(model: nn.Module) -> Any:
    """What a DataParallel run would save."""
    return nn.DataParallel(model).state_dict()


def metadata(state: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(key, dict(value)) for key, value in state._metadata.items()]


@models
def test_strip_gives_the_metadata_of_the_model_itself(model: nn.Module, tmp_path: Path) -> None:
    """Names, versions and order: the entry of ``module`` takes the place of the wrapper's ''."""
    found = edited(parallel(model), "strip_module", tmp_path)
    assert metadata(found) == metadata(model.state_dict())
    assert list(found) == list(model.state_dict())


@models
@pytest.mark.parametrize("prefix", ["stem.", "module.", "a.", "0."])
def test_strip_of_any_prefix_gives_what_torchs_own_function_gives(
    model: nn.Module, prefix: str, tmp_path: Path
) -> None:
    """Also where only some keys have it, and where it is the name of a part of the model."""
    state = model.state_dict()
    keys = [key.removeprefix(prefix) for key in state]
    if len(set(keys)) < len(keys):
        pytest.skip("two keys would be one, which ckptool refuses")
    found = edited(state, "strip_module", tmp_path, prefix=prefix)
    if list(found) == list(state):
        assert metadata(found) == metadata(state)
        return
    consume(state, prefix)
    assert dict(metadata(found)) == dict(metadata(state))


@models
def test_add_gives_the_metadata_of_the_wrapped_model(model: nn.Module, tmp_path: Path) -> None:
    found = edited(model.state_dict(), "add_module", tmp_path)
    wrapped = parallel(model)
    assert list(found) == list(wrapped)
    # '' stays what it was, for nobody knows the wrapper's own version; the rest gains the prefix. So does the model
    # itself where it has keys of its own: load_state_dict asks for their version.
    own = any("." not in key for key in model.state_dict())
    below = [item for item in metadata(wrapped) if item[0] not in ("", *(() if own else ("module",)))]
    assert [item for item in metadata(found) if item[0]] == below


@pytest.mark.parametrize("edit", ["strip_module", "add_module", "strip_wrappers"])
def test_without_a_key_to_rename_the_metadata_stays(edit: str, tmp_path: Path) -> None:
    """A part without parameters that is called ``module`` is no wrapper; torch's function takes it for one."""
    model = nn.Sequential(OrderedDict(module=nn.ReLU(), flatten=nn.Flatten()))
    state = model.state_dict()
    assert metadata(edited(state, edit, tmp_path)) == metadata(state)
    consume(state, "module.")
    assert metadata(state) != metadata(model.state_dict())


def test_metadata_that_two_state_dicts_share(tmp_path: Path) -> None:
    """An average that took over the ``_metadata`` of the model: one object, renamed once, right for both."""
    state = parallel(Versioned())
    average = OrderedDict((key, value.clone()) for key, value in state.items())
    average._metadata = state._metadata  # type: ignore[attr-defined]
    found = edited({"model": state, "ema": average}, "strip_module", tmp_path)
    expected = metadata(Versioned().state_dict())
    assert metadata(found["model"]) == expected and metadata(found["ema"]) == expected
    assert found["model"]._metadata is found["ema"]._metadata


@pytest.mark.parametrize("fixture", [item for item in LOADABLE if item.state_dicts], ids=by_name)
def test_strip_of_every_fixture_gives_what_torchs_own_function_gives(fixture: Fixture, tmp_path: Path) -> None:
    if fixture.path.name in ("collision.pth", "zip_two_pickles.pth"):
        pytest.skip("refused")
    out = tmp_path / "out.pth"
    with ckptool.open(fixture.path) as checkpoint:
        paths = [parse_path(item.path) for item in checkpoint.state_dicts if item.confidence == "high"]
        ckptool.save(ckptool.strip_module(checkpoint), out)
    before, after = oracle.load(fixture.path), oracle.load(out)
    for path in paths:
        old, new = before, after
        for step in path:
            old, new = old[step], new[step]
        consume(old, "module.")
        assert hasattr(new, "_metadata") == hasattr(old, "_metadata")
        if hasattr(old, "_metadata"):
            assert dict(metadata(new)) == dict(metadata(old))

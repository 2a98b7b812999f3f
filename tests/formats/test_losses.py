"""No tensor is left out by a conversion that succeeds, or by a command that a refusal prints, wherever it is held."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import say
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckptool

#: Elements by which the hidden tensor is known again.
HIDDEN = torch.arange(100.0, 107.0)


def _with_attribute(value: Any, **attributes: Any) -> Any:
    for name, held in attributes.items():
        setattr(value, name, held)
    return value


PLACES = {
    "an attribute of the state dict": lambda: _with_attribute(OrderedDict(w=torch.ones(2)), hidden=HIDDEN),
    "an attribute of a dict in it": lambda: {
        "a": {"w": torch.ones(2)},
        "b": _with_attribute(OrderedDict(w=torch.ones(2)), hidden=HIDDEN),
    },
    "the metadata of the modules": lambda: _with_attribute(
        OrderedDict(w=torch.ones(2)), _metadata={"": {"version": 1, "table": HIDDEN}}
    ),
    "an attribute of a tensor": lambda: {"w": _with_attribute(torch.ones(2), scale=HIDDEN)},
    "an attribute of a parameter": lambda: {"w": _with_attribute(torch.nn.Parameter(torch.ones(2)), scale=HIDDEN)},
    "a list in an attribute": lambda: {"w": _with_attribute(torch.ones(2), scales=[{"a": (HIDDEN,)}])},
    "under a tuple": lambda: {"w": torch.ones(2), (1, 2): HIDDEN},
    "a key": lambda: {"w": torch.ones(2), HIDDEN: 1},
    "a set": lambda: {"w": torch.ones(2), "s": {HIDDEN}},
}
TARGETS = {
    "dcp": ("--to-format", "dcp"),
    "safetensors": ("--to-format", "safetensors"),
    "legacy": ("--to-format", "legacy"),
    "torch": ("--to-format", "torch"),
}


def _holds(path: Path) -> bool:
    """Return whether the bytes of the hidden tensor are in a file or folder, none of which is compressed."""
    files = [path] if path.is_file() else list(path.iterdir())
    return any(HIDDEN.numpy().tobytes() in file.read_bytes() for file in files)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", PLACES)
def test_a_conversion_keeps_each_tensor_or_is_refused(place: str, target: str, tmp_path: Path) -> None:
    torch.save(PLACES[place](), tmp_path / "x.pth")
    output = tmp_path / "output"
    said = say("convert", tmp_path / "x.pth", *TARGETS[target], "-o", output)
    if said.code == 0:
        assert _holds(output)
    else:
        assert said.code == 4 and not output.exists(), said.all
        # What a safetensors file lacks of a state dict may be a whole optimizer, which is meant to stay behind.
        assert "--allow-loss" not in said.all or "--allow-loss entries" in said.all, said.all


def test_a_tensor_with_attributes_is_an_object_of_a_dcp_folder(tmp_path: Path) -> None:
    torch.save(PLACES["an attribute of a tensor"](), tmp_path / "x.pth")
    assert say("convert", tmp_path / "x.pth", "--to-format", "dcp", "-o", tmp_path / "x").code == 0
    reader = dcp.FileSystemReader(tmp_path / "x")
    loaded = _load_state_dict_from_keys({"w"}, storage_reader=reader)
    assert torch.equal(loaded["w"].scale, HIDDEN)


TRAINING = {
    "optimizer": lambda model: torch.optim.Adam(model.parameters()).state_dict(),
    "rng_state": lambda model: torch.get_rng_state(),
    "best": lambda model: torch.tensor(0.5),
    "seen": lambda model: {"batches": torch.tensor([3, 4])},
    "args": lambda model: {"lr": 0.1, "name": "run"},
}


@pytest.mark.parametrize("kind", ["safetensors", "shards"])
def test_a_training_checkpoint_is_converted_at_once_and_the_report_lists_what_is_left_out(
    kind: str, tmp_path: Path
) -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    torch.optim.Adam(model.parameters()).step()
    saved = {"model": model.state_dict(), **{name: make(model) for name, make in TRAINING.items()}}
    torch.save(saved, tmp_path / "x.pth")
    output = tmp_path / ("x.safetensors" if kind == "safetensors" else "shards")
    options = () if kind == "safetensors" else ("--to-format", "safetensors", "--max-shard-size", "20")
    said = say("convert", tmp_path / "x.pth", "-o", output, *options)
    assert said.code == 0, said.all
    assert all(name in said.out for name in TRAINING)
    with ckptool.open(output) as checkpoint:
        assert checkpoint.keys() == model.state_dict().keys()
    assert say("convert", tmp_path / "x.pth", "-o", output, "--force", "--strict", *options).code == 4


@pytest.mark.parametrize("held", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(4).untyped_storage()])
def test_what_may_be_weights_beside_the_state_dict_is_refused(held: Any, tmp_path: Path) -> None:
    torch.save({"model": torch.nn.Linear(3, 2).state_dict(), "ema": [held]}, tmp_path / "x.pth")
    said = say("convert", tmp_path / "x.pth", "-o", tmp_path / "x.safetensors")
    assert said.code == 4 and "ema" in said.err and "--key model" in said.err
    assert say("convert", tmp_path / "x.pth", "-o", tmp_path / "x.safetensors", "--key", "model").code == 0

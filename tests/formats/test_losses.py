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

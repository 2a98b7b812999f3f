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
from ckptool.cli.main import run

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


# -- A format without checksums must not give wrong bytes a good name: what the input says of them is looked at.


NAMES = ("net.a", "net.b", "other.c")


def damaged(path: Path, which: str) -> Path:
    """A checkpoint of two state dicts in which a bit of one tensor is another one."""
    tensors = {name: torch.randn(50, 40) for name in NAMES}
    torch.save({head: {n: t for n, t in tensors.items() if n.startswith(head)} for head in ("net", "other")}, path)
    with ckptool.open(path) as checkpoint:
        (entry,) = (entry for entry in checkpoint.survey.tensors if entry.key == which)
        stored = checkpoint.container.stored(entry.tensor.storage)
        assert stored.span is not None
        at = stored.span.offset + 1234
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("to", ["safetensors", "legacy", "shards"])
def test_a_flipped_bit_is_not_passed_on(
    which: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = damaged(tmp_path / "in.pth", which), tmp_path / "out"
    how = {
        "safetensors": ["--to-format", "safetensors", "--key", "net", "--allow-loss", "entries"],
        "shards": ["--to-format", "safetensors", "--key", "net", "--allow-loss", "entries", "--max-shard-size", "9KB"],
        "legacy": ["--to-format", "legacy"],
    }[to]
    code = run(["convert", str(source), "-o", str(out), *how])
    said = capsys.readouterr().err
    if which == "other.c" and to != "legacy":
        # What does not go into the output need not be whole.
        assert code == 0 and out.exists()
        return
    assert code == 3 and not out.exists() and [file.name for file in tmp_path.iterdir()] == ["in.pth"]
    assert f'net["{which}"]' in said or f'other["{which}"]' in said
    assert "checksum" in said and f"ckptool salvage {source}" in said


@pytest.mark.parametrize("flip", [False, True])
def test_large_inputs_are_looked_at_by_a_thread(flip: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1 << 20), "b": torch.ones(3)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        stored = checkpoint.container.stored(checkpoint.survey.tensors[0].tensor.storage)
    assert stored.span is not None and stored.size > 2 << 20
    if flip:
        with (tmp_path / "in.pth").open("r+b") as file:
            file.seek(stored.span.offset + stored.size - 1)
            file.write(b"\x01")
    assert run(["convert", str(tmp_path / "in.pth"), "-o", str(tmp_path / "x.safetensors"), "-q"]) == (3 if flip else 0)
    assert (tmp_path / "x.safetensors").exists() != flip


def test_a_view_that_becomes_an_item_is_looked_at(tmp_path: Path) -> None:
    """Of a storage that several tensors are views of, each item has a part, under a checksum of its own."""
    torch.save(dict(zip("abc", torch.randn(3, 500))), tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        stored = checkpoint.container.stored(checkpoint.survey.tensors[0].tensor.storage)
    assert stored.span is not None
    data = bytearray((tmp_path / "in.pth").read_bytes())
    data[stored.span.offset + 3000] ^= 1
    (tmp_path / "in.pth").write_bytes(data)
    how = ["--to-format", "dcp", "--allow-loss", "all", "--tied", "clone"]
    assert run(["convert", str(tmp_path / "in.pth"), "-o", str(tmp_path / "out"), *how]) == 3

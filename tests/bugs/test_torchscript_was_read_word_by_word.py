"""Of a TorchScript archive every instruction was read by itself, and every tensor twice: 200,000 of them took more than
twice as long as those of torch.save. The phrase that its pickler repeats is read in one step now, as if it were not."""

from __future__ import annotations

import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.base.errors import PickleError
from ckptool.checkpoint.tensors import TensorReader
from ckptool.pickles import fast_decode
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Graph, Instance


class Leaf(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size, size)), nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.ones(2, 3, 4, 5).permute(3, 1, 0, 2))
        self.register_buffer("empty", torch.zeros(0, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Names that are numbers, as the keys of storages are: one string for both.
        self.layers = nn.ModuleList([Leaf(size) for size in (2, 3) * 20])
        self.layers[7].weight = self.layers[9].weight
        self.layers[11].bias = nn.Parameter(self.layers[9].weight[1, 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("script") / "m.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Net()).save(str(made))
    return made


@pytest.fixture(scope="module")
def data(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("m/data.pkl")


def written_out(graph: Graph) -> list[Any]:
    """Every node and all of the style, comparable."""
    nodes: list[Any] = []
    for node in graph.nodes:
        slots = [name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ()) if name != "filling"]
        held = [getattr(node, name) for name in slots]
        if isinstance(node, Instance):
            held += [list(node.items), list(node.pairs), list(node.states)]
        nodes.append((type(node), held or repr(node)))
    style = [getattr(graph.style, name) for name in graph.style.__slots__]
    return [nodes, graph.root, style, dict(graph.refused), list(graph.oddities)]


def outcome(data: bytes) -> Any:
    try:
        return written_out(decode(data).graph)
    except PickleError as error:
        return str(error), error.offset


def word_by_word(data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_decode, "_TORCH_SAVE", lambda *_: None)
        patch.setattr(fast_decode, "_TORCHSCRIPT", lambda *_: None)
        return outcome(data)


def test_it_is_the_same(data: bytes) -> None:
    assert outcome(data) == word_by_word(data)


def test_damaged_ones_are_the_same(data: bytes) -> None:
    chance = random.Random(7)
    for _ in range(300):
        spoilt = bytearray(data)
        spoilt[chance.randrange(2, len(data))] = chance.choice((0x28, 0x74, 0x68, 0x72, 0x2E, chance.randrange(256)))
        assert outcome(bytes(spoilt)) == word_by_word(bytes(spoilt))


def test_phrases_are_met(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real, met = fast_decode._TORCHSCRIPT, [0]

    def counting(*arguments: Any) -> Any:
        found = real(*arguments)
        met[0] += found is not None
        return found

    monkeypatch.setattr(fast_decode, "_TORCHSCRIPT", counting)
    graph = decode(data).graph
    # The first ones have small memo numbers.
    assert met[0] > 100
    style = graph.style.memoizing_late()
    assert encode(Graph(graph.nodes, graph.root, style, graph.refused, graph.oddities)) == data


def test_a_tensor_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survey goes on with what the container has read; only what it detached is new."""
    real, read = TensorReader._read_storage, [0]

    def counting(*arguments: Any) -> None:
        read[0] += 1
        real(*arguments)

    monkeypatch.setattr(TensorReader, "_read_storage", counting)
    with ckptool.open(path) as checkpoint:
        assert len(checkpoint.survey.tensors) == 200
        assert read[0] == len(checkpoint.survey.reader.uses())
        # An edited graph has a reader of its own.
        edited = ckptool.remap_devices(checkpoint, {"cpu": "cuda:1"})
        assert {entry.tensor.location for entry in edited.survey.tensors} == {"cuda:1"}

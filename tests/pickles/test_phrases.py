"""Tensors are read a phrase at a time; nobody can tell: instruction by instruction it is the same."""

from __future__ import annotations

import io
import pickle
import random
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptool.base.errors import PickleError
from ckptool.base.limits import LIMITS
from ckptool.pickles import fast_decode
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Graph, Node

#: Tensors before the memo has numbers of four bytes, from which on there are phrases.
_FIRST = 40


class Storage(NamedTuple):
    """What the persistent id tells."""

    key: str
    device: str
    size: int


class Tensor:
    """Pickled like one of torch: a call with six arguments."""

    def __init__(self, storage: Storage, offset: int, shape: tuple[int, ...], grad: bool, hooks: object) -> None:
        self.args = storage, offset, (*shape,), tuple(reversed(shape)), grad, hooks

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return rebuild, self.args


class Hooks:
    """Pickled like an empty OrderedDict in a tensor."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Hooks, ()


def rebuild(*args: object) -> object:
    """What a pickle of tensors names and nobody calls."""
    raise AssertionError(args)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        # The word and the device may be one object for all.
        return ("storage", Storage, *obj) if isinstance(obj, Storage) else None


def written(value: object, protocol: int = 2) -> bytes:
    """The pickle as torch.save would write it."""
    out = io.BytesIO()
    _Pickler(out, protocol).dump(value)
    return out.getvalue()


#: Few of each, so that tensors have much in common.
_sizes = st.sampled_from((4, 4, 4, 300, 70_000, 1 << 40))
_shapes = st.lists(_sizes, max_size=5).map(tuple)
_devices = st.sampled_from(("cpu", "cuda:0", "cuda:0", "cuda:1", "m", "privateuseone:12", "gerät"))


@st.composite
def tensors(draw: Any) -> list[tuple[str, object]]:
    """Some more tensors, of which some are the same as one before, have its hooks, its storage or its shape."""
    made: list[tuple[str, object]] = []
    for number in range(draw(st.integers(1, 20))):
        device = draw(_devices)
        fresh = "".join(list(device)) if len(device) > 1 and draw(st.booleans()) else device
        storage = Storage(str(draw(st.integers(0, 10**9))), fresh, draw(_sizes))
        tensor = Tensor(storage, draw(st.sampled_from((0, 0, 300))), draw(_shapes), draw(st.booleans()), Hooks())
        if made and draw(st.integers(0, 3)) == 0:
            other = draw(st.sampled_from(made))[1]
            assert isinstance(other, Tensor)
            place = draw(st.integers(0, 6))
            tensor = other if place == 6 else tensor
            if place < 6:
                tensor.args = tuple((other if n == place else tensor).args[n] for n in range(6))  # type: ignore[assignment]
        made.append((f"layer.{number}.wéight" if number % 5 == 4 else f"layer.{number}", tensor))
    return made


def checkpoint(more: list[tuple[str, object]]) -> tuple[object, ...]:
    """Tensors enough to fill the small memo numbers, then these, then dicts of one pair."""
    modules: dict[str, object] = {f"module.{n}": {"version": 1} for n in range(3)}
    modules |= {"odd": {"version": 2}, "none": {}, "two": {1: 2, 3: 4}}
    return OrderedDict([*[(f"first.{n}", usual(n)) for n in range(_FIRST)], *more]), modules


def usual(number: int) -> Tensor:
    """A tensor with a device of its own, as on a GPU."""
    return Tensor(Storage(str(number), "".join(("cuda:", "0")), 4), 0, (4,), False, Hooks())


@contextmanager
def one_by_one() -> Iterator[None]:
    """No phrases: every instruction by itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_pattern", "read_pairs"):
            patch.setattr(sys.modules["ckptool.pickles.decode"], name, lambda *_: -1)
        yield


def told(node: Node) -> object:
    """A node with everything in it."""
    if not hasattr(node, "__slots__"):
        return type(node), node
    slots = [name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())]
    return type(node), [
        (name, told(getattr(node, name)) if name == "filling" else getattr(node, name)) for name in slots
    ]


def outcome(data: bytes) -> object:
    """All that can be known of a pickle: its graph number by number and how it is written again, or the error."""
    try:
        graph, end, _ = decode(data)
    except PickleError as error:
        return type(error), error.what, error.offset, [told(node) for node in error.seen]
    kept = ("forms", "unmemoized", "memoized", "batches", "discarded", "memo_base")
    about = [getattr(graph.style, name) for name in kept], graph.refused, graph.oddities
    return graph.root, end, [told(node) for node in graph.nodes], about, encode(graph)


def phrases_in(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many patterns and dicts of one pair are read by phrases."""
    counts = [0, 0]

    def counting(number: int, read: Callable[..., int], new: int) -> Callable[..., int]:
        def counted(machine: Any, stack: list[int], *places: int) -> int:
            size = len(stack) + new
            end = read(machine, stack, *places)
            # The first one, and others that follow it, each after a key.
            counts[number] += 1 + (len(stack) - size) // 2 if end >= 0 else 0
            return end

        return counted

    decoder = sys.modules["ckptool.pickles.decode"]
    monkeypatch.setattr(decoder, "read_pattern", counting(0, fast_decode.read_pattern, 0))
    monkeypatch.setattr(decoder, "read_pairs", counting(1, fast_decode.read_pairs, 1))
    assert encode(decode(data).graph) == data
    return counts[0], counts[1]


@settings(max_examples=examples(150))
@given(tensors(), st.sampled_from((2, 2, 2, 3, 1, 4, 5)))
def test_a_phrase_is_what_its_instructions_are(more: list[tuple[str, object]], protocol: int) -> None:
    data = written(checkpoint(more), protocol)
    with one_by_one():
        expected = outcome(data)
    assert outcome(data) == expected
    assert encode(decode(data).graph) == data


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(("flip", "cut", "double")))
def test_damaged_phrases_are_what_their_instructions_are(place: int, byte: int, how: str) -> None:
    data = DAMAGED
    at = len(data) - 1 - place % 900
    data = {
        "flip": data[:at] + bytes((byte,)) + data[at + 1 :],
        "cut": data[:at],
        "double": data[:at] + data[at - 4 :],
    }[how]
    with one_by_one():
        expected = outcome(data)
    assert outcome(data) == expected


def test_every_byte_of_a_phrase_counts() -> None:
    check_every_byte(DAMAGED, DAMAGED.rindex(b"layer.44") - 5)


def test_every_byte_of_a_dict_of_one_pair_counts() -> None:
    check_every_byte(MODULES, MODULES.rindex(b"module.6") - 5)


def check_every_byte(data: bytes, begin: int) -> None:
    """Replace every byte from ``begin`` on by some others."""
    for at in range(begin, len(data)):
        for byte in b"\x84\x85\x86\x87\x88th)K(RX}s\0\xff":
            spoilt = data[:at] + bytes((byte,)) + data[at + 1 :]
            with one_by_one():
                expected = outcome(spoilt)
            assert outcome(spoilt) == expected


DAMAGED = written(
    OrderedDict(
        (
            f"layer.{n}",
            Tensor(Storage(str(n), "cpu" if n % 2 else "".join(("cuda:", "1")), 4), 0, (4, 300), False, Hooks()),
        )
        for n in range(_FIRST + 5)
    )
)
#: Enough strings to fill the small memo numbers, then names of modules with dicts of one pair.
MODULES = written([[f"{n} of many" for n in range(300)], {f"module.{n}": {"version": 1} for n in range(7)}])


def test_tensors_and_metadata_are_phrases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this file would compare the loops with themselves."""
    more: list[tuple[str, object]] = [(f"more.{n}", usual(n)) for n in range(20)]
    patterns, pairs = phrases_in(written(checkpoint(more)), monkeypatch)
    assert patterns >= 30
    assert pairs >= 2


def test_phrases_count_towards_the_limit_of_nodes() -> None:
    for nodes in range(300, 400, 7):
        limits = LIMITS._replace(nodes=nodes)
        with one_by_one(), pytest.raises(PickleError) as expected:
            decode(DAMAGED, limits=limits)
        with pytest.raises(PickleError) as found:
            decode(DAMAGED, limits=limits)
        assert (found.value.what, found.value.offset) == (expected.value.what, expected.value.offset)


def test_a_memo_number_that_is_written_again_means_the_other_object() -> None:
    key = DAMAGED.index(b"X\x07\0\0\0storage") + 12
    assert DAMAGED[key : key + 1] == b"q"
    number = DAMAGED[key + 1 : key + 2]
    # Before the last tensors another string takes the number of the word.
    at = DAMAGED.index(b"X\x08\0\0\0layer.44")
    data = DAMAGED[:at] + b"X\x01\0\0\0aq" + number + b"0" + DAMAGED[at:]
    with one_by_one():
        expected = outcome(data)
    assert outcome(data) == expected


# -- TorchScript -----------------------------------------------------------------------------------------------
# The phrase that the pickler of TorchScript repeats is read in one step, with the same result as instruction by
# instruction.


class ScriptLeaf(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size, size)), nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.ones(2, 3, 4, 5).permute(3, 1, 0, 2))
        self.register_buffer("empty", torch.zeros(0, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ScriptNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Names that are numbers, as the keys of storages are: one string for both.
        self.layers = nn.ModuleList([ScriptLeaf(size) for size in (2, 3) * 20])
        self.layers[7].weight = self.layers[9].weight
        self.layers[11].bias = nn.Parameter(self.layers[9].weight[1, 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def script_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("script") / "m.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(ScriptNet()).save(str(made))
    return made


@pytest.fixture(scope="module")
def script_pickle(script_path: Path) -> bytes:
    with zipfile.ZipFile(script_path) as archive:
        return archive.read("m/data.pkl")


def test_torchscript_read_by_phrases_is_the_same(script_pickle: bytes) -> None:
    """The pickle itself, and damaged ones."""
    chance = random.Random(7)
    for number in range(300):
        data = bytearray(script_pickle)
        if number:
            odd = (0x28, 0x74, 0x68, 0x72, 0x2E, chance.randrange(256))
            data[chance.randrange(2, len(script_pickle))] = chance.choice(odd)
        with one_by_one():
            expected = outcome(bytes(data))
        assert outcome(bytes(data)) == expected


def test_phrases_of_torchscript_are_met(script_pickle: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real, met = fast_decode._TORCHSCRIPT, [0]

    def counting(*arguments: Any) -> Any:
        found = real.match(*arguments)
        met[0] += found is not None
        return found

    monkeypatch.setattr(fast_decode, "_TORCHSCRIPT", SimpleNamespace(match=counting))
    graph = decode(script_pickle).graph
    # The first ones have small memo numbers.
    assert met[0] > 100
    style = graph.style.replaced(memoize_late=True)
    assert encode(Graph(graph.nodes, graph.root, style, graph.refused, graph.oddities)) == script_pickle

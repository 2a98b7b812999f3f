"""A pickle that differs in texts alone has the graph that a run over it gives, whatever the difference is."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.base.errors import PickleError
from ckptool.pickles import compare
from ckptool.pickles.compare import difference, redecoded
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Call, Dict, Graph, Persistent, Ref


def _saved(count: int) -> bytes:
    held = {
        f"module.layers.{number}.{part}": torch.zeros(number % 3 + 1, 2) for number in range(count) for part in "ab"
    }
    file = io.BytesIO()
    torch.save({"model": held, "device": "cuda:0", "epoch": 3, "twins": [held, held]}, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


#: Three hundred, so that memo numbers take four bytes: then tensors are read and written at one go.
PICKLES = {"few": _saved(2), "many": _saved(150), "plain": pickle.dumps({"a": ["b", "c", b"d"], "e": ("b", 1)}, 2)}


def _with_texts(graph: Graph, change: Callable[[str], str]) -> Graph:
    texts = {ref: change(node) for ref, node in enumerate(graph.nodes) if type(node) is str}
    return graph.edited(texts)


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize(
    "change", [lambda text: text.removeprefix("module."), lambda text: "mödule." + text, lambda text: text * 90, str]
)
def test_other_texts(name: str, change: Callable[[str], str]) -> None:
    data = PICKLES[name]
    graph = decode(data).graph
    other = encode(_with_texts(graph, change))
    made = redecoded(graph, data, other)
    assert made is None or difference(decode(other).graph, made) == ""


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("text", ["module.layers.0.a", "cuda:0", "cpu", "model", "b"])
def test_keys_and_devices_are_found(name: str, text: str) -> None:
    """What the edits of the command line change."""
    data = PICKLES[name]
    graph = decode(data).graph
    edited = _with_texts(graph, lambda other: "new" if other == text else other)
    made = redecoded(graph, data, encode(edited))
    assert made is not None
    assert difference(edited, made) == ""


def test_a_pickle_within_other_bytes() -> None:
    """A legacy file has other pickles before the one that is edited."""
    data = PICKLES["many"]
    graph = decode(b"before" + data, 6).graph
    edited = _with_texts(graph, lambda text: text.removeprefix("module."))
    made = redecoded(graph, data, encode(edited))
    assert made is not None
    assert difference(edited, made) == ""


@settings(max_examples=examples(400))
@given(st.data())
def test_whatever_else_is_other_it_is_no_other_graph(data: Any) -> None:
    """Bytes that are flipped, put in and left out: what is taken for a change of texts is one."""
    original = PICKLES[data.draw(st.sampled_from(sorted(PICKLES)))]
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        size = data.draw(st.integers(0, 3))
        changed[place : place + size] = data.draw(st.binary(max_size=3))
    graph = decode(original).graph
    made = redecoded(graph, original, bytes(changed))
    if made is None:
        return
    try:
        run = decode(bytes(changed))
    except PickleError as error:
        raise AssertionError(f"it does not decode: {error}") from error
    assert run.end == len(changed)
    assert difference(run.graph, made) == ""


def _wrapped(count: int) -> bytes:
    """The state dict of a wrapped model: its ``_metadata`` has the wrapper and the module in it."""
    model = torch.nn.ModuleDict({"module": torch.nn.Sequential(*(torch.nn.Linear(2, 1) for _ in range(count)))})
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "rate": 0.5, "zero": 0.0, "names": ("a", ["b"])}, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


WRAPPED = _wrapped(60)
#: Without the names in a tuple: what nothing but containers hold.
NESTED = pickle.dumps({"a": {"b": [1, 0.5, "c"], "d": {"e": "f", "g": -0.0}}, "h": [{"i": "j"}, {"k": "l"}]}, 2)


def _edit(data: Any, graph: Graph) -> Graph:
    """The graph with other keys, and perhaps with one entry less in a mapping."""
    texts = [ref for ref, node in enumerate(graph.nodes) if type(node) is str and node.startswith("module")]
    chosen = data.draw(st.sampled_from([texts, texts[:3], []]))
    changes: dict[Ref, Any] = {ref: str(graph.nodes[ref]).removeprefix("module.") for ref in chosen}
    mappings = [ref for ref, node in enumerate(graph.nodes) if isinstance(node, Call | Dict) and len(node.pairs) > 2]
    for ref in data.draw(st.lists(st.sampled_from(mappings), max_size=2, unique=True)):
        node = graph.nodes[ref]
        assert isinstance(node, Call | Dict)
        at = 2 * data.draw(st.integers(0, len(node.pairs) // 2 - 1))
        pairs = [*node.pairs[:at], *node.pairs[at + 2 :]]
        changes[ref] = Dict(pairs) if isinstance(node, Dict) else node.filled(node.items, pairs, node.states)
    return graph.edited(changes)


def _spoilt(data: Any, graph: Graph) -> None:
    """Change one node: a text, a number, or what it refers to."""
    ref = data.draw(st.integers(0, len(graph.nodes) - 1))
    node, other = graph.nodes[ref], data.draw(st.integers(0, len(graph.nodes) - 1))
    if type(node) is str:
        graph.nodes[ref] = node + "x"
    elif type(node) is float:
        graph.nodes[ref] = -node
    elif type(node) is int:
        graph.nodes[ref] = bool(node)
    elif type(node) is tuple and node:
        graph.nodes[ref] = (min(other, ref - 1), *node[1:])
    elif isinstance(node, Persistent):
        graph.nodes[ref] = Persistent(min(other, ref - 1))
    elif isinstance(node, Dict) and node.pairs:
        graph.nodes[ref] = Dict([*node.pairs[:-1], other])
    elif isinstance(node, Call) and node.filling is None:
        graph.nodes[ref] = Call(node.op, node.func, min(other, ref - 1))


@settings(max_examples=examples(400))
@given(st.data())
def test_graphs_compare_the_same_in_columns_and_node_by_node(data: Any) -> None:
    graph = decode(data.draw(st.sampled_from((WRAPPED, NESTED, PICKLES["many"])))).graph
    edited = _edit(data, graph)
    read = decode(encode(edited)).graph
    assert difference(edited, read) == ""
    for _ in range(data.draw(st.integers(0, 2))):
        _spoilt(data, read)
    nothing = bytes(max(len(edited.nodes), len(read.nodes)))
    assert bool(difference(edited, read)) == bool(compare._difference(edited, read, nothing, compare.CONSTANTS, None))


def test_the_tensors_of_an_edited_state_dict_are_compared_in_columns() -> None:
    graph = decode(WRAPPED).graph
    metadata = next(node for node in graph.nodes if isinstance(node, Call) and len(node.pairs) == 2 * 62)
    ref = graph.nodes.index(metadata)
    pairs = [metadata.pairs[0], *metadata.pairs[3:]]
    changes: dict[Ref, Any] = {ref: metadata.filled((), pairs, metadata.states)}
    edited = graph.edited(changes)
    read = decode(encode(edited)).graph
    common = compare._common(edited, read)
    assert common is not None
    calls = [
        ref for ref, node in enumerate(graph.nodes) if type(node) is Call and type(graph.nodes[node.args]) is tuple
    ]
    assert sum(common[ref] for ref in calls) >= 120


def test_a_text_that_names_a_function_decides_more_than_itself() -> None:
    data = pickle.dumps(len, 4)
    assert redecoded(decode(data).graph, data, data.replace(b"len", b"abs")) is None

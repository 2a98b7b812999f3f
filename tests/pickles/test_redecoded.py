"""A pickle that differs in texts alone: its graph is what a run over it gives, its bytes what the encoder writes."""

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
from ckptool.checkpoint.graph_editor import GraphEditor
from ckptool.pickles import opcodes as op
from ckptool.pickles.compare import difference, redecoded, respelled
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Call, Dict, Graph, Persistent, children


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


def _respelt(graph: Graph, change: Callable[[str], str]) -> Graph:
    """Return the graph with other texts in its tuples and dicts, as edits put them in."""
    editor = GraphEditor(graph)
    for ref, node in enumerate(graph.nodes):
        if type(node) is tuple or type(node) is Dict:
            parts = node if type(node) is tuple else node.pairs
            new = [
                editor.text(part, change(text)) if type(text := graph.nodes[part]) is str else part for part in parts
            ]
            if new != [*parts]:
                editor.put(ref, tuple(new) if type(node) is tuple else Dict(new))
    return editor.done()


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize(
    "change", [lambda text: text.removeprefix("module."), lambda text: "mödule." + text, lambda text: text * 90, str]
)
def test_other_texts(name: str, change: Callable[[str], str]) -> None:
    data = PICKLES[name]
    graph = decode(data).graph
    edited = _respelt(graph, change)
    other = encode(edited)
    assert respelled(graph, data + b"after STOP", edited) in (None, other)
    made = redecoded(graph, data, other)
    assert made is None or difference(decode(other).graph, made) == ""


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("text", ["module.layers.0.a", "cuda:0", "cpu", "model", "b"])
def test_keys_and_devices_are_found(name: str, text: str) -> None:
    """What the edits of the command line change."""
    data = PICKLES[name]
    graph = decode(data).graph
    edited = graph.edited({ref: "new" for ref, node in enumerate(graph.nodes) if node == text})
    made = redecoded(graph, data, encode(edited))
    assert made is not None
    assert difference(edited, made) == ""


def test_a_pickle_within_other_bytes() -> None:
    """A legacy file has other pickles before the one that is edited."""
    data = PICKLES["many"]
    graph = decode(b"before" + data, 6).graph
    edited = _respelt(graph, lambda text: text.removeprefix("module."))
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


def test_a_text_that_names_a_function_decides_more_than_itself() -> None:
    data = pickle.dumps(len, 4)
    assert redecoded(decode(data).graph, data, data.replace(b"len", b"abs")) is None


@settings(max_examples=examples(300))
@given(st.data())
def test_any_edit_is_written_as_by_the_encoder_or_left_to_it(data: Any) -> None:
    """Some texts of some containers change; some containers lose, repeat or reorder what they hold."""
    original = PICKLES[data.draw(st.sampled_from(sorted(PICKLES)))]
    graph = decode(original).graph
    editor = GraphEditor(graph)
    containers = [ref for ref, node in enumerate(graph.nodes) if type(node) in (tuple, Dict) and node != ()]
    for ref in data.draw(st.lists(st.sampled_from(containers), min_size=1, max_size=3)):
        node = editor.node(ref)
        parts = [*node] if type(node) is tuple else [*node.pairs]  # type: ignore[union-attr]
        at = data.draw(st.integers(0, len(parts) - 1))
        part = parts[at]
        if part < len(graph.nodes) and type(graph.nodes[part]) is str:
            parts[at] = editor.text(part, data.draw(st.sampled_from(("new", "mödule.a", "cpu"))))
        elif data.draw(st.booleans()):
            parts[at] = data.draw(st.sampled_from(parts))
        editor.put(ref, tuple(parts) if type(node) is tuple else Dict(parts))
    edited = editor.done()
    made = respelled(graph, original, edited)
    if made is not None:
        assert made == encode(edited)
        assert difference(edited, decode(made).graph) == ""


def test_a_tensor_that_shares_a_part_or_is_filled() -> None:
    """The last tensor takes each part, in turn, from the one before it, or its strides from its shape."""
    graph = decode(PICKLES["many"]).graph
    calls = [ref for ref, node in graph.of_type(Call) if len(children(graph.nodes[node.args])) == 6][-2:]
    ids = [saved.pid for _, saved in graph.of_type(Persistent)][-2:]
    args = [children(node)[1] for node in map(graph.nodes.__getitem__, calls)]
    edits = [(args[1], 3, children(graph.nodes[args[1]])[2])]
    for one, other in (args, ids, calls):
        edits += [(other, at, part) for at, part in enumerate(children(graph.nodes[one]))]
    for ref, at, part in edits:
        parts = [*children(graph.nodes[ref])]
        parts[at] = part
        new = Call(op.REDUCE, *parts) if ref in calls else tuple(parts)
        for node in (new, Call(op.REDUCE, *parts).filled((), (), (part,))) if ref in calls else (new,):
            edited = graph.edited({ref: node})
            assert difference(edited, decode(encode(edited)).graph) == ""


def test_other_bytes_than_the_edit_asked_for_are_another_graph() -> None:
    """The quick comparison of two respelled graphs sees what the slow one sees."""
    data = PICKLES["many"]
    graph = decode(data).graph
    edited = _respelt(graph, lambda text: text.removeprefix("module."))
    made = respelled(graph, data, edited)
    assert made is not None
    other = redecoded(graph, data, made.replace(b"layers.7.a", b"layers.7.b", 1))
    assert other is not None
    assert difference(edited, other) == "'layers.7.a' became 'layers.7.b'"

"""What is written of an edited graph, and of one that takes more than one attempt."""

from __future__ import annotations

import pickletools
from typing import Any

import pytest
from pickle_oracle import alike, load

from ckptool.pickles import opcodes as op
from ckptool.pickles.compare import difference
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Call, Dict, Global, Graph, List, Node, Persistent, Ref, Style, children


def find(graph: Graph, value: Node) -> Ref:
    """The one node that is this value."""
    (ref,) = [ref for ref, node in enumerate(graph.nodes) if type(node) is type(value) and node == value]
    return ref


def replaced(data: bytes, old: Any, new: Any) -> bytes:
    """A pickle with another value in place of one; the laws hold for it."""
    graph = decode(data).graph
    edited = graph.edited({find(graph, old): new})
    again = encode(edited)
    assert difference(edited, decode(again).graph) == ""
    return again


# -- the manner of new nodes ------------------------------------------------------------------------------------

PYTHON2 = b"\x80\x02}q\x01(U\x03keyq\x02U\x05valueX\x04\x00\x00\x00textq\x03U\x04lastu."


def added(data: bytes, value: Node, like: Any) -> bytes:
    """A pickle of [all that was there, the new value]; the new one is written like an old one, if any."""
    graph = decode(data).graph
    new, root = len(graph.nodes), len(graph.nodes) + 1
    manner = {new: find(graph, like)} if like is not None else None
    return encode(graph.edited({}, [value, List([graph.root, new])], root, manner))


@pytest.mark.parametrize(
    ("like", "written"),
    [
        (None, b"X\x03\x00\x00\x00newq\x05"),
        ("text", b"X\x03\x00\x00\x00newq\x05"),
        ("key", b"U\x03newq\x05"),
        ("value", b"U\x03new"),
    ],
)
def test_a_new_node_is_written_like_the_old_one_that_it_names(like: Any, written: bytes) -> None:
    inner = PYTHON2[2:-1].replace(b"q\x03", b"q\x04").replace(b"q\x02", b"q\x03").replace(b"q\x01", b"q\x02")
    assert added(PYTHON2, "new", like) == b"\x80\x02]q\x01(" + inner + written + b"e."


@pytest.mark.parametrize("protocol", range(6))
def test_a_graph_made_by_hand_is_memoised_and_has_the_default_opcodes(protocol: int) -> None:
    nodes: list[Node] = ["a", 1, (0, 1), List([0, 2, 2]), Dict([0, 3]), True, 2.5, List([4, 5, 6])]
    again = encode(Graph(nodes, 7, Style(protocol, header=protocol > 1)))
    pair = ("a", 1)
    root, _ = load(again)
    assert root == [{"a": ["a", pair, pair]}, True, 2.5]
    assert root[0]["a"][1] is root[0]["a"][2]
    allowed = {0: 0, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4}[protocol]
    assert max(info.proto for info, _, _ in pickletools.genops(again)) <= allowed


# -- a form that does not fit any more ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "old", "new", "again"),
    [
        (b"\x80\x02M\x05\x00.", 5, 70_000, b"\x80\x02J\x70\x11\x01\x00."),
        (b"\x80\x02\x8a\x01\x05.", 5, 6, b"\x80\x02\x8a\x01\x06."),
        (b"\x80\x02\x8a\x01\x05.", 5, "text", b"\x80\x02X\x04\x00\x00\x00textq\x00."),
        (b"\x80\x02\x8a\x01\x05.", 5, 1.0, b"\x80\x02G?\xf0" + bytes(6) + b"."),
        (b"\x80\x02U\x01a.", "a", 7, b"\x80\x02K\x07."),
        (b"\x80\x02U\x01a.", "a", "x" * 256, b"\x80\x02X\x00\x01\x00\x00" + b"x" * 256 + b"."),
        (b"\x80\x02U\x01\xff.", "\udcff", "\udcff" * 256, b"\x80\x02T\x00\x01\x00\x00" + b"\xff" * 256 + b"."),
        (b"\x80\x02U\x01a.", "a", "\ud800", b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80."),
        (b"\x80\x04\x8c\x01a\x94.", "a", "x" * 256, b"\x80\x04X\x00\x01\x00\x00" + b"x" * 256 + b"\x94."),
        (b"\x80\x03C\x01a.", b"a", b"x" * 256, b"\x80\x03B\x00\x01\x00\x00" + b"x" * 256 + b"."),
        (b"Va\np0\n.", "a", "\n", b"V\\u000a\np0\n."),
        (b"I01\n.", True, 2, b"K\x02."),
    ],
    ids=repr,
)
def test_a_value_that_outgrows_its_form_takes_another(data: bytes, old: Any, new: Any, again: bytes) -> None:
    assert replaced(data, old, new) == again


def test_a_container_with_other_elements_is_filled_in_the_default_batches() -> None:
    graph = decode(b"\x80\x02]q\x00(K\x01eK\x02a.").graph
    assert encode(graph) == b"\x80\x02]q\x00(K\x01eK\x02a."
    one, two = find(graph, 1), find(graph, 2)
    assert encode(graph.edited({graph.root: List([two, one])})) == b"\x80\x02]q\x00(K\x02eK\x01a."
    assert encode(graph.edited({graph.root: List([one, two, one])})) == b"\x80\x02]q\x00(K\x01K\x02K\x01e."


def test_a_global_keeps_its_name_when_the_strings_of_stack_global_change() -> None:
    data = b"\x80\x04\x8c\x01a\x94\x8c\x01b\x94\x93\x94h\x01\x86."
    graph = decode(data).graph
    edited = graph.edited({find(graph, "b"): "c"})
    again = encode(edited)
    assert again == b"\x80\x04\x8c\x01a\x8c\x01b\x93\x94\x8c\x01c\x94\x86."
    assert difference(edited, decode(again).graph) == ""
    # To give it another name takes a node without the strings.
    renamed = encode(graph.edited({find_global(graph): Global("x", "y")}))
    assert renamed == b"\x80\x04cx\ny\n\x94\x8c\x01b\x94\x86."


def find_global(graph: Graph) -> Ref:
    (ref,) = [ref for ref, node in enumerate(graph.nodes) if type(node) is Global]
    return ref


# -- sharing that the style does not foresee ----------------------------------------------------------------------


def test_what_an_edit_shares_is_memoised() -> None:
    graph = decode(b"\x80\x02](NQ]e.").graph
    (pid,) = [ref for ref, node in enumerate(graph.nodes) if type(node) is Persistent]
    edited = graph.edited({graph.root: List([pid, pid])})
    assert encode(edited) == b"\x80\x02](NQq\x00h\x00e."
    assert encode(graph) == b"\x80\x02](NQ]e."


@pytest.mark.parametrize("made", [b"]", b"NQ", b"\x97", b"\x82\x01", b"K\x01\x85", b"(ca\nb\no", b"(ia\nb\n"])
def test_one_object_by_dup_stays_one(made: bytes) -> None:
    graph = decode(made + b"2\x86.").graph
    again = decode(encode(graph)).graph
    left, right = children(again.nodes[again.root])
    assert left == right


# -- objects that depend on themselves --------------------------------------------------------------------------

#: The root is a tuple or call that leads to itself; nothing of it is more than weights_only takes.
TANGLED = [
    b"]q\x00h\x00\x85q\x01ah\x01.",
    b"}q\x00h\x00K\x01\x86q\x01h\x00K\x02h\x01sh\x01.",
    b"ca\nb\n]q\x00\x85Rq\x01h\x00h\x01ah\x01.",
    b"ca\nb\n)\x81q\x00]q\x01h\x00ah\x01h\x00\x86q\x02h\x00}K\x01h\x02sbh\x02.",
    b"]q\x00]q\x01h\x00h\x01\x86q\x02h\x00h\x02ah\x01h\x02a(h\x02h\x00h\x01h\x02t.",
    b"]q\x00Qq\x01h\x00h\x01ah\x01.",
    b"]q\x00h\x00\x85q\x01a]q\x02h\x02h\x01\x86q\x03a(h\x03h\x01t.",
]


@pytest.mark.parametrize("popping", [b"", b"N0"], ids=["without POP", "with POP"])
@pytest.mark.parametrize("data", TANGLED, ids=bytes.hex)
def test_a_knot_is_written_without_pop_or_as_the_pickler_does(data: bytes, popping: bytes) -> None:
    data = b"\x80\x02" + popping + data
    graph = decode(data).graph
    again = encode(graph)
    assert decode(again).graph.oddities == () if popping else not decode(again).graph.refused
    assert difference(graph, decode(again).graph) == ""
    assert alike(load(data)[0], load(again)[0])


@pytest.mark.parametrize("refused", [{}, {op.POP: 1}])
@pytest.mark.parametrize(
    "node", [(0,), (1, 0), Call(op.REDUCE, 0, 1), Persistent(0)], ids=["pair", "triple", "call", "persistent"]
)
def test_what_holds_itself_with_nothing_between_is_no_pickle(node: Node, refused: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="depends on itself"):
        encode(Graph([node, ()], 0, Style(2), refused))


def test_a_name_that_no_opcode_can_spell_is_no_pickle() -> None:
    with pytest.raises(ValueError, match="line feed"):
        encode(Graph([Global("a\nb", "c")], 0, Style(2)))

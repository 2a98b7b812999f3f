"""What the decoder refuses, and what it remarks on: the reason and the place, as CPython's unpickler would have it."""

from __future__ import annotations

import pickle

import pytest
from decoded_graphs import graph_of, refusal, root_of

from ckptool.base.limits import LIMITS
from ckptool.pickles.decode import decode
from ckptool.pickles.nodes import Call, Dict, Global

# -- what CPython refuses, too ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [b"]", b"}", b"\x8f", b"\x96" + bytes(8), b"]\x85", b"N]\x86\x85\x85", b"(]tN\x86"], ids=bytes.hex
)
def test_what_has_no_hash_is_no_key(key: bytes) -> None:
    error = "as a key of a dict or in a set"
    for data in (
        b"}" + key + b"Ns.",
        b"}(" + key + b"Nu.",
        b"(" + key + b"Nd.",
        b"(" + key + b"\x91.",
        b"\x8f(" + key + b"\x90.",
    ):
        assert error in refusal(data).what
        with pytest.raises(TypeError):
            pickle.loads(data)
    assert isinstance(root_of(b"}ca\nb\n" + key + b"\x85RNs."), Dict)


#: CPython takes BUILD with None on anything.
STRICTER = ("BUILD on a List",)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "the pickle ends in the middle of an instruction"),
        (b".", "an instruction takes more from the stack than there is"),
        (b"q\x00.", "an instruction takes more from the stack than there is"),
        (b"K\x01(0.", ""),
        (b"h\x00.", "memo 0 is read before it is written"),
        (b"\x80\x06N.", "pickle protocol 6 is newer than any known (5)"),
        (b"\xff.", "byte 0xff is not a pickle opcode"),
        (b"NK\x01R.", "REDUCE with arguments that are not a tuple"),
        (b"N)R.", "REDUCE calls a NoneType"),
        (b"])\x81.", "NEWOBJ calls a List"),
        (b"ca\nb\n)K\x01\x92.", "NEWOBJ_EX with keyword arguments that are not a dict"),
        (b"(o.", "an instruction takes more from the stack than there is"),
        (b"]Nb.", "BUILD on a List"),
        (b"NK\x01a.", "APPEND on a NoneType"),
        (b"](K\x01\x90.", "ADDITEMS on a List"),
        (b"}(K\x01u.", "SETITEMS with a key that has no value"),
        (b"(K\x01d.", "DICT with a key that has no value"),
        (b"\x82\x00.", "an extension code below 1"),
        (b"\x84\xff\xff\xff\xff.", "an extension code below 1"),
        (b"NN\x93.", "STACK_GLOBAL on something that is not a string"),
        (b"ca\xff\nb\n.", "a global whose name is not UTF-8"),
        (b"(ia\xc3\xa9\nb\n.", "a name or id that is not ASCII"),
        (b"P\xe9\n.", "a name or id that is not ASCII"),
        (b"X\x01\x00\x00\x00\xff.", "a string is not UTF-8"),
        (b"V\\u12\n.", "a string with an invalid escape"),
        (b"Sa\n.", "STRING without its quotes"),
        (b"S'a\"\n.", "STRING without its quotes"),
        (b"S'\\x1'\n.", "STRING with an invalid escape"),
        (b"Ione\n.", "a number that cannot be parsed"),
        (b"Np-1\n.", "a negative memo index"),
        (b"Np99999999999999999999\n.", "a memo index that is too large"),
        (b"F1e999\n.", "a number that is too large"),
        (b"S'no end", "the pickle ends in the middle of a line"),
        (b"]\x98.", "READONLY_BUFFER on something that is not a buffer"),
    ],
    ids=repr,
)
def test_what_cpython_refuses_is_refused_with_the_reason(data: bytes, what: str) -> None:
    if what:
        assert refusal(data).what == what
        if what not in STRICTER:
            with pytest.raises(Exception):  # noqa: B017
                pickle.loads(data)
    else:
        assert root_of(data) == 1


# -- what is odd --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "oddity"),
    [
        (b"\x80\x02\x80\x02N.", (2, "a second PROTO")),
        (b"N\x80\x02.", (1, "PROTO is not the first instruction")),
        (b"NN.", (2, "values are left on the stack at STOP")),
        (b"(N.", (2, "values are left on the stack at STOP")),
        (b"]q\x00}q\x00\x86.", (4, "memo 0 is written twice")),
        (b"]q\x05\x94.", (3, "MEMOIZE in a memo with gaps")),
        (b"\x80\x04\x95\x02" + bytes(7) + b"N.X", ()),
        (b"\x80\x04\x95\x03" + bytes(7) + b"N.X", (12, "the last FRAME reaches beyond STOP")),
        (b"\x80\x04\x95\x0b" + bytes(7) + b"\x95\x02" + bytes(7) + b"N.", (11, "a FRAME begins inside another")),
        (b"ca\nb\nNbNb.", (8, "an object is built twice")),
    ],
    ids=repr,
)
def test_what_no_pickler_writes_is_noted(data: bytes, oddity: tuple[int, str]) -> None:
    assert graph_of(data).oddities == ((oddity,) if oddity else ())


def test_remarks_are_limited() -> None:
    graph = decode(b"\x80\x02" * 50 + b"N.", limits=LIMITS._replace(listed=10)).graph
    assert len(graph.oddities) == 10


def test_what_is_popped_is_still_in_the_arena() -> None:
    graph = graph_of(b"cos\nsystem\n(X\x02\x00\x00\x00lstR0(ia\nb\n0N.")
    assert [(node.module, node.name) for node in graph.nodes if isinstance(node, Global)] == [
        ("os", "system"),
        ("a", "b"),
    ]
    assert sum(isinstance(node, Call) for node in graph.nodes) == 2


def test_opcodes_that_weights_only_refuses_are_counted() -> None:
    assert graph_of(b"\x80\x04\x8c\x01a\x94\x8c\x01b\x940(0.").refused == {0x8C: 2, 0x94: 2, 0x30: 2}
    assert graph_of(b"\x80\x02]q\x00(K\x01\x88e.").refused == {}

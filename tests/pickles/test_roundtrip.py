"""What CPython pickles comes out of ``encode`` as it went into ``decode``, byte for byte."""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import pickletools
import struct
from typing import Any

import pytest
from pickle_objects import Holder, Keywords, Pid, Plain, Slots, dump, python_dump

from ckptool.pickles.compare import difference
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Extension

PROTOCOLS = range(6)


def recursive_tuple(size: int) -> Any:
    """A tuple whose first element is a list that holds the tuple."""
    inner: list[Any] = []
    made = (inner, *range(size - 1))
    inner.append(made)
    return made


def recursive_object() -> Plain:
    made = Plain()
    made.children = [made, {"parent": made}]  # type: ignore[attr-defined]
    return made


def slots() -> Slots:
    made = Slots()
    made.a, made.b = [1], made
    return made


def recursive_set() -> Any:
    member = Plain()
    made = frozenset({member})
    member.home = made  # type: ignore[attr-defined]
    return made


SHARED = ["key", "value"]

OBJECTS: dict[str, Any] = {
    "state dict": collections.OrderedDict(
        (f"layer.{n}.weight", Pid(("storage", n, "cpu", n * 100))) for n in range(400)
    ),
    "shared": [SHARED, SHARED, (SHARED, "key"), {"key": SHARED}],
    "recursive list": (lambda made: (made.append(made), made)[1])([]),
    "recursive dict": (lambda made: (made.__setitem__("self", made), made)[1])({}),
    "recursive object": recursive_object(),
    "recursive 1-tuple": recursive_tuple(1),
    "recursive 3-tuple": recursive_tuple(3),
    "recursive 4-tuple": recursive_tuple(4),
    "recursive frozenset": recursive_set(),
    "recursive arguments": (lambda made: (made.held.append(made), made)[1])(Holder([])),
    "many shared": [[str(number) for number in range(300)] * 2],
    "ints": [
        sign * (1 << bits) + step
        for bits in (0, 7, 8, 15, 16, 31, 32, 63, 2039, 2040)
        for sign in (1, -1)
        for step in (-1, 0, 1)
    ],
    "floats": [0.0, -0.0, 1e-320, float("inf"), float("-inf"), float("nan"), 0.1],
    "texts": ["", "\n\r\\\0\x1a", "\ud800", "\U0001f600", "\xff", "x" * 255, "\xe9" * 128, "x" * 256],
    "bytes": [b"", b"\n", b"x" * 255, b"x" * 256, bytearray(b"x" * 300)],
    "complex": [1j, complex("nan")],
    "deque": collections.deque(range(1500), maxlen=2000),
    "defaultdict": collections.defaultdict(list, {n: [n] for n in range(1001)}),
    "counter": collections.Counter("abracadabra"),
    "NEWOBJ_EX": [Keywords(), Keywords()],
    "two states": slots(),
    "classes": [Plain, Plain.Inner, Plain.Inner, len, dict.fromkeys, struct.Struct, ..., type(None)],
    "deep list": (lambda made: [made := [made] for _ in range(100)][-1])([]),
    "large text": ["a" * 70_000, "b" * 65_536, "c" * 65_535, "d"],
    "large bytes": [b"a" * 70_000, bytearray(b"b" * 65_536), b"c" * 65_535],
    "many frames": [f"text number {number}" for number in range(8_000)],
    "one int": 7,
    "nothing": None,
}


def dumps(obj: Any, protocol: int) -> bytes:
    try:
        return dump(obj, protocol)
    except (pickle.PicklingError, TypeError) as error:
        pytest.skip(str(error))


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", OBJECTS)
def test_what_the_c_pickler_writes_comes_out_byte_for_byte(name: str, protocol: int) -> None:
    data = dumps(OBJECTS[name], protocol)
    decoded = decode(data)
    assert decoded.end == len(data)
    assert decoded.graph.oddities == ()
    assert encode(decoded.graph) == data


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_optimized_pickle_comes_out_as_the_same_graph(name: str, protocol: int) -> None:
    data = pickletools.optimize(dumps(OBJECTS[name], protocol))
    graph = decode(data).graph
    again = encode(graph)
    assert difference(graph, decode(again).graph) == ""
    # optimize lays its FRAMEs otherwise than the pickler.
    assert again == data or len(data) > 60_000


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [0, 1, 2, 999, 1000, 1001, 1002, 2000, 2001])
@pytest.mark.parametrize(
    "kind", [list, tuple, set, frozenset, collections.deque, dict.fromkeys, collections.OrderedDict.fromkeys]
)
def test_batches_come_out_byte_for_byte(kind: Any, size: int, protocol: int) -> None:
    for write in (dump, python_dump):
        data = write(kind(range(size)), protocol)
        assert encode(decode(data).graph) == data


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickler_without_memo_comes_out_byte_for_byte(protocol: int) -> None:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol)
    pickler.fast = True
    pickler.dump([SHARED, SHARED, {"key": (1, 2, SHARED)}, collections.OrderedDict(a=SHARED)])
    assert encode(decode(file.getvalue()).graph) == file.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("code", [200, 300, 70_000])
def test_extension_codes_come_out_byte_for_byte(code: int, protocol: int) -> None:
    copyreg.add_extension("pickle_objects", "Plain", code)
    try:
        data = dump([Plain, Plain, Plain()], protocol)
    finally:
        copyreg.remove_extension("pickle_objects", "Plain", code)
    graph = decode(data).graph
    assert [node.code for node in graph.nodes if isinstance(node, Extension)] == [code] * 3
    assert encode(graph) == data


def test_out_of_band_buffers_come_out_byte_for_byte() -> None:
    held: list[Any] = []
    values = [
        pickle.PickleBuffer(b"read only"),
        pickle.PickleBuffer(bytearray(b"writable")),
        pickle.PickleBuffer(b"in"),
    ]
    data = pickle.dumps(values, 5, buffer_callback=lambda buffer: held.append(buffer) or len(held) == 3)
    assert encode(decode(data).graph) == data


#: Pickles by older and other writers, which CPython 3 reads and does not write. Those of Python 2.7 are by its cPickle.
HANDMADE = {
    "python 2.7, protocol 0": (
        b"(lp1\nV\\u20ac\naS'shared'\np2\nag2\na(I1\nI2\nI3\nI4\ntp3\na(I5\ntp4\na(dp5\nS'big'"
        b"\np6\nI1099511627776\nsS'k'\nL5L\nsaI01\naNa(im\nOld\np7\n(dp8\nS'x'\n(lp9\nS'shar"
        b"ed'\np10\nasbaS'\\xff\\n\\'\"'\np11\na."
    ),
    "python 2.7, protocol 1": (
        b"]q\x01(X\x03\x00\x00\x00\xe2\x82\xacU\x06sharedq\x02h\x02(K\x01K\x02K\x03K\x04tq\x03(K\x05tq\x04}q\x05(U\x03bigq\x06I1099511627776\nU\x01"
        b"kL5L\nuI01\nN(cm\nOld\nq\x07oq\x08}q\tU\x01x]q\nU\x06sharedq\x0basbU\x04\xff\n'\"q\x0ce."
    ),
    "python 2.7, protocol 2": (
        b"\x80\x02]q\x01(X\x03\x00\x00\x00\xe2\x82\xacU\x06sharedq\x02h\x02(K\x01K\x02K\x03K\x04tq\x03K\x05\x85q\x04}q\x05(U\x03bigq\x06I1099511627776\nU"
        b"\x01k\x8a\x01\x05u\x88N(cm\nOld\nq\x07oq\x08}q\tU\x01x]q\nU\x06sharedq\x0basbU\x04\xff\n'\"q\x0ce."
    ),
    "python 2, instance": b"(imodule\nClass\np0\n(dp1\nS'x'\np2\nI1\nsb.",
    "python 2, OBJ": b"(cmodule\nClass\nq\x00K\x01oq\x01}q\x02U\x01xq\x03K\x01sb.",
    "persistent ids as text": b"(lp0\nPfirst\naPsecond\na.",
    "NaN with a sign": b"(lp0\nFnan\naF-nan\na.",
    "NaN with a load": b"]q\x00(G\x7f\xf8\x00\x00\x00\x00\x12\x34G\xff\xf0\x00\x00\x00\x00\x00\x01e.",
    "memo from 1 with gaps in PUT": b"\x80\x02]q\x01(U\x01a]q\x02h\x02h\x01e.",
    "items one by one": b"\x80\x02]q\x00K\x01aK\x02a(K\x03e}q\x01K\x01K\x02s(K\x03K\x04ua(e.",
    "texts in longer forms": b"\x80\x04X\x01\x00\x00\x00a\x94\x8d\x01\x00\x00\x00\x00\x00\x00\x00b\x94\x86\x94.",
    "bytes in longer forms": b"\x80\x03B\x01\x00\x00\x00aq\x00\x8e\x01\x00\x00\x00\x00\x00\x00\x00bq\x01\x86q\x02.",
    "ints in longer forms": b"\x80\x02(M\x01\x00J\x01\x00\x00\x00\x8b\x01\x00\x00\x00\x01I1\ntq\x00.",
    "extension in a longer form": b"\x80\x02\x83\x05\x00.",
    "short tuples with MARK": b"\x80\x02((K\x01tq\x00(K\x01K\x02tq\x01(ttq\x02.",
    "whole containers": b"\x80\x02(K\x01(K\x02K\x03dq\x00lq\x01.",
    "protocol 4 opcodes under PROTO 2": b"\x80\x02\x8c\x01a\x8c\x01b\x93q\x00.",
    "protocol 2 opcodes under PROTO 4": b"\x80\x04]q\x00(X\x01\x00\x00\x00aq\x01h\x01e.",
    "protocol 2 opcodes without PROTO": b"]q\x00(\x88K\x01\x85q\x01\x8a\x05\xff\xff\xff\xff\x7fe.",
    "one object by DUP": b"\x80\x02]2\x86.",
}


@pytest.mark.parametrize("name", HANDMADE)
def test_other_writers_come_out_as_the_same_graph_and_nearly_always_byte_for_byte(name: str) -> None:
    data = HANDMADE[name]
    graph = decode(data).graph
    again = encode(graph)
    assert difference(graph, decode(again).graph) == ""
    # DUP has no memo number to come back to.
    assert again == (b"\x80\x02]q\x00h\x00\x86." if name == "one object by DUP" else data)

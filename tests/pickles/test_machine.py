"""The decoder against hostile pickles: it takes time and memory in proportion to their size, and no recursion."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from decoded_graphs import graph_of, refusal, root_of
from pickle_objects import dump

from ckptool.base.errors import PickleError, PickleLimitError, TruncatedPickleError
from ckptool.base.limits import LIMITS
from ckptool.pickles import opcodes as op
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Dict, List, children

MILLION = 1_000_000


@contextmanager
def memory(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# -- sizes that lie -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "head",
    [
        *(
            bytes((code,)) + struct.pack("<Q", size)
            for code in b"\x8d\x8e\x95\x96"
            for size in (2**62, 2**63, 2**64 - 1, 9)
        ),
        *(bytes((code,)) + struct.pack("<I", size) for code in b"BX" for size in (2**31, 2**32 - 1, 9)),
        *(bytes((code,)) + struct.pack("<i", 2**31 - 1) for code in b"T\x8b"),
        *(bytes((code, 255)) for code in b"CU\x8a\x8c"),
    ],
    ids=bytes.hex,
)
def test_a_size_beyond_the_end_costs_nothing(head: bytes) -> None:
    with memory(100_000):
        error = refusal(b"\x80\x04K\x01" + head + b"short.")
    assert isinstance(error, TruncatedPickleError)
    assert error.offset == 4


@pytest.mark.parametrize("code", [op.BINSTRING, op.LONG4])
def test_a_negative_size_is_refused(code: int) -> None:
    assert "negative size" in refusal(bytes((code,)) + b"\xff\xff\xff\xff" + b"x" * 99 + b".").what


@pytest.mark.parametrize("index", [300, 2**31, 2**32 - 1])
def test_a_memo_number_costs_no_memory(index: int) -> None:
    number = struct.pack("<I", index)
    with memory(100_000):
        assert isinstance(root_of(b"]r" + number + b"j" + number + b"\x86."), tuple)


def test_a_memo_number_of_thousands_of_digits_is_only_a_number() -> None:
    digits = b"0" * 4000 + b"7"
    assert isinstance(root_of(b"]p" + digits + b"\ng" + digits + b"\n\x86."), tuple)
    assert refusal(b"]p" + b"9" * 4000 + b"\n.").what == "a memo index that is too large"
    assert refusal(b"]p" + b"9" * 5000 + b"\n.").what == "a memo index that is not a number"


def test_digits_without_end_are_refused() -> None:
    for code in b"ILF":
        assert "limits.int_digits" in refusal(bytes((code,)) + b"9" * MILLION + b"\n.").what
    assert decode(b"L" + b"9" * 4300 + b"\n.").graph.nodes[0] == 10**4300 - 1


def test_an_int_longer_than_cpython_prints_comes_out_again() -> None:
    for data in (
        b"\x80\x02\x8b" + struct.pack("<i", 50_000) + b"\x01" * 50_000 + b".",
        b"L-0x" + b"f" * 4000 + b"L\n.",
    ):
        assert isinstance(root_of(data), int)
        assert encode(decode(data).graph) == data


# -- depth and number ---------------------------------------------------------------------------------------------

DEEP: dict[str, Callable[[int], bytes]] = {
    "tuples": lambda n: b")" + b"\x85" * n + b".",
    "lists": lambda n: b"]" * n + b"a" * (n - 1) + b".",
    "lists by LIST": lambda n: b"(" * n + b"l" * n + b".",
    "dicts": lambda n: b"}" + b"K\x01}" * n + b"s" * n + b".",
    "frozensets": lambda n: b"(" * n + b"\x91" * n + b".",
    "calls": lambda n: b"ca\nb\n" + b")R" * n + b".",
    "arguments": lambda n: b"ca\nb\n" * n + b")" + b"R\x85" * n + b".",
    "states": lambda n: b"ca\nb\n" * n + b"b" * (n - 1) + b".",
    "persistent ids": lambda n: b"N" + b"Q" * n + b".",
    "instances": lambda n: b"(ca\nb\n" * n + b"o" * n + b".",
    "read-only buffers": lambda n: b"\x97" + b"\x98" * n + b".",
}


@pytest.mark.parametrize("kind", DEEP)
def test_depth_is_no_recursion(kind: str) -> None:
    graph = graph_of(DEEP[kind](20_000))
    assert sum(1 for _ in graph.reachable()) >= 20_000


def test_a_million_nested_tuples_are_a_key() -> None:
    data = b"}" + DEEP["tuples"](MILLION)[:-1] + b"Ns."
    assert len(decode(data, limits=LIMITS._replace(few_nodes=2 * MILLION)).graph.nodes) > MILLION


def test_objects_are_bounded_by_bytes() -> None:
    """Made by hand a node takes one byte: tensors take nine."""
    assert "objects in 1,000,002 bytes, which is the limit" in refusal(DEEP["tuples"](MILLION)).what


def test_a_million_marks_are_only_marks() -> None:
    assert refusal(b"(" * MILLION + b".").what == "an instruction takes more from the stack than there is"
    assert decode(b"(" * MILLION + b"N.").graph.oddities == ((MILLION + 1, "values are left on the stack at STOP"),)


def test_laughs_by_the_billion_are_few_nodes() -> None:
    data = (
        b"("
        + b"K\x01" * 10
        + b"tq\x00"
        + b"".join(b"(" + b"h%c" % n * 10 + b"tq%c" % (n + 1) for n in range(200))
        + b"."
    )
    graph = graph_of(data)
    assert len(graph.nodes) == 202
    assert len(encode(graph)) <= len(data)


@pytest.mark.parametrize(
    "step", [b"K\x01a", b"K\x01K\x02s", b"Nb", b"K\x01aNb", b"(K\x01e", b"(K\x01K\x02u", b"(u", b"(e"], ids=bytes.hex
)
@pytest.mark.parametrize("made", [b"ca\nb\n)R", b"ca\nb\n", b"NQ"], ids=bytes.hex)
def test_filling_an_object_in_very_many_steps_takes_linear_time(made: bytes, step: bytes) -> None:
    data = made + step * 30_000 + b"."
    assert encode(graph_of(data)) == data


def test_a_tuple_with_very_many_lists_that_hold_it_is_written_once() -> None:
    lists = 10_000
    numbers = [struct.pack("<I", number) for number in range(lists + 1)]
    data = b"(" + b"".join(b"]r" + number for number in numbers[:-1]) + b"tr" + numbers[-1]
    data += b"".join(b"j" + number + b"j" + numbers[-1] + b"a0" for number in numbers[:-1]) + b"."
    # As the C pickler goes about it, there would be a copy of the tuple for each list.
    assert len(encode(graph_of(data))) < 2 * len(data)


# -- cycles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"]q\x00h\x00a.",
        b"}q\x00K\x01h\x00s.",
        b"ca\nb\n)Rq\x00h\x00b.",
        b"ca\nb\nq\x00(h\x00h\x00e.",
        b"\x8fq\x00(ca\nb\n)Rq\x01h\x00b\x90.",
        b"]q\x00h\x00\x85q\x01ah\x01.",
        b"ca\nb\n]q\x00\x85Rq\x01h\x00h\x01a0.",
        b"]q\x00Qq\x01h\x00h\x01a0.",
        b"ca\nb\n)Rq\x00\x98q\x01h\x00h\x01b0.",
        b"(l2a.",
        b"(ca\nb\n]q\x00oq\x01h\x00h\x01a0.",
        b"(]q\x00ia\nb\nq\x01h\x00h\x01a0.",
        b"(ca\nb\n)Rq\x00\x91q\x01h\x00h\x01b0.",
    ],
    ids=bytes.hex,
)
def test_a_cycle_comes_out_as_a_cycle(data: bytes) -> None:
    graph = graph_of(data)
    assert graph.root in {child for ref in graph.reachable() for child in children(graph.nodes[ref])}


# -- where it begins and ends -------------------------------------------------------------------------------------


def test_a_pickle_may_begin_anywhere_and_errors_say_where() -> None:
    data = b"junk" + dump([1, "a"], 2) + dump({}, 2)
    first = decode(data, 4)
    assert isinstance(first.graph.nodes[first.graph.root], List)
    second = decode(data, first.end)
    assert isinstance(second.graph.nodes[second.graph.root], Dict)
    assert second.end == len(data)
    with pytest.raises(PickleError) as caught:
        decode(b"junkN\xff", 4, where="data.pkl")
    assert (caught.value.where, caught.value.offset) == ("data.pkl", 5)


@pytest.mark.parametrize("protocol", range(6))
def test_every_cut_is_told_as_one(protocol: int) -> None:
    data = dump({"key": [1, 2**70, 1.5, "text", ("a", None), len, range(3)]}, protocol)
    for end in range(len(data)):
        with pytest.raises(TruncatedPickleError):
            decode(data[:end])


@pytest.mark.parametrize("protocol", range(6))
def test_every_flipped_bit_is_refused_or_carried(protocol: int) -> None:
    data = dump({"key": [1, 2**70, 1.5, "text", ("a", None), len, range(3)]}, protocol)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            graph_of(bytes(flipped))
        except PickleError as error:
            assert error.offset <= len(data)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"(" * 10 * MILLION, "marks are open at once"),
        (b"N0" * 5 * MILLION + b"N.", "values are dropped or repeated"),
        (b"]" + b"2a" * 5 * MILLION + b".", "values are dropped or repeated"),
    ],
    ids=["MARK", "POP", "DUP"],
)
def test_opcodes_that_make_nothing_are_bounded(body: bytes, what: str) -> None:
    """Ten megabytes of them would take ten seconds, or two gigabytes."""
    with pytest.raises(PickleLimitError, match=f"more than 1,000,000 {what}"):
        decode(b"\x80\x04" + body)

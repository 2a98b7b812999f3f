"""Random streams over all opcodes: the machine agrees with CPython's unpickler.

Where they differ on purpose:

* What depends on the result of a call is taken for good: a call as arguments, class, keyword arguments or buffer.
* Extension codes need not be registered.
* Appending to and setting in a bytearray, a set or a buffer is refused (``bytearray.append``, or any APPENDS of
  nothing: the C code looks at nothing then). So is setting by number in a list, and BUILD with None on what
  takes no state. weights_only refuses all these, too.
* Byte strings of Python 2 may hold anything: the encoding is the reader's choice.
* LONG_BINPUT with a number in the billions is taken; CPython runs out of memory.
"""

from __future__ import annotations

import random

import pytest
from conftest import examples
from pickle_oracle import alike, load
from pickle_streams import stream

from ckptool.base.errors import PickleError
from ckptool.pickles.compare import difference
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Global

pytestmark = pytest.mark.sampled

STREAMS = [
    stream(random.Random(seed), (5, 15, 40, 80)[seed % 4], accepted=seed % 5 == 0) for seed in range(examples(8000))
]

#: What CPython says where it refuses on account of a stub.
ON_ACCOUNT_OF_A_STUB = (
    "not 'Stub'",
    "not Stub",
    "argument list must be a tuple",
    "unregistered extension",
    "keywords must be",
)
#: What we say where we refuse what CPython takes.
STRICTER = ("APPEND", "SETITEM", "ADDITEMS", "BUILD")


def decoded(data: bytes) -> Decoded | PickleError:
    try:
        return decode(data)
    except PickleError as error:
        return error


def expected(data: bytes) -> tuple[object, list[tuple[str, str]]] | Exception:
    try:
        return load(data)
    except Exception as error:
        return error


@pytest.fixture(scope="module")
def accepted() -> list[tuple[bytes, Decoded, tuple[object, list[tuple[str, str]]]]]:
    """The streams that both take, with what both make of them."""
    both = [(data, decoded(data), expected(data)) for data in STREAMS]
    return [
        (data, ours, theirs) for data, ours, theirs in both if isinstance(ours, Decoded) and isinstance(theirs, tuple)
    ]


def test_both_accept_and_refuse_the_same_streams() -> None:
    outcomes = {"both take": 0, "both refuse": 0, "on purpose": 0}
    for data in STREAMS:
        ours, theirs = decoded(data), expected(data)
        if isinstance(ours, Decoded) == isinstance(theirs, tuple):
            outcomes["both take" if isinstance(ours, Decoded) else "both refuse"] += 1
        elif isinstance(ours, PickleError):
            assert ours.what.startswith(STRICTER), (data, ours)
            outcomes["on purpose"] += 1
        else:
            assert any(text in str(theirs) for text in ON_ACCOUNT_OF_A_STUB), (data, theirs)
            outcomes["on purpose"] += 1
    assert outcomes["both take"] > len(STREAMS) * 3 // 4
    assert outcomes["both refuse"] > len(STREAMS) // 16
    assert outcomes["on purpose"] < len(STREAMS) // 100


def test_both_find_the_same_globals_in_the_same_order(accepted) -> None:  # type: ignore[no-untyped-def]
    for data, ours, (_, names) in accepted:
        found = [(node.module, node.name) for node in ours.graph.nodes if type(node) is Global]
        assert found == names, data


def test_what_is_written_again_is_the_same_graph(accepted) -> None:  # type: ignore[no-untyped-def]
    for data, ours, _ in accepted:
        assert difference(ours.graph, decode(encode(ours.graph)).graph) == "", data


def test_what_is_written_again_is_the_same_object_to_cpython(accepted) -> None:  # type: ignore[no-untyped-def]
    for data, ours, (theirs, _) in accepted:
        again, _ = load(encode(ours.graph))
        assert alike(theirs, again), data


def test_a_stream_that_weights_only_takes_stays_one(accepted) -> None:  # type: ignore[no-untyped-def]
    taken = [(data, ours) for data, ours, _ in accepted if not ours.graph.refused]
    assert len(taken) > len(STREAMS) // 8
    for data, ours in taken:
        assert not decode(encode(ours.graph)).graph.refused, data


def test_damaged_streams_raise_nothing_but_pickle_errors() -> None:
    rng = random.Random(0)
    outcomes = []
    for data in STREAMS:
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        found = decoded(bytes(damaged))
        outcomes.append(isinstance(found, Decoded))
        if isinstance(found, Decoded):
            assert difference(found.graph, decode(encode(found.graph)).graph) == "", bytes(damaged)
        else:
            assert 0 <= found.offset <= len(damaged)
    assert 0.1 < sum(outcomes) / len(outcomes) < 0.9

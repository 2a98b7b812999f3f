"""``plain_strings`` takes only pickles that ``decode`` takes too, and gives their strings."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.base.errors import PickleError
from ckptool.pickles.decode import decode
from ckptool.pickles.nodes import Dict, Graph, List
from ckptool.pickles.plain import plain_strings

#: Three of its lists are one list, and one key is in several dicts.
SHARED: list[Any] = [1, 2]
VALUES: tuple[Any, ...] = (
    None,
    {},
    "",
    {"epoch": 3, "lr": 0.1, "names": ["a", "b"], "on": True, "off": False, "none": None},
    [{"loss": 0.5, "step": n} for n in range(40)],
    {("a", 1): (), (1, (2, 3)): (1, 2, 3, 4, 5), 7: [[]], 70000: -1, 300: 2**70, -5: -(2**200)},
    (SHARED, SHARED, SHARED),
    {"long": "x" * 300, "short": "y" * 255},
    list(range(2500)),
    {str(n): n for n in range(1100)},
    {"crop": bytes(200), b"key": b"x" * 300, "none": b""},
)
KINDS = (type(None), bool, int, float, str, bytes, tuple, List, Dict)


def _cycle() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def _is_plain(graph: Graph) -> bool:
    return all(type(node) in KINDS for node in graph.nodes)


def _agrees(data: bytes) -> bool:
    """Check the answer against the decoder; return whether it was a pickle of plain data."""
    strings = plain_strings(data)
    if strings is None:
        return False
    graph, end, _ = decode(data)
    assert end == len(data)
    assert _is_plain(graph)
    assert sorted(strings.texts) == sorted(node for node in graph.nodes if type(node) is str)
    assert sorted(strings.binary) == sorted(node for node in graph.nodes if type(node) is bytes)
    assert not graph.oddities
    return True


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [*VALUES, _cycle()], ids=range(len(VALUES) + 1))
def test_plain_data_is_taken(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    # The pickler cuts a large pickle into several frames. Protocol 2 has no bytes: it makes them by a call.
    assert _agrees(data) or data.count(b"\x95") > 1 or (b"_codecs" in data and protocol == 2)


@pytest.mark.parametrize("value", ["é", bytearray(b"x"), {1, 2}, 1j, print, range(3)], ids=repr)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_data_is_left_to_the_decoder(value: Any, protocol: int) -> None:
    assert plain_strings(pickle.dumps([value], protocol)) is None


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"N.",
        b"\x80\x01N.",
        b"\x80\x06N.",
        b"\x80\x02N.N.",
        b"\x80\x02N.\0",
        b"\x80\x02NN.",
        b"\x80\x02(N.",
        b"\x80\x02N}(s.",
        b"\x80\x02}(Nu.",
        b"\x80\x02}]Ns.",
        b"\x80\x02}(]Nu.",
        b"\x80\x02}]\x85Ns.",
        b"\x80\x02}(]tNs.",
        b"\x80\x02}N]a.",
        b"\x80\x02](Na.",
        b"\x80\x02N(Ne.",
        b"\x80\x02h\0.",
        b"\x80\x02Nq\1.",
        b"\x80\x02Nq\0h\1.",
        b"\x80\x02\x85.",
        b"\x80\x02N\x87.",
        b"\x80\x02]q\0(q\1Ne.",
        b"\x80\x02X\xff\xff\xff\xffab.",
        b"\x80\x04\x8c\xffab.",
        b"\x80\x04C\xffab.",
        b"\x80\x03B\xff\xff\xff\xffab.",
        b"\x80\x04\x8e\1\0\0\0\0\0\0\0a.",
        b"\x80\x05\x96\1\0\0\0\0\0\0\0a.",
        b"\x80\x04\x95\2\0\0\0\0\0\0\0N.N.",
        b"\x80\x04\x95\3\0\0\0\0\0\0\0N.",
        b"\x80\x02N0N.",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02\x82\1.",
        b"\x80\x02NQ.",
        b"\x80\x02G1234567",
    ],
)
def test_what_is_damaged_or_odd_is_left_to_the_decoder(data: bytes) -> None:
    assert plain_strings(data) is None


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_mutated_pickles(protocol: int) -> None:
    """Thousands of changed pickles: whatever is taken, the decoder takes too."""
    rng = random.Random(protocol)
    seeds = [pickle.dumps(value, protocol) for value in (*VALUES[:7], VALUES[-1])]
    codes = b"N\x88\x89K})](tuesa\x85\x86\x87\x94qhj.X\x8cGJM0128RcQ\x93\x81\x82b"
    taken = 0
    for number in range(8000):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(2, len(data)) if len(data) > 2 else 0
            how = rng.randrange(4)
            if how == 0 and data:
                data[at] = rng.choice(codes)
            elif how == 1 and data:
                data[at] = rng.randrange(256)
            elif how == 2:
                data[at:at] = data[at : at + rng.randrange(1, 9)]
            else:
                del data[at : at + rng.randrange(1, 4)]
        taken += _agrees(bytes(data))
    assert taken > 200


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_data = st.recursive(
    _scalars, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_scalars, inner), max_leaves=30
)


@given(_data, st.integers(2, 5))
def test_any_plain_data(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    graph = decode(data).graph
    assert _agrees(data) or not (_is_plain(graph) and all(text.isascii() for text in graph.strings))


@given(st.binary(max_size=60))
def test_any_bytes(tail: bytes) -> None:
    for data in (b"\x80\x02" + tail + b".", b"\x80\x04" + tail + b"."):
        try:
            _agrees(data)
        except PickleError as error:
            raise AssertionError("the decoder refuses it") from error

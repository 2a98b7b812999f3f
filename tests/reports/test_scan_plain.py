"""A small pickle of plain data is recognised at once: the decoder takes it too, and a whole search says the same."""

from __future__ import annotations

import base64
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES
from crafted_files import SYSTEM, dumped
from hypothesis import given
from hypothesis import strategies as st

from bench.samples import samples
from ckptool.files.sources import BytesSource
from ckptool.formats.plain_pickle import is_plain_pickle
from ckptool.pickles.decode import decode
from ckptool.pickles.nodes import Dict, List
from ckptool.pickles.plain import plain_strings
from ckptool.reports import scan as scanning
from ckptool.reports.scan import scan_file

EVIL = dumped(SYSTEM)
SHARED: list[Any] = [1, 2]
PLAIN: tuple[Any, ...] = (
    {"epoch": 3, "lr": 0.1, "names": ["a", "b"], "on": True, "off": False, "none": None},
    {("a", 1): (), (1, (2, 3)): (1, 2, 3, 4, 5), 7: [[]], 70000: -1, 300: 2**70, -5: -(2**200)},
    (SHARED, SHARED, {"long": "x" * 300, "short": "y" * 255}),
    {str(n): n for n in range(1100)},
    {"crop": bytes(200), "mask": b"\1\0" * 40, "id": b"7"},
)
#: Values that hide something in a string or in bytes, or that are no plain data.
OTHER: tuple[Any, ...] = (
    {"bytes": b"N." + EVIL},
    {"_target_": "os.system", "command": "true"},
    {"text": "!!python/object/apply:os.system ['true']"},
    {"text": base64.b64encode(pickle.dumps({"x": EVIL})).decode()},
    {"text": EVIL.decode("latin-1")},
    {"bytes": b"cos\nsystem\n(S'true'\ntR."},
    {"bytes": b"PK\x05\x06" + bytes(18)},
    {"zip": "PK\x05\x06" + "\0" * 18, "other": "PK\x03\x04"},
    *([value] for value in ("é", bytearray(b"x"), {1, 2}, 1j, print, range(3))),
)
#: Bytes that mean another format at these offsets.
SIGNATURES = {4: (b"ftyp", b"TFL3"), 8: (b"WEBP", b'{"a":'), 257: (b"ustar\0",), 512: (b"\x89HDF\r\n\x1a\n",)}
NAMES = ("a.pkl", "a.pt", "a.bin", "a.joblib", "a.npy", "a.weights")
NAMES += ("a.mnn", "a.py", "a.json", "a.distcp", "a", "a.zip")


def _agrees(data: bytes) -> bool:
    """Check the answer against the decoder; return whether it was a pickle of plain data."""
    strings = plain_strings(data)
    if strings is None:
        return False
    graph, end, _ = decode(data)
    assert end == len(data) and not graph.oddities
    assert {*map(type, graph.nodes)} <= {type(None), bool, int, float, str, bytes, tuple, List, Dict}
    assert sorted(strings.texts) == sorted(node for node in graph.nodes if type(node) is str)
    assert sorted(strings.binary) == sorted(node for node in graph.nodes if type(node) is bytes)
    return True


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Return a function that scans a file in both ways, and tells whether the quick one took it."""

    def compare(path: Path) -> bool:
        quick = scan_file(str(path))
        with monkeypatch.context() as patch:
            patch.setattr(scanning, "is_plain_pickle", lambda source: False)
            assert quick == scan_file(str(path)), path.name
        return is_plain_pickle(BytesSource(path.read_bytes(), str(path)))

    return compare


def test_fixtures_and_samples(compared: Callable[[Path], bool], tmp_path: Path) -> None:
    for path in FIXTURES.rglob("*"):
        assert path.is_dir() or not compared(path) or path.suffix in (".pkl", ".pickle"), path
    quick = []
    for number, item in enumerate(samples()):
        path = tmp_path / f"{number}_{item.name}"
        path.write_bytes(item.data)
        if compared(path):
            quick.append(item.name)
            assert not item.hostile
    assert {"values2.pkl", "values3.pkl", "values4.pkl", "values5.pkl"} <= set(quick)


@pytest.mark.parametrize("protocol", range(6))
def test_values_under_every_name(protocol: int, compared: Callable[[Path], bool], tmp_path: Path) -> None:
    taken = set()
    for number, value in enumerate(PLAIN + OTHER):
        for name in NAMES:
            for rest in (b"", b"\0", EVIL) if name == NAMES[0] else (b"",):
                path = tmp_path / name
                path.write_bytes(pickle.dumps(value, protocol) + rest)
                if compared(path):
                    taken.add(number)
                    assert not rest
    # Protocol 2 makes bytes by a call.
    assert taken == set(range(0 if protocol < 2 else 4 if protocol == 2 else 5))


def test_bytes_of_other_formats(compared: Callable[[Path], bool], tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    for at, every in SIGNATURES.items():
        for magic in every:
            for data in (
                pickle.dumps(["\0" * 700], 2),
                b"\x80\x02G" + bytes(8) + b".",
                b"\x80\x04\x8c\x20" + bytes(33),
            ):
                path.write_bytes((data[:at] + magic + data[at + len(magic) :])[: len(data)])
                compared(path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_mutated_pickles(protocol: int, compared: Callable[[Path], bool], tmp_path: Path) -> None:
    """Thousands of changed pickles: whatever is taken, the decoder takes too, and both scans say the same."""
    rng = random.Random(protocol)
    seeds = [pickle.dumps(value, protocol) for value in PLAIN[:3] + OTHER]
    codes = b"N\x88\x89K})](tuesa\x85\x86\x87\x94qhj.X\x8cGJM01RcQ\x93\x81\x82bBC\x8e\x8a"
    path = tmp_path / "a.pkl"
    taken = 0
    for number in range(6000):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(rng.randrange(1, 3)):
            at, how = rng.randrange(2, len(data)), rng.randrange(4)
            changed = (bytes([rng.choice(codes)]), bytes([rng.randrange(256)]), bytes(data[at : at + 4]) * 2, b"")[how]
            data[at : at + (1, 1, 4, rng.randrange(1, 4))[how]] = changed
        if _agrees(bytes(data)) or number % 6 == 0:
            path.write_bytes(data)
            taken += compared(path)
    assert taken > 50


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_data = st.recursive(
    _scalars, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_scalars, inner), max_leaves=30
)


@given(_data, st.integers(2, 5))
def test_any_plain_data(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    # Protocol 2 has no bytes: it calls codecs.encode, or bytes() for none.
    plain = protocol > 2 or not (b"_codecs" in data or b"__builtin__" in data)
    assert _agrees(data) or not (plain and all(text.isascii() for text in decode(data).graph.strings))


def test_a_large_pickle_is_searched() -> None:
    assert is_plain_pickle(BytesSource(pickle.dumps([0.5] * 1000, 2), "a.pkl"))
    assert not is_plain_pickle(BytesSource(pickle.dumps([0.5] * 10_000, 2), "a.pkl"))

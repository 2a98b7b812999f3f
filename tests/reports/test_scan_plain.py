"""A small pickle of plain data is recognised at once, and its scan is the same as that of a whole search."""

from __future__ import annotations

import base64
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES
from crafted_files import SYSTEM, dumped

from bench.samples import samples
from ckptool.files.sources import BytesSource
from ckptool.formats.plain_pickle import is_plain_pickle
from ckptool.reports import scan as scanning
from ckptool.reports.scan import FileScan, scan_file

EVIL = dumped(SYSTEM)
#: Values of small pickles: ordinary ones, and ones that hide something in a string.
VALUES: tuple[Any, ...] = (
    {"epoch": 3, "lr": 0.1, "names": ["a", "b"], "on": True},
    [{"loss": n / 2, "step": n} for n in range(30)],
    (1, (2, 3), [], {}, None, "text"),
    {"text": "x" * 600, "more": ["y" * 200] * 3},
    {"crop": bytes(200), "mask": b"\1\0" * 40, "id": b"7"},
    {"bytes": b"(lp0\nI1\na."},
    {"bytes": b'{"_target_": "os.system"}'},
    {"bytes": b"N." + EVIL},
    {"StructuredToParameterName@@": {"a": "b"}},
    {"_target_": "os.system", "command": "true"},
    {"type": "torch.nn.Linear", "cfg": "x = 1"},
    {"text": "!!python/object/apply:os.system ['true']"},
    {"text": base64.b64encode(pickle.dumps({"x": EVIL})).decode()},
    {"text": '{"_target_": "os.system"}'},
    {"bytes": EVIL},
    {"bytes": b"cos\nsystem\n(S'true'\ntR."},
    {"bytes": b"PK\x03\x04" + bytes(40)},
    {"bytes": b"PK\x05\x06" + bytes(18)},
    {"bytes": b"\x80\x04N."},
    {"text": EVIL.decode("latin-1")},
    {"text": "\x80\x04N."},
    {"zip": "PK\x05\x06" + "\0" * 18, "other": "PK\x03\x04"},
    {"text": "cos\nsystem\n(S'true'\ntR."},
)
#: Bytes that mean another format at these offsets, to be written into the text of a pickle.
SIGNATURES = {
    4: (b"ftyp", b"TFL3", b"ORTM", b"ET12", b"PTMF", b"BP01", b"RKNN"),
    8: (b"WEBP", b"WAVE", b"AVI ", b'{"a":', b"  {"),
    64: (b"\xef\xbe\xad\xde",),
    136: (b"\x0a\0\0\0\0\0\0\0reg:linear",),
    257: (b"ustar\0", b"ustar  \0"),
    512: (b"\x89HDF\r\n\x1a\n",),
}
NAMES = (
    *("a.pkl", "a.pickle", "a.pt", "a.pth", "a.bin", "a.ckpt", "a.joblib", "a.npy", "a.weights", "a.mnn", "a.py", "a"),
    *("a.json", "a.md", "a.gin", "a.safetensors", "a.keras", "a.onnx.data", "a.data-00000-of-00001", "a.meta", "a.pb"),
    *("a.distcp", ".metadata", "a.zip", "a.tar", "a.msgpack", "a.PKL", "a b!c.pkl", "{x}.pkl", "a.sh", "a.ipynb"),
)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that compares both ways for a file, and tells whether the quick way took it."""
    taken: list[bool] = []

    def noted(source: Any) -> bool:
        taken.append(is_plain_pickle(source))
        return taken[-1]

    def compare(path: Path) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(scanning, "is_plain_pickle", noted)
            quick: FileScan = scan_file(str(path))
            patch.setattr(scanning, "is_plain_pickle", lambda source: False)
            assert quick == scan_file(str(path)), path.name
        return bool(taken and taken.pop())

    return compare


def test_fixtures_and_samples(compared: Any, tmp_path: Path) -> None:
    quick = [path.name for path in sorted(FIXTURES.rglob("*")) if path.is_file() and compared(path)]
    for number, item in enumerate(samples()):
        path = tmp_path / f"{number}_{item.name}"
        path.write_bytes(item.data)
        if compared(path):
            quick.append(item.name)
            assert not item.hostile
    assert {"values2.pkl", "values3.pkl", "values4.pkl", "values5.pkl"} <= set(quick)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_value_under_every_name(protocol: int, compared: Any, tmp_path: Path) -> None:
    taken = set()
    for number, value in enumerate(VALUES):
        data = pickle.dumps(value, protocol)
        for name in NAMES:
            for rest in (b"", b"\0", b"N.", EVIL) if name in NAMES[:3] else (b"",):
                path = tmp_path / name
                path.write_bytes(data + rest)
                if compared(path):
                    taken.add(number)
                    assert not rest
    # Values 4 to 6 have bytes, which protocol 2 makes by a call.
    assert taken == set(range(0 if protocol < 2 else 4 if protocol == 2 else 7))


def _with_signatures() -> Iterator[bytes]:
    for protocol in (2, 4):
        for size in (300, 700):
            data = pickle.dumps(["\0" * size], protocol)
            for at, every in SIGNATURES.items():
                for magic in every:
                    yield data[:at] + magic + data[at + len(magic) :]
        # A float, an integer or a short text takes up the first bytes, so that they may hold anything.
        yield b'\x80\x02G\1\0\0\0\0{"x.'
        yield b"\x80\x02GTFL3TFL3."
        for at, every in SIGNATURES.items():
            for magic in every if at < 10 else ():
                for head in (b"\x80\x02G", b"\x80\x02J", b"\x80\x02X\x20\0\0\0", b"\x80\x04\x8c\x20", b"\x80\2K"):
                    yield (head + b"\0" * 40)[:at] + magic + b"\0" * (36 - at - len(magic)) + b"."
                    yield (head + b"\0" * (at - len(head)) + magic)[:11] + b"."


def test_bytes_of_other_formats(compared: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    for data in _with_signatures():
        path.write_bytes(data)
        compared(path)


def test_the_legacy_magic_number_and_tar_headers(compared: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    block = bytearray(pickle.dumps("\0" * 600, 2))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    for data in (pickle.dumps(0x1950A86A20F9469CFC6C, 2), bytes(block), bytes(block) + b"\0" * 1024):
        path.write_bytes(data)
        assert not compared(path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_mutated_pickles(protocol: int, compared: Any, tmp_path: Path) -> None:
    """Thousands of changed pickles: both ways say the same about each."""
    rng = random.Random(protocol)
    seeds = [pickle.dumps(value, protocol) for value in VALUES]
    codes = b"N\x88\x89K})](tuesa\x85\x86\x87\x94qhj.X\x8cGJM01RcQ\x93\x81\x82bBC\x8e\x8a"
    path = tmp_path / "a.pkl"
    taken = 0
    for number in range(2500):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(data))
            how = rng.randrange(5)
            if how == 0:
                data[at] = rng.choice(codes)
            elif how == 1:
                data[at] = rng.randrange(256)
            elif how == 2:
                data[at:at] = data[at : at + rng.randrange(1, 9)]
            elif how == 3:
                del data[at : at + rng.randrange(1, 4)]
            else:
                data[at:at] = rng.choice(seeds)[: rng.randrange(40)]
        path.write_bytes(data)
        taken += compared(path)
    assert taken > 50


def test_a_large_pickle_is_searched() -> None:
    assert is_plain_pickle(BytesSource(pickle.dumps([0.5] * 1000, 2), "a.pkl"))
    assert not is_plain_pickle(BytesSource(pickle.dumps([0.5] * 10_000, 2), "a.pkl"))

"""Models of other frameworks are named, with what opens them; nothing in them is believed."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import CORPUS, MANIFEST, Fixture, by_name, corpus_files, needs_corpus

import ckptool
from ckptool.errors import MalformedError, NotACheckpointError, UnreadableError
from ckptool.formats.foreign import KINDS
from ckptool.formats.gguf import summary
from ckptool.formats.protobuf import fields
from ckptool.source import BytesSource

FOREIGN = [item for item in MANIFEST if item.container in KINDS or item.container == "executorch"]


def refusal(path: Path) -> NotACheckpointError:
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(path)
    return caught.value


@pytest.mark.parametrize("item", FOREIGN, ids=by_name)
def test_named_by_its_content(item: Fixture, tmp_path: Path) -> None:
    error = refusal(item.path)
    assert error.kind == item.container
    assert error.next
    if item.path.name not in ("flax_model.msgpack", "saved_model.pb"):
        other = tmp_path / "model.bin"
        other.write_bytes(item.path.read_bytes())
        assert refusal(other).kind == item.container


@pytest.mark.parametrize("item", FOREIGN, ids=by_name)
def test_cut_or_changed_it_never_crashes(item: Fixture, tmp_path: Path) -> None:
    data = item.path.read_bytes()
    path = tmp_path / item.path.name
    chance = random.Random(1)
    for _ in range(60):
        at = chance.randrange(len(data))
        for bad in (data[:at], data[:at] + chance.randbytes(3) + data[at + 3 :]):
            path.write_bytes(bad)
            with pytest.raises(UnreadableError):
                ckptool.open(path)


def test_arrays_as_numpy_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array, words in (
        (np.zeros((2, 3), "f4"), "float32 2x3"),
        (np.zeros((), "i8"), "int64 scalar"),
        (np.zeros((5,), ">f8"), "float64 (big-endian) 5"),
        (np.zeros((0, 4), "?"), "bool 0x4"),
        (np.zeros((1, 2), "c8"), "complex64 1x2"),
        (np.zeros(3, "U7"), "text 3"),
        (np.array([{}], dtype=object), "objects (a pickle) 1"),
        (np.zeros(2, [("a", "f4")]), "records 2"),
    ):
        np.save(path, array)
        assert refusal(path).what.endswith(f": {words}")
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", a=np.zeros((2, 3)), b=np.zeros(4, "u1"))
        assert refusal(tmp_path / "x.npz").what.endswith(": a float64 2x3 and b uint8 4")
    save(tmp_path / "x.npz", **{f"a{number}": np.zeros(1) for number in range(50)})
    assert "of 50 arrays" in refusal(tmp_path / "x.npz").what


def test_a_header_of_gguf_is_bounded() -> None:
    tracemalloc.start()
    for body in (
        struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + b"x" * 100,
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(1000),
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 1 << 60) + bytes(1000),
        struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 0xFFFFFFFF),
        b"\x03",
        b"",
    ):
        assert len(summary(BytesSource(b"GGUF" + body))) < 300
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_gguf_in_every_version() -> None:
    name = b"general.architecture"
    for order, version, count in (("<", 1, "I"), ("<", 2, "Q"), (">", 3, "Q")):
        text = struct.pack(f"{order}I2{count}", version, 0, 1)
        text += struct.pack(f"{order}{count}", len(name)) + name
        text += struct.pack(f"{order}I{count}", 8, 3) + b"gpt"
        assert f"version {version}" in summary(BytesSource(b"GGUF" + text))
        assert "architecture gpt" in summary(BytesSource(b"GGUF" + text))


def test_protobuf_that_is_none() -> None:
    for data in (b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b", b"\x08", bytes(40), b"\x0f\x01"):
        assert fields(BytesSource(data)) == []
    assert len(fields(BytesSource(b"\x08\x01" * 100_000))) == 64


@pytest.mark.parametrize(
    ("module", "kind"), [("sklearn.svm", "sklearn"), ("joblib.numpy_pickle", "joblib"), ("xgboost.core", "pickle")]
)
def test_pickles_of_other_libraries(module: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    text = module.encode()
    for whole in (b"\x80\x02c" + text + b"\nModel\n)\x81.", b"\x80\x02c" + text + b"\nModel\n)\x81\xff\xff raw arrays"):
        path.write_bytes(whole)
        assert refusal(path).kind == kind


def test_a_pickle_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": np.zeros(3)}, 4))
    assert "NumPy arrays in it" in refusal(tmp_path / "a.pkl").what


def test_by_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-7.data-00000-of-00001"
    path.write_bytes(b"\x9a\x11\xc0\xbe" * 100)
    assert refusal(path).kind == "tensorflow-data"


def test_a_folder_does_not_count_them(tmp_path: Path) -> None:
    """``validate DIR`` looks at what claims to be a checkpoint, and models of others do not."""
    for item in FOREIGN:
        (tmp_path / f"{item.path.name}.bin").write_bytes(item.path.read_bytes())
        if item.container not in ("sklearn", "executorch", "pickle"):
            (tmp_path / f"{item.path.name}.pt").write_bytes(item.path.read_bytes())
    from ckptool.searching import find_targets

    found = list(find_targets([str(tmp_path)]))
    assert [item for item in found if not isinstance(item, UnreadableError)] == []


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_every_real_file_is_opened_or_named(path: Path) -> None:
    try:
        ckptool.open(path).close()
    except NotACheckpointError as error:
        assert error.kind
        assert error.next or error.kind == "unknown"
    except MalformedError as error:
        pytest.fail(f"{CORPUS}: {error}")

"""Models of other frameworks are named, with what opens them; nothing in them is believed."""

from __future__ import annotations

import pickle
import random
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import CORPUS, FIXTURES, MANIFEST, REAL, Real, by_name, corpus_files, needs_corpus

import ckptool
from ckptool.cli.main import run
from ckptool.errors import MalformedError, NotACheckpointError, UnreadableError
from ckptool.formats.foreign import KINDS
from ckptool.formats.gguf import summary
from ckptool.formats.protobuf import fields
from ckptool.source import BytesSource

#: Written by the libraries themselves, and heads and marks of what none could be had for.
HANDMADE = [
    Real(item.path, item.container, "", item.why) for item in MANIFEST if item.container in (*KINDS, "executorch")
]
FOREIGN = [*HANDMADE, *(item for item in REAL if item.kind in KINDS and item.path.is_file())]
FOLDERS = [item for item in REAL if item.kind in KINDS and item.path.is_dir()]
#: Told by their names: nothing in them is a mark.
BY_NAME = ("external.onnx.data",)


def refusal(path: Path) -> NotACheckpointError:
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(path)
    return caught.value


@pytest.mark.parametrize("item", FOREIGN, ids=by_name)
def test_named_by_its_content(item: Real, tmp_path: Path) -> None:
    error = refusal(item.path)
    assert error.kind == item.kind
    assert error.next
    if item.path.name not in BY_NAME:
        other = tmp_path / "model.bin"
        other.write_bytes(item.path.read_bytes())
        assert refusal(other).kind == item.kind


@pytest.mark.parametrize("item", FOLDERS, ids=by_name)
def test_folders_are_named(item: Real) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(item.path)
    assert caught.value.kind == item.kind
    assert caught.value.next


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny.gguf", "version 3, architecture llama, 5 tensors (F16 1, Q8_0 1, Q4_0 1, BF16 1 and F32 1)"),
        ("big_endian.gguf", "version 3, big-endian, architecture llama, 5 tensors"),
        ("net.onnx", "an ONNX model, opset 21, written by 'onnx-example'"),
        ("net.keras", "a Keras model (.keras), written by Keras 3."),
        ("net.h5", "a Keras model as HDF5"),
        ("net.weights.h5", "an HDF5 file with weights of Keras"),
        ("user_block.h5", "an HDF5 file,"),
        ("shards.weights.json", "the index of weights in shards, such as 'shards_00000.weights.h5'"),
        ("linen.msgpack", "a msgpack file of Flax, first key 'params'"),
        ("train_state.msgpack", "a msgpack file of Flax, first key 'step'"),
        ("frozen.pb", "a TensorFlow graph (.pb)"),
        ("tf_v1", "a folder of TensorFlow checkpoints of the first version"),
        ("tf_v1/model.ckpt-7", "a TensorFlow checkpoint of the first version (V1),"),
        ("tf_v2/model.ckpt-7.meta", "the graph of a TensorFlow checkpoint (.meta)"),
        ("tf_v2/model.ckpt-7.index", "the index of a TensorFlow checkpoint"),
        ("tf_v2/model.ckpt-7.data-00000-of-00001", "the data of a TensorFlow checkpoint"),
        ("tf_v2/checkpoint", "the text that says which TensorFlow checkpoint is the latest"),
        ("tf_saved/saved_model.pb", "a TensorFlow SavedModel, not a torch checkpoint: its graph"),
        ("tf_saved/variables", "a folder of TensorFlow checkpoints,"),
        ("orbax/manifest.ocdbt", "a part of a checkpoint of Orbax"),
        ("orbax_manager/10", "a checkpoint of Orbax"),
        ("net.mlmodel", "a Core ML model, specification 1"),
        ("net.mlpackage", "a Core ML package"),
        ("logistic.joblib", "a file of joblib (LogisticRegression)"),
        ("logistic.pkl", "a pickled scikit-learn model (LogisticRegression)"),
        ("logistic.z", "a pickle that zlib compressed, as joblib does"),
        ("ppo.zip", "a model of Stable-Baselines3 2."),
    ],
)
def test_in_words(name: str, words: str) -> None:
    path = FIXTURES / "real" / name
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(path)
    assert words in caught.value.what


def test_what_is_no_graph_of_tensorflow() -> None:
    assert refusal(FIXTURES / "real" / "tf_saved" / "fingerprint.pb").kind == "unknown"


def test_the_policy_is_named_not_its_optimizer() -> None:
    path = FIXTURES / "real" / "ppo.zip"
    assert refusal(path).next == f"ckptool inspect '{path}!policy.pth'"
    with ckptool.open(f"{path}!policy.pth") as checkpoint:
        assert len(checkpoint.survey.tensors) == 8


def test_a_folder_without_a_checkpoint_says_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FIXTURES / "real" / "orbax_manager", tmp_path / "steps")
    shutil.copy(FIXTURES / "real" / "tiny.gguf", tmp_path)
    (tmp_path / "notes.txt").write_text("nothing")
    for path, words in (
        (tmp_path, "'tiny.gguf' is a GGUF model"),
        (tmp_path / "steps", "'10' is a checkpoint of Orbax"),
    ):
        assert run(["inspect", str(path)]) == 3
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("item", FOREIGN, ids=by_name)
def test_cut_or_changed_it_never_crashes(item: Real, tmp_path: Path) -> None:
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
        if item.kind not in ("sklearn", "executorch", "pickle") and item.path.name not in BY_NAME:
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

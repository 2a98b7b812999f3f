"""Models of other frameworks are named, with what opens them; nothing in them is believed."""

from __future__ import annotations

import random
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from conftest import CHECKPOINTS, CORPUS, MANIFEST, REAL, Real, by_name, corpus_files, needs_corpus

import ckptool
from ckptool.base.errors import MalformedError, NotACheckpointError, UnreadableError
from ckptool.files.sources import open_source
from ckptool.formats.foreign.frameworks import foreign_kinds, match_magic, match_structure

#: Written by the libraries themselves, and heads and marks of what none could be had for.
HANDMADE = [Real(item.path, item.container, "", item.why) for item in MANIFEST if item.container in foreign_kinds()]
FOREIGN = [*HANDMADE, *(item for item in REAL if item.kind in foreign_kinds() and item.path.is_file())]
FOLDERS = [item for item in REAL if item.kind in foreign_kinds() and item.path.is_dir()]
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


@pytest.mark.sampled(every=3)
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


def test_a_folder_does_not_count_them(tmp_path: Path) -> None:
    """``validate DIR`` looks at what claims to be a checkpoint, and models of others do not."""
    for item in FOREIGN:
        (tmp_path / f"{item.path.name}.bin").write_bytes(item.path.read_bytes())
        if item.kind not in ("sklearn", "executorch", "pickle") and item.path.name not in BY_NAME:
            (tmp_path / f"{item.path.name}.pt").write_bytes(item.path.read_bytes())
    from ckptool.formats.checkpoint_search import find_checkpoints

    found = list(find_checkpoints([str(tmp_path)]))
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
        # One GGUF file was stored as text, which replaced bytes of it.
        assert "U+FFFD" in error.what, f"{CORPUS}: {error}"


# -- rows of the table, as the formats are documented ------------------------------------------------


def _proto(number: int, data: bytes) -> bytes:
    """A field of bytes in protobuf."""
    assert len(data) < 128
    tag = number << 3 | 2
    return (bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])) + bytes([len(data)]) + data


def _t7(name: str) -> bytes:
    return struct.pack("<3i", 4, 1, 3) + b"V 1" + struct.pack("<i", len(name)) + name.encode() + bytes(64)


def _llama2(shared: bool) -> bytes:
    dim, hidden, layers, heads, kv_heads, vocabulary, length = 8, 16, 2, 4, 2, 32, 10
    floats = vocabulary * dim * (1 if shared else 2) + dim + length * (dim // heads)
    floats += layers * (2 * dim + 2 * dim * dim + 2 * dim * (dim // heads) * kv_heads + 3 * dim * hidden)
    sizes = (dim, hidden, layers, heads, kv_heads, vocabulary if shared else -vocabulary, length)
    return struct.pack("<7i", *sizes) + np.ones(floats, "<f4").tobytes()


PIECE = struct.pack("<Bf", 0x15, 0.0)
FLOATS = np.linspace(-1, 1, 40).astype("<f4").tobytes()
LAYER = _proto(1, b"conv1") + _proto(2, b"Convolution") + _proto(7, FLOATS[:40])
OLD_LAYER = _proto(2, b"data") + _proto(3, b"conv1") + _proto(4, b"conv1") + b"\x28\x04"
XGBOOST = bytes(136) + struct.pack("<Q", 15) + b"binary:logistic"
MINDSPORE = _proto(1, b"conv.weight") + _proto(2, b"\x08\2\x08\3" + _proto(2, b"Float32") + _proto(3, FLOATS[:24]))
SENTENCES = _proto(1, _proto(1, b"<unk>") + PIECE + b"\x18\2") + _proto(1, _proto(1, b"a") + PIECE) * 9
TRANSFORMER = struct.pack("<IH", 6, 16) + b"TransformerSpec\0" + struct.pack("<II", 7, 2)
LEARNER = b"{L" + struct.pack(">q", 7) + b"learner{L" + struct.pack(">q", 10) + b"attributes"
WHISPER = (50000, 750, 384, 6, 4, 448, 384, 6, 4, 80, 1)
#: (name, content, kind, a word of what is said)
MARKS = [
    ("net.caffemodel", _proto(1, b"AlexNet") + _proto(100, LAYER) * 3, "caffe", "Caffe"),
    ("nameless.caffemodel", _proto(100, LAYER) * 3, "caffe", "Caffe"),
    ("old.caffemodel", _proto(1, b"AlexNet") + _proto(2, OLD_LAYER) * 3, "caffe", "Caffe"),
    ("model.t7", _t7("nn.Sequential"), "torch7", "Torch7"),
    ("tensor.t7", _t7("torch.FloatTensor"), "torch7", "Torch7"),
    ("table.t7", struct.pack("<5i", 3, 1, 2, 2, 5) + b"epoch" + struct.pack("<id", 1, 3.0), "torch7", "Torch7"),
    ("list.t7", struct.pack("<4id", 3, 1, 2, 1, 1.0) + _t7("torch.FloatTensor"), "torch7", "Torch7"),
    ("text.t7", b"4\n1\n3\nV 1\n13\nnn.Sequential\n3\n2\n1\n", "torch7", "Torch7"),
    ("net.param", b"7767517\n3 3\nInput data 0 1 data\n", "ncnn", "ncnn"),
    ("net.param.bin", struct.pack("<3i", 7767517, 3, 3) + bytes(40), "ncnn", "ncnn"),
    ("net.bin", struct.pack("<I", 0x01306B47) + FLOATS, "ncnn", "ncnn"),
    ("yolo.weights", struct.pack("<3iq", 0, 2, 5, 32013312) + FLOATS, "darknet", "Darknet"),
    ("old.weights", struct.pack("<4i", 0, 1, 0, 32013312) + FLOATS, "darknet", "Darknet"),
    ("final.mdl", b"\0B<TransitionModel> <Topology> ", "kaldi", "Kaldi"),
    ("feats.ark", b"utt-1 \0BFM \4" + struct.pack("<iBi", 3, 4, 4) + FLOATS, "kaldi", "ark"),
    ("spm.model", SENTENCES, "sentencepiece", "SentencePiece"),
    ("stories.bin", _llama2(True), "llama2.c", "llama2.c"),
    ("unshared.bin", _llama2(False), "llama2.c", "llama2.c"),
    ("v2.bin", struct.pack("<Ii", 0x616B3432, 2) + bytes(300), "llama2.c", "llama2.c"),
    ("model.bin", TRANSFORMER, "ctranslate2", "CTransl"),
    ("model.xml", b'<?xml version="1.0"?>\n<net name="a" version="11">\n<layers>', "openvino", "OpenVINO"),
    ("model.ubj", LEARNER, "xgboost", "UBJ"),
    ("model.json", b'{"learner":{"attributes":{},"feature_names":[]},"version":[3,2,0]}', "xgboost", "XGBoost"),
    ("model.model", b"binf" + XGBOOST, "xgboost", "old binary"),
    ("bare.model", struct.pack("<f", 0.5) + XGBOOST[4:], "xgboost", "old binary"),
    ("model.txt", b"tree\nversion=v4\nnum_class=1\n", "lightgbm", "LightGBM"),
    ("model.cbm", b"CBM1" + bytes(40), "catboost", "CatBoost"),
    ("weight.bin", struct.pack("<II", 1, 2) + bytes(56) + struct.pack("<I", 0xDEADBEEF) + FLOATS, "coreml", "Core ML"),
    ("ggml-tiny.bin", b"lmgg" + struct.pack("<3i", 51865, 1500, 384) + bytes(40), "whisper.cpp", "whisper.cpp"),
    ("ggml-short.bin", b"lmgg" + struct.pack("<11i", *WHISPER), "whisper.cpp", "whisper"),
    ("ggml-silero-v5.bin", b"lmgg" + struct.pack("<i10s3i", 10, b"silero-16k", 5, 1, 2), "whisper.cpp", "whisper.cpp"),
    ("llama.bin", b"lmgg" + struct.pack("<3i", 32000, 4096, 256) + bytes(40), "ggml", "GGML"),
    ("lora.bin", b"algg" + bytes(40), "ggml", "LoRA"),
    ("model.mnn", struct.pack("<I4Hi3I", 12, 8, 12, 4, 8, 8, 0, 0, 0), "mnn", "MNN"),
    ("model.rknn", b"RKNN\0\0\0\0" + bytes(40), "rknn", "Rockchip"),
    ("model.bpte", struct.pack("<I", 28) + b"BP08" + bytes(40), "executorch", "bundled"),
    ("wiki.bin", struct.pack("<2i", 793712314, 12) + bytes(40), "fasttext", "fastText"),
    ("net.ckpt", _proto(1, MINDSPORE), "mindspore", "MindSpore"),
    ("net.pdmodel", _proto(1, b"\x08\0\x10" + b"\xff" * 9 + b"\1" + _proto(3, b"x" * 20)), "paddle", "PaddlePaddle"),
    ("net.pdiparams", bytes(16) + struct.pack("<i", 6) + b"\x08\5\x10\2\x10\3" + FLOATS, "paddle", "PaddlePaddle"),
    ("net.params", struct.pack("<QQ", 0xF7E58D4F05049CB7, 0) + bytes(40), "tvm", "TVM"),
    ("old.mat", b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(90), "matlab", "MATLAB"),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "data", "kind", "word"), MARKS, ids=[item[0] for item in MARKS])
def test_marks(name: str, data: bytes, kind: str, word: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    error = refusal(tmp_path / name)
    assert (error.kind, word in error.what) == (kind, True), error.what
    assert error.next
    assert kind in foreign_kinds()


def test_numbers_without_a_mark_are_told_by_what_is_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(FLOATS)
    (tmp_path / "b.bin").write_bytes(FLOATS)
    (tmp_path / "c.bin").write_bytes(FLOATS)
    (tmp_path / "a.param").write_bytes(b"7767517\n3 3\nInput data 0 1 data\n")
    (tmp_path / "b.xml").write_bytes(b'<?xml version="1.0"?>\n<net name="a" version="11">\n')
    assert [refusal(tmp_path / f"{name}.bin").kind for name in "abc"] == ["ncnn", "openvino", "unknown"]


@pytest.mark.parametrize("name", ["a.weights", "a.bin", "a.mnn", "a.ark", "a.model"])
def test_what_has_no_structure_has_no_name(name: str, tmp_path: Path) -> None:
    chance = random.Random(3)
    for size in (40, 400, 4000):
        (tmp_path / name).write_bytes(b"\x9a" + chance.randbytes(size))
        assert refusal(tmp_path / name).kind == "unknown"


@pytest.mark.parametrize(
    "path",
    [*(item.path for item in CHECKPOINTS), *(path for path in corpus_files() if path.suffix != ".gguf")],
    ids=lambda path: path.name,
)
def test_no_checkpoint_has_a_mark_of_another(path: Path) -> None:
    if path.is_dir():
        return
    with closing(open_source(path)) as source:
        head = source.read(0, 1024)
        assert match_magic(source) is None
        assert match_structure(head, source) is None

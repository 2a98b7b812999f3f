"""File signatures of other frameworks, as one table.

Each row has the magic bytes or the structure of a format, and the program that opens it. The comment above a row names
the source that defines the format. Rows with ``magic`` are tried first, before a file is examined as text. Other rows
are tried last: they match the structure, and the name of the file or its neighbours if the structure is ambiguous.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache
from typing import Final, TypeAlias

from ...base.errors import UnreadableError
from ...base.records import NamedTuple
from ...files.sources import Source
from .headers import gguf_summary, npy_summary

#: Takes the source and the offset of its magic bytes; returns whether the rest also fits.
Test: TypeAlias = "Callable[[Source, int], bool]"


class ForeignFormat(NamedTuple):
    """A format that ckptool does not read: its short name, a noun phrase for it, and the tool that opens it."""

    kind: str
    description: str
    tool: str

    def known_by(
        self,
        *magic: bytes,
        at: tuple[int, ...] = (0,),
        suffix: tuple[str, ...] = (),
        first: bytes = b"",
        test: Test | None = None,
        detail: Callable[[Source], str] | None = None,
    ) -> Signature:
        """Return the table row for this format."""
        return Signature(self, magic, at, suffix, first, test, detail)


class Signature(NamedTuple):
    """A format and the rules that recognise it.

    The file starts with one of ``magic`` at one of the offsets ``at``, its name ends with one of ``suffix``, and it
    passes ``test``. ``first`` are all first bytes with which it can pass; b"" stands for any. ``detail`` returns text
    that follows the description after a colon.
    """

    format: ForeignFormat
    magic: tuple[bytes, ...]
    at: tuple[int, ...]
    suffix: tuple[str, ...]
    first: bytes
    test: Test | None
    detail: Callable[[Source], str] | None

    def matches(self, source: Source) -> bool:
        """Return whether the file has this format, trusting none of its content."""
        if self.suffix and not source.name.lower().endswith(self.suffix):
            return False
        if not self.magic:
            return self.test is None or self.test(source, 0)
        size = max(map(len, self.magic))
        for at in self.at:
            if source.read(at, size).startswith(self.magic) and (self.test is None or self.test(source, at)):
                return True
        return False

    def format_of(self, source: Source) -> ForeignFormat:
        """Describe a file that matches."""
        if self.detail is None:
            return self.format
        return self.format._replace(description=f"{self.format.description}: {self.detail(source)}")


def _begins(pattern: bytes, size: int = 1024) -> Test:
    """Return a test that matches a pattern against the first bytes."""
    # The pattern is compiled at the first test, not when the table is built.
    return lambda source, at: re.match(pattern, source.read(at, size), re.S) is not None


def _holds(pattern: bytes, size: int = 1 << 16) -> Test:
    """Return a test that searches the first bytes for a pattern."""
    return lambda source, at: re.search(pattern, source.read(at, size), re.S) is not None


def _beside(suffix: str, pattern: bytes) -> Test:
    """Return a test for bare numbers: a file with another suffix describes them, and matches the pattern."""

    def test(source: Source, at: int) -> bool:
        from ...files.folders import open_folder  # few files need it

        folder, name = os.path.split(os.path.splitext(source.name)[0] + suffix)
        beside = open_folder(folder)
        if beside.size(name) is None:  # never tries to open a missing file: an audit of opens shows one
            return False
        try:
            with closing(beside.open(name)) as other:
                return re.search(pattern, other.read(0, 1024), re.S) is not None
        except UnreadableError:
            return False

    return test


def _numbers(source: Source, at: int, form: str) -> tuple[int, ...]:
    """Unpack the numbers at an offset; return an empty tuple if the file ends within them."""
    data = source.read(at, struct.calcsize(form))
    return struct.unpack(form, data) if len(data) == struct.calcsize(form) else ()


def _is_whisper(source: Source, at: int) -> bool:
    """Return whether a file has Whisper's sizes, or is the voice activity detector of whisper.cpp.

    The sizes are 1,500 audio positions, or matching heads of the audio and text parts with 80 or 128 mel bands. The
    detector begins with its name.
    """
    sizes = _numbers(source, 4, "<10i")
    if len(sizes) == 10:
        _, _, audio, audio_heads, _, _, text, text_heads, _, bands = sizes
        heads = min(audio, audio_heads, text, text_heads) > 0 and not (audio % audio_heads or text % text_heads)
        if heads and bands in (80, 128):
            return True
    first = _numbers(source, 4, "<2i")
    usual = bool(first) and 51_000 < first[0] < 53_000 and first[1] == 1500
    return usual or source.read(8, 6) == b"silero"


def _is_llama2(source: Source, at: int) -> bool:
    """Return whether a file has seven sizes and exactly as many floats as they imply."""
    sizes = _numbers(source, 0, "<7i")
    if not sizes:
        return False
    dim, hidden, layers, heads, kv_heads, vocabulary, length = sizes
    if min(dim, hidden, layers, heads, kv_heads, length) <= 0 or not vocabulary or dim % heads or heads % kv_heads:
        return False
    floats = abs(vocabulary) * dim * (2 if vocabulary < 0 else 1) + dim
    floats += layers * (2 * dim + 2 * dim * dim + 2 * dim * (dim // heads) * kv_heads + 3 * dim * hidden)
    return source.size == 28 + 4 * (floats + length * (dim // heads))


def _is_darknet(source: Source, at: int) -> bool:
    """Return whether a file has a version, the number of images seen, and floats of plausible magnitude."""
    version = _numbers(source, 0, "<3i")
    if not version or version[0] != 0 or not 0 <= version[1] <= 2 or not 0 <= version[2] <= 9:
        return False
    begin = 20 if version[1] >= 2 else 16  # ``seen`` has 8 bytes since version 0.2
    floats = _numbers(source, begin, f"<{min(64, (source.size - begin) // 4)}f") if source.size > begin else ()
    return (source.size - begin) % 4 == 0 and bool(floats) and all(abs(number) < 1e6 for number in floats)


def _is_old_xgboost(source: Source, at: int) -> bool:
    """Return whether the name of an objective follows 136 bytes of parameters."""
    begin = 4 if source.read(0, 4) == b"binf" else 0
    size = _numbers(source, begin + 136, "<Q")
    if not size or not 3 < size[0] < 64:
        return False
    return re.match(rb"(reg|binary|multi|rank|survival|count):\w", source.read(begin + 144, 12)) is not None


def _is_ncnn_weights(source: Source, at: int) -> bool:
    """Return whether a file has the tag of the first weights, or bare numbers that a .param file describes."""
    tagged = _begins(rb"\x47\x6b\x30\x01|\x38\x4b\x0d\0|\x56\xc0\x02\0")
    return tagged(source, at) or _beside(".param", rb"\A7767517\s")(source, at)


def _is_flatbuffer(source: Source, at: int) -> bool:
    """Return whether the root and its field table, before or after it, are within the file."""
    root = _numbers(source, 0, "<I")
    if not root or not 4 <= root[0] < source.size - 4:
        return False
    back = _numbers(source, root[0], "<i")
    fields = _numbers(source, root[0] - back[0], "<2H") if back and 0 <= root[0] - back[0] < source.size else ()
    return bool(fields) and 4 <= fields[0] < 512 and not fields[0] % 2 and 4 <= fields[1] < 4096


def _is_keras(source: Source, at: int) -> bool:
    """Return whether a file has names that Keras 2 writes, or the groups "layers" and "vars" of Keras 3."""
    block = source.read(at, 1 << 16)
    keras2 = b"keras_version" in block or b"layer_names" in block or b"model_weights" in block
    return keras2 or (b"layers\0" in block and b"vars\0" in block)


def _skip_strings(data: bytes, at: int, tags: bytes) -> int:
    """Return the offset after the short protobuf strings with these tags."""
    while data[at : at + 1] and data[at] in tags and data[at + 1 : at + 2] and data[at + 1] < 0x80:
        at += 2 + data[at + 1]
    return at


def _is_caffe(source: Source, at: int) -> bool:
    """Return whether a file is a NetParameter: an optional name, then a layer with name and type.

    The layer is field 100, or field 2 in version 1.
    """
    data = source.read(0, 4096)
    name = _skip_strings(data, 0, b"\x0a") if data[:1] == b"\x0a" else 0
    begin = re.compile(rb"\xa2\x06[\x80-\xff]{0,4}[\0-\x7f]\x0a|\x12[\x80-\xff]{0,4}[\0-\x7f]").match(data, name)
    if begin is None or not data[2:name].isascii() or not data[2:name].decode("ascii").isprintable():
        return False
    if begin.group()[:1] == b"\xa2":
        type_at = _skip_strings(data, begin.end() - 1, b"\x0a")
        return re.compile(rb"\x12[\2-\x40][A-Z][A-Za-z\d]").match(data, type_at) is not None
    type_at = _skip_strings(data, begin.end(), b"\x12\x1a\x22")  # inputs, outputs, name
    return type_at > begin.end() and re.compile(rb"\x28[\1-\x28]").match(data, type_at) is not None


_HDF: Final = b"\x89HDF\r\n\x1a\n"
#: The HDF5 signature may follow a user block of 512 bytes, or of 512 doubled any number of times.
_HDF_AT: Final = (0, 512, 1024, 2048, 4096, 8192)
_TF: Final = "tf.train.load_checkpoint reads it"
_PADDLE: Final = "paddle.static.load_inference_model reads it with its"
_XGBOOST: Final = "xgboost.Booster(model_file=...) reads it"
_RKNN: Final = "rknn-toolkit2 and the RKNN runtime run it"
_NCNN: Final = "ncnn runs it with its .bin, which has the weights"
_EXECUTORCH: Final = "the executorch package runs it"
_GGUF: Final = "the gguf package reads it, llama.cpp runs it; from_pretrained of transformers takes some as gguf_file"
_OCDBT: Final = (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde", b"\x0c\xdb\x12\x34")
_TORCH7: Final = (
    "torchfile.load reads it (pip install torchfile), and torch.utils.serialization.load_lua of PyTorch 0.4"
)

#: The first row that matches counts.
SIGNATURES: Final[tuple[Signature, ...]] = (
    # -- numbers and arrays
    # numpy/lib/format.py
    ForeignFormat("npy", "a NumPy array", "numpy.load reads it").known_by(b"\x93NUMPY", detail=npy_summary),
    # MAT-File Format
    ForeignFormat("matlab", "a MATLAB file", "scipy.io.loadmat reads it").known_by(b"MATLAB 5.0 MAT-file"),
    # MAT-File Format
    ForeignFormat("matlab", "a MATLAB file (HDF5)", "h5py reads it").known_by(b"MATLAB 7.3 MAT-file"),
    # keras/src/legacy/saving/legacy_h5_format.py
    ForeignFormat("hdf5", "a Keras model as HDF5", "keras.models.load_model reads it").known_by(
        _HDF, at=_HDF_AT, test=_holds(b"model_config")
    ),
    # keras/src/saving/saving_lib.py
    ForeignFormat(
        "hdf5", "an HDF5 file with weights of Keras", "load_weights of the Keras model, or h5py reads it"
    ).known_by(_HDF, at=_HDF_AT, test=_is_keras),
    # HDF5 File Format Specification
    ForeignFormat("hdf5", "an HDF5 file", "h5py reads it").known_by(_HDF, at=_HDF_AT),
    # -- GGML
    # docs/gguf.md of ggml
    ForeignFormat("gguf", "a GGUF model (llama.cpp)", _GGUF).known_by(b"GGUF", detail=gguf_summary),
    # models/convert-pt-to-ggml.py and models/convert-silero-vad-to-ggml.py of whisper.cpp
    ForeignFormat("whisper.cpp", "a model of whisper.cpp", "whisper.cpp runs it").known_by(b"lmgg", test=_is_whisper),
    # llama.cpp before 2023-08: llama-util.h
    ForeignFormat(
        "ggml",
        "a GGML model, older than GGUF",
        "llama.cpp's convert scripts make GGUF of models of LLaMA; others run in the program of their time",
    ).known_by(b"lmgg", b"fmgg", b"tjgg"),
    # llama.cpp: convert-lora-to-ggml.py
    ForeignFormat(
        "ggml",
        "a LoRA adapter of llama.cpp, older than GGUF",
        "convert_lora_to_gguf.py of llama.cpp makes GGUF from the adapter that it was made of",
    ).known_by(b"algg"),
    # llama.h: LLAMA_SESSION_MAGIC
    ForeignFormat("ggml", "a session of llama.cpp", "llama.cpp reads it").known_by(b"nsgg"),
    # export.py of llama2.c
    ForeignFormat("llama2.c", "a model of llama2.c", "the run program of llama2.c runs it").known_by(b"24ka"),
    # -- trees
    # src/common/json.cc of dmlc/xgboost
    ForeignFormat("xgboost", "an XGBoost model (UBJSON)", _XGBOOST).known_by(b"{L\0\0\0\0", test=_holds(b"learner")),
    # src/learner.cc of dmlc/xgboost
    ForeignFormat("xgboost", "an XGBoost model (JSON)", _XGBOOST).known_by(
        b"{",
        test=_begins(
            rb'\{\s*"(?:learner|version)"\s*:.*"(?:learner_model_param|gradient_booster|attributes)"', 1 << 16
        ),
    ),
    # dmlc/xgboost 0.90: src/learner.cc
    ForeignFormat(
        "xgboost", "an XGBoost model in the old binary format (base64)", "xgboost before 1.0 reads it"
    ).known_by(b"bs64\t"),
    # src/boosting/gbdt_model_text.cpp of LightGBM
    ForeignFormat("lightgbm", "a LightGBM model", "lightgbm.Booster(model_file=...) reads it").known_by(
        b"tree\n", b"tree\r\n", test=_holds(rb"\n(?:version|num_class)=")
    ),
    # catboost/libs/model/model.cpp
    ForeignFormat("catboost", "a CatBoost model", "catboost.CatBoost().load_model reads it").known_by(b"CBM1"),
    # -- text and speech
    # src/fasttext.cc
    ForeignFormat("fasttext", "a fastText model", "fasttext.load_model reads it").known_by(b"\xba\x16\x4f\x2f"),
    # src/base/io-funcs-inl.h of Kaldi
    ForeignFormat(
        "kaldi", "a model of Kaldi", "Kaldi reads it (nnet3-copy, copy-feats); kaldiio reads archives"
    ).known_by(b"\0B", test=_begins(rb"\0B(?:<[A-Za-z]\w*>|[FDC][MV]\d? |\x04)")),
    # src/util/kaldi-table-inl.h of Kaldi
    ForeignFormat("kaldi", "an archive of Kaldi (ark)", "kaldiio.load_ark reads it").known_by(
        first=bytes(range(0x21, 0x7F)), test=_begins(rb"[!-~]{1,200} \0B(?:<[A-Za-z]\w*>|[FDC][MV]\d? |\x04)")
    ),
    # python/ctranslate2/specs/model_spec.py
    ForeignFormat(
        "ctranslate2", "a CTranslate2 model", "ctranslate2.Translator or Generator loads its folder"
    ).known_by(first=bytes(range(0x01, 0x15)), test=_begins(rb"[\x01-\x14]\0\0\0[\x04-\x60]\0\w{2,90}Spec\0")),
    # -- programs on devices
    # schema.fbs of tensorflow/lite
    ForeignFormat("tflite", "a TensorFlow Lite model", "tf.lite.Interpreter runs it").known_by(b"TFL3", at=(4,)),
    # ort.fbs of onnxruntime
    ForeignFormat("onnx", "a model of ONNX Runtime (.ort)", "onnxruntime runs it").known_by(b"ORTM", at=(4,)),
    # program.fbs of executorch
    ForeignFormat("executorch", "an ExecuTorch program", _EXECUTORCH).known_by(
        b"ET", at=(4,), test=lambda source, at: source.read(6, 2).isdigit()
    ),
    # torch/csrc/jit/serialization/mobile_bytecode.fbs
    ForeignFormat(
        "mobile-flatbuffer",
        "a PyTorch Mobile model as a flatbuffer",
        "torch.jit.load reads it, and runs its code when it is called",
    ).known_by(b"PTMF", at=(4,)),
    # bundled_program_schema.fbs of executorch
    ForeignFormat("executorch", "a bundled program of ExecuTorch (.bpte)", _EXECUTORCH).known_by(
        b"BP0", b"BP1", at=(4,)
    ),
    # as read by source/rknn.js of netron
    ForeignFormat("rknn", "a Rockchip model (.rknn)", _RKNN).known_by(b"RKNN", b"CYPTRKNN"),
    # as read by source/rknn.js of netron
    ForeignFormat("rknn", "a Rockchip model (.rknn)", _RKNN).known_by(b"RKNN", at=(4,)),
    # mlmodel/src/MILBlob/Blob/StorageFormat.hpp of coremltools
    ForeignFormat("coreml", "the weights of a Core ML model (weight.bin)", "coremltools reads its .mlpackage").known_by(
        b"\xef\xbe\xad\xde", at=(64,), test=lambda source, at: source.read(4, 4) == b"\2\0\0\0"
    ),
    # as written by trtexec of TensorRT 7 to 10
    ForeignFormat("tensorrt", "a TensorRT engine", "the TensorRT runtime that built it runs it").known_by(
        b"ftrt", b"ptrt"
    ),
    # src/net.cpp of ncnn: Net::load_param
    ForeignFormat("ncnn", "the graph of an ncnn model (.param)", _NCNN).known_by(
        b"7767517", test=_begins(rb"7767517\s+\d+ +\d+\s")
    ),
    # src/net.cpp of ncnn: Net::load_param_bin
    ForeignFormat("ncnn", "the graph of an ncnn model (.param.bin)", _NCNN).known_by(b"\xdd\x85\x76\0"),
    # src/core/src/xml_util of openvino
    ForeignFormat(
        "openvino",
        "the graph of an OpenVINO model (.xml)",
        "openvino.Core().read_model reads it with its .bin, which has the weights",
    ).known_by(b"<?xml", b"<net", test=_begins(rb"(?:<\?xml[^>]{0,200}>)?\s*<net\s[^>]{0,400}\bversion=")),
    # the PMML schema of dmg.org
    ForeignFormat("pmml", "a model in PMML", "pypmml or JPMML reads it").known_by(
        b"<?xml", b"<PMML", test=_begins(rb"(?:<\?xml[^>]{0,200}>)?\s*<PMML\s")
    ),
    # src/runtime/file_utils.h of TVM: kTVMNDArrayListMagic
    ForeignFormat(
        "tvm", "parameters of TVM", "tvm.relay.load_param_dict or tvm.runtime.load_param_dict reads it"
    ).known_by(struct.pack("<Q", 0xF7E58D4F05049CB7)),
    # mlir/docs/BytecodeFormat.md
    ForeignFormat("mlir", "MLIR bytecode", "mlir-opt reads it").known_by(b"ML\xefR"),
    # -- training frameworks
    # An object: index, version, class. A table: index, size, and its first key, a number or a string.
    # File.lua of torch/torch7
    ForeignFormat("torch7", "a file of Torch7 (Lua)", _TORCH7).known_by(
        b"\4\0\0\0",
        b"\3\0\0\0",
        test=_begins(
            rb"\x04\0{3}\x01\0{3}(?:[\x03-\x06]\0{3}V \d{1,4})?[\x04-\x7f]\0{3}[a-z][\w.]+"
            rb"|\x03\0{3}\x01\0{3}..[\0-\x0f]\0(?:\x01\0{3}.{6}[\xf0-\xff\0-\x0f][\x3f\x40]|\x02\0{3}.\0{3}[!-~])"
        ),
    ),
    # File.lua of torch/torch7
    ForeignFormat("torch7", "a file of Torch7 (Lua, as text)", _TORCH7).known_by(
        b"4\n", b"3\n", test=_begins(rb"4\n1\n\d\nV \d+\n\d+\n[a-z][\w.]+\n|3\n1\n\d+\n[12]\n")
    ),
    # src/ndarray/ndarray.cc of MXNet: kMXAPINDArrayListMagic
    ForeignFormat("mxnet", "a parameter file of MXNet", "mxnet.nd.load reads it").known_by(b"\x12\x01" + bytes(14)),
    # paddle/fluid/framework/lod_tensor.cc: SerializeToStream
    ForeignFormat("paddle", "parameters of PaddlePaddle (.pdiparams)", f"{_PADDLE} .pdmodel").known_by(
        bytes(16), test=_begins(rb"\0{16}[\2-\x60]\0{3}\x08[\0-\x20]\x10")
    ),
    # tensorstore/kvstore/ocdbt/format
    ForeignFormat(
        "orbax", "a part of a checkpoint of Orbax (TensorStore's OCDBT)", "orbax.checkpoint reads its folder"
    ).known_by(*_OCDBT),
    # checkpoint_state.proto of TensorFlow
    ForeignFormat("tensorflow", "the text file that names the latest TensorFlow checkpoint", _TF).known_by(
        b"model_checkpoint_path:"
    ),
    # caffe2/serialize/file_format.h, 2018
    ForeignFormat("torch-preview", "a container of a PyTorch 1.0 preview, which no release reads", "").known_by(
        b"PYTORCH1"
    ),
    # -- not models
    # RFC 2083
    ForeignFormat("png", "a PNG picture", "").known_by(b"\x89PNG"),
    # ITU T.81
    ForeignFormat("jpeg", "a JPEG picture", "").known_by(b"\xff\xd8\xff"),
    # GIF89a Specification
    ForeignFormat("gif", "a GIF picture", "").known_by(b"GIF87a", b"GIF89a"),
    # ISO 32000
    ForeignFormat("pdf", "a PDF document", "").known_by(b"%PDF-"),
    # parquet-format
    ForeignFormat("parquet", "a Parquet file", "pyarrow.parquet reads it").known_by(b"PAR1"),
    # Arrow Columnar Format
    ForeignFormat("arrow", "an Arrow file", "pyarrow.ipc.open_file reads it").known_by(b"ARROW1\0\0"),
    # sqlite.org/fileformat.html
    ForeignFormat("sqlite", "an SQLite database", "sqlite3 reads it").known_by(b"SQLite format 3\0"),
    # System V ABI
    ForeignFormat(
        "elf",
        "a program or shared library (ELF), such as AOTInductor compiles",
        "file and readelf tell more; running it runs its code",
    ).known_by(b"\x7fELF"),
    # -- without magic bytes
    # Pieces: each has a text and a score, and a kind if it is not the usual one.
    # src/sentencepiece_model.proto
    ForeignFormat(
        "sentencepiece",
        "a model of SentencePiece, the vocabulary of a tokenizer",
        "sentencepiece.SentencePieceProcessor(model_file=...) reads it",
    ).known_by(
        first=b"\n",
        test=_begins(rb"\x0a[\x08-\x60]\x0a[\1-\x50][^\0-\x08]{1,80}?\x15.{4}(?:\x18[\x01-\x06])?\x0a[\x08-\x60]\x0a"),
    ),
    # mindspore/ccsrc/utils/checkpoint.proto
    ForeignFormat("mindspore", "a checkpoint of MindSpore", "mindspore.load_checkpoint reads it").known_by(
        first=b"\n",
        test=_begins(
            rb"\x0a[\x80-\xff]{0,4}[\0-\x7f]\x0a[\1-\x7f][ -~]{1,127}\x12[\x80-\xff]{0,4}[\0-\x7f]"
            rb"(?:\x08[\x80-\xff]*[\0-\x7f])*\x12[\4-\x0a](?:BF|F|UI|I|B|S)[a-z]+\d*\x1a"
        ),
    ),
    # paddle/fluid/framework/framework.proto: ProgramDesc
    ForeignFormat("paddle", "a program of PaddlePaddle (.pdmodel)", f"{_PADDLE} .pdiparams").known_by(
        first=b"\n", test=_begins(rb"\x0a[\x80-\xff]{0,4}[\0-\x7f]\x08\0\x10\xff{9}\x01")
    ),
    # src/caffe/proto/caffe.proto: NetParameter
    ForeignFormat(
        "caffe", "a Caffe model (.caffemodel)", "cv2.dnn.readNetFromCaffe reads it with its .prototxt, and Caffe does"
    ).known_by(first=b"\n\x12\xa2", test=_is_caffe),
    # src/learner.cc of dmlc/xgboost: LearnerModelParamLegacy
    ForeignFormat(
        "xgboost",
        "an XGBoost model in the old binary format",
        "xgboost before 3.1 reads it; its save_model('model.ubj') writes the current format",
    ).known_by(test=_is_old_xgboost),
    # tensorflow/core/util/tensor_bundle/naming.cc
    ForeignFormat(
        "tensorflow-data", "the data of a TensorFlow checkpoint: its .index names the variables", _TF
    ).known_by(test=lambda source, at: re.search(r"\.data-\d{5}-of-\d{5}\Z", source.name) is not None),
    # docs/ExternalData.md of onnx
    ForeignFormat(
        "onnx",
        "the weights of an ONNX model: bare bytes, which its .onnx file describes",
        "onnx.load of the .onnx file reads both",
    ).known_by(suffix=(".onnx.data", ".onnx_data")),
    # src/parser.c of pjreddie/darknet: load_weights_upto
    ForeignFormat(
        "darknet", "Darknet weights (YOLO)", "darknet reads it with its .cfg; cv2.dnn.readNetFromDarknet, too"
    ).known_by(suffix=(".weights",), test=_is_darknet),
    # export.py of llama2.c: legacy_export
    ForeignFormat(
        "llama2.c", "a model of llama2.c, of its first version", "the run program of llama2.c runs it"
    ).known_by(suffix=(".bin",), test=_is_llama2),
    # src/modelbin.cpp of ncnn
    ForeignFormat(
        "ncnn", "the weights of an ncnn model", "ncnn runs it with its .param, which describes them"
    ).known_by(suffix=(".bin",), test=_is_ncnn_weights),
    # src/core/src/pass/serialize.cpp of openvino
    ForeignFormat(
        "openvino",
        "the weights of an OpenVINO model",
        "openvino.Core().read_model reads its .xml, which describes them",
    ).known_by(suffix=(".bin",), test=_beside(".xml", rb"<net\s")),
    # schema/default/MNN.fbs of alibaba/MNN
    ForeignFormat("mnn", "a model of MNN", "MNN.nn.load_module_from_file of MNN runs it").known_by(
        suffix=(".mnn",), test=_is_flatbuffer
    ),
)

#: All places of magic bytes in the table.
_PLACES: Final = tuple(sorted({at for row in SIGNATURES for at in row.at}))


def with_magic(source: Source) -> tuple[Signature, ...]:
    """Return the rows whose magic bytes a file may have, in the order of the table."""
    return _with_magic(tuple(source.read(at, 1) for at in _PLACES))


@lru_cache(4096)
def _with_magic(found: tuple[bytes, ...]) -> tuple[Signature, ...]:
    first = dict(zip(_PLACES, found, strict=True))
    return tuple(row for row in SIGNATURES if any(magic[:1] == first[at] for magic in row.magic for at in row.at))


@lru_cache(4096)
def without_magic(suffix: str, first: bytes) -> tuple[Signature, ...]:
    """Return the rows without magic bytes that a file may fit, in the order of the table.

    ``suffix`` is the last suffix of its name, ``first`` its first byte, or b"" for an empty file.
    """
    rows = (row for row in SIGNATURES if not row.magic and (not row.first or first in row.first))
    return tuple(row for row in rows if not row.suffix or any(known.endswith(suffix) for known in row.suffix))

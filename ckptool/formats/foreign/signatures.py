"""The files of other frameworks as one table: the mark of each, the program that opens it, and who defines the mark.

A row with ``magic`` is told by its first bytes, and asked before a file is looked at as text. One without is told by
its structure, with its name or what stands beside it where that alone could be anything; it is asked last.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ...base.errors import UnreadableError
from ...files.sources import Source, open_source
from . import gguf
from .arrays import array_words

#: (the source, where its mark begins) -> does the rest fit, too?
Test: TypeAlias = "Callable[[Source, int], bool]"


class Signature(NamedTuple):
    """A kind of file: its short name, what it is, the program that opens it, and where its mark is defined.

    ``magic`` are the bytes of which one is at one of the offsets ``at``, ``suffix`` the ends of names of which it has
    one, ``test`` the rest. ``detail`` is told behind a colon.
    """

    kind: str
    what: str
    tool: str
    source: str
    magic: tuple[bytes, ...] = ()
    at: tuple[int, ...] = (0,)
    suffix: tuple[str, ...] = ()
    test: Test | None = None
    detail: Callable[[Source], str] | None = None

    def fits(self, source: Source) -> bool:
        """Is the file of this kind? Nothing of it is believed."""
        if self.suffix and not source.name.lower().endswith(self.suffix):
            return False
        if not self.magic:
            return self.test is not None and self.test(source, 0)
        size = max(map(len, self.magic))
        for at in self.at:
            if source.read(at, size).startswith(self.magic) and (self.test is None or self.test(source, at)):
                return True
        return False


def _begins(pattern: bytes, most: int = 1024) -> Test:
    """Do its first bytes look like this?"""
    # Compiled when a file is asked, not when the table is made.
    return lambda source, at: re.match(pattern, source.read(at, most), re.S) is not None


def _holds(pattern: bytes, most: int = 1 << 16) -> Test:
    """Is this in its first bytes?"""
    return lambda source, at: re.search(pattern, source.read(at, most), re.S) is not None


def _beside(suffix: str, pattern: bytes) -> Test:
    """Does a file of the same name with another suffix look like this? Bare numbers are told by what describes them."""

    def test(source: Source, at: int) -> bool:
        other = os.path.splitext(source.name)[0] + suffix
        if not os.path.isfile(other):
            return False
        try:
            file = open_source(other)
        except UnreadableError:
            return False
        try:
            return re.search(pattern, file.read(0, 1024), re.S) is not None
        finally:
            file.close()

    return test


def _numbers(source: Source, at: int, form: str) -> tuple[int, ...]:
    """Numbers from an offset on, none where the file ends within them."""
    data = source.read(at, struct.calcsize(form))
    return struct.unpack(form, data) if len(data) == struct.calcsize(form) else ()


def _is_whisper(source: Source, at: int) -> bool:
    """Vocabularies of Whisper, and 1,500 places of audio."""
    found = _numbers(source, 4, "<2i")
    return bool(found) and 51_000 < found[0] < 53_000 and found[1] == 1500


def _is_llama2(source: Source, at: int) -> bool:
    """Seven sizes without a mark, and exactly the floats that they ask for."""
    found = _numbers(source, 0, "<7i")
    if not found:
        return False
    dim, hidden, layers, heads, kv_heads, vocabulary, length = found
    if min(dim, hidden, layers, heads, kv_heads, length) <= 0 or not vocabulary or dim % heads or heads % kv_heads:
        return False
    floats = abs(vocabulary) * dim * (2 if vocabulary < 0 else 1) + dim
    floats += layers * (2 * dim + 2 * dim * dim + 2 * dim * (dim // heads) * kv_heads + 3 * dim * hidden)
    return source.size == 28 + 4 * (floats + length * (dim // heads))


def _is_darknet(source: Source, at: int) -> bool:
    """A version, the number of pictures seen, and floats of the usual size."""
    found = _numbers(source, 0, "<3i")
    if not found or found[0] != 0 or not 0 <= found[1] <= 2 or not 0 <= found[2] <= 9:
        return False
    begin = 20 if found[1] >= 2 else 16  # ``seen`` has 8 bytes from version 0.2 on
    floats = _numbers(source, begin, f"<{min(64, (source.size - begin) // 4)}f") if source.size > begin else ()
    return (source.size - begin) % 4 == 0 and bool(floats) and all(abs(number) < 1e6 for number in floats)


def _is_old_xgboost(source: Source, at: int) -> bool:
    """136 bytes of parameters, then the name of the objective."""
    begin = 4 if source.read(0, 4) == b"binf" else 0
    size = _numbers(source, begin + 136, "<Q")
    if not size or not 3 < size[0] < 64:
        return False
    return re.match(rb"(reg|binary|multi|rank|survival|count):\w", source.read(begin + 144, 12)) is not None


def _is_flatbuffer(source: Source, at: int) -> bool:
    """A root whose table of fields is in front of it or behind it, and in the file."""
    root = _numbers(source, 0, "<I")
    if not root or not 4 <= root[0] < source.size - 4:
        return False
    back = _numbers(source, root[0], "<i")
    fields = _numbers(source, root[0] - back[0], "<2H") if back and 0 <= root[0] - back[0] < source.size else ()
    return bool(fields) and 4 <= fields[0] < 512 and not fields[0] % 2 and 4 <= fields[1] < 4096


def _is_keras(source: Source, at: int) -> bool:
    """What a file of Keras 2 names. Keras 3 has weights in groups called layers and vars."""
    block = source.read(at, 1 << 16)
    old = b"keras_version" in block or b"layer_names" in block or b"model_weights" in block
    return old or (b"layers\0" in block and b"vars\0" in block)


def _past(data: bytes, at: int, tags: bytes) -> int:
    """The offset behind the short strings of protobuf with these tags."""
    while data[at : at + 1] and data[at] in tags and data[at + 1 : at + 2] and data[at + 1] < 0x80:
        at += 2 + data[at + 1]
    return at


def _is_caffe(source: Source, at: int) -> bool:
    """A NetParameter: perhaps its name, then a layer with a name and a type (100), or one of the first version (2)."""
    data = source.read(0, 4096)
    name = _past(data, 0, b"\x0a") if data[:1] == b"\x0a" else 0
    begin = re.compile(rb"\xa2\x06[\x80-\xff]{0,4}[\0-\x7f]\x0a|\x12[\x80-\xff]{0,4}[\0-\x7f]").match(data, name)
    if begin is None or not data[2:name].isascii() or not data[2:name].decode("ascii").isprintable():
        return False
    if begin.group()[:1] == b"\xa2":
        kind = _past(data, begin.end() - 1, b"\x0a")
        return re.compile(rb"\x12[\2-\x40][A-Z][A-Za-z\d]").match(data, kind) is not None
    kind = _past(data, begin.end(), b"\x12\x1a\x22")  # what it reads, what it gives, its name
    return kind > begin.end() and re.compile(rb"\x28[\1-\x28]").match(data, kind) is not None


_HDF: Final = (b"\x89HDF\r\n\x1a\n",)
#: Where the mark of HDF5 may be: behind a block of the user's, of 512 bytes or twice that ...
_HDF_AT: Final = (0, 512, 1024, 2048, 4096, 8192)
_TF: Final = "tf.train.load_checkpoint reads it"
_GGUF: Final = "the gguf package reads it, llama.cpp runs it; from_pretrained of transformers takes some as gguf_file"
_OCDBT: Final = (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde", b"\x0c\xdb\x12\x34")
_TORCH7: Final = (
    "torchfile.load reads it (pip install torchfile), and torch.utils.serialization.load_lua of PyTorch 0.4"
)

#: The first row that fits counts.
SIGNATURES: Final[tuple[Signature, ...]] = (
    # -- numbers and arrays
    Signature(
        "npy", "a NumPy array", "numpy.load reads it", "numpy/lib/format.py", (b"\x93NUMPY",), detail=array_words
    ),
    Signature("matlab", "a MATLAB file", "scipy.io.loadmat reads it", "MAT-File Format", (b"MATLAB 5.0 MAT-file",)),
    Signature("matlab", "a MATLAB file (HDF5)", "h5py reads it", "MAT-File Format", (b"MATLAB 7.3 MAT-file",)),
    Signature(
        "hdf5",
        "a Keras model as HDF5",
        "keras.models.load_model reads it",
        "keras/src/legacy/saving/legacy_h5_format.py",
        _HDF,
        _HDF_AT,
        test=_holds(b"model_config"),
    ),
    Signature(
        "hdf5",
        "an HDF5 file with weights of Keras",
        "load_weights of the Keras model, or h5py reads it",
        "keras/src/saving/saving_lib.py",
        _HDF,
        _HDF_AT,
        test=_is_keras,
    ),
    Signature("hdf5", "an HDF5 file", "h5py reads it", "HDF5 File Format Specification", _HDF, _HDF_AT),
    # -- GGML
    Signature("gguf", "a GGUF model (llama.cpp)", _GGUF, "docs/gguf.md of ggml", (b"GGUF",), detail=gguf.summary),
    Signature(
        "whisper.cpp",
        "a model of whisper.cpp",
        "whisper.cpp runs it",
        "models/convert-pt-to-ggml.py of whisper.cpp",
        (b"lmgg",),
        test=_is_whisper,
    ),
    Signature(
        "ggml",
        "a GGML model, older than GGUF",
        "llama.cpp's convert scripts make GGUF of models of LLaMA; others run in the program of their time",
        "llama.cpp before 2023-08: llama-util.h",
        (b"lmgg", b"fmgg", b"tjgg"),
    ),
    Signature(
        "ggml",
        "a LoRA adapter of llama.cpp, older than GGUF",
        "convert_lora_to_gguf.py of llama.cpp makes GGUF of the adapter that it was made from",
        "llama.cpp: convert-lora-to-ggml.py",
        (b"algg",),
    ),
    Signature("ggml", "a session of llama.cpp", "llama.cpp reads it", "llama.h: LLAMA_SESSION_MAGIC", (b"nsgg",)),
    Signature("llama2.c", "a model of llama2.c", "run of llama2.c runs it", "export.py of llama2.c", (b"24ka",)),
    # -- trees
    Signature(
        "xgboost",
        "an XGBoost model (UBJSON)",
        "xgboost.Booster(model_file=...) reads it",
        "src/common/json.cc of dmlc/xgboost",
        (b"{L\0\0\0\0",),
        test=_holds(b"learner"),
    ),
    Signature(
        "xgboost",
        "an XGBoost model (JSON)",
        "xgboost.Booster(model_file=...) reads it",
        "src/learner.cc of dmlc/xgboost",
        (b"{",),
        test=_begins(
            rb'\{\s*"(?:learner|version)"\s*:.*"(?:learner_model_param|gradient_booster|attributes)"', 1 << 16
        ),
    ),
    Signature(
        "xgboost",
        "an XGBoost model in its old binary form",
        "xgboost before 3.1 reads it, and save_model('model.ubj') of that writes the form of today",
        "src/learner.cc of dmlc/xgboost: LearnerModelParamLegacy",
        (b"binf",),
        test=_is_old_xgboost,
    ),
    Signature(
        "xgboost",
        "an XGBoost model in its old binary form (base64)",
        "xgboost before 1.0 reads it",
        "dmlc/xgboost 0.90: src/learner.cc",
        (b"bs64\t",),
    ),
    Signature(
        "lightgbm",
        "a LightGBM model",
        "lightgbm.Booster(model_file=...) reads it",
        "src/boosting/gbdt_model_text.cpp of LightGBM",
        (b"tree\n", b"tree\r\n"),
        test=_holds(rb"\n(?:version|num_class)="),
    ),
    Signature(
        "catboost",
        "a CatBoost model",
        "catboost.CatBoost().load_model reads it",
        "catboost/libs/model/model.cpp",
        (b"CBM1",),
    ),
    # -- text and speech
    Signature(
        "fasttext", "a fastText model", "fasttext.load_model reads it", "src/fasttext.cc", (b"\xba\x16\x4f\x2f",)
    ),
    Signature(
        "kaldi",
        "a model of Kaldi",
        "Kaldi reads it (nnet3-copy, copy-feats); kaldiio reads archives",
        "src/base/io-funcs-inl.h of Kaldi",
        (b"\0B",),
        test=_begins(rb"\0B(?:<[A-Za-z]\w*>|[FDC][MV]\d? |\x04)"),
    ),
    Signature(
        "kaldi",
        "an archive of Kaldi (ark)",
        "kaldiio.load_ark reads it",
        "src/util/kaldi-table-inl.h of Kaldi",
        test=_begins(rb"[!-~]{1,200} \0B(?:<[A-Za-z]\w*>|[FDC][MV]\d? |\x04)"),
    ),
    Signature(
        "ctranslate2",
        "a CTranslate2 model",
        "ctranslate2.Translator or Generator loads its folder",
        "python/ctranslate2/specs/model_spec.py",
        test=_begins(rb"[\x01-\x14]\0\0\0[\x04-\x60]\0\w{2,90}Spec\0"),
    ),
    # -- programs on devices
    Signature(
        "tflite",
        "a TensorFlow Lite model",
        "tf.lite.Interpreter runs it",
        "schema.fbs of tensorflow/lite",
        (b"TFL3",),
        (4,),
    ),
    Signature(
        "onnx", "a model of ONNX Runtime (.ort)", "onnxruntime runs it", "ort.fbs of onnxruntime", (b"ORTM",), (4,)
    ),
    Signature(
        "executorch",
        "an ExecuTorch program",
        "the executorch package runs it",
        "program.fbs of executorch",
        (b"ET",),
        (4,),
        test=lambda source, at: source.read(6, 2).isdigit(),
    ),
    Signature(
        "mobile-flatbuffer",
        "a PyTorch Mobile model as a flatbuffer",
        "torch.jit.load reads it, and runs its code when it is called",
        "torch/csrc/jit/serialization/mobile_bytecode.fbs",
        (b"PTMF",),
        (4,),
    ),
    Signature(
        "executorch",
        "a bundled program of ExecuTorch (.bpte)",
        "the executorch package runs it",
        "bundled_program_schema.fbs of executorch",
        (b"BP0", b"BP1"),
        (4,),
    ),
    Signature(
        "rknn",
        "a Rockchip model (.rknn)",
        "rknn-toolkit2 and the RKNN runtime run it",
        "as read by source/rknn.js of netron",
        (b"RKNN", b"CYPTRKNN"),
    ),
    Signature(
        "rknn",
        "a Rockchip model (.rknn)",
        "rknn-toolkit2 and the RKNN runtime run it",
        "as read by source/rknn.js of netron",
        (b"RKNN",),
        (4,),
    ),
    Signature(
        "coreml",
        "the weights of a Core ML model (weight.bin)",
        "coremltools reads its .mlpackage",
        "mlmodel/src/MILBlob/Blob/StorageFormat.hpp of coremltools",
        (b"\xef\xbe\xad\xde",),
        (64,),
        test=lambda source, at: source.read(4, 4) == b"\2\0\0\0",
    ),
    Signature(
        "tensorrt",
        "a TensorRT engine",
        "the TensorRT runtime that built it runs it",
        "as written by trtexec of TensorRT 7 to 10",
        (b"ftrt", b"ptrt"),
    ),
    Signature(
        "ncnn",
        "the graph of an ncnn model (.param)",
        "ncnn runs it with its .bin, which has the weights",
        "src/net.cpp of ncnn: Net::load_param",
        (b"7767517",),
        test=_begins(rb"7767517\s+\d+ +\d+\s"),
    ),
    Signature(
        "ncnn",
        "the graph of an ncnn model (.param.bin)",
        "ncnn runs it with its .bin, which has the weights",
        "src/net.cpp of ncnn: Net::load_param_bin",
        (b"\xdd\x85\x76\0",),
    ),
    Signature(
        "openvino",
        "the graph of an OpenVINO model (.xml)",
        "openvino.Core().read_model reads it with its .bin, which has the weights",
        "src/core/src/xml_util of openvino",
        (b"<?xml", b"<net"),
        test=_begins(rb"(?:<\?xml[^>]{0,200}>)?\s*<net\s[^>]{0,400}\bversion="),
    ),
    Signature(
        "pmml",
        "a model in PMML",
        "pypmml or JPMML reads it",
        "the PMML schema of dmg.org",
        (b"<?xml", b"<PMML"),
        test=_begins(rb"(?:<\?xml[^>]{0,200}>)?\s*<PMML\s"),
    ),
    Signature(
        "tvm",
        "parameters of TVM",
        "tvm.relay.load_param_dict or tvm.runtime.load_param_dict reads it",
        "src/runtime/file_utils.h of TVM: kTVMNDArrayListMagic",
        (struct.pack("<Q", 0xF7E58D4F05049CB7),),
    ),
    Signature("mlir", "MLIR bytecode", "mlir-opt reads it", "mlir/docs/BytecodeFormat.md", (b"ML\xefR",)),
    # -- training frameworks
    Signature(
        "torch7",
        "a file of Torch7 (Lua)",
        _TORCH7,
        "File.lua of torch/torch7",
        (b"\4\0\0\0", b"\3\0\0\0"),
        # An object: index, version, class. A table: index, size, and its first key, a number or a string.
        test=_begins(
            rb"\x04\0{3}\x01\0{3}(?:[\x03-\x06]\0{3}V \d{1,4})?[\x04-\x7f]\0{3}[a-z][\w.]+"
            rb"|\x03\0{3}\x01\0{3}..[\0-\x0f]\0(?:\x01\0{3}.{6}[\xf0-\xff\0-\x0f][\x3f\x40]|\x02\0{3}.\0{3}[!-~])"
        ),
    ),
    Signature(
        "torch7",
        "a file of Torch7 (Lua, as text)",
        _TORCH7,
        "File.lua of torch/torch7",
        (b"4\n", b"3\n"),
        test=_begins(rb"4\n1\n\d\nV \d+\n\d+\n[a-z][\w.]+\n|3\n1\n\d+\n[12]\n"),
    ),
    Signature(
        "mxnet",
        "a parameter file of MXNet",
        "mxnet.nd.load reads it",
        "src/ndarray/ndarray.cc of MXNet: kMXAPINDArrayListMagic",
        (b"\x12\x01" + bytes(14),),
    ),
    Signature(
        "paddle",
        "parameters of PaddlePaddle (.pdiparams)",
        "paddle.static.load_inference_model reads it with its .pdmodel",
        "paddle/fluid/framework/lod_tensor.cc: SerializeToStream",
        (bytes(16),),
        test=_begins(rb"\0{16}[\2-\x60]\0{3}\x08[\0-\x20]\x10"),
    ),
    Signature(
        "orbax",
        "a part of a checkpoint of Orbax (TensorStore's OCDBT)",
        "orbax.checkpoint reads its folder",
        "tensorstore/kvstore/ocdbt/format",
        _OCDBT,
    ),
    Signature(
        "tensorflow",
        "the text that says which TensorFlow checkpoint is the latest",
        _TF,
        "checkpoint_state.proto of TensorFlow",
        (b"model_checkpoint_path:",),
    ),
    Signature(
        "torch-preview",
        "a container of a PyTorch 1.0 preview, which no release reads",
        "",
        "caffe2/serialize/file_format.h, 2018",
        (b"PYTORCH1",),
    ),
    # -- no models
    Signature("png", "a PNG picture", "", "RFC 2083", (b"\x89PNG",)),
    Signature("jpeg", "a JPEG picture", "", "ITU T.81", (b"\xff\xd8\xff",)),
    Signature("gif", "a GIF picture", "", "GIF89a Specification", (b"GIF87a", b"GIF89a")),
    Signature("pdf", "a PDF document", "", "ISO 32000", (b"%PDF-",)),
    Signature("parquet", "a Parquet file", "pyarrow.parquet reads it", "parquet-format", (b"PAR1",)),
    Signature("arrow", "an Arrow file", "pyarrow.ipc.open_file reads it", "Arrow Columnar Format", (b"ARROW1\0\0",)),
    Signature(
        "sqlite", "an SQLite database", "sqlite3 reads it", "sqlite.org/fileformat.html", (b"SQLite format 3\0",)
    ),
    Signature(
        "elf",
        "a program or shared library (ELF), such as AOTInductor compiles",
        "file and readelf tell more; running it runs its code",
        "System V ABI",
        (b"\x7fELF",),
    ),
    # -- without a mark of their own
    Signature(
        "sentencepiece",
        "a model of SentencePiece, the vocabulary of a tokenizer",
        "sentencepiece.SentencePieceProcessor(model_file=...) reads it",
        "src/sentencepiece_model.proto",
        # Pieces, each with its text and score, and the kind where it is not the usual one.
        test=_begins(rb"\x0a[\x08-\x60]\x0a[\1-\x50][^\0-\x08]{1,80}?\x15.{4}(?:\x18[\x01-\x06])?\x0a[\x08-\x60]\x0a"),
    ),
    Signature(
        "mindspore",
        "a checkpoint of MindSpore",
        "mindspore.load_checkpoint reads it",
        "mindspore/ccsrc/utils/checkpoint.proto",
        test=_begins(
            rb"\x0a[\x80-\xff]{0,4}[\0-\x7f]\x0a[\1-\x7f][ -~]{1,127}\x12[\x80-\xff]{0,4}[\0-\x7f]"
            rb"(?:\x08[\x80-\xff]*[\0-\x7f])*\x12[\4-\x0a](?:BF|F|UI|I|B|S)[a-z]+\d*\x1a"
        ),
    ),
    Signature(
        "paddle",
        "a program of PaddlePaddle (.pdmodel)",
        "paddle.static.load_inference_model reads it with its .pdiparams",
        "paddle/fluid/framework/framework.proto: ProgramDesc",
        test=_begins(rb"\x0a[\x80-\xff]{0,4}[\0-\x7f]\x08\0\x10\xff{9}\x01"),
    ),
    Signature(
        "caffe",
        "a Caffe model (.caffemodel)",
        "cv2.dnn.readNetFromCaffe reads it with its .prototxt, and Caffe does",
        "src/caffe/proto/caffe.proto: NetParameter",
        test=_is_caffe,
    ),
    Signature(
        "xgboost",
        "an XGBoost model in its old binary form",
        "xgboost before 3.1 reads it, and save_model('model.ubj') of that writes the form of today",
        "src/learner.cc of dmlc/xgboost: LearnerModelParamLegacy",
        test=_is_old_xgboost,
    ),
    Signature(
        "tensorflow-data",
        "the data of a TensorFlow checkpoint",
        _TF,
        "tensorflow/core/util/tensor_bundle/naming.cc",
        test=lambda source, at: re.search(r"\.data-\d{5}-of-\d{5}\Z", source.name) is not None,
        detail=lambda source: "its .index names the variables",
    ),
    Signature(
        "onnx",
        "the file of weights of an ONNX model",
        "onnx.load of the .onnx file reads both",
        "docs/ExternalData.md of onnx",
        suffix=(".onnx.data", ".onnx_data"),
        test=lambda source, at: True,
        detail=lambda source: "bare bytes, which its .onnx file describes",
    ),
    Signature(
        "darknet",
        "a file of weights of Darknet (YOLO)",
        "darknet reads it with its .cfg; cv2.dnn.readNetFromDarknet, too",
        "src/parser.c of pjreddie/darknet: load_weights_upto",
        suffix=(".weights",),
        test=_is_darknet,
    ),
    Signature(
        "llama2.c",
        "a model of llama2.c, of its first version",
        "run of llama2.c runs it",
        "export.py of llama2.c: legacy_export",
        suffix=(".bin",),
        test=_is_llama2,
    ),
    Signature(
        "ncnn",
        "the file of weights of an ncnn model",
        "ncnn runs it with its .param, which says what they are",
        "src/modelbin.cpp of ncnn",
        suffix=(".bin",),
        test=_begins(rb"\x47\x6b\x30\x01|\x38\x4b\x0d\0|\x56\xc0\x02\0"),
    ),
    Signature(
        "ncnn",
        "the file of weights of an ncnn model",
        "ncnn runs it with its .param, which says what they are",
        "src/modelbin.cpp of ncnn",
        suffix=(".bin",),
        test=_beside(".param", rb"\A7767517\s"),
    ),
    Signature(
        "openvino",
        "the file of weights of an OpenVINO model",
        "openvino.Core().read_model reads its .xml, which says what they are",
        "src/core/src/pass/serialize.cpp of openvino",
        suffix=(".bin",),
        test=_beside(".xml", rb"<net\s"),
    ),
    Signature(
        "mnn",
        "a model of MNN",
        "MNN.nn.load_module_from_file of MNN runs it",
        "schema/default/MNN.fbs of alibaba/MNN",
        suffix=(".mnn",),
        test=_is_flatbuffer,
    ),
)

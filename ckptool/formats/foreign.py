"""Models of other frameworks, told by their content: what they are, and which tool opens them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from ..errors import MalformedError
from ..human import counted, cut, listed, shown
from ..limits import LIMITS
from ..pickles.nodes import Global, Node
from ..source import BytesSource, Source
from ..zips import Archive, Record, contents
from . import gguf
from .protobuf import Field, fields

__all__ = ["KINDS", "Named", "named", "named_archive", "named_folder", "named_pickle", "packed_by"]


class Named(NamedTuple):
    """A format: its short name, what it is in words, and which tool opens it."""

    kind: str
    what: str
    tool: str


#: Short names of all of them.
KINDS: Final = frozenset(
    (
        *("gguf", "ggml", "npy", "npz", "hdf5", "keras", "tensorflow", "tensorflow-index", "tensorflow-data"),
        *("orbax", "savedmodel", "onnx", "coreml", "tflite", "flax", "msgpack", "mxnet", "tensorrt", "torch-preview"),
        *("sklearn", "joblib", "paddle", "png", "jpeg"),
    )
)
_TF: Final = "tf.train.load_checkpoint reads it"
_GGUF: Final = "the gguf package reads it, llama.cpp runs it; from_pretrained of transformers takes some as gguf_file"
#: What a file of Keras 2 names. Keras 3 has weights in groups called layers and vars.
_KERAS: Final = re.compile(rb"keras_version|layer_names|model_weights")
_HDF: Final = b"\x89HDF\r\n\x1a\n"
#: Where the signature of an HDF5 file may stand: behind a block of the user's, of 512 bytes or twice that ...
_HDF_PLACES: Final = (0, 512, 1024, 2048, 4096, 8192)
_TF_DATA: Final = re.compile(r"\.data-\d{5}-of-\d{5}\Z")
#: The last eight bytes of a table of LevelDB, in which TensorFlow keeps the names of variables.
_TABLE: Final = bytes.fromhex("57fb808b247547db")
_MAGIC: Final = (
    (b"ftrt", "tensorrt", "a TensorRT engine", "the TensorRT runtime that built it runs it"),
    (b"ptrt", "tensorrt", "a TensorRT engine", "the TensorRT runtime that built it runs it"),
    (b"lmgg", "ggml", "a GGML model, older than GGUF", "llama.cpp's convert scripts make GGUF of it"),
    (b"fmgg", "ggml", "a GGML model, older than GGUF", "llama.cpp's convert scripts make GGUF of it"),
    (b"tjgg", "ggml", "a GGML model, older than GGUF", "llama.cpp's convert scripts make GGUF of it"),
    (b"\x12\x01" + bytes(14), "mxnet", "a parameter file of MXNet", "mxnet.nd.load reads it"),
    *(
        (mark, "orbax", "a part of a checkpoint of Orbax (TensorStore's OCDBT)", "orbax.checkpoint reads its folder")
        for mark in (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde", b"\x0c\xdb\x12\x34")
    ),
    (b"\x89PNG", "png", "a PNG picture", ""),
    (b"\xff\xd8\xff", "jpeg", "a JPEG picture", ""),
    (b"PYTORCH1", "torch-preview", "a container of a PyTorch 1.0 preview, which no release reads", ""),
)


def named(head: bytes, source: Source) -> Named | None:
    """The format of a file that is no archive and no pickle."""
    if head.startswith(b"GGUF"):
        return Named("gguf", f"a GGUF model (llama.cpp): {gguf.summary(source)}", _GGUF)
    if head.startswith(b"\x93NUMPY"):
        return Named("npy", f"a NumPy array: {_array(head) or 'its header is damaged'}", "numpy.load reads it")
    hdf = next((place for place in _HDF_PLACES if source.read(place, len(_HDF)) == _HDF), -1)
    if hdf >= 0:
        block = source.read(hdf, 1 << 16)
        if b"model_config" in block:
            return Named("hdf5", "a Keras model as HDF5", "keras.models.load_model reads it")
        if _KERAS.search(block) or (b"layers\0" in block and b"vars\0" in block):
            return Named(
                "hdf5", "an HDF5 file with weights of Keras", "load_weights of the Keras model, or h5py reads it"
            )
        return Named("hdf5", "an HDF5 file", "h5py reads it")
    if head[4:8] == b"TFL3":
        return Named("tflite", "a TensorFlow Lite model", "tf.lite.Interpreter runs it")
    for magic, kind, what, tool in _MAGIC:
        if head.startswith(magic):
            return Named(kind, what, tool)
    if source.size > len(_TABLE) and source.read(source.size - len(_TABLE), len(_TABLE)) == _TABLE:
        return _table(head)
    if _TF_DATA.search(source.name):
        return Named("tensorflow-data", "the data of a TensorFlow checkpoint: its .index names the variables", _TF)
    if re.search(r"\.onnx[._]data\Z", source.name):
        what = "the file of weights of an ONNX model: bare bytes, which its .onnx file describes"
        return Named("onnx", what, "onnx.load of the .onnx file reads both")
    if head.lstrip().startswith(b"model_checkpoint_path:"):
        return Named("tensorflow", "the text that says which TensorFlow checkpoint is the latest", _TF)
    return _msgpack(head, source) or (_message(source) if head[:1] in (b"\x08", b"\x0a") else None)


def _table(head: bytes) -> Named:
    """A table of LevelDB: its first value is the header of an index (``num_shards`` is its first field), or the list
    of all slices in a checkpoint of TensorFlow's first format, which holds the weights as well."""
    if head[:2] == b"\0\0" and head[3:4] == b"\x0a":
        return Named("tensorflow", "a TensorFlow checkpoint of the first version (V1)", _TF)
    return Named("tensorflow-index", "the index of a TensorFlow checkpoint: names, not weights", _TF)


def _is_graph(node: Field) -> bool:
    """Is it a NodeDef: a name, and an operation? Of a long one only the beginning is there."""
    size = node.head[1] if len(node.head) > 1 else 0
    name, rest = node.head[2 : 2 + size], node.head[2 + size :]
    if node.head[:1] != b"\x0a" or not name.isascii() or not name.decode("ascii").isprintable() or not name:
        return False
    return not rest or (rest[:1] == b"\x12" and rest[2:3].isalpha())


def _message(source: Source) -> Named | None:
    """A model in protobuf: ONNX, Core ML or TensorFlow."""
    found = fields(source)
    by_number: dict[int, Field] = {field.number: field for field in reversed(found)}
    first = by_number.get(1)
    if first is None:
        return None
    second, graph = by_number.get(2), by_number.get(7)
    if 0 < first.value < 100 and graph is not None and graph.size and max(by_number) < 64:
        opsets = [field.head for field in found if field.number == 8]
        numbers = [_opset(text) for text in opsets]
        opset = next((f", opset {number}" for number in numbers if number), "")
        maker = second.head.decode("utf-8", "replace") if second and second.size < 64 else ""
        by = f", written by {shown(maker)}" if maker else ""
        return Named("onnx", f"an ONNX model{opset}{by}", "onnx.load reads it, onnxruntime runs it")
    if 0 < first.value < 100 and second is not None and any(200 <= number <= 4000 for number in by_number):
        return Named("coreml", f"a Core ML model, specification {first.value}", "coremltools reads it")
    if first.value == 1 and second is not None and (b"serve" in source.read(0, 4096) or source.name.endswith(".pb")):
        what = "a TensorFlow SavedModel: its graph, without its variables"
        return Named("savedmodel", what, "tf.saved_model.load reads its folder")
    if source.name.endswith(".meta") and first.size and second is not None:
        what = "the graph of a TensorFlow checkpoint (.meta): without its variables"
        return Named("tensorflow", what, "tf.compat.v1.train.import_meta_graph reads it")
    if first.size and _is_graph(first):
        return Named("tensorflow", "a TensorFlow graph (.pb)", "tf.compat.v1.GraphDef reads it")
    return None


def _opset(data: bytes) -> int:
    """The version in an OperatorSetIdProto of the default domain, 0 for another."""
    inner = fields(BytesSource(data))
    if any(field.number == 1 and field.head.strip() not in (b"", b"ai.onnx") for field in inner):
        return 0
    return next((field.value for field in inner if field.number == 2), 0)


def _msgpack(head: bytes, source: Source) -> Named | None:
    """A map whose first key is a printable string: what Flax and others write."""
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return None
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    mark = head[at : at + 1]
    if not mark:
        return None
    if 0xA1 <= mark[0] <= 0xBF:
        size, begin = mark[0] & 31, at + 1
    elif mark[0] == 0xD9 and len(head) > at + 1:
        size, begin = head[at + 1], at + 2
    else:
        return None
    key, value = head[begin : begin + size], head[begin + size : begin + size + 1]
    if len(key) < size or not key.isascii() or not key.decode("ascii").isprintable() or not value:
        return None
    # Arrays of NumPy are extensions of type 1 (flax/serialization.py).
    arrays = re.search(rb"\xc7.\x01|\xc8..\x01|\xc9....\x01", source.read(0, 1 << 16), re.S)
    if arrays or source.name.endswith(".msgpack"):
        what = f"a msgpack file of Flax, first key {shown(key.decode('ascii'))}"
        return Named("flax", what, "flax.serialization.msgpack_restore reads it")
    return Named("msgpack", f"msgpack data, first key {shown(key.decode('ascii'))}", "the msgpack package reads it")


def _array(head: bytes) -> str:
    """``float32 4x3`` of an .npy header, "" where there is none."""
    wide = head[6:7] != b"\x01"
    size = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    text = head[12 if wide else 10 :][: min(size, 4000)]
    kind = re.search(rb"'descr'\s*:\s*'([^']{1,20})'", text)
    shape = re.search(rb"'shape'\s*:\s*\(([\d, L]{0,400})\)", text)
    if shape is None:
        return ""
    sizes = "x".join(part.strip(" L") for part in shape.group(1).decode("ascii").split(",") if part.strip(" L"))
    name = _dtype(kind.group(1).decode("ascii", "replace")) if kind else "records"
    return f"{name} {sizes or 'scalar'}"


def _dtype(text: str) -> str:
    """``<f4`` is float32."""
    words = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
    kind, size = text[1:2], text[2:]
    if kind in words and size.isdigit() and len(size) < 4:
        return f"{words[kind]}{8 * int(size)}" + (" (big-endian)" if text[:1] == ">" else "")
    return {"b": "bool", "O": "objects (a pickle)", "S": "bytes", "U": "text", "V": "raw"}.get(kind, cut(text, 20))


def named_archive(archive: Archive) -> Named | None:
    """The format of a zip archive that is none of torch's."""
    names = {record.name: record for record in archive.records}
    if names and all(name.endswith(".npy") for name in names):
        arrays = [
            f"{name.removesuffix('.npy')} {_array(_first(archive, record)) or '(?)'}"
            for name, record in list(names.items())[:4]
        ]
        what = f"a NumPy archive (npz) of {counted(len(names), 'array')}: {listed(arrays, len(names), most=4)}"
        return Named("npz", what, "numpy.load reads it")
    if "config.json" in names and "model.weights.h5" in names:
        found = re.search(rb'"keras_version"\s*:\s*"([\w.]{1,20})"', _first(archive, names.get("metadata.json")))
        version = f", written by Keras {found.group(1).decode()}" if found else ""
        return Named("keras", f"a Keras model (.keras){version}", "keras.models.load_model reads it")
    return None


def packed_by(archive: Archive) -> str:
    """Which library put checkpoints into an archive, in words with its version; "" where it is not known."""
    record = archive.by_name.get("_stable_baselines3_version")
    if record is None:
        return ""
    version = re.match(rb"[\w.+-]{1,30}", _first(archive, record))
    return "a model of Stable-Baselines3" + (f" {version.group().decode('ascii')}" if version else "")


def _first(archive: Archive, record: Record | None) -> bytes:
    """The first bytes of a record."""
    if record is None or record.method not in (0, 8):
        return b""
    size = min(record.size, LIMITS.inflated_bytes)
    try:
        return next(iter(contents(archive.payload(record), size, record.method != 0, record.name)), b"")[:4096]
    except MalformedError:
        return b""


#: (a module, what its pickles are, kind, the tool)
_PICKLED: Final = (
    ("joblib", "joblib", "a file of joblib", "joblib.load reads it, and runs what it names"),
    ("sklearn", "sklearn", "a pickled scikit-learn model", "joblib.load or pickle reads it, and runs what it names"),
    ("xgboost", "pickle", "a pickled XGBoost model", "pickle reads it, and runs what it names"),
    ("lightgbm", "pickle", "a pickled LightGBM model", "pickle reads it, and runs what it names"),
    ("paddle", "paddle", "a parameter file of PaddlePaddle", "paddle.load reads it"),
)


def named_pickle(nodes: Collection[Node]) -> Named | None:
    """The framework whose classes or marks a bare pickle names, as far as it was followed."""
    if "StructuredToParameterName@@" in [node for node in nodes if type(node) is str]:
        return Named("paddle", "a parameter file of PaddlePaddle (.pdparams, .pdopt)", "paddle.load reads it")
    found = [node for node in nodes if isinstance(node, Global)]
    modules = {node.module.partition(".")[0] for node in found}
    for module, kind, what, tool in _PICKLED:
        if module in modules:
            name = next((f" ({cut(node.name, 60)})" for node in found if node.module.startswith("sklearn")), "")
            return Named(kind, what + name, tool)
    if "numpy" in modules and not any(module.startswith("torch") for module in modules):
        return Named("pickle", "a bare pickle with NumPy arrays in it, not written by torch.save", "")
    return None


_Names = Collection[str]
_FOLDERS: Final[tuple[tuple[Callable[[_Names], bool], Named], ...]] = (
    (
        lambda names: "saved_model.pb" in names or "saved_model.pbtxt" in names,
        Named("savedmodel", "a TensorFlow SavedModel", "tf.saved_model.load reads it"),
    ),
    (
        lambda names: (
            any(name.endswith(".index") for name in names)
            and ("checkpoint" in names or any(map(_TF_DATA.search, names)))
        ),
        Named("tensorflow", "a folder of TensorFlow checkpoints", _TF),
    ),
    (
        lambda names: "checkpoint" in names and any(name.endswith(".meta") for name in names),
        Named("tensorflow", "a folder of TensorFlow checkpoints of the first version (V1)", _TF),
    ),
    (
        lambda names: "_CHECKPOINT_METADATA" in names or {"_METADATA", "_sharding"} <= set(names),
        Named("orbax", "a checkpoint of Orbax (JAX, Flax)", "orbax.checkpoint.StandardCheckpointer().restore reads it"),
    ),
    (
        lambda names: "Manifest.json" in names and "Data" in names,
        Named("coreml", "a Core ML package (.mlpackage)", "coremltools reads it"),
    ),
)


def named_folder(names: _Names) -> Named | None:
    """The format of a folder, by the names in it."""
    return next((known for test, known in _FOLDERS if test(names)), None)

"""Recognise other frameworks' files, archives, pickles and folders, where a signature is not enough."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Final

from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import cut, join_limited, pluralize, quoted
from ...files.sources import BytesSource, Source
from ...files.zips.reader import Archive, Record, content_chunks
from ...pickles.nodes import Global, Node
from .headers import npy_header_summary
from .signatures import SIGNATURES, ForeignFormat, with_magic, without_magic

_TF: Final = "tf.train.load_checkpoint reads it"
#: The last eight bytes of a LevelDB table, in which TensorFlow stores variable names.
_LEVELDB_MAGIC: Final = bytes.fromhex("57fb808b247547db")


def match_magic(source: Source) -> ForeignFormat | None:
    """Return the format of a file with known magic bytes, or None. Call it before examining the file as text."""
    return next((row.format_of(source) for row in with_magic(source) if row.matches(source)), None)


def match_structure(head: bytes, source: Source) -> ForeignFormat | None:
    """Return the format of a file without magic bytes that is neither an archive nor a pickle; None if unknown."""
    size = len(_LEVELDB_MAGIC)
    if source.size > size and source.read(source.size - size, size) == _LEVELDB_MAGIC:
        # The first value of the table is an index header, whose first field is ``num_shards``. In a checkpoint of
        # TensorFlow's first format, which also holds the weights, it is the list of slices.
        if head[:2] == b"\0\0" and head[3:4] == b"\x0a":
            return ForeignFormat("tensorflow", "a TensorFlow checkpoint of the first version (V1)", _TF)
        return ForeignFormat("tensorflow-index", "the index of a TensorFlow checkpoint: names, not weights", _TF)
    rows = without_magic(os.path.splitext(source.name)[1].lower(), head[:1])
    known = next((row.format_of(source) for row in rows if row.matches(source)), None)
    return known or _msgpack(head, source) or (_protobuf_model(source) if head[:1] in (b"\x08", b"\x0a") else None)


#: The most fields of a protobuf message that are read.
_MAX_FIELDS: Final = 64
_VARINT, _BYTES = 0, 2
#: The size of a value in bytes by wire type; a varint and a byte string carry their own sizes.
_WIDTHS: Final = {_VARINT: 0, 1: 8, _BYTES: 0, 5: 4}


class Field(NamedTuple):
    """A protobuf field: its number, its value if it is a varint, and the first bytes and size of a byte string."""

    number: int
    value: int
    head: bytes
    size: int


def fields(source: Source) -> list[Field]:
    """Return the first outermost fields of a protobuf message; an empty list if the source is not one."""
    message: list[Field] = []
    at = 0
    while at < source.size and len(message) < _MAX_FIELDS:
        block = source.read(at, 20)
        tag, used = _varint(block, 0)
        number, wire = tag >> 3, tag & 7
        field, width = Field(number, -1, b"", 0), _WIDTHS.get(wire, 0)
        if used > 0 and wire in (_VARINT, _BYTES):
            value, used = _varint(block, used)
            field = field._replace(value=value)
        if used < 0 or not 0 < number < 1 << 29 or wire not in _WIDTHS:
            return []
        if wire == _BYTES:
            width = field.value
            if at + used + width > source.size:
                return []
            field = Field(number, -1, source.read(at + used, min(width, 64)), width)
        message.append(field)
        at += used + width
    return message


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, offset after it); the offset is -1 if there is no varint."""
    value = 0
    for count, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    return 0, -1


def _is_node_def(node: Field) -> bool:
    """Return whether a field begins like a TensorFlow NodeDef: a name, then an operation. Long fields are cut."""
    size = node.head[1] if len(node.head) > 1 else 0
    name, rest = node.head[2 : 2 + size], node.head[2 + size :]
    if node.head[:1] != b"\x0a" or not name.isascii() or not name.decode("ascii").isprintable() or not name:
        return False
    return not rest or (rest[:1] == b"\x12" and rest[2:3].isalpha())


def _protobuf_model(source: Source) -> ForeignFormat | None:
    """Recognise a model in protobuf: ONNX, Core ML or TensorFlow. Return None for anything else."""
    message = fields(source)
    by_number: dict[int, Field] = {field.number: field for field in reversed(message)}
    first, second, graph = by_number.get(1), by_number.get(2), by_number.get(7)
    if first is None:
        return None
    if 0 < first.value < 100 and graph is not None and graph.size and max(by_number) < 64:
        opset = next((number for field in message if field.number == 8 and (number := _opset(field.head))), 0)
        producer = second.head.decode("utf-8", "replace") if second and second.size < 64 else ""
        description = "an ONNX model" + (f", opset {opset}" if opset else "")
        description += f", written by {quoted(producer)}" if producer else ""
        return ForeignFormat("onnx", description, "onnx.load reads it, onnxruntime runs it")
    if 0 < first.value < 100 and second is not None and any(200 <= number <= 4000 for number in by_number):
        return ForeignFormat("coreml", f"a Core ML model, specification {first.value}", "coremltools reads it")
    if first.value == 1 and second is not None and (b"serve" in source.read(0, 4096) or source.name.endswith(".pb")):
        description = "a TensorFlow SavedModel: its graph, without its variables"
        return ForeignFormat("savedmodel", description, "tf.saved_model.load reads its folder")
    if source.name.endswith(".meta") and first.size and second is not None:
        description = "the graph of a TensorFlow checkpoint (.meta): without its variables"
        return ForeignFormat("tensorflow", description, "tf.compat.v1.train.import_meta_graph reads it")
    if first.size and _is_node_def(first):
        return ForeignFormat("tensorflow", "a TensorFlow graph (.pb)", "tf.compat.v1.GraphDef reads it")
    return None


def _opset(data: bytes) -> int:
    """Return the version in an OperatorSetIdProto of the default domain, or 0 for another domain."""
    message = fields(BytesSource(data))
    if any(field.number == 1 and field.head.strip() not in (b"", b"ai.onnx") for field in message):
        return 0
    return next((field.value for field in message if field.number == 2), 0)


def _msgpack(head: bytes, source: Source) -> ForeignFormat | None:
    """Recognise a map whose first key is a printable string, as Flax and others write it; None for other data."""
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return None
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    tag = head[at : at + 1]
    if tag and 0xA1 <= tag[0] <= 0xBF:
        size, begin = tag[0] & 31, at + 1
    elif tag == b"\xd9" and len(head) > at + 1:
        size, begin = head[at + 1], at + 2
    else:
        return None
    key, value = head[begin : begin + size], head[begin + size : begin + size + 1]
    if len(key) < size or not key.isascii() or not key.decode("ascii").isprintable() or not value:
        return None
    first = f"first key {quoted(key.decode('ascii'))}"
    # NumPy arrays are extensions of type 1 (flax/serialization.py).
    arrays = re.search(rb"\xc7.\x01|\xc8..\x01|\xc9....\x01", source.read(0, 1 << 16), re.S)
    if arrays or source.name.endswith(".msgpack"):
        return ForeignFormat("flax", f"a Flax msgpack file, {first}", "flax.serialization.msgpack_restore reads it")
    return ForeignFormat("msgpack", f"msgpack data, {first}", "the msgpack package reads it")


#: Required record names, and the format that they indicate.
_ARCHIVES: Final = {
    # keras/src/saving/saving_lib.py
    ("config.json", "model.weights.h5"): ForeignFormat(
        "keras", "a Keras model (.keras)", "keras.models.load_model reads it"
    ),
    # stable_baselines/common/save_util.py
    ("data", "parameter_list", "parameters"): ForeignFormat(
        "stable-baselines",
        "a model of Stable-Baselines 2 (TensorFlow)",
        "stable_baselines of that version reads it; its record 'parameters' is a NumPy archive (npz)",
    ),
    # devtools/etrecord/_etrecord.py of executorch
    ("ETRECORD_V0",): ForeignFormat(
        "executorch", "an ExecuTorch ETRecord, for its profiler", "executorch.devtools.Inspector reads it"
    ),
    # ModelSerializer.java of deeplearning4j
    ("configuration.json", "coefficients.bin"): ForeignFormat(
        "deeplearning4j",
        "a Deeplearning4j model",
        "ModelSerializer.restoreMultiLayerNetwork of Deeplearning4j reads it",
    ),
}


def foreign_archive(archive: Archive) -> ForeignFormat | None:
    """Return the format of a zip archive that is not one of torch's, or None if it is unknown."""
    records = {record.name: record for record in archive.records}
    if records and all(name.endswith(".npy") for name in records):
        first = ((name.removesuffix(".npy"), _head(archive, record)) for name, record in list(records.items())[:4])
        arrays = [f"{name} {npy_header_summary(head) or '(?)'}" for name, head in first]
        count = pluralize(len(records), "array")
        description = f"a NumPy archive (npz) of {count}: {join_limited(arrays, len(records), most=4)}"
        return ForeignFormat("npz", description, "numpy.load reads it")
    known = next((known for names, known in _ARCHIVES.items() if all(name in records for name in names)), None)
    if known is not None and known.kind == "keras":
        version = re.search(rb'"keras_version"\s*:\s*"([\w.]{1,20})"', _head(archive, records.get("metadata.json")))
        written_by = f", written by Keras {version.group(1).decode()}" if version else ""
        return known._replace(description=known.description + written_by)
    return known


def archive_producer(archive: Archive) -> str:
    """Return the library that packed checkpoints into an archive, with its version; "" if unknown."""
    if "MAR-INF/MANIFEST.json" in archive.by_name:
        return "an archive of TorchServe (.mar)"
    record = archive.by_name.get("_stable_baselines3_version")
    if record is None:
        return ""
    version = re.match(rb"[\w.+-]{1,30}", _head(archive, record))
    return "a model of Stable-Baselines3" + (f" {version.group().decode('ascii')}" if version else "")


def _head(archive: Archive, record: Record | None) -> bytes:
    """Return the first bytes of a record, or b"" if it cannot be read."""
    if record is None or record.method not in (0, 8):
        return b""
    size = min(record.size, LIMITS.inflated_bytes)
    try:
        return next(iter(content_chunks(archive.payload(record), size, record.method != 0, record.name)), b"")[:4096]
    except MalformedError:
        return b""


#: The package of a class that a pickle names, and the format that it indicates.
_PICKLES: Final[dict[str, ForeignFormat]] = {
    # numpy_pickle.py of joblib
    "joblib": ForeignFormat("joblib", "a file of joblib", "joblib.load reads it, and runs what it names"),
    "sklearn": ForeignFormat(
        "sklearn", "a pickled scikit-learn model", "joblib.load or pickle reads it, and runs what it names"
    ),
    **{
        module: ForeignFormat("pickle", f"a pickled {name} model", "pickle reads it, and runs what it names")
        for module, name in (("xgboost", "XGBoost"), ("lightgbm", "LightGBM"), ("catboost", "CatBoost"))
    },
    # python/paddle/framework/io.py
    "paddle": ForeignFormat("paddle", "a parameter file of PaddlePaddle", "paddle.load reads it"),
}
#: The key that Paddle appends to every state dict (paddle/framework/io.py: _build_saved_state_dict).
_PADDLE_KEY: Final = "StructuredToParameterName@@"
#: Bytes at the end of a pickle that are searched for that key.
_PADDLE_TAIL: Final = 1 << 18


def foreign_pickle(nodes: Collection[Node], source: Source) -> ForeignFormat | None:
    """Return the framework named by the decoded classes or keys of a bare pickle, or None if it is unknown."""
    tail = source.read(max(source.size - _PADDLE_TAIL, 0), _PADDLE_TAIL)
    if _PADDLE_KEY.encode() in tail or _PADDLE_KEY in [node for node in nodes if type(node) is str]:
        return ForeignFormat("paddle", "a parameter file of PaddlePaddle (.pdparams, .pdopt)", "paddle.load reads it")
    names = [node for node in nodes if isinstance(node, Global)]
    modules = {node.module.partition(".")[0] for node in names}
    known = next((known for module, known in _PICKLES.items() if module in modules), None)
    if known is None:
        return None
    model = next((f" ({cut(node.name, 60)})" for node in names if node.module.startswith("sklearn")), "")
    return known._replace(description=known.description + model)


_SAVED_MODEL: Final = ForeignFormat("savedmodel", "a TensorFlow SavedModel", "tf.saved_model.load reads it")
_ORBAX: Final = ForeignFormat(
    "orbax", "a checkpoint of Orbax (JAX, Flax)", "orbax.checkpoint.StandardCheckpointer().restore reads it"
)
#: Required file names (with a backslash: patterns), and the format that they indicate.
_FOLDERS: Final = {
    ("saved_model.pb",): _SAVED_MODEL,
    ("saved_model.pbtxt",): _SAVED_MODEL,
    (r"\.index\Z", r"\Acheckpoint\Z|\.data-\d{5}-of-\d{5}\Z"): ForeignFormat(
        "tensorflow", "a folder of TensorFlow checkpoints", _TF
    ),
    ("checkpoint", r"\.meta\Z"): ForeignFormat(
        "tensorflow", "a folder of TensorFlow checkpoints of the first version (V1)", _TF
    ),
    ("_CHECKPOINT_METADATA",): _ORBAX,
    ("_METADATA", "_sharding"): _ORBAX,
    # mlflow/models/model.py
    ("MLmodel",): ForeignFormat(
        "mlflow", "an MLflow model", "mlflow.pytorch.load_model reads it; ckptool reads what is in its folder data"
    ),
    ("coremldata.bin",): ForeignFormat(
        "coreml", "a compiled Core ML model (.mlmodelc)", "Core ML runs it; coremltools reads the .mlpackage"
    ),
    ("Manifest.json", "Data"): ForeignFormat("coreml", "a Core ML package (.mlpackage)", "coremltools reads it"),
}


def foreign_folder(names: Collection[str]) -> ForeignFormat | None:
    """Return the format of a folder by its file names, or None if it is unknown."""

    def is_there(name: str) -> bool:
        return any(re.search(name, other) for other in names) if "\\" in name else name in names

    return next((known for required, known in _FOLDERS.items() if all(map(is_there, required))), None)


_TABLES: Final = (_ARCHIVES, _FOLDERS, _PICKLES)
#: The kinds of all foreign formats. Such a file is never taken for a damaged torch checkpoint.
FOREIGN_KINDS: Final = frozenset(
    (
        *(row.format.kind for row in SIGNATURES),
        *(known.kind for table in _TABLES for known in table.values()),
        *("npz", "tensorflow-index", "flax", "msgpack"),
    )
) - {"pickle"}

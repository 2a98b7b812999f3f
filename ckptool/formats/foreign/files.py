"""Models of other frameworks, told by their content: what they are, and which tool opens them.

Files are told by the table in ``signatures``; here are those that take more than a look at some bytes - messages of
protobuf, archives, pickles, folders - each a table as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.text import counted, cut, listed, shown
from ...files.sources import BytesSource, Source
from ...files.zips.reader import Archive, Record, contents
from ...pickles.nodes import Global, Node
from ..programs.protobuf import Field, fields
from .arrays import header_words
from .signatures import SIGNATURES, Signature


class Named(NamedTuple):
    """A format: its short name, what it is in words, which tool opens it, and where its mark is defined."""

    kind: str
    what: str
    tool: str
    source: str = ""


_TF: Final = "tf.train.load_checkpoint reads it"
#: The last eight bytes of a table of LevelDB, in which TensorFlow keeps the names of variables.
_TABLE: Final = bytes.fromhex("57fb808b247547db")


def marked(source: Source) -> Named | None:
    """The format of a file that begins with a mark: asked before it is looked at as text."""
    return next((_worded(row, source) for row in SIGNATURES if row.magic and row.fits(source)), None)


def _worded(row: Signature, source: Source) -> Named:
    what = f"{row.what}: {row.detail(source)}" if row.detail is not None else row.what
    return Named(row.kind, what, row.tool, row.source)


def named(head: bytes, source: Source) -> Named | None:
    """The format of a file that is no archive and no pickle, and has no mark at its beginning."""
    if source.size > len(_TABLE) and source.read(source.size - len(_TABLE), len(_TABLE)) == _TABLE:
        return _table(head)
    found = next((_worded(row, source) for row in SIGNATURES if not row.magic and row.fits(source)), None)
    return found or _msgpack(head, source) or (_message(source) if head[:1] in (b"\x08", b"\x0a") else None)


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


def named_archive(archive: Archive) -> Named | None:
    """The format of a zip archive that is none of torch's."""
    names = {record.name: record for record in archive.records}
    if names and all(name.endswith(".npy") for name in names):
        arrays = [
            f"{name.removesuffix('.npy')} {header_words(_first(archive, record)) or '(?)'}"
            for name, record in list(names.items())[:4]
        ]
        what = f"a NumPy archive (npz) of {counted(len(names), 'array')}: {listed(arrays, len(names), most=4)}"
        return Named("npz", what, "numpy.load reads it")
    row = next((known for holds, known in _ZIPPED if all(name in names for name in holds)), None)
    if row is not None and row.kind == "keras":
        found = re.search(rb'"keras_version"\s*:\s*"([\w.]{1,20})"', _first(archive, names.get("metadata.json")))
        return row._replace(what=f"{row.what}, written by Keras {found.group(1).decode()}") if found else row
    return row


#: Records that must be there, and what the archive then is.
_ZIPPED: Final[tuple[tuple[tuple[str, ...], Named], ...]] = (
    (
        ("config.json", "model.weights.h5"),
        Named("keras", "a Keras model (.keras)", "keras.models.load_model reads it", "keras/src/saving/saving_lib.py"),
    ),
    (
        ("data", "parameter_list", "parameters"),
        Named(
            "stable-baselines",
            "a model of Stable-Baselines 2 (TensorFlow)",
            "stable_baselines of that version reads it; its record 'parameters' is a NumPy archive (npz)",
            "stable_baselines/common/save_util.py",
        ),
    ),
    (
        ("ETRECORD_V0",),
        Named(
            "executorch",
            "an ETRecord of ExecuTorch, for its profiler",
            "executorch.devtools.Inspector reads it",
            "devtools/etrecord/_etrecord.py of executorch",
        ),
    ),
    (
        ("configuration.json", "coefficients.bin"),
        Named(
            "deeplearning4j",
            "a model of Deeplearning4j",
            "ModelSerializer.restoreMultiLayerNetwork of Deeplearning4j reads it",
            "ModelSerializer.java of deeplearning4j",
        ),
    ),
)


def packed_by(archive: Archive) -> str:
    """Which library put checkpoints into an archive, in words with its version; "" where it is not known."""
    if "MAR-INF/MANIFEST.json" in archive.by_name:
        return "an archive of TorchServe (.mar)"
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


#: A package whose classes are named, and what the pickle then is.
_PICKLED: Final[tuple[tuple[str, Named], ...]] = tuple(
    (module, Named(kind, what, tool, source))
    for module, kind, what, tool, source in (
        ("joblib", "joblib", "a file of joblib", "joblib.load reads it, and runs what it names", "numpy_pickle.py"),
        (
            "sklearn",
            "sklearn",
            "a pickled scikit-learn model",
            "joblib.load or pickle reads it, and runs what it names",
            "",
        ),
        ("xgboost", "pickle", "a pickled XGBoost model", "pickle reads it, and runs what it names", ""),
        ("lightgbm", "pickle", "a pickled LightGBM model", "pickle reads it, and runs what it names", ""),
        ("catboost", "pickle", "a pickled CatBoost model", "pickle reads it, and runs what it names", ""),
        (
            "paddle",
            "paddle",
            "a parameter file of PaddlePaddle",
            "paddle.load reads it",
            "python/paddle/framework/io.py",
        ),
    )
)
#: A key that Paddle adds to every state dict, as the last one (paddle/framework/io.py: _build_saved_state_dict).
_PADDLE: Final = "StructuredToParameterName@@"
#: Bytes at the end of a pickle in which that is looked for.
_TAIL: Final = 1 << 18


def named_pickle(nodes: Collection[Node], source: Source) -> Named | None:
    """The framework whose classes or marks a bare pickle names, as far as it was followed."""
    if _PADDLE in [node for node in nodes if type(node) is str] or _PADDLE.encode() in source.read(
        max(source.size - _TAIL, 0), _TAIL
    ):
        return Named("paddle", "a parameter file of PaddlePaddle (.pdparams, .pdopt)", "paddle.load reads it")
    found = [node for node in nodes if isinstance(node, Global)]
    modules = {node.module.partition(".")[0] for node in found}
    for module, known in _PICKLED:
        if module in modules:
            name = next((f" ({cut(node.name, 60)})" for node in found if node.module.startswith("sklearn")), "")
            return known._replace(what=known.what + name)
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
            and ("checkpoint" in names or any(re.search(r"\.data-\d{5}-of-\d{5}\Z", name) for name in names))
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
        lambda names: "MLmodel" in names,
        Named(
            "mlflow",
            "a model of MLflow",
            "mlflow.pytorch.load_model reads it; ckptool reads what is in its folder data",
            "mlflow/models/model.py",
        ),
    ),
    (
        lambda names: "coremldata.bin" in names,
        Named("coreml", "a compiled Core ML model (.mlmodelc)", "Core ML runs it; coremltools reads the .mlpackage"),
    ),
    (
        lambda names: "Manifest.json" in names and "Data" in names,
        Named("coreml", "a Core ML package (.mlpackage)", "coremltools reads it"),
    ),
)


def named_folder(names: _Names) -> Named | None:
    """The format of a folder, by the names in it."""
    return next((known for test, known in _FOLDERS if test(names)), None)


#: Short names of all of them: a file that is one of these never claims to be a torch checkpoint.
KINDS: Final = frozenset(
    (
        *(row.kind for row in SIGNATURES),
        *(known.kind for _, known in (*_ZIPPED, *_PICKLED, *_FOLDERS)),
        *("npz", "tensorflow-index", "flax", "msgpack"),
    )
) - {"pickle"}

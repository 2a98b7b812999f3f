"""Show what is in a checkpoint: the value at a path as Python values, JSON or text.

The JSON is strict:

========================  ==========================================================================
number, str, bool, None   as in JSON; "nan", "inf" and "-inf" for floats that JSON cannot express
complex number            [real, imaginary]
bytes                     {"base64": "..."}
dict                      an object; keys that are not strings are written as Python prints them
list, tuple, set          a list
tensor                    nested lists, as from ``tolist()``
quantized tensor          {"int_repr": [...], "scale": ..., "zero_point": ...}, or with "scales", "zero_points", "axis"
sparse, nested, wrapper   {"tensor": kind, "dtype": ..., "shape": [...], "parts": {...}}
tensor without values     {"tensor": kind, "dtype": ..., "shape": [...], "reason": "..."}
another object            {"class": "...", "attributes": {...}}
class or function         {"global": "module.name"}
storage without a tensor  {"storage": "..."}
an object within itself   {"ref": path}; also a long object already written, or one deeper than 200 levels
========================  ==========================================================================
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isfinite, prod
from typing import Any, Final

from ..base.errors import MalformedError, RefusedError, TargetError
from ..base.steps import command
from ..base.text import json_value, pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.paths import bounded, joined
from ..checkpoint.selection import TEXTS, Located, lookup, text_names
from ..checkpoint.tensors import Tensor
from ..edits.sanitize.numpy_values import with_plain_numpy
from ..files.downloads import expect_reads
from ..files.sources import Piece
from ..formats.opening import CheckpointOrPath, as_checkpoint
from ..pickles.nodes import Dict, Ref
from ..values import objects
from ..values.elements import read_for, storage_reader
from ..values.interpretation import Reading, excessive_repeats, interpret, numbers_in
from ..values.numeric import Number, json_number
from ..values.objects import ContainerValue, ScalarValue, ValueMember, python_value
from ..values.tensor_text import interpret_for_display, shown_parts, tensor_lines, tensor_summary


def find_value(checkpoint: Checkpoint, key: str) -> tuple[Checkpoint, Located]:
    """Return the checkpoint with NumPy's values made plain, and the place in it that ``key`` leads to.

    Raise UnreadableError if the pickle uses a feature that ckptool does not support, TargetError if nothing is at
    ``key``.
    """
    checkpoint = _plain(checkpoint, key)
    names = text_names(checkpoint, key)
    return (checkpoint, lookup(checkpoint, key)) if names is None else _texts(checkpoint, key, names)


def _texts(checkpoint: Checkpoint, key: str, names: Sequence[str]) -> tuple[Checkpoint, Located]:
    """Return a checkpoint that holds only the texts of the header with these names, and their place."""
    editor, texts = GraphEditor(checkpoint.graph), checkpoint.metadata
    if any(name not in texts for name in names):
        step = command("get", checkpoint.path, TEXTS)
        raise TargetError(f"the header has no text {names[0]!r}", path=checkpoint.path, next=step)
    pairs = [(editor.add(name), editor.add(texts[name])) for name in names]
    root = editor.add(Dict([ref for pair in pairs for ref in pair])) if key == TEXTS else pairs[0][1]
    return checkpoint.replace(graph=editor.done(root)), Located(root, key)


def _plain(checkpoint: Checkpoint, key: str = "") -> Checkpoint:
    checkpoint = with_plain_numpy(checkpoint.in_full(key))
    _ = checkpoint.survey  # raises UnreadableError for unsupported features
    return checkpoint


def contents(checkpoint: Checkpoint) -> objects.MappingView:
    """Return the mapping view of a checkpoint, with NumPy's values made plain. Raise errors as ``find_value`` does."""
    return objects.contents(_plain(checkpoint))


def get(path: CheckpointOrPath, key: str = "") -> Any:
    """Return the value at ``key``, a path as ``inspect`` prints it ("" or "." for the whole file), as Python values.

    Scalars, bytes, dicts, lists, tuples and sets become Python's own. A tensor becomes a ``TensorValue``, which reads
    its numbers from the file on demand; an object of another class becomes an ``ObjectValue`` with its attributes.
    Nothing is executed, and neither torch nor NumPy is needed. Raise TargetError if nothing is at ``key``.

    >>> ckptool.get("training.pth", "epoch")
    41
    >>> ckptool.get("training.pth", "optimizer.param_groups[0].lr")
    0.001
    >>> ckptool.get("training.pth", "state_dict.module.head.bias")
    <TensorValue 'state_dict["module.head.bias"]' float32 5 cuda:0>
    """
    # Tensors read from the file later. It is closed when the last of them is gone.
    checkpoint, place = find_value(as_checkpoint(path), key)
    return objects.value_of(checkpoint, place.ref, place.path)


#: Maximum depth of nested objects; readers of JSON stop at about a thousand.
_MAX_DEPTH: Final = 200
#: An object with more characters is written once; later occurrences refer to it.
_LONG: Final = 1_000
#: Maximum number of empty lists that a shape may ask for.
_MAX_EMPTY: Final = 1_000_000
#: How the JSON of a container begins and ends; an object's class is inserted.
_BRACKETS: Final = {"sequence": ("[", "]"), "mapping": ("{", "}"), "object": ('{"class": %s, "attributes": {', "}}")}


def json_pieces(checkpoint: Checkpoint, ref: Ref, path: str) -> Iterator[str]:
    """Yield the JSON of the value at ``ref``, whose path is ``path``. At most one piece of a tensor is in memory.

    Raise MalformedError if bytes are missing, RefusedError for a tensor that repeats its elements excessively.
    """
    expect_reads(_read(checkpoint, ref), path=checkpoint.path)
    return _JsonWriter(checkpoint).pieces(ref, path, 0)


def _read(checkpoint: Checkpoint, ref: Ref) -> Iterator[Piece | None]:
    for inner in checkpoint.graph.reachable(ref):
        tensor = checkpoint.survey.reader.tensor(inner)
        if tensor is not None and tensor.storage:
            yield read_for(storage_reader(checkpoint, tensor.storage), tensor)


class _JsonWriter:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        #: The path of each object that was written, and its size in characters; None while it is being written.
        self.places: dict[Ref, tuple[str, int | None]] = {}

    def pieces(self, ref: Ref, path: str, depth: int) -> Iterator[str]:
        node = self.checkpoint.graph.nodes[ref]
        if node is None or isinstance(node, bool | int | float | str):
            yield _text(_json_leaf(ScalarValue("", node)))
            return
        known, size = self.places.get(ref, ("", 0))
        value = python_value(self.checkpoint, ref) if size is not None and size <= _LONG else None
        if value is None:
            yield _text({"ref": known})
        elif isinstance(value, ScalarValue):
            yield _text(_json_leaf(value))
        elif isinstance(value, ContainerValue) and value.members and depth >= _MAX_DEPTH:
            yield _text({"ref": path})
        else:
            path, size = bounded(path, ref), 0
            self.places[ref] = (path, None)
            if isinstance(value, Tensor):
                pieces = self._tensor(ref, value, path)
            else:
                pieces = self._container(value, path, depth)
            for piece in pieces:
                size += len(piece)
                yield piece
            self.places[ref] = (path, size)

    def _container(self, container: ContainerValue, path: str, depth: int) -> Iterator[str]:
        begin, end = _BRACKETS[container.kind]
        yield begin % _text(container.cls) if container.kind == "object" else begin
        values = (python_value(self.checkpoint, member.ref) for member in container.members)
        if container.kind == "sequence" and all(isinstance(value, ScalarValue) for value in values):
            values = (python_value(self.checkpoint, member.ref) for member in container.members)
            texts, comma = (_text(_json_leaf(value)) for value in values if isinstance(value, ScalarValue)), ""
            while some := list(islice(texts, _LONG)):
                yield comma + ", ".join(some)
                comma = ", "
            yield end
            return
        comma, indent = "", "\n" + "  " * (depth + 1)
        for name, step, ref, _ in container.members:
            yield comma + indent + ("" if container.kind == "sequence" else f"{_text(name)}: ")
            yield from self.pieces(ref, joined(path, step), depth + 1)
            comma = ","
        yield (indent[:-2] if comma else "") + end

    def _tensor(self, ref: Ref, tensor: Tensor, path: str) -> Iterator[str]:
        facts: dict[str, Any] = {"tensor": tensor.kind, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        parts = tensor.parts if tensor.kind != "quantized" else ()
        if parts and not tensor.storage:
            yield _text(facts)[:-1] + ', "parts": {'
            comma = ""
            for name, part, inner in shown_parts(self.checkpoint.survey.reader, tensor):
                yield f"{comma}{_text(name)}: "
                yield from self._tensor(part, inner, path)
                comma = ", "
            yield "}}"
            return
        reading = interpret_for_display(self.checkpoint, ref)
        if isinstance(reading, str):
            yield _text({**facts, "reason": reading})
            return
        if reading.affine is None:
            yield from _lists(self.checkpoint, reading)
            return
        yield '{"int_repr": '
        yield from _lists(self.checkpoint, reading)
        scales, zero_points, axis = reading.affine
        values: dict[str, Any] = {"scale": _float(scales[0]), "zero_point": _float(zero_points[0])}
        if axis >= 0:
            values = {"scales": list(map(_float, scales)), "zero_points": list(map(_float, zero_points)), "axis": axis}
        yield ", " + _text(values)[1:]


def _lists(checkpoint: Checkpoint, reading: Reading) -> Iterator[str]:
    shape = reading.tensor.shape
    endless = excessive_repeats(shape, reading.tensor.stride)
    if endless:
        raise RefusedError(f"the tensor is too large to print: {endless}", path=checkpoint.path)
    if 0 in shape:
        outer = shape[: shape.index(0)]
        text = "[]"
        for size in reversed(outer if prod(outer) <= _MAX_EMPTY else ()):
            text = "[" + ", ".join([text] * size) + "]"
        yield text
        return
    if not shape:
        yield _text(json_number(next(numbers_in(reading))[0]))
        return
    width = shape[-1]
    # The number of rows in a list of each outer dimension: brackets open where it begins, and close where it ends.
    rows = [prod(shape[axis:-1]) for axis in range(len(shape) - 1)]
    row = at = 0
    for numbers in numbers_in(reading):
        done = 0
        while done < len(numbers):
            part = numbers[done : done + width - at]
            opening = "[" * (1 + sum(row % size == 0 for size in rows)) if at == 0 else ""
            comma = ", " if row or at else ""
            done, at = done + len(part), at + len(part)
            closing = ""
            if at == width:
                row, at = row + 1, 0
                closing = "]" * (1 + sum(row % size == 0 for size in rows))
            yield comma + opening + _numbers(part) + closing


def _numbers(values: list[Number]) -> str:
    text = json.dumps(values, default=json_number)[1:-1]
    # NaN and Infinity are not valid JSON.
    return text if "N" not in text and "I" not in text else ", ".join(_text(json_number(value)) for value in values)


def _float(value: float) -> object:
    return json_number(int(value) if isfinite(value) and value == int(value) and abs(value) < 1 << 53 else value)


def _json_leaf(leaf: ScalarValue) -> object:
    value = leaf.value
    if isinstance(value, bytes):
        return {"base64": b64encode(value).decode()}
    if leaf.type in ("global", "storage"):
        return {leaf.type: value}
    if isinstance(value, int):
        return json_value(value)
    return value if isinstance(value, str) else json_number(value)


#: One encoder for all values, because ``json.dumps`` creates one per call, and there may be a million values.
_text: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


#: Maximum characters of a string or bytes in a tree, and of a list on one line.
_MAX_STRING: Final = 500
_MAX_INLINE: Final = 100


def entry_lines(checkpoint: Checkpoint, ref: Ref, path: str) -> Iterator[str]:
    """Yield the lines that show the value at ``ref``, unescaped. Raise MalformedError if bytes are missing."""
    shown = python_value(checkpoint, ref)
    if isinstance(shown, Tensor):
        yield from tensor_lines(checkpoint, ref)
    elif isinstance(shown, ScalarValue):
        # A string is shown without quotes, with its own line breaks.
        yield from shown.value.split("\n") if isinstance(shown.value, str) else [_text_leaf(shown, 1 << 20)]
    elif not shown.members:
        yield _empty(shown)
    else:
        if shown.kind == "object":
            yield f"{shown.cls}, {pluralize(len(shown.members), 'attribute')}"
        yield from _tree(checkpoint, shown.members, path, 0, {ref: path}, {})


def outline(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield lines that show the top-level entries, except tensors and state dicts. No tensor is read."""
    state_dicts = {item.path for item in checkpoint.state_dicts}
    members = [
        ValueMember(entry.key, entry.path, entry.ref)
        for entry in checkpoint.survey.entries
        if entry.path not in state_dicts and checkpoint.survey.reader.tensor(entry.ref) is None
    ]
    return _tree(checkpoint, members, "", 0, {}, None)


def _tree(
    checkpoint: Checkpoint,
    members: Sequence[ValueMember],
    path: str,
    depth: int,
    opened: dict[Ref, str],
    numbers: dict[Ref, str] | None,
) -> Iterator[str]:
    """Yield the lines of the members of a container.

    ``opened`` maps the containers that are shown to their paths, ``numbers`` the tensors to their texts: each number is
    read once, because it may be at a million places. With None no tensor is read.
    """
    for name, step, ref, _ in members:
        value, inside = python_value(checkpoint, ref), None
        if isinstance(value, Tensor):
            text = tensor_summary(value) if numbers is None else numbers.get(ref) or _tensor(checkpoint, ref, value)
            if numbers is not None:
                numbers[ref] = text
        elif isinstance(value, ScalarValue):
            text = _text_leaf(value, _MAX_STRING)
        elif inline := _inline(checkpoint, value):
            text = inline
        elif ref in opened:
            text = f"the same {value.cls} as {opened[ref] or 'the root'}"
        elif depth >= _MAX_DEPTH:
            text = f"{value.cls}, deeper than is shown"
        else:
            opened[ref], inside = bounded(joined(path, step), ref), value.members
            noun = {"object": "attribute", "sequence": "element"}.get(value.kind, "entry")
            text = f"{value.cls}, {pluralize(len(inside), noun)}"
        yield f"{'  ' * depth}{name}: {text}"
        if inside is not None:
            yield from _tree(checkpoint, inside, opened[ref], depth + 1, opened, numbers)


def _inline(checkpoint: Checkpoint, container: ContainerValue) -> str:
    if not container.members:
        return _empty(container)
    if container.kind != "sequence" or len(container.members) > _MAX_INLINE // 2:
        return ""
    leaves = [python_value(checkpoint, member.ref) for member in container.members]
    texts = [_text_leaf(leaf, _MAX_INLINE) for leaf in leaves if isinstance(leaf, ScalarValue)]
    left, right = {"tuple": ("(", ")"), "set": ("{", "}")}.get(container.cls, ("[", "]"))
    text = left + ", ".join(texts) + right
    return text if len(texts) == len(leaves) and len(text) <= _MAX_INLINE else ""


def _empty(container: ContainerValue) -> str:
    return f"{container.cls}, no attributes" if container.kind == "object" else f"an empty {container.cls}"


def _text_leaf(leaf: ScalarValue, limit: int) -> str:
    value = leaf.value
    if isinstance(value, str) and leaf.type == "str":
        return _cut(json.dumps(value, ensure_ascii=False), limit, f"{len(value):,} characters")
    if isinstance(value, bytes):
        return _cut(repr(value[:limit]), limit, f"{len(value):,} bytes")
    return str(json_value(value))


def _cut(text: str, limit: int, size: str) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({size})"


def _tensor(checkpoint: Checkpoint, ref: Ref, tensor: Tensor) -> str:
    if tensor.numel != 1 or tensor.kind != "dense":
        return tensor_summary(tensor)
    how = interpret(checkpoint, ref)
    if isinstance(how, str):
        return f"{tensor_summary(tensor)} ({how})"
    try:
        (value,) = next(numbers_in(how))
    except MalformedError:
        return f"{tensor_summary(tensor)} (its bytes are missing)"
    return f"{tensor_summary(tensor)} = {f'{value:.7g}' if isinstance(value, float) else value}"

"""Show what is in a checkpoint: the value at a path as Python values, JSON or text, and the tree of objects.

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
from collections.abc import Iterator
from itertools import chain, islice
from math import isfinite, prod
from typing import Any, Final

from ..base.errors import MalformedError, RefusedError
from ..base.records import NamedTuple, TypedDict
from ..base.text import huge_text, is_huge, pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import class_name, device_text, mapping
from ..checkpoint.paths import as_children, bounded, extra_children, joined, sequence
from ..checkpoint.selection import Located, lookup
from ..checkpoint.tensors import Tensor
from ..edits.sanitize.numpy_values import with_plain_numpy
from ..files.downloads import expect_reads
from ..files.sources import Piece
from ..formats.opening import CheckpointOrPath, as_checkpoint
from ..pickles.nodes import Global, Graph, Ref, children
from ..values import objects
from ..values.elements import read_for, storage_reader
from ..values.interpretation import Reading, excessive_repeats, interpret, numbers_in
from ..values.numeric import Number, json_number
from ..values.python_values import ContainerValue, ScalarValue, python_value
from ..values.tensor_text import interpret_for_display, shown_parts, tensor_lines, tensor_summary


def find_value(checkpoint: Checkpoint, key: str) -> tuple[Checkpoint, Located]:
    """Return the checkpoint with NumPy's values made plain, and the place in it that ``key`` leads to.

    Raise UnreadableError if the pickle uses a feature that ckptool does not support, TargetError if nothing is at
    ``key``.
    """
    checkpoint = with_plain_numpy(checkpoint)
    _ = checkpoint.survey  # raises UnreadableError for unsupported features
    return checkpoint, lookup(checkpoint, key)


def contents(checkpoint: Checkpoint) -> objects.MappingView:
    """Return the mapping view of a checkpoint, with NumPy's values made plain.

    Raise UnreadableError as ``find_value`` does.
    """
    checkpoint = with_plain_numpy(checkpoint)
    _ = checkpoint.survey
    return objects.contents(checkpoint)


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


#: Maximum number of children shown per container; the others are counted.
_MAX_CHILDREN: Final = 60


class BranchReport(TypedDict):
    """One line of the tree: depth, name of the step, type, short value, and bytes of the tensors below.

    A tensor at several paths counts at the first one.
    """

    depth: int
    name: str
    type: str
    value: str
    bytes: int


def tree_of(checkpoint: Checkpoint, depth: int) -> list[BranchReport]:
    """Return the tree without its tensors, down to ``depth`` levels.

    An object that occurs again is named, but not opened again.
    """
    graph = checkpoint.graph
    branches: list[BranchReport] = []
    opened: dict[Ref, str] = {}
    sizes = _sizes(checkpoint)
    work: list[tuple[Ref, int, str, str]] = [(graph.root, 0, "(root)", "(root)")]
    while work:
        ref, level, name, path = work.pop()
        if ref < 0:
            branches.append({"depth": level, "name": "...", "type": "", "value": name, "bytes": 0})
            continue
        if checkpoint.survey.reader.tensor(ref) is not None:
            continue
        leaf = _branch_leaf(checkpoint, ref)
        cls, value = leaf or (class_name(graph, ref), f"the same object as {opened.get(ref)}")
        if leaf is None and ref not in opened:
            children, count = _children(graph, ref)
            value = pluralize(count, "entry")
            if children:
                opened[ref] = path
            if level < depth:
                if count > len(children):
                    work.append((-1, level + 1, f"and {count - len(children):,} more", ""))
                work += [(child, level + 1, step, f"{path} {step}") for step, child in reversed(children)]
        branches.append({"depth": level, "name": name, "type": cls, "value": value, "bytes": sizes.get(ref, 0)})
    return branches


def _sizes(checkpoint: Checkpoint) -> dict[Ref, int]:
    """Return the bytes of the tensors and of other storages below each object that has any."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    parents: dict[Ref, Ref] = {graph.root: -1}
    sizes: dict[Ref, int] = {}
    work = [graph.root]
    while work:
        ref = work.pop()
        tensor, storage = reader.tensor(ref), reader.storage(ref)
        if tensor is not None or storage is not None:
            sizes[ref] = tensor.own_bytes if tensor is not None else storage.nbytes if storage is not None else 0
            continue
        found = [child for child in children(graph.nodes[ref]) if child not in parents]
        parents.update(dict.fromkeys(found, ref))
        work += found
    # Each object comes after the one that contains it.
    for ref in reversed(parents):
        if ref in sizes and parents[ref] >= 0:
            sizes[parents[ref]] = sizes.get(parents[ref], 0) + sizes[ref]
    return sizes


def _branch_leaf(checkpoint: Checkpoint, ref: Ref) -> tuple[str, str] | None:
    """Return the type and value of a node that is not opened; None for a container."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    node, cls = graph.nodes[ref], class_name(graph, ref)
    if node is None or isinstance(node, bool | int | float):
        huge = isinstance(node, int) and is_huge(node)
        return cls, "" if node is None else "a huge integer" if huge else str(node)
    if isinstance(node, str | bytes):
        return cls, repr(node[:200])
    if isinstance(node, Global):
        return "global", f"{node.module}.{node.name}"
    device, storage = device_text(graph, ref), reader.storage(ref)
    if storage is not None:
        return storage.cls, f"{storage.nbytes:,} bytes {storage.location}"
    return None if device is None else (cls, device)


def _children(graph: Graph, ref: Ref) -> tuple[list[tuple[str, Ref]], int]:
    """Return the first children with their names, and the number of all children."""
    inside = sequence(graph, ref)
    if inside is not None:
        return [(f"[{number}]", item) for number, item in enumerate(inside[:_MAX_CHILDREN])], len(inside)
    items = mapping(graph, ref)
    entries = as_children(graph, items or ())
    # If an object is filled by key, its constructor arguments are not content.
    rest = [child for child in extra_children(graph, ref, entries) if items is None or child.step[0] != "("]
    first: list[tuple[str, Ref]] = []
    for child in islice(chain(entries, rest), _MAX_CHILDREN):
        key = graph.nodes[child.key] if child.key >= 0 else None
        first.append((key if isinstance(key, str) else child.step, child.ref))
    return first, len(entries) + len(rest)


#: Maximum depth of nested objects; readers of JSON stop at about a thousand.
_MAX_DEPTH: Final = 200
#: An object with more characters is written once; later occurrences refer to it.
_LONG: Final = 1_000
#: Maximum number of empty lists that a shape may ask for.
_MAX_EMPTY: Final = 1_000_000


class _Open(NamedTuple):
    """An object being written: its remaining members, its closing text, and where it began."""

    members: Iterator[tuple[str, Ref, str]]
    end: str
    ref: Ref
    path: str
    begin: int


def json_pieces(checkpoint: Checkpoint, ref: Ref, path: str) -> Iterator[str]:
    """Yield the JSON of the value at ``ref``, whose path is ``path``. At most one piece of a tensor is in memory.

    Raise MalformedError if bytes are missing, RefusedError for a tensor that repeats its elements excessively.
    """
    expect_reads(_read(checkpoint, ref), path=checkpoint.path)
    return _Writer(checkpoint).pieces(ref, path)


def _read(checkpoint: Checkpoint, ref: Ref) -> Iterator[Piece | None]:
    """Yield what is read for the tensors in an object."""
    for inner in Graph(checkpoint.graph.nodes, ref, checkpoint.graph.style).reachable():
        tensor = checkpoint.survey.reader.tensor(inner)
        if tensor is not None and tensor.storage:
            yield read_for(storage_reader(checkpoint, tensor.storage), tensor)


class _Writer:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.stack: list[_Open] = []
        self.inside: set[Ref] = set()
        self.places: dict[Ref, tuple[str, int]] = {}
        self.written = 0

    def pieces(self, ref: Ref, path: str) -> Iterator[str]:
        for piece in self._pieces(ref, path):
            self.written += len(piece)
            yield piece

    def _pieces(self, ref: Ref, path: str) -> Iterator[str]:
        yield from self._value(ref, path)
        while self.stack:
            top, indent = self.stack[-1], "\n" + "  " * len(self.stack)
            member = next(top.members, None)
            if member is not None:
                prefix, child, where = member
                yield prefix.replace("\n", indent, 1)
                yield from self._value(child, where)
                continue
            self.stack.pop()
            self.inside.discard(top.ref)
            self.places[top.ref] = (top.path, self.written - top.begin)
            yield indent[:-2] + top.end

    def _value(self, ref: Ref, path: str) -> Iterator[str]:
        known = self.places.get(ref)
        if known is not None and (ref in self.inside or known[1] > _LONG):
            yield _text({"ref": known[0]})
            return
        node = self.checkpoint.graph.nodes[ref]
        if node is None or isinstance(node, bool | int | float | str):
            yield _text(_json_leaf(ScalarValue("", node)))
            return
        value = python_value(self.checkpoint, ref)
        if isinstance(value, ScalarValue):
            yield _text(_json_leaf(value))
        elif isinstance(value, Tensor):
            begin = self.written
            yield from self._tensor(ref, value, path)
            self.places[ref] = (path, self.written - begin)
        elif not value.members and value.kind != "object":
            yield "{}" if value.kind == "mapping" else "[]"
        elif len(self.stack) >= _MAX_DEPTH:
            yield _text({"ref": path})
        else:
            yield from self._opened(ref, value, path)

    def _opened(self, ref: Ref, container: ContainerValue, path: str) -> Iterator[str]:
        path = bounded(path, ref)
        members = container.members
        if container.kind == "sequence" and all(
            isinstance(python_value(self.checkpoint, member.ref), ScalarValue) for member in members
        ):
            leaves = (python_value(self.checkpoint, member.ref) for member in members)
            texts = (_text(_json_leaf(leaf)) for leaf in leaves if isinstance(leaf, ScalarValue))
            begin, size = "[", 2
            while piece := list(islice(texts, _LONG)):
                text = begin + ", ".join(piece)
                size += len(text)
                yield text
                begin = ", "
            yield "]"
            self.places[ref] = (path, size)
            return
        opening = _text({"class": container.cls})[:-1] + ', "attributes": {' if container.kind == "object" else "{"
        if not container.members:
            yield opening + "}}"
            return
        self.inside.add(ref)
        self.places[ref] = (path, 0)
        self.stack.append(_Open(self._members(container, path), _END[container.kind], ref, path, self.written))
        yield "[" if container.kind == "sequence" else opening

    def _members(self, container: ContainerValue, path: str) -> Iterator[tuple[str, Ref, str]]:
        comma = "\n"
        for name, step, ref, _ in container.members:
            yield comma if container.kind == "sequence" else f"{comma}{_text(name)}: ", ref, joined(path, step)
            comma = ",\n"

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


_END: Final = {"sequence": "]", "mapping": "}", "object": "}}"}


def _lists(checkpoint: Checkpoint, reading: Reading) -> Iterator[str]:
    """Yield the numbers of a tensor as nested lists."""
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
    if leaf.kind in ("name", "storage"):
        return {"global" if leaf.kind == "name" else "storage": value}
    if isinstance(value, int) and is_huge(value):
        return huge_text(value)
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
    else:
        yield from _tree(checkpoint, ref, shown, path)


def _tree(checkpoint: Checkpoint, ref: Ref, container: ContainerValue, path: str) -> Iterator[str]:
    opened = {ref: path}
    texts: dict[Ref, str] = {}
    if not container.members:
        yield _empty(container)
        return
    if container.kind == "object":
        yield f"{container.cls}, {pluralize(len(container.members), 'attribute')}"
    work: list[Iterator[tuple[str, Ref, str]]] = [_members(container, path)]
    while work:
        step = next(work[-1], None)
        if step is None:
            work.pop()
            continue
        name, child, where = step
        indent = "  " * (len(work) - 1)
        inner = python_value(checkpoint, child)
        if not isinstance(inner, ContainerValue):
            text = texts.get(child, "")
            if not text and isinstance(inner, Tensor):
                # Read the number once, because the tensor may be at a million places.
                text = texts[child] = _tensor(checkpoint, child, inner)
            elif isinstance(inner, ScalarValue):
                text = _text_leaf(inner, _MAX_STRING)
            yield f"{indent}{name}: {text}"
            continue
        inline = _inline(checkpoint, inner)
        if inline:
            yield f"{indent}{name}: {inline}"
        elif child in opened:
            yield f"{indent}{name}: the same {inner.cls} as {opened[child] or 'the root'}"
        elif len(work) >= _MAX_DEPTH:
            yield f"{indent}{name}: {inner.cls}, deeper than is shown"
        else:
            opened[child] = where
            noun = "attribute" if inner.kind == "object" else "element" if inner.kind == "sequence" else "entry"
            yield f"{indent}{name}: {inner.cls}, {pluralize(len(inner.members), noun)}"
            work.append(_members(inner, where))


def _members(container: ContainerValue, path: str) -> Iterator[tuple[str, Ref, str]]:
    for name, step, ref, _ in container.members:
        yield name, ref, bounded(joined(path, step), ref)


def _inline(checkpoint: Checkpoint, container: ContainerValue) -> str:
    """Return an empty container or a short list of scalars as one line; "" for other containers."""
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
    if container.kind == "object":
        return f"{container.cls}, no attributes"
    return f"an empty {container.cls}"


def _text_leaf(leaf: ScalarValue, limit: int) -> str:
    value = leaf.value
    if isinstance(value, str) and leaf.kind == "str":
        return _cut(json.dumps(value, ensure_ascii=False), limit, f"{len(value):,} characters")
    if isinstance(value, bytes):
        return _cut(repr(value[:limit]), limit, f"{len(value):,} bytes")
    return huge_text(value) if isinstance(value, int) and is_huge(value) else str(value)


def _cut(text: str, limit: int, size: str) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({size})"


def _tensor(checkpoint: Checkpoint, ref: Ref, tensor: Tensor) -> str:
    """Return a tensor as one line, with its value if it is a single number."""
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

"""The value at a path as strict JSON, in pieces.

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
from itertools import islice
from math import isfinite, prod
from typing import Any, Final, NamedTuple

from ..base.errors import RefusedError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import plain_parts
from ..checkpoint.paths import bounded, joined
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Ref
from ..values.interpretation import Reading, excessive_repeats, numbers_in
from ..values.numeric import Number, json_number
from ..values.python_values import ContainerValue, ScalarValue, python_value
from ..values.tensor_text import interpret_for_display, shown_parts
from .json_values import huge_text, is_huge

#: Maximum depth of nested objects; readers of JSON stop at about a thousand.
_MAX_DEPTH: Final = 200
#: An object with more characters is written once; later occurrences refer to it.
_LONG: Final = 1_000
#: Types of values that fit on one line.
_SIMPLE: Final = frozenset((str, int, bool, type(None)))
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
    return _Writer(checkpoint).pieces(ref, path)


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
            yield _text(_leaf(ScalarValue("", node)))
            return
        plain = self._plain(ref)
        if plain:
            self.places[ref] = (bounded(path, ref), len(plain))
            yield plain
            return
        value = python_value(self.checkpoint, ref)
        if isinstance(value, ScalarValue):
            yield _text(_leaf(value))
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

    def _plain(self, ref: Ref) -> str:
        """Return the complete JSON of a dict of strings to plain values, which may be frequent; "" for
        other objects.
        """
        parts = plain_parts(self.checkpoint.graph, ref)
        if not parts or not _SIMPLE.issuperset(map(type, parts)) or not {str}.issuperset(map(type, parts[::2])):
            return ""
        entries = dict(zip(parts[::2], parts[1::2]))
        if len(entries) * 2 < len(parts):
            return ""  # a key occurs twice
        indent = "\n" + "  " * len(self.stack)
        rows = [f"{indent}  {_text(key)}: {_text(_leaf(ScalarValue('', value)))}" for key, value in entries.items()]  # type: ignore[arg-type]
        return "{" + ",".join(rows) + indent + "}"

    def _opened(self, ref: Ref, container: ContainerValue, path: str) -> Iterator[str]:
        path = bounded(path, ref)
        members = container.members
        if container.kind == "sequence" and all(
            isinstance(python_value(self.checkpoint, member.ref), ScalarValue) for member in members
        ):
            leaves = (python_value(self.checkpoint, member.ref) for member in members)
            texts = (_text(_leaf(leaf)) for leaf in leaves if isinstance(leaf, ScalarValue))
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


def _leaf(leaf: ScalarValue) -> object:
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

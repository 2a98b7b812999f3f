"""An edited GGUF file: a new header, and the bytes of its tensors as they are.

Entries that no edit changed are copied with their types. A changed value keeps the type that it had.
"""

from __future__ import annotations

from contextlib import suppress
from struct import error, pack, unpack
from typing import Any, Final, TypeAlias, cast

from ...base.errors import MalformedError, RefusedError
from ...base.steps import command, suggested_output
from ...base.text import quoted
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.objects import list_items, mapping
from ...checkpoint.tensors import Tensor, is_contiguous
from ...files.sources import Piece, Plan, Span, merge_pieces
from ...pickles.nodes import List, Ref
from ...values.elements import tensor_size
from ..losses import Promise
from ..tensor_table import TensorEntry, repeated
from .header import ALIGNMENT, ARRAY, MAGIC, NUMBERS, STRING, TENSOR_TYPES, shortest, type_name
from .reader import GGUF, described, object_of

_TYPES: Final = {dtype.name: number for number, dtype in TENSOR_TYPES.items()}
#: The types of new values: a bool, a whole number by its size, and any other number.
_BOOL, _INTEGERS, _FLOAT = 7, (4, 5, 10, 11), 6


#: The values of the metadata, the bytes of its entries, and the tensors with their bytes.
_Output: TypeAlias = tuple[dict[str, Any], list[bytes], list[tuple[str, Tensor, Piece]]]


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """Return the file with its edited metadata and tensors; raise RefusedError for tensors with other values."""
    _, entries, tensors = _output(checkpoint)
    source, header = cast(GGUF, checkpoint.container).files[0]
    order, alignment = header.order, header.alignment
    at, infos, pieces, kept = 0, list[bytes](), list[Piece](), len(tensors) == len(header.entries)
    for name, tensor, piece in tensors:
        if tensor.location != "cpu":
            what = f"GGUF has no place for devices, and {quoted(name)} is tagged {tensor.location}"
            raise RefusedError(what, path=checkpoint.path, next="the program that loads it chooses the device")
        size, shape = tensor_size(tensor), tuple(reversed(tensor.shape))
        numbers = pack(f"{order}I{len(shape)}QIQ", len(shape), *shape, _TYPES[tensor.dtype], at)
        infos.append(_text(name, order) + numbers)
        pieces += [piece, bytes(-size % alignment)]
        kept = kept and piece == Span(source, header.data + at, size)
        at += size + -size % alignment
    counts = pack(f"{order}IQQ", header.version, len(tensors), len(entries))
    text = MAGIC + counts + b"".join([*entries, *infos])
    text += bytes(-len(text) % alignment)
    if kept and source.size > header.data:
        pieces = [Span(source, header.data, source.size - header.data)]
    return Plan(merge_pieces([text, *pieces])), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the metadata, and the names, dtypes and shapes of the tensors."""
    values, _, named = _output(checkpoint)
    tensors = [TensorEntry(name, tensor.dtype, tensor.shape, 0, tensor_size(tensor)) for name, tensor, _ in named]
    manifest = {name: (dtype, shape) for name, dtype, shape, *_ in tensors}
    graph = object_of(values, tensors)
    return Promise("gguf", graph, manifest=manifest, byteorder=checkpoint.container.byteorder)


def _output(checkpoint: Checkpoint) -> _Output:
    container, path = cast(GGUF, checkpoint.container), checkpoint.path
    source, header = container.files[0]
    if len(container.files) > 1:
        step = "join the files first, with llama-gguf-split of llama.cpp"
        raise RefusedError("the model is in several files, and edits write one", path=path, next=step)
    items = mapping(checkpoint.graph, checkpoint.graph.root)
    if items is None:
        raise RefusedError("GGUF holds a dict of entries and tensors", path=path)
    names = [str(checkpoint.graph.nodes[key]) for key, _ in items]
    if (twice := repeated(names)) is not None:
        raise RefusedError(f"two entries or tensors would be called {quoted(twice)}", path=path)
    values, entries, tensors = output = dict[str, Any](), list[bytes](), list[tuple[str, Tensor, Piece]]()
    for name, (_, ref) in zip(names, items):
        tensor = checkpoint.survey.reader.tensor(ref)
        if tensor is not None:
            tensors.append((name, tensor, _piece(checkpoint, name, tensor)))
            continue
        value = _value(checkpoint, ref)
        kind, begin, end = header.places.get(name, (-1, 0, 0))
        if kind >= 0 and repr(described(header.metadata[name])) == repr(value):
            value, raw = header.metadata[name], source.read(begin, end - begin)
        else:
            inner = int.from_bytes(source.read(begin, 4), "big" if header.order == ">" else "little")
            kind = _kind(value) if kind < 0 else kind
            value, raw = _encoded(checkpoint, name, value, kind, inner, header.order)
        values[name] = value
        entries.append(_text(name, header.order) + pack(header.order + "I", kind) + raw)
    if values.get(ALIGNMENT) != header.metadata.get(ALIGNMENT):
        raise RefusedError(f"{ALIGNMENT} says where the tensors are, so it cannot be edited", path=path)
    return output


def _piece(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Piece:
    """Return the bytes of a tensor, which must be as the file or an edit has them."""
    body, size = checkpoint.body(tensor.storage), tensor_size(tensor)
    whole = body is not None and isinstance(body.piece, Span | bytes) and body.size == size and not tensor.offset
    if body is None or not whole or not is_contiguous(tensor) or tensor.dtype not in _TYPES:
        what = f"llama.cpp writes the values of GGUF, and the edit changes those of {quoted(name)}"
        step = command("convert", checkpoint.path, output=suggested_output(checkpoint.path, "plain", ".safetensors"))
        with suppress(MalformedError):  # then convert would fail
            checkpoint.container.originals()
            raise RefusedError(what, path=checkpoint.path, next=step)
        raise RefusedError(what, path=checkpoint.path)
    return body.piece


def _value(checkpoint: Checkpoint, ref: Ref) -> Any:
    """Return the value at a reference: a text, number, bool, or a list of these. Raise RefusedError for any other."""
    node = checkpoint.graph.nodes[ref]
    if isinstance(node, List):
        return [_value(checkpoint, item) for item in list_items(node)]
    if type(node) not in (str, int, float, bool):
        raise RefusedError("GGUF holds texts, numbers, bools and lists of them", path=checkpoint.path)
    return node


def _kind(value: Any) -> int:
    """Return the type for a new value."""
    if type(value) is int:
        limits = ((1 << 32, 0), (1 << 31, -(1 << 31)), (1 << 64, 0))
        return next((kind for kind, (high, low) in zip(_INTEGERS, limits) if low <= value < high), _INTEGERS[-1])
    return {bool: _BOOL, str: STRING, float: _FLOAT}.get(type(value), ARRAY)


def _encoded(checkpoint: Checkpoint, name: str, value: Any, kind: int, inner: int, order: str) -> tuple[Any, bytes]:
    """Return a value as it will be read, and its bytes in this type; raise RefusedError if the type cannot hold it."""
    if kind == STRING and isinstance(value, str):
        return value, _text(value, order)
    if kind in NUMBERS and isinstance(value, bool) is (kind == _BOOL) and isinstance(value, int | float):
        form = order + NUMBERS[kind]
        with suppress(error, OverflowError):
            raw = pack(form, value)
            (read,) = unpack(form, raw)
            read = shortest(read) if kind == _FLOAT else read
            if read == value or value != value:
                return read, raw
    elif kind == ARRAY and isinstance(value, list):
        parts = [_encoded(checkpoint, name, part, inner, -1, order) for part in value]
        return [part for part, _ in parts], pack(order + "IQ", inner, len(parts)) + b"".join(raw for _, raw in parts)
    what = f"{quoted(name)} is of the type {type_name(kind)}, which cannot hold {value!r}"
    raise RefusedError(what, path=checkpoint.path)


def _text(text: str, order: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return pack(order + "Q", len(data)) + data

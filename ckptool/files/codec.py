"""Encode parts of plans as JSON: values, classes and operations of a vocabulary, and files by URI and stamp.

A value is null, a boolean, a number, a string, a list (decoded as a tuple), or an object with one member:

- ``{"bytes": "..."}``: bytes in base64
- ``{"input": 3}``: a file, by its place in the list of inputs
- ``{"deferred": [7, "DeferredCrc"]}``: a number that is known once bytes were computed
- ``{"dtype": "float32"}``
- ``{"function": "elementwise"}``: an operation of the vocabulary
- ``{"Span": [...]}``: a class of the vocabulary, and its fields

Nothing else can be named: decoding creates data, and runs no code.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints
from urllib.parse import unquote_to_bytes

from ..base import lazy
from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import ChangedError, MalformedError, RefusedError
from ..base.records import NamedTuple, TypedDict, is_typed_dict
from ..base.steps import STDIN
from .pool import open_pooled
from .sources import BytesSource, Deferred, FileSource, MemberSource, Piece, SliceSource, Source, Span

_SCHEME: Final = "file://"
#: Numbers in a task are smaller than this, whatever their sign.
_MOST: Final = 1 << 64


def has_shape(value: object, kind: Any) -> bool:
    """Return whether a JSON value has a type: a TypedDict, a list of a type, a string, a number, or Any."""
    if is_typed_dict(kind):
        fields = _fields(kind)
        return isinstance(value, dict) and all(
            name in value and has_shape(value[name], field) for name, field in fields.items()
        )
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return isinstance(value, list) and (item is Any or all(has_shape(one, item) for one in value))
    if kind is int:
        return type(value) is int and -_MOST < value < _MOST
    return kind is Any or type(value) is kind


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


class InputFile(TypedDict):
    """An input file: its URI, and its ``size`` (bytes), ``mtime_ns`` and ``inode`` when the plan was made."""

    uri: str
    size: int
    mtime_ns: int
    inode: int


class Word(NamedTuple):
    """A class or function of ckptool that plans may name: its place ``module:name``, and the fields of its objects.

    ``fields`` is None for a named tuple or a function.
    """

    place: str
    fields: tuple[str, ...] | None = None

    def resolve(self) -> Any:
        """Import and return the class or function."""
        module, _, name = self.place.partition(":")
        value: Any = lazy.module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value


class Vocabulary:
    """The classes and operations that plans may name, by their names in JSON."""

    def __init__(self, classes: Mapping[str, Word], operations: Mapping[str, Word]) -> None:
        self.classes, self.operations = classes, operations
        self._class_names = {word.place: name for name, word in classes.items()}
        self._operation_names = {word.place: name for name, word in operations.items()}
        self._by_type: dict[type, str] = {}

    def class_name(self, value: object) -> str:
        """Return the name of a value's class, or "" if the vocabulary lacks it."""
        kind = type(value)
        if kind not in self._by_type:
            self._by_type[kind] = self._class_names.get(_place(kind), "")
        return self._by_type[kind]

    def operation_name(self, value: object) -> str:
        """Return the name of an operation, or "" if the vocabulary lacks it."""
        return self._operation_names.get(_place(value), "") if callable(value) else ""


def _place(value: Any) -> str:
    return f"{value.__module__.removeprefix('ckptool.')}:{value.__qualname__}"


class Encoder:
    """Encode the values of one task; collect its input files in ``inputs``, and its deferred numbers in ``deferred``.

    ``number_of`` returns the number of a deferred value. ``known`` caches the files of all tasks of a plan by their
    ids.
    """

    def __init__(
        self, vocabulary: Vocabulary, number_of: Callable[[Deferred], int], known: dict[int, InputFile]
    ) -> None:
        self.inputs: list[InputFile] = []
        self.deferred: list[int] = []
        self._vocabulary = vocabulary
        self._number_of = number_of
        self._known = known
        self._places: dict[int, int] = {}

    def encode(self, value: object) -> Any:
        """Return a value as JSON. Raises RefusedError for a source that another process cannot open."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, bytes):
            return {"bytes": b64encode(value).decode("ascii")}
        if kind is tuple and all(type(item) is int for item in value):  # type: ignore[attr-defined]
            return list(value)  # type: ignore[call-overload]
        if isinstance(value, Span):
            return self.piece(value)
        name = self._vocabulary.class_name(value)
        if isinstance(value, tuple | list) and not name and not isinstance(value, Dtype):
            return [self.encode(item) for item in value]
        file = value.local_file() if isinstance(value, Source) else None
        if file is not None:
            return {"input": self._input(file)}
        if isinstance(value, Deferred):
            number = self._number_of(value)
            self.deferred.append(number)
            return {"deferred": [number, name]}
        if isinstance(value, Dtype):
            return {"dtype": value.name}
        operation = self._vocabulary.operation_name(value)
        if operation:
            return {"function": operation}
        assert name, f"{_place(kind)} is not in the vocabulary of plans"
        fields = self._vocabulary.classes[name].fields
        own: Sequence[object] = value if fields is None else [getattr(value, field) for field in fields]  # type: ignore[assignment]
        return {name: [self.encode(item) for item in own]}

    def piece(self, piece: Piece) -> Any:
        """Encode a piece: a span of a file as a span, and a span of bytes in memory as the bytes."""
        if not isinstance(piece, Span):
            return self.encode(piece)
        source, offset, size = plain_span(piece)
        if isinstance(source, BytesSource):
            return self.encode(source.read(offset, size))
        return {"Span": [self.encode(source), offset, size]}

    def _input(self, file: FileSource) -> int:
        place = self._places.get(id(file))
        if place is None:
            place = self._places[id(file)] = len(self.inputs)
            if id(file) not in self._known:
                self._known[id(file)] = input_of(file)
            self.inputs.append(self._known[id(file)])
        return place


def plain_span(span: Span) -> Span:
    """Return the span of the file, or of other bytes, that members and slices lead to."""
    source, offset, size = span
    while isinstance(source, MemberSource | SliceSource):
        if isinstance(source, SliceSource):
            offset += source.offset
            source = source.source
        else:
            source = source.inner
    return Span(source, offset, size)


def input_of(file: FileSource) -> InputFile:
    """Return the location and stamp of a file; raise RefusedError for a stream, which other processes cannot read."""
    if file.name == STDIN:
        what = "a stream cannot be read by other processes"
        raise RefusedError(what, path=file.name, next="save it as a file first")
    _, inode, size, mtime_ns = file.signature
    return {"uri": Path(os.path.realpath(file.name)).as_uri(), "size": size, "mtime_ns": mtime_ns, "inode": inode}


def path_of(uri: str) -> str:
    """Return the path of a ``file://`` URI; raise MalformedError for any other URI."""
    if not uri.startswith(_SCHEME):
        raise MalformedError(f"{uri!r} is not the URI of a file", next="plan again with this version")
    return os.fsdecode(unquote_to_bytes(uri.removeprefix(_SCHEME)))


def open_input(file: InputFile) -> FileSource:
    """Open an input file of a plan; raise ChangedError if it has changed since."""
    path = path_of(file["uri"])
    source = open_pooled(path)
    _, inode, size, mtime_ns = source.signature
    if (inode, size, mtime_ns) != (file["inode"], file["size"], file["mtime_ns"]):
        source.close()
        raise ChangedError("the file changed since the plan was made", path=path, next="plan again")
    return source


class Decoder:
    """Decode the values of one task.

    ``inputs`` are the open files. ``deferred`` maps the number of each deferred value to its object.
    """

    def __init__(self, vocabulary: Vocabulary, inputs: Sequence[Source]) -> None:
        self.deferred: dict[int, Deferred] = {}
        self._vocabulary = vocabulary
        self._inputs = inputs

    def decode(self, value: Any) -> Any:
        """Return the object that a JSON value stands for; raise MalformedError for a name outside the vocabulary."""
        if isinstance(value, list):
            return tuple(self.decode(item) for item in value)
        if not isinstance(value, dict):
            return value
        try:
            ((name, content),) = value.items()
            if name == "bytes":
                return b64decode(content, validate=True)
            if name == "input":
                return self._inputs[content]
            if name == "dtype":
                return BY_NAME[content]
            if name == "function":
                return self._vocabulary.operations[content].resolve()
            if name == "deferred":
                number, kind = content
                if number not in self.deferred:
                    self.deferred[number] = self._vocabulary.classes[kind].resolve()()
                return self.deferred[number]
            cls = self._vocabulary.classes[name].resolve()
            return cls(*(self.decode(item) for item in content))
        except (LookupError, ValueError, TypeError) as error:
            what = f"it is not a task of this version: {type(error).__name__}: {error}"
            raise MalformedError(what, next="plan again") from error

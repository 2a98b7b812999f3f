"""NumPy arrays in other files: where their bytes end, and whether they are pickled.

Sources: ``numpy/lib/format.py`` (``.npy``), ``joblib/numpy_pickle.py`` (``NumpyArrayWrapper``: the array follows the
BUILD of its wrapper, in the middle of the pickle).
"""

from __future__ import annotations

import re
from math import prod
from typing import Final

from ...base.errors import PickleError, TruncatedPickleError
from ...base.records import NamedTuple
from ...checkpoint.objects import mapped_name
from ...files.sources import Source
from ...pickles.decode import decode
from ...pickles.nodes import Call, Dict, Global, Graph, Node, Ref

_MAGIC: Final = b"\x93NUMPY"
#: The most characters of a header: NumPy reads no more unless it trusts the file (``_MAX_HEADER_SIZE``).
_MAX_HEADER: Final = 10_000
#: The size of an element in bytes, for types named by one letter; other types state their size.
_SIZES: Final = {
    **dict.fromkeys("?bB", 1),
    **dict.fromkeys("hHe", 2),
    **dict.fromkeys("iIf", 4),
    **dict.fromkeys("qQlLdF", 8),  # on Windows a long has 4; then the search resumes in mid-array
    **dict.fromkeys("gD", 16),
}
_SIMPLE: Final = r"[<>|=]?(?:([biufcmMSUV])(\d{1,9})|([?bBhHeiIfqQlLdFgD]))(?:\[\w{1,20}\])?\Z"
_WRAPPER: Final = "joblib.numpy_pickle.NumpyArrayWrapper"


class NpyData(NamedTuple):
    """The data of an ``.npy`` file: its first byte and its size in bytes; ``pickled`` if the elements may be
    objects."""

    begin: int
    nbytes: int
    pickled: bool


def npy_data(source: Source, at: int) -> NpyData | None:
    """Return the data that follows the header of an ``.npy`` file at an offset, or None if there is no header. If the
    header cannot be understood, the elements may be objects, pickled directly after it."""
    head = source.read(at, 12)
    if head[:6] != _MAGIC or len(head) < 12:
        return None
    wide = head[6] > 1
    size = int.from_bytes(head[8 : 12 if wide else 10], "little")
    header = at + (12 if wide else 10)
    begin = header + size
    if size > _MAX_HEADER:
        return NpyData(begin, 0, True)
    from ast import literal_eval  # only for arrays

    try:
        fields = literal_eval(source.read(header, size).decode("latin-1"))
        shape, width = fields["shape"], _width(fields["descr"])
        nbytes = width * prod(shape) if width is not None and all(type(n) is int and n >= 0 for n in shape) else -1
    except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError):
        nbytes = -1
    known = type(nbytes) is int and nbytes >= 0
    return NpyData(begin, nbytes if known else 0, not known)


def _width(descr: object) -> int | None:
    """Return the size of an element in bytes, or None if it may hold objects."""
    match = re.match(_SIMPLE, descr) if isinstance(descr, str) else None
    if match is not None:
        kind, size, letter = match.groups()
        return _SIZES[letter] if letter else int(size) * (4 if kind == "U" else 1)
    if isinstance(descr, list):  # records: (name, type) or (name, type, shape)
        widths = [_width(field[1]) for field in descr if len(field) == 2]
        return sum(width for width in widths if width) if len(widths) == len(descr) and None not in widths else None
    return None


def joblib_array_end(nodes: list[Node], built: Ref, at: int, data: bytes) -> tuple[int, bool]:
    """Return where the bytes end that an object reads by itself, and whether they are a separate pickle. ``built`` is
    the object, ``at`` the offset after its BUILD. The result is (``at``, False) for any object other than a joblib
    array, since it reads nothing. For pickled elements the end is unknown, and the result is (start, True). Raises
    PickleError for an array of unknown size."""
    node = nodes[built]
    func = nodes[node.func] if type(node) is Call else None
    if type(func) is not Global or mapped_name(func) != _WRAPPER:
        return at, False
    state = _dict(nodes, node)
    dtype, shape = state.get("dtype"), state.get("shape")
    width = _dtype_width(nodes, dtype)
    sizes = [nodes[ref] for ref in shape] if type(shape) is tuple else None
    if sizes is None or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise PickleError("an array of joblib without a shape", offset=at)
    if width is None:
        return at, True
    if type(state.get("numpy_array_alignment_bytes")) is int:
        at += 1 + (data[at] if at < len(data) else 0)
    end = at + width * prod(size for size in sizes if type(size) is int)
    if end > len(data):
        raise TruncatedPickleError("an array of joblib that reaches beyond the file", offset=at)
    return end, False


def _dict(nodes: list[Node], node: Node) -> dict[str, Node]:
    states = node.states if type(node) is Call else ()
    state = nodes[states[-1]] if states else None
    if type(state) is tuple and state:  # (the dict, the slots)
        state = nodes[state[0]]
    pairs = state.pairs if type(state) is Dict else ()
    return {key: nodes[pairs[n + 1]] for n in range(0, len(pairs), 2) if type(key := nodes[pairs[n]]) is str}


def _dtype_width(nodes: list[Node], node: Node) -> int | None:
    """Return the element size of a pickled ``numpy.dtype`` in bytes, or None for objects. Its state is (3 or 4, byte
    order, subarray, names, fields, size, alignment, flags). The lowest flag means objects (``arraydescr_reduce`` in
    numpy/_core/src/multiarray/descriptor.c)."""
    args = nodes[node.args] if type(node) is Call else None
    code = nodes[args[0]] if type(args) is tuple and args else None
    if type(code) is not str:
        raise PickleError("an array of joblib without a type")
    states = node.states if type(node) is Call else ()
    state = nodes[states[-1]] if states else None
    flags = nodes[state[7]] if type(state) is tuple and len(state) > 7 else 0
    if code.startswith("O") or (type(flags) is int and flags & 1):
        return None
    width = _width(code)
    if width is None:
        raise PickleError(f"an array of joblib of the type {code!r}")
    return width


class JoblibArrays:
    """Skips the joblib arrays in a pickle. ``found`` has the pickles of object arrays, by offset. ``skip`` is a method
    because a recursive closure would be a reference cycle and keep the data in memory."""

    def __init__(self, data: bytes, where: str) -> None:
        self.found: dict[int, Graph] = {}
        self._data = data
        self._where = where

    def skip(self, nodes: list[Node], built: Ref, at: int) -> int:
        """Return where the pickle continues after an object was built."""
        end, pickled = joblib_array_end(nodes, built, at, self._data)
        if not pickled:
            return end
        decoded = decode(self._data, end, where=self._where, foreign=self.skip)
        self.found[end] = decoded.graph
        return decoded.end

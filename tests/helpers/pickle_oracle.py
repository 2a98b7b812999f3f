"""CPython's own unpickler with stubs in place of everything that a pickle names: the oracle of these tests."""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["EXTENSIONS", "Stub", "alike", "load"]

#: Codes of the extension registry that the streams use.
EXTENSIONS = (1, 255, 256, 65_535, 65_536)

for _code in EXTENSIONS:
    copyreg.add_extension("extensions", f"code{_code}", _code)


class Stub(type):
    """What stands for a class, for what it makes, and for what that makes: all can be called, filled and hashed.

    ``made`` says how it came about; ``log`` how it was filled, in order.
    """

    made: tuple[Any, ...]
    log: list[tuple[str, Any]]

    def __call__(cls, *args: Any, **kwargs: Any) -> Stub:
        return stub("call", cls, args, kwargs)

    def append(cls, item: Any) -> None:
        cls.log.append(("item", item))

    def extend(cls, items: list[Any]) -> None:
        for item in items:
            cls.log.append(("item", item))

    add = append

    def __setitem__(cls, key: Any, value: Any) -> None:
        cls.log += [("key", key), ("value", value)]

    def __setstate__(cls, state: Any) -> None:
        cls.log.append(("state", state))


class _New:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return stub("new", cls, args, kwargs)


def stub(*made: Any) -> Stub:
    """A new stub."""
    return Stub("stub", (_New,), {"made": made, "log": []})


def _buffers() -> Iterator[bytes]:
    """Endless equal buffers, because those of objects that are thrown away are not taken again."""
    while True:
        yield bytes(bytearray(b"buffer"))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="surrogateescape", buffers=_buffers())
        self.names: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        if module != "extensions":
            self.names.append((module, name))
        return stub("global", module, name)

    def persistent_load(self, pid: Any) -> Any:
        return stub("persistent", pid)


def load(data: bytes) -> tuple[Any, list[tuple[str, str]]]:
    """What CPython makes of a pickle, and the names that it asked for in order."""
    unpickler = _Unpickler(data)
    # Each code is looked up anew: the registry keeps what find_class gave.
    copyreg._extension_cache.clear()  # type: ignore[attr-defined]
    return unpickler.load(), unpickler.names


def alike(a: Any, b: Any) -> bool:
    """Are two objects equal down to types, order, NaNs and sharing? Of sets of stubs only the size counts."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    work = [(a, b)]
    while work:
        left, right = work.pop()
        if type(left) is not type(right):
            return False
        if left is None or isinstance(left, int | float) or left == ():
            if _bits(left) != _bits(right):
                return False
            continue
        if id(left) in forward or id(right) in backward:
            if forward.get(id(left)) != id(right) or backward.get(id(right)) != id(left):
                return False
            continue
        forward[id(left)], backward[id(right)] = id(right), id(left)
        ours, theirs = _parts(left), _parts(right)
        if len(ours) != len(theirs):
            return False
        if isinstance(left, str | bytes | bytearray | memoryview):
            if ours != theirs:
                return False
        else:
            work += zip(ours, theirs)
    return True


def _bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value


def _parts(value: Any) -> Any:
    if isinstance(value, Stub):
        made = value.made if value.made[0] != "call" else (*value.made[:2], value.made[2], tuple(value.made[3]))
        return [*made, *(part for step in value.log for part in step)]
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    if isinstance(value, set | frozenset):
        plain = all(isinstance(item, int | str | bytes) for item in value)
        return sorted(value, key=repr) if plain else [None] * len(value)
    return value

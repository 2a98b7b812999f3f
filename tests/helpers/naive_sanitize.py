"""The oracle of sanitize: what torch loads of the original, converted naively in Python, against what torch loads of
the output by default. And the laws that every output keeps."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import sys
import types
import uuid
from pathlib import Path
from typing import Any

import foreign_objects as foreign
import numpy as np
import oracle
import torch

import ckptool
from ckptool import sanitize
from ckptool.reports.validate import validation_report

#: Objects that become a dict of their attributes.
_ATTRIBUTES = (
    *(argparse.Namespace, types.SimpleNamespace, foreign.Config, foreign.Frozen, foreign.Empty, foreign.SlotsAndDict),
    *(foreign.Slots, foreign.WithSlots),
)


def saved(path: Path, value: Any, protocol: int = 2, legacy: bool = False) -> Path:
    """``torch.save`` where the classes are importable."""
    with foreign.importable():
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    return path


def original(path: Path) -> Any:
    """What torch loads without weights_only: of files of the tests alone."""
    with foreign.importable():
        return torch.load(path, weights_only=False, map_location="cpu")


class Sanitized:
    """An output: what torch loads of it, and the changes by path."""

    def __init__(self, loaded: Any, changes: list[tuple[str, str]], edited: bool) -> None:
        self.loaded = loaded
        self.changes = changes
        self.edited = edited

    def what(self, path: str) -> str:
        return "; ".join(what for place, what in self.changes if place == path)


def sanitized(path: Path, out: Path, meta: bool = True, loops: bool = False, **options: bool) -> Sanitized:
    """Sanitize, and hold the output to the laws that every output keeps.

    ``meta`` is False for what torch cannot load there, ``loops`` True for what the comparison does not end on.
    """
    for home in foreign.HOMES.values():
        assert home.partition(".")[0] not in sys.modules, "nothing can be imported here"
    with ckptool.open(path) as checkpoint:
        result = sanitize(checkpoint, **options)
        ckptool.save(result, out, force=True)
        changes = [(change.path, change.what) for change in result.changes]
        edited = result.edited
    if not edited:
        assert out.read_bytes() == path.read_bytes()
    report = validation_report(str(out))
    assert (report["status"], report["warnings"]) == ("valid", 0), report["checks"]
    assert set(report["not_checked"]) <= {"checksums"}, report["not_checked"]
    with ckptool.open(out) as checkpoint:
        assert not sanitize(checkpoint).edited, "a second time changes nothing"
    loaded = torch.load(out, map_location="cpu")
    if report["format"] == "torch-zip":
        mapped = torch.load(out, map_location="cpu", mmap=True)
        found = "" if loops else oracle.difference(loaded, mapped)
        assert not found, found
    if meta:
        torch.load(out, map_location="meta")
    return Sanitized(loaded, changes, edited)


def agrees(path: Path, out: Path, **options: bool) -> Sanitized:
    """Sanitize and compare with the naive conversion."""
    result = sanitized(path, out, **options)
    found = oracle.difference(naive(original(path)), result.loaded)
    assert not found, found
    return result


def naive(value: Any) -> Any:
    """What a user would write to make it plain, with the same things shared."""
    return _Naive().convert(value)


class _Naive:
    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.keep: list[Any] = []

    def convert(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | torch.device | torch.dtype | torch.Size):
            return value
        if id(value) not in self.done:
            self.keep.append(value)
            self.done[id(value)] = self.fresh(value)
        return self.done[id(value)]

    def fresh(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return value if kind in (torch.Tensor, torch.nn.Parameter) else value.as_subclass(torch.Tensor)
        if isinstance(value, np.ndarray | np.generic):
            return self.numpy(value)
        if isinstance(value, enum.Enum):
            return self.convert(value.value)
        if kind in (foreign.DictConfig, foreign.ListConfig):
            return self.filled(value, value._content)
        if kind is foreign.AnyNode:
            return self.convert(value._val)
        if kind in _ATTRIBUTES:
            slots = [name for name in ("x", "y", "width", "inner") if name not in getattr(value, "__dict__", {})]
            found = {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in slots if hasattr(value, n)}}
            return self.filled(value, found)
        if kind is functools.partial:
            return self.filled(value, {"func": value.func, "args": value.args, "keywords": value.keywords})
        if isinstance(value, dict | list | collections.deque):
            return self.filled(value, value)
        if isinstance(value, range):
            return list(value)
        if isinstance(value, tuple):
            return tuple(map(self.convert, value))
        if isinstance(value, set | frozenset):
            return {self.convert(member) for member in value}
        return self.scalar(value)

    def filled(self, value: Any, content: Any) -> Any:
        """A mapping or list, known before it is filled: it may hold itself."""
        if isinstance(content, dict):
            made: Any = type(content)() if type(content) in (collections.OrderedDict, collections.Counter) else {}
            self.done[id(value)] = made
            for key, entry in content.items():
                made[self.convert(key)] = self.convert(entry)
            if isinstance(made, collections.OrderedDict):
                made.__dict__.update(self.convert(vars(content)))
            return made
        if isinstance(content, list | collections.deque):
            made = self.done[id(value)] = []
            made += map(self.convert, content)
            return made
        return self.convert(content)

    def numpy(self, value: Any) -> Any:
        if value.dtype.kind in "Mm":
            value = value.view(value.dtype.str[0] + "i8")
        if isinstance(value, np.generic):
            return value.item()
        if value.dtype.kind in "OSU":
            return self.convert(value.tolist())
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="K")
        # Of an array without elements the strides say nothing.
        return (
            torch.from_numpy(native) if native.size else torch.empty(value.shape, dtype=torch.from_numpy(native).dtype)
        )

    def scalar(self, value: Any) -> Any:
        if isinstance(value, pathlib.PurePath | uuid.UUID | decimal.Decimal | fractions.Fraction):
            return str(value)
        if isinstance(value, datetime.datetime | datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, datetime.timedelta):
            return value.total_seconds()
        if isinstance(value, re.Pattern):
            return value.pattern
        if isinstance(value, slice):
            return (value.start, value.stop, value.step)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return f"{value.__module__}.{value.__qualname__}"
        return next((kind(value) for kind in (str, float) if isinstance(value, kind)), value)

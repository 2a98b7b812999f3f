"""Classes of other packages, rebuilt under their module names as far as their pickles go, and modules that do not
exist when the file is read: ``importable`` makes them, and takes them away again."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass
class Config:
    width: int = 1
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int = 1
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slots:
    width: int = 1
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    """Its pickle holds the values alone: the names of its fields are in the class."""

    width: int = 1
    inner: Any = None


class WithSlots:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class SlotsAndDict(WithSlots):
    def __init__(self, x: Any, y: Any, z: Any) -> None:
        super().__init__(x, y)
        self.z = z


class Empty:
    pass


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = "eval"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


class ByName:
    """What Python 3.11 and 3.12 make of some enumerations: ``getattr(cls, name)``."""

    def __reduce__(self) -> Any:
        return getattr, (Mode, "TRAIN")


Pair = collections.namedtuple("Pair", "first second")


class Names(list[Any]):
    pass


class Sizes(tuple[Any, ...]):
    pass


class Table(dict[Any, Any]):
    pass


class Ordered(collections.OrderedDict[Any, Any]):
    pass


class Text(str):
    pass


class Number(float):
    pass


class Members(set[Any]):
    pass


class Keywords:
    """``__getnewargs_ex__``: NEWOBJ_EX in protocol 4, a partial of ``__new__`` before."""

    def __new__(cls, *, k: Any) -> Keywords:
        made = object.__new__(cls)
        made.given = k
        return made

    def __getnewargs_ex__(self) -> Any:
        return (), {"k": self.given}

    def __getstate__(self) -> Any:
        return None

    given: Any


class Stateful:
    """Its state is a list."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __getstate__(self) -> Any:
        return list(self.values)

    def __setstate__(self, state: Any) -> None:
        self.values = tuple(state)


class Made:
    """What a function makes: nothing of it is in the file."""

    def __reduce__(self) -> Any:
        return make, (1, "x")


def make(a: Any, b: Any) -> Made:
    return Made()


class Outer:
    class Inner:
        pass

    def method(self) -> None:
        pass


class Boxes(torch.Tensor):
    pass


class EasyDict(dict[Any, Any]):
    """easydict 1: each entry is an attribute as well."""

    def __init__(self, **entries: Any) -> None:
        for name, value in entries.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)


class Munch(dict[Any, Any]):
    """munch: its state is its entries."""

    def __getstate__(self) -> Any:
        return dict(self.items())

    def __setstate__(self, state: Any) -> None:
        self.clear()
        self.update(state)


class AddictDict(dict[Any, Any]):
    """addict.Dict: its state is itself."""

    def __getstate__(self) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        self.update(state)


class CfgNode(dict[Any, Any]):
    """yacs: it keeps books in its ``__dict__``."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__["__immutable__"] = True
        self.__dict__["__deprecated_keys__"] = set()


class ContainerMetadata:
    def __init__(self, key: Any) -> None:
        self.ref_type, self.object_type, self.optional, self.key = Any, dict, True, key


class AnyNode:
    def __init__(self, value: Any, parent: Any, key: Any) -> None:
        self._metadata, self._parent, self._flags_cache = ContainerMetadata(key), parent, None
        self._val = value


class DictConfig:
    """omegaconf: each value in a node of its own, each node with its parent."""

    def __init__(self, content: Any, parent: Any = None, key: Any = None) -> None:
        self._metadata, self._parent, self._flags_cache = ContainerMetadata(key), parent, {"readonly": None}
        self._content: Any = content
        if isinstance(content, dict):
            self._content = {name: node(value, self, name) for name, value in content.items()}


class ListConfig:
    def __init__(self, content: Any, parent: Any = None, key: Any = None) -> None:
        self._metadata, self._parent = ContainerMetadata(key), parent
        self._content: Any = content
        if isinstance(content, list):
            self._content = [node(value, self, number) for number, value in enumerate(content)]


def node(value: Any, parent: Any, key: Any) -> Any:
    """What omegaconf makes of a value."""
    kind = {dict: DictConfig, list: ListConfig}.get(type(value), AnyNode)
    return kind(value, parent, key)


#: Where each class says that it is.
HOMES: dict[type, str] = {
    EasyDict: "easydict.EasyDict",
    Munch: "munch.Munch",
    AddictDict: "addict.addict.Dict",
    CfgNode: "yacs.config.CfgNode",
    ContainerMetadata: "omegaconf.base.ContainerMetadata",
    AnyNode: "omegaconf.nodes.AnyNode",
    DictConfig: "omegaconf.dictconfig.DictConfig",
    ListConfig: "omegaconf.listconfig.ListConfig",
}
_OWN: tuple[Any, ...] = (
    *(
        Config,
        Frozen,
        Slots,
        FrozenSlots,
        WithSlots,
        SlotsAndDict,
        Empty,
        Mode,
        Level,
        Bits,
        ByName,
        Pair,
        Names,
        Sizes,
    ),
    *(Table, Ordered, Text, Number, Members, Keywords, Stateful, Made, make, Outer, Boxes),
)
for thing in _OWN:
    HOMES[thing] = f"research_lab.things.{thing.__name__}"
for _cls, _home in HOMES.items():
    _cls.__module__, _, _cls.__qualname__ = _home.rpartition(".")
    _cls.__name__ = _cls.__qualname__
Outer.Inner.__module__, Outer.Inner.__qualname__ = Outer.__module__, "Outer.Inner"
Outer.method.__module__, Outer.method.__qualname__ = Outer.__module__, "Outer.method"


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """The modules are there inside of it, and nowhere else: what reads a file outside cannot import them."""
    before = dict(sys.modules)
    for cls, home in HOMES.items():
        module, _, name = home.rpartition(".")
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            if not isinstance(sys.modules.get(part), _Module):
                sys.modules[part] = _Module(part)
        setattr(sys.modules[module], name, cls)
    try:
        yield
    finally:
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]


class _Module(types.ModuleType):
    pass


Namespace = argparse.Namespace

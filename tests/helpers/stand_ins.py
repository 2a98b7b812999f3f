"""Classes of packages that are not installed, under their own modules and names, as far as pickles hold them."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

#: What was put into modules, with what was there before.
_PLACED: list[tuple[types.ModuleType, str, Any]] = []
_MODULES: list[str] = []
_NOTHING: Final = object()


def place(name: str, value: Any) -> Any:
    """Give a class or function a full name, and make it importable until ``put_away``."""
    home, _, own = name.rpartition(".")
    value.__module__, value.__name__, value.__qualname__ = home, own, own
    parts = home.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if module not in sys.modules:
            sys.modules[module] = types.ModuleType(module)
            _MODULES.append(module)
            if end > 1:
                _set(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[module])
    _set(sys.modules[home], own, value)
    return value


def placed(name: str) -> Any:
    """Return the stand-in with this full name, or None."""
    home, _, own = name.rpartition(".")
    same = any(module.__name__ == home and each == own for module, each, _ in _PLACED)
    return getattr(sys.modules[home], own) if same else None


def _set(module: types.ModuleType, name: str, value: Any) -> None:
    _PLACED.append((module, name, getattr(module, name, _NOTHING)))
    setattr(module, name, value)


def stand_in(name: str, base: type = object, **members: Any) -> Any:
    """Make a class with this full name, or return the one that was made."""
    return placed(name) or place(name, type(base)(name.rpartition(".")[2], (base,), members))


def instance(name: str, **attributes: Any) -> Any:
    """Make an object of a class with this full name, with attributes."""
    made = stand_in(name)()
    made.__dict__.update(attributes)
    return made


def called(function: str, *arguments: Any, real: Callable[..., Any] | None = None) -> Any:
    """Make an object whose pickle calls a function with this full name."""
    target = placed(function) or place(function, real or (lambda *given: given))

    class Call:
        def __reduce__(self) -> Any:
            return target, arguments

    return Call()


def put_away() -> None:
    """Take all stand-ins away again."""
    while _PLACED:
        module, name, before = _PLACED.pop()
        if before is _NOTHING:
            delattr(module, name)
        else:
            setattr(module, name, before)
    while _MODULES:
        sys.modules.pop(_MODULES.pop(), None)


class Net(nn.Module):
    """The model of most situations."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes)


def trained() -> Net:
    """Return the model with values that only a file can give it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net()


#: The state dict of the trained model.
STATE: Final = collections.OrderedDict(trained().state_dict())


def state(prefix: str = "") -> Any:
    """Return a copy of the state dict, with a prefix before each key."""
    return collections.OrderedDict((prefix + key, value.clone()) for key, value in STATE.items())

"""Do work when it is first needed: import a module of ckptool by its name, compile a regular expression."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, AnyStr, cast


@cache
def module(name: str) -> ModuleType:
    """Import and return ``ckptool.NAME``; no other module imports by name."""
    return import_module(f"ckptool.{name}")


def is_loaded(name: str) -> bool:
    """Return whether ``ckptool.NAME`` was imported already."""
    return f"ckptool.{name}" in sys.modules


class _Regex:
    """A regular expression that is compiled when an attribute of it is first used."""

    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self._source = pattern, flags

    def __getattr__(self, name: str) -> Any:
        value = getattr(re.compile(*self._source), name)  # type: ignore[type-var]
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[object, ...]:
        return regex, self._source


def regex(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a regular expression that takes no time to define; a module may define many that a command never uses."""
    return cast("re.Pattern[AnyStr]", _Regex(pattern, flags))

"""Do work when it is first needed: import a module, read a table, compile a regular expression."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, AnyStr, cast


@cache
def module(name: str) -> ModuleType:
    """Import and return ``ckptool.NAME``; no other module imports by name."""
    return import_module(f"ckptool.{name}")


def table(name: str) -> dict[str, Any]:
    """Return the table in ``ckptool/NAME.json``."""
    import json  # a command without a finding needs none

    with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), f"{name}.json"), encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


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

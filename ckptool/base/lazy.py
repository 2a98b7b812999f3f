"""Do no work that may be needless: import a module or compile a regular expression when it is first needed, and make
no result again that the last file had too."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, AnyStr, Final, Generic, TypeVar, cast

T = TypeVar("T")


@cache
def module(name: str) -> ModuleType:
    """Import and return ``ckptool.NAME``; no other module imports by name."""
    return import_module(f"ckptool.{name}")


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


#: The most bytes of a pickle, and nodes of its graph, for which a result is kept.
SMALL_PICKLE: Final = 1 << 16


class Recent(Generic[T]):
    """The latest result, and the arguments that it depends on.

    The first argument is compared by identity, unless it is bytes; the others are compared by value. All of them stay
    alive until another result is kept.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[object, ...], T] | None = None

    def result(self, make: Callable[[], T], *arguments: object, small: bool = True) -> T:
        """Return the kept result if it is for these arguments; otherwise make it, and keep it if it is ``small``."""
        kept = self._kept
        if kept is not None:
            first, asked = kept[0][0], arguments[0]
            same = first is asked or (type(first) is bytes and first == asked)
            if same and kept[0][1:] == arguments[1:]:
                return kept[1]
        made = make()
        if small:
            self._kept = arguments, made
        return made

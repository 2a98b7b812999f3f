"""Choosing names by glob patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

__all__ = ["EVERY", "Globs"]


class Globs:
    """``include`` any of these (all, when there are none), then ``exclude`` any of those.

    A pattern matches the key or the whole path, with case. ``*`` is any text, dots included, ``?`` one character;
    brackets are themselves, as they stand in paths.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        # One text is one pattern, not one for each of its letters.
        include = (include,) if isinstance(include, str) else include
        exclude = (exclude,) if isinstance(exclude, str) else exclude
        self.include, self.exclude = tuple(include), tuple(exclude)
        self._include = [_compiled(pattern) for pattern in include]
        self._exclude = [_compiled(pattern) for pattern in exclude]

    def __repr__(self) -> str:
        return f"Globs({self.include!r}, {self.exclude!r})"

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def match(self, *names: str) -> bool:
        """Is something with these names chosen?"""
        if self._include and not any(pattern.match(name) for pattern in self._include for name in names):
            return False
        return not any(pattern.match(name) for pattern in self._exclude for name in names)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + r"\Z", re.DOTALL)


#: No choice: every key.
EVERY: Final = Globs()

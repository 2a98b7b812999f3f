"""Choosing names by glob patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final


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
        self._include = [Glob(pattern) for pattern in include]
        self._exclude = [Glob(pattern) for pattern in exclude]

    def __repr__(self) -> str:
        return f"Globs({self.include!r}, {self.exclude!r})"

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def match(self, *names: str) -> bool:
        """Is something with these names chosen?"""
        if self._include and not any(glob.matches(name) for glob in self._include for name in names):
            return False
        return not any(glob.matches(name) for glob in self._exclude for name in names)


class Glob:
    """One pattern: ``*`` is any text, ``?`` one character.

    The texts between the stars are looked for one by one, from the end of a name: so the first star takes as much as
    it can, and the work grows with the name, not with its power of the number of stars as for a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        first, *others = pattern.split("*")
        self._head = _piece(first)
        self._others = [_piece(part[::-1]) for part in reversed(others)]
        #: Characters of a name that are none of a star's.
        self._fixed = len(pattern) - len(others)
        #: (beginning, end) around the only star, of most patterns.
        self._ends = (first, others[0]) if len(others) == 1 and "?" not in pattern else None

    def matches(self, name: str) -> bool:
        """Does the whole name match?"""
        if self._ends is None:
            return self.wild(name) is not None
        begin, end = self._ends
        return len(name) >= self._fixed and name.startswith(begin) and name.endswith(end)

    def wild(self, name: str) -> list[str] | None:
        """What each star and each question mark stands for, in their order; None for a name that does not match."""
        if len(name) < self._fixed:
            return None
        if not self._others:
            whole = self._head.fullmatch(name)
            return None if whole is None else list(whole.groups())
        head = self._head.match(name)
        if head is None:
            return None
        back, at = name[::-1], 0
        most = len(name) - head.end()
        found: list[str] = []
        for number, piece in enumerate(self._others):
            part = piece.search(back, at, most) if number else piece.match(back, 0, most)
            if part is None:
                return None
            if number:
                found.append(back[at : part.start()][::-1])
            found += part.groups()
            at = part.end()
        found.append(back[at:most][::-1])
        return [*head.groups(), *reversed(found)]


def _piece(text: str) -> re.Pattern[str]:
    return re.compile("".join("(.)" if char == "?" else re.escape(char) for char in text), re.DOTALL)


#: No choice: every key.
EVERY: Final = Globs()

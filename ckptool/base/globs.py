"""Glob patterns for names and paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final


class Globs:
    """A selection: names matching any ``include`` pattern (every name if there are none) and no ``exclude`` pattern.

    A pattern is case-sensitive and matches the key or the whole path. ``*`` is any text, dots included, ``?`` one
    character; brackets are literal, since paths contain them.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        # A plain string is one pattern, not one per letter.
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
        """Return whether something with these names is selected."""
        if self._include and not any(glob.matches(name) for glob in self._include for name in names):
            return False
        return not any(glob.matches(name) for glob in self._exclude for name in names)


class Glob:
    """One pattern: ``*`` is any text, ``?`` one character.

    The parts between the stars are searched one by one from the end of a name, so the first star is the greediest, and
    the time is linear in the name: a regular expression backtracks polynomially in the number of stars.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        first, *others = pattern.split("*")
        self._head = _compile(first)
        self._others = [_compile(part[::-1]) for part in reversed(others)]
        self._min_length = len(pattern) - len(others)
        #: The fast path, most patterns: (start, end) around the only star.
        self._ends = (first, others[0]) if len(others) == 1 and "?" not in pattern else None

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        if self._ends is None:
            return self.wildcards(name) is not None
        start, end = self._ends
        return len(name) >= self._min_length and name.startswith(start) and name.endswith(end)

    def wildcards(self, name: str) -> list[str] | None:
        """Return the text matched by each star and question mark, in order; None if the name does not match."""
        if len(name) < self._min_length:
            return None
        if not self._others:
            whole = self._head.fullmatch(name)
            return None if whole is None else list(whole.groups())
        head = self._head.match(name)
        if head is None:
            return None
        backwards, at = name[::-1], 0
        limit = len(name) - head.end()
        texts: list[str] = []
        for number, pattern in enumerate(self._others):
            match = pattern.search(backwards, at, limit) if number else pattern.match(backwards, 0, limit)
            if match is None:
                return None
            if number:
                texts.append(backwards[at : match.start()][::-1])
            texts += match.groups()
            at = match.end()
        texts.append(backwards[at:limit][::-1])
        return [*head.groups(), *reversed(texts)]


def _compile(text: str) -> re.Pattern[str]:
    return re.compile("".join("(.)" if char == "?" else re.escape(char) for char in text), re.DOTALL)


#: Selects every name.
MATCH_ALL: Final = Globs()

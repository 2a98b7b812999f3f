"""Select keys and paths by patterns: globs, or regular expressions after ``re:``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from .records import TypedDict

#: The prefix that marks a regular expression.
REGEX: Final = "re:"


#: One pattern, or several.
Patterns: TypeAlias = Sequence[str] | str


class Choice(TypedDict):
    """The two arguments that select keys: patterns to include and patterns to exclude."""

    include: Patterns
    exclude: Patterns


class Globs:
    """A selection of names that match any ``include`` pattern and no ``exclude`` pattern.

    Without ``include`` patterns, every name that is not excluded is selected.

    A pattern is case-sensitive and matches the whole key or the whole path. ``*`` matches any text, including dots;
    ``?`` matches one character; ``[45]``, ``[a-c]`` and ``[!x]`` match one character of a class; ``{a,b}`` matches one
    of several patterns. In a path, brackets are literal, as in ``state_dict[0].x``, except within the quotes of a key,
    as in ``state_dict["layer[45].*"]``. A key or path always matches itself, whatever characters it contains. After
    ``re:``, a pattern is a regular expression of Python's ``re``; a badly written one may take long. Raises TargetError
    for an invalid pattern.

    >>> globs = Globs(["*.weight"], exclude=["head.*"])
    >>> globs.match("stem.0.weight"), globs.match("head.weight")
    (True, False)
    """

    def __init__(self, include: Patterns = (), exclude: Patterns = ()) -> None:
        # A string is also a sequence: without this, each letter would be a pattern.
        include = (include,) if isinstance(include, str) else include
        exclude = (exclude,) if isinstance(exclude, str) else exclude
        self.include, self.exclude = tuple(include), tuple(exclude)
        self._include = [Glob(pattern) for pattern in include]
        self._exclude = [Glob(pattern) for pattern in exclude]

    def __repr__(self) -> str:
        return f"Globs({self.include!r}, {self.exclude!r})"

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    @property
    def patterns(self) -> Choice:
        """The patterns, as keyword arguments for functions that take them."""
        return {"include": self.include, "exclude": self.exclude}

    def match(self, key: str, path: str = "") -> bool:
        """Return whether an entry with this key and path is selected."""
        if self._include and not any(glob.matches(key, path) for glob in self._include):
            return False
        return not any(glob.matches(key, path) for glob in self._exclude)

    def decide(self, key: str, path: str = "") -> bool | None:
        """Return whether a pattern selects (True) or excludes (False) this entry and everything in it.

        Return None if no pattern matches; the containing entry decides then.
        """
        if any(glob.matches(key, path) for glob in self._exclude):
            return False
        return True if any(glob.matches(key, path) for glob in self._include) else None

    @property
    def words(self) -> str:
        """The selection as a phrase for messages."""
        included, excluded = (" or ".join(map(repr, patterns)) for patterns in (self.include, self.exclude))
        if included and excluded:
            return f"keys that match {included} but not {excluded}"
        return f"keys that match {included}" if included else f"keys that do not match {excluded}"


class Glob:
    """One compiled pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        #: The fast path, taken for most patterns: the texts before and after the only star, or the whole text. Empty if
        #: the pattern needs a regular expression.
        self._ends: list[str] = []
        if pattern.startswith(REGEX):
            from .patterns import compiled

            self._key = self._path = compiled(pattern, len(REGEX))
        elif pattern.count("*") < 2 and not any(char in pattern for char in "?[{"):
            self._ends = pattern.split("*")
        else:
            from .patterns import glob_regex

            self._key = self._path = glob_regex(pattern)
            if "[" in pattern:
                self._path = glob_regex(pattern, path=True)

    def matches(self, key: str, path: str = "") -> bool:
        """Return whether the pattern matches the whole key or the whole path; an empty path never matches."""
        if self._ends:
            return _fits(self._ends, key) or (path != "" and _fits(self._ends, path))
        if self.pattern in (key, path) or self._key.fullmatch(key):
            return True
        return path != "" and self._path.fullmatch(path) is not None


def _fits(ends: Sequence[str], name: str) -> bool:
    start, end = ends[0], ends[-1]
    if len(ends) == 1:
        return name == start
    return len(name) >= len(start) + len(end) and name.startswith(start) and name.endswith(end)


def is_pattern(text: str) -> bool:
    """Return whether a text may match anything except itself."""
    return text.startswith(REGEX) or any(char in text for char in "*?{")


def split_globs(text: str) -> list[str]:
    """Split a text at the commas outside of braces and classes; a regular expression extends to the end of the text."""
    from .patterns import split

    parts = split(text)
    at = next((number for number, part in enumerate(parts) if part.startswith(REGEX)), len(parts))
    return parts[:at] + [",".join(parts[at:])] * (at < len(parts))


#: Selects every name.
MATCH_ALL: Final = Globs()

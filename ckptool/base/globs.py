"""Select keys and paths by patterns: globs, or regular expressions after ``re:``. Rename keys by wildcards.

Matching a glob takes time linear in the name. With two stars, ``re`` would try every division of the text between them.
So each star becomes an atomic group, as in ``fnmatch``: it takes the first place where the text up to the next star
fits. Alternatives in braces would also make ``re`` try many choices, so each combination of alternatives becomes a
regular expression of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, count, product
from math import prod
from typing import Final, TypeAlias

from .errors import TargetError
from .records import NamedTuple
from .text import quoted

#: The prefix that marks a regular expression.
REGEX: Final = "re:"
#: The deepest nesting of braces.
_MOST_NESTED: Final = 50
#: The most combinations of alternatives in braces.
_MOST_COMBINED: Final = 256
#: One pattern, or several.
Patterns: TypeAlias = Sequence[str] | str


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
        self.include = (include,) if isinstance(include, str) else tuple(include)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._include, self._exclude = list(map(Glob, self.include)), list(map(Glob, self.exclude))

    def __repr__(self) -> str:
        return f"Globs({self.include!r}, {self.exclude!r})"

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
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
        if pattern.startswith(REGEX):
            self._key = self._path = compiled(pattern, len(REGEX))
        elif pattern.count("*") < 2 and not any(char in pattern for char in "?[{"):  # most patterns
            self._key = self._path = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
        else:
            self._key = glob_regex(pattern)
            self._path = glob_regex(pattern, path=True) if "[" in pattern else self._key

    def matches(self, key: str, path: str = "") -> bool:
        """Return whether the pattern matches the whole key or the whole path; an empty path never matches."""
        if self.pattern == key or self._key.fullmatch(key):
            return True
        return path != "" and (self.pattern == path or self._path.fullmatch(path) is not None)


def is_pattern(text: str) -> bool:
    """Return whether a text may match anything except itself."""
    return text.startswith(REGEX) or any(char in text for char in "*?{")


def split_globs(text: str) -> list[str]:
    """Split a text at the commas outside of braces and classes; a regular expression extends to the end of the text."""
    tokens = list(_tokens(text, path=False))
    syntax = _groups(tokens)
    parts = [""]
    for number, token in enumerate(tokens):
        if token.source == "," and number not in syntax and not parts[-1].startswith(REGEX):
            parts.append("")
        else:
            parts[-1] += token.source
    return parts


MATCH_ALL: Final = Globs()


class Part(NamedTuple):
    """A part of a glob.

    ``source`` is the part as written. ``text`` is the literal text, or None for a wildcard. ``regex`` matches one
    character; it is "" for a star and for braces. ``options`` holds the alternatives in braces.
    """

    source: str
    text: str | None
    regex: str = ""
    options: tuple[tuple[Part, ...], ...] = ()


def glob_parts(pattern: str, *, path: bool = False) -> list[Part]:
    """Return the parts of a glob, read by the rules for keys or for paths; raise TargetError if it is invalid."""
    tokens = list(_tokens(pattern, path))
    syntax = _groups(tokens)
    parts: list[Part] = []
    #: For each open brace: its token number, the parts before it, and the alternatives read so far.
    groups: list[tuple[int, list[Part], list[tuple[Part, ...]]]] = []
    for number, token in enumerate(tokens):
        if number not in syntax:
            parts.append(token)
            continue
        if token.source == "{":
            if len(groups) == _MOST_NESTED:
                raise TargetError(f"{quoted(pattern)} has more than {_MOST_NESTED} braces within braces")
            groups.append((number, parts, []))
        else:
            groups[-1][2].append(tuple(parts))
        parts = []
        if token.source == "}":
            start, parts, options = groups.pop()
            source = "".join(part.source for part in tokens[start : number + 1])
            parts.append(Part(source, None, options=tuple(options)))
    if _combinations(parts) > _MOST_COMBINED:
        message = f"the braces of {quoted(pattern)} have more than {_MOST_COMBINED} combinations"
        raise TargetError(message, next="use several patterns")
    return parts


def glob_regex(pattern: str, *, path: bool = False) -> re.Pattern[str]:
    """Return the regular expression for a whole key, or a whole path; raise TargetError if the glob is invalid."""
    numbers = count()
    combined = _combined(glob_parts(pattern, path=path))
    return re.compile("|".join(_linear(atoms, numbers) for atoms in combined), re.DOTALL)


def compiled(pattern: str, start: int) -> re.Pattern[str]:
    """Compile the regular expression that begins at ``start`` of a pattern; raise TargetError if it is invalid."""
    import warnings  # only regular expressions need this import

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern[start:])
    except re.error as error:
        place = len(pattern) if error.pos is None else start + error.pos
        raise _invalid("a regular expression", pattern, place, error.msg) from error
    except (OverflowError, RecursionError) as error:
        raise _invalid("a regular expression", pattern, start, "it is too large") from error


def _combinations(parts: Sequence[Part]) -> int:
    return prod(sum(map(_combinations, part.options)) for part in parts if part.options)


def _combined(parts: Sequence[Part]) -> Iterator[list[str]]:
    """Yield each combination of the alternatives in braces, as a list of regular expressions, with "" for a star."""
    choices = [
        [atoms for option in part.options for atoms in _combined(option)] if part.options else [[part.regex]]
        for part in parts
    ]
    yield from (list(chain.from_iterable(choice)) for choice in product(*choices))


def _linear(atoms: Sequence[str], numbers: Iterator[int]) -> str:
    """Return an expression without backtracking. Each atom matches one character; "" stands for any text."""
    pieces = [""]
    for atom in atoms:
        if atom:
            pieces[-1] += atom
        else:
            pieces.append("")
    first, *middle, last = pieces if len(pieces) > 1 else (pieces[0], None)
    if last is None:
        return f"(?:{first})"
    named = ((piece, f"_{next(numbers)}") for piece in middle if piece)
    return first + "".join(f"(?=(?P<{name}>.*?{piece}))(?P={name})" for piece, name in named) + f".*{last}"


def _tokens(pattern: str, path: bool) -> Iterator[Part]:
    """Yield the parts of a glob; each brace and comma is a literal part."""
    at, in_quotes = 0, False
    while at < len(pattern):
        char = pattern[at]
        bracket = '"]' if in_quotes else '["'
        part = Part(char, char, re.escape(char))
        if char == "*":
            part = Part(char, None)
        elif char == "?":
            part = Part(char, None, ".")
        elif path and pattern.startswith(bracket, at):
            part = Part(bracket, bracket, re.escape(bracket))
            in_quotes = not in_quotes
        elif char == "[" and (in_quotes or not path):
            part = _class(pattern, at) or part
        yield part
        at += len(part.source)


def _class(pattern: str, start: int) -> Part | None:
    """Read a character class, or return None if no bracket closes it."""
    negated = pattern[start + 1 : start + 2] in ("!", "^")
    begin = start + 1 + negated
    end = pattern.find("]", begin + 1)
    if end < 0:
        return None
    source, inside = pattern[start : end + 1], pattern[begin:end]
    if len(inside) == 1 and not negated:
        return Part(source, inside, re.escape(inside))
    ranges, at = "", 0
    while at < len(inside):
        is_range = inside[at + 1 : at + 2] == "-" and at + 2 < len(inside)
        low, high = inside[at], inside[at + 2 if is_range else at]
        if high < low:
            raise _invalid("a glob", pattern, begin + at, f"the range {low}-{high} runs backwards")
        ranges += "-".join(re.escape(char) for char in dict.fromkeys((low, high)))
        at += 3 if is_range else 1
    return Part(source, None, f"[{'^' * negated}{ranges}]")


def _groups(tokens: Sequence[Part]) -> set[int]:
    """Return the token numbers of the braces that enclose alternatives, and of the commas between the alternatives.

    Braces without a comma and unclosed braces are plain text.
    """
    syntax: set[int] = set()
    groups: list[list[int]] = []
    for number, token in enumerate(tokens):
        if token.source == "{":
            groups.append([number])
        elif token.source == "," and groups:
            groups[-1].append(number)
        elif token.source == "}" and groups:
            group = groups.pop()
            syntax.update([*group, number] if len(group) > 1 else ())
    return syntax


def escaped(text: str) -> str:
    """Return the glob that matches only this key."""
    return "".join(f"[{char}]" if char in "*?[{" else char for char in text)


def _invalid(kind: str, pattern: str, at: int, why: str) -> TargetError:
    """Return the error for an invalid pattern, with the place where it is invalid."""
    where = f"at character {at + 1:,}, {quoted(pattern[at:])}" if at < len(pattern) else "at its end"
    return TargetError(f"{quoted(pattern)} is not {kind}: {why}, {where}")


class Renaming:
    """A glob and its replacement, which repeats the wildcards of the glob in the same order.

    The replacement repeats either all wildcards, or only ``*`` and ``?`` and no class or brace. The first wildcard
    takes as much text as it can, then the second, and so on. Raises TargetError if the wildcards differ.
    """

    def __init__(self, old: str, new: str) -> None:
        parts, new_parts = glob_parts(old), glob_parts(new)
        wildcards = [part.source for part in parts if part.text is None]
        repeated = [part.source for part in new_parts if part.text is None]
        free = [source in ("*", "?") for source in wildcards]
        if repeated != wildcards and repeated != [source for source, kept in zip(wildcards, free) if kept]:
            message = f"{new!r} needs the wildcards of {old!r}, in their order: {' '.join(wildcards) or 'none'}"
            raise TargetError(message, next="write OLD=NEW such as 'backbone.*=encoder.*'")
        self._new = [part.text for part in new_parts]
        self._kept = [kept or repeated == wildcards for kept in free]
        numbers = count()
        #: For each combination of alternatives, the expression for the mirrored name. In the mirrored name, each star
        #: takes as little as it can, starting with the last star. So in the name itself, each star takes as much as it
        #: can, starting with the first.
        self._mirrored = [
            re.compile(_linear(atoms[::-1], numbers), re.DOTALL) for atoms in _combined(list(_marked(parts)))
        ]

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        return any(regex.fullmatch(name[::-1]) for regex in self._mirrored)

    def new_name(self, name: str) -> str:
        """Return the new name, or the name unchanged if it does not match."""
        mirrored, size = name[::-1], len(name)
        matches = filter(None, (regex.fullmatch(mirrored) for regex in self._mirrored))
        places = [
            [(size - match.start(f"a{n}"), size - match.start(f"b{n}")) for n in range(len(self._kept))]
            for match in matches
        ]
        if not places:
            return name
        texts = (name[begin:end] for (begin, end), kept in zip(max(places), self._kept) if kept)
        return "".join(next(texts) if text is None else text for text in self._new)


def _marked(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts, with an empty group before and after each wildcard: ``a0`` and ``b0`` around the first."""
    numbers = count()
    for part in parts:
        if part.text is None:
            number = next(numbers)
            yield from (Part("", "", f"(?P<a{number}>)"), part, Part("", "", f"(?P<b{number}>)"))
        else:
            yield part

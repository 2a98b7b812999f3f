"""The syntax of globs, translated to regular expressions; and renames by wildcards.

A glob takes time linear in the name. Two stars would let ``re`` try every division of the text between them, so a star
is followed by what ``fnmatch`` also writes: an atomic group that takes the first place where the text up to the next
star fits. Braces would need such choices too: each combination of alternatives is a regular expression of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, count, product
from math import prod
from typing import Final, NamedTuple

from .errors import TargetError
from .text import quoted

#: Braces within braces.
_MOST_NESTED: Final = 50
#: Combinations of the alternatives in braces.
_MOST_COMBINED: Final = 256
_RENAME_STEP: Final = "write OLD=NEW such as 'backbone.*=encoder.*'"


class Part(NamedTuple):
    """A part of a glob: as it is written, its text, or None for a wildcard, and the expression for one character.

    ``regex`` is "" for a star and for braces, which have ``options``.
    """

    source: str
    text: str | None
    regex: str = ""
    options: tuple[tuple[Part, ...], ...] = ()


def glob_parts(pattern: str, *, path: bool = False) -> list[Part]:
    """Return the parts of a glob, as it is read for keys or for paths; raise TargetError for an invalid one."""
    tokens = list(_tokens(pattern, path))
    syntax = _groups(tokens)
    parts: list[Part] = []
    #: Of each open brace its number, the parts before it, and its options so far.
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
    """Return the regular expression that matches a whole key, or a whole path; raise TargetError as ``glob_parts``."""
    numbers = count()
    combined = _combined(glob_parts(pattern, path=path))
    return re.compile("|".join(_linear(atoms, numbers) for atoms in combined), re.DOTALL)


def compiled(pattern: str, start: int) -> re.Pattern[str]:
    """Compile the regular expression that begins at ``start`` of a pattern; raise TargetError for an invalid one."""
    import warnings  # for regular expressions alone

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
    """Yield each combination of the alternatives in braces: the expressions of its characters, and "" for a star."""
    choices = [
        [atoms for option in part.options for atoms in _combined(option)] if part.options else [[part.regex]]
        for part in parts
    ]
    for choice in product(*choices):
        yield list(chain.from_iterable(choice))


def _linear(atoms: Sequence[str], numbers: Iterator[int]) -> str:
    """Return an expression without backtracking for parts that take one character each, or any text for ""."""
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
    """Yield the parts of a glob without regard to braces."""
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
    """Read a class of characters; return None if no bracket closes it."""
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
    """Return the numbers of the braces that enclose alternatives, and of the commas between these.

    Braces without a comma, or that are not closed, are plain text.
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


def split(text: str) -> list[str]:
    """Split a text at the commas outside of braces and classes."""
    tokens = list(_tokens(text, path=False))
    syntax = _groups(tokens)
    parts = [""]
    for number, token in enumerate(tokens):
        if token.source == "," and number not in syntax:
            parts.append("")
        else:
            parts[-1] += token.source
    return parts


def escaped(text: str) -> str:
    """Return the glob that matches this key alone."""
    return "".join(f"[{char}]" if char in "*?[{" else char for char in text)


def _invalid(kind: str, pattern: str, at: int, why: str) -> TargetError:
    """Return the error for an invalid pattern, which shows where it is invalid."""
    where = f"at character {at + 1:,}, {quoted(pattern[at:])}" if at < len(pattern) else "at its end"
    return TargetError(f"{quoted(pattern)} is not {kind}: {why}, {where}")


class Renaming:
    """A glob and its replacement, which repeats the wildcards of the glob in their order.

    Classes and braces may be left out, if all of them are. Each wildcard takes as much text as it can, the first one
    first. Raises TargetError if the wildcards differ.
    """

    def __init__(self, old: str, new: str) -> None:
        parts, new_parts = glob_parts(old), glob_parts(new)
        wildcards = [part.source for part in parts if part.text is None]
        repeated = [part.source for part in new_parts if part.text is None]
        free = [source in ("*", "?") for source in wildcards]
        if repeated != wildcards and repeated != [source for source, kept in zip(wildcards, free) if kept]:
            message = f"{new!r} needs the wildcards of {old!r}, in their order: {' '.join(wildcards) or 'none'}"
            raise TargetError(message, next=_RENAME_STEP)
        self._new = [part.text for part in new_parts]
        self._kept = [kept or repeated == wildcards for kept in free]
        numbers = count()
        #: For each combination of alternatives the expression of the mirrored name. There each star takes as little as
        #: it can, from the last one on. So in the name each takes as much as it can, from the first one on.
        self._mirrored = [
            re.compile(_linear(atoms[::-1], numbers), re.DOTALL) for atoms in _combined(list(_marked(parts)))
        ]

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        return any(regex.fullmatch(name[::-1]) for regex in self._mirrored)

    def new_name(self, name: str) -> str:
        """Return the new name; the name itself if it does not match."""
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
    """Yield the parts with an empty group before and after each wildcard: ``a0`` and ``b0`` around the first."""
    numbers = count()
    for part in parts:
        if part.text is None:
            number = next(numbers)
            yield from (Part("", "", f"(?P<a{number}>)"), part, Part("", "", f"(?P<b{number}>)"))
        else:
            yield part

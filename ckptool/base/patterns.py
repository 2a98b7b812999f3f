"""The syntax of globs: parts, classes, braces; and renames by wildcards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from .automata import ANY, ANY_TEXT, Automaton, Chars, Choice, Concat, Node, literal
from .errors import TargetError
from .text import quoted

#: Braces within braces, and parentheses within parentheses.
MOST_NESTED: Final = 50
_RENAME_STEP: Final = "write OLD=NEW such as 'backbone.*=encoder.*'"


class Part(NamedTuple):
    """A part of a glob: as it is written, its text, None for a wildcard, and the node that matches it."""

    source: str
    text: str | None
    node: Node


def glob_parts(pattern: str, *, path: bool = False) -> list[Part]:
    """Return the parts of a glob, as it is read for keys or for paths; raise TargetError for an invalid one."""
    tokens = list(_tokens(pattern, path))
    syntax = _groups(tokens)
    parts: list[Part] = []
    #: Of each open brace its number, the parts before it, and its options so far.
    groups: list[tuple[int, list[Part], list[Node]]] = []
    for number, token in enumerate(tokens):
        if number not in syntax:
            parts.append(token)
            continue
        if token.source == "{":
            if len(groups) == MOST_NESTED:
                raise TargetError(f"{quoted(pattern)} has more than {MOST_NESTED} braces within braces")
            groups.append((number, parts, []))
        else:
            groups[-1][2].append(joined(parts))
        parts = []
        if token.source == "}":
            start, parts, options = groups.pop()
            source = "".join(part.source for part in tokens[start : number + 1])
            parts.append(Part(source, None, Choice(tuple(options))))
    return parts


def joined(parts: Iterable[Part]) -> Node:
    """Return the node for the parts one after the other."""
    return Concat(tuple(part.node for part in parts))


def _tokens(pattern: str, path: bool) -> Iterator[Part]:
    """Yield the parts of a glob without regard to braces."""
    at, in_quotes = 0, False
    while at < len(pattern):
        char = pattern[at]
        bracket = '"]' if in_quotes else '["'
        part = Part(char, char, literal(char))
        if char == "*":
            part = Part(char, None, ANY_TEXT)
        elif char == "?":
            part = Part(char, None, ANY)
        elif path and pattern.startswith(bracket, at):
            part = Part(bracket, bracket, literal(bracket))
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
        return Part(source, inside, literal(inside))
    ranges, at = [], 0
    while at < len(inside):
        is_range = inside[at + 1 : at + 2] == "-" and at + 2 < len(inside)
        low, high = inside[at], inside[at + 2 if is_range else at]
        if high < low:
            raise invalid("a glob", pattern, begin + at, f"the range {low}-{high} runs backwards")
        ranges.append((low, high))
        at += 3 if is_range else 1
    return Part(source, None, Chars(tuple(ranges), negated))


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


def invalid(kind: str, pattern: str, at: int, why: str) -> TargetError:
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
        places = [number for number, part in enumerate(parts) if part.text is None]
        wildcards = [parts[place].source for place in places]
        repeated = [part.source for part in new_parts if part.text is None]
        free = [source in ("*", "?") for source in wildcards]
        if repeated != wildcards and repeated != [source for source, kept in zip(wildcards, free) if kept]:
            message = f"{new!r} needs the wildcards of {old!r}, in their order: {' '.join(wildcards) or 'none'}"
            raise TargetError(message, next=_RENAME_STEP)
        self._new = [part.text for part in new_parts]
        self._whole = Automaton(joined(parts))
        #: For each wildcard: itself, None for a star; what follows it, mirrored; whether the new name repeats it.
        self._wildcards = [
            (
                None if source == "*" else Automaton(parts[place].node),
                Automaton(joined(parts[place + 1 :]).mirrored()),
                kept or repeated == wildcards,
            )
            for place, source, kept in zip(places, wildcards, free)
        ]
        #: The lengths of the texts before each wildcard.
        ends = [-1, *places]
        self._skips = [sum(len(part.text or "") for part in parts[a + 1 : b]) for a, b in zip(ends, places)]

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        return self._whole.matches(name)

    def new_name(self, name: str) -> str:
        """Return the new name; the name itself if it does not match."""
        if not self.matches(name):
            return name
        texts, at, backwards = [], 0, name[::-1]
        for skip, (wildcard, rest, kept) in zip(self._skips, self._wildcards):
            at += skip
            ends = None if wildcard is None else set(wildcard.ends(name, at))
            # The lengths grow, so the first place is the last one in the name.
            places = (len(name) - length for length in rest.ends(backwards))
            end = next(place for place in places if ends is None or place in ends)
            texts += [name[at:end]] if kept else []
            at = end
        repeats = iter(texts)
        return "".join(next(repeats) if text is None else text for text in self._new)

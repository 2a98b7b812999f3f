"""Regular expressions for keys: those of ``re`` that need no backtracking, read into the nodes of an automaton.

Lookarounds, backreferences, word boundaries, flags and possessive quantifiers are refused: they cannot be matched in
linear time, or not by an automaton alone.
"""

from __future__ import annotations

import re
import warnings
from typing import Final, NoReturn

from .automata import Chars, Choice, Concat, Edge, Node, Repeat, literal
from .patterns import MOST_NESTED, invalid

_CATEGORIES: Final = {
    "d": Chars(tests=(str.isdecimal,)),
    "s": Chars(tests=(str.isspace,)),
    "w": Chars((("_", "_"),), tests=(str.isalnum,)),
}
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_ANY: Final = Chars((("\n", "\n"),), negated=True)
_COUNTS: Final = re.compile(r"\{(?:(\d+)(,?)(\d*)|(,)(\d*))\}")
_SIMPLE: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CODE: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_OCTAL: Final = re.compile(r"0[0-7]{0,2}|[0-3][0-7]{2}")


def parse(pattern: str, start: int = 0) -> Node:
    """Return the node for the regular expression that begins at ``start`` of a pattern.

    Raises TargetError for an invalid one, and for one that is not supported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern[start:])
    except re.error as error:
        place = len(pattern) if error.pos is None else start + error.pos
        raise invalid("a regular expression", pattern, place, error.msg) from error
    except (OverflowError, RecursionError) as error:
        raise invalid("a regular expression", pattern, start, "it is too large") from error
    return _Parser(pattern, start).choice()


class _Parser:
    """A parser that reads a valid regular expression from left to right; ``at`` is its position."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self._depth = 0

    def refuse(self, at: int, what: str) -> NoReturn:
        raise invalid("supported as a regular expression", self.text, at, f"{what} are not")

    def skip(self, text: str) -> bool:
        """Skip this text if the rest begins with it; return whether it did."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def take(self) -> str:
        self.at += 1
        return self.text[self.at - 1]

    def choice(self) -> Node:
        """Read up to a closing parenthesis, or to the end."""
        options = [self.sequence()]
        while self.skip("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom()))
        return Concat(tuple(parts))

    def repeated(self, node: Node) -> Node:
        """Read the quantifier of a node, if there is one."""
        start, char = self.at, self.text[self.at : self.at + 1]
        counts = _COUNTS.match(self.text, self.at)
        if char in _SIMPLE:
            least, most = _SIMPLE[char]
            self.at += 1
        elif counts:
            least = int(counts[1] or 0)
            end = counts[3] or counts[5]
            most = int(end) if end else None if counts[2] or counts[4] else least
            self.at = counts.end()
        else:
            return node
        if self.skip("+"):
            self.refuse(start, "possessive quantifiers")
        self.skip("?")  # a lazy one matches the same texts
        return Repeat(node, least, most)

    def atom(self) -> Node:
        start, char = self.at, self.take()
        if char == "(":
            return self.group(start)
        if char == "[":
            return self.set()
        if char == "\\":
            return self.escape()
        if char in "^$":
            return Edge(char == "^")
        return _ANY if char == "." else literal(char)

    def group(self, start: int) -> Node:
        if self.skip("?#"):
            self.at = self.text.index(")", self.at) + 1
            return Concat()
        if self.skip("?P<"):
            self.at = self.text.index(">", self.at) + 1
        elif not self.skip("?:") and self.skip("?"):
            what = "lookarounds" if self.text[self.at] in "=!<" else "such groups, flags among them,"
            self.refuse(start, what)
        self._depth += 1
        if self._depth > MOST_NESTED:
            self.refuse(start, f"more than {MOST_NESTED} groups within groups")
        node = self.choice()
        self._depth -= 1
        self.at += 1
        return node

    def escape(self) -> Node:
        start, char = self.at - 1, self.text[self.at]
        if char.lower() in _CATEGORIES:
            self.at += 1
            node = _CATEGORIES[char.lower()]
            return node if char.islower() else node._replace(negated=True)
        if char in "AZz":
            self.at += 1
            return Edge(char == "A")
        if char in "bB":
            self.refuse(start, "word boundaries")
        if char in "123456789" and not _OCTAL.match(self.text, self.at):
            self.refuse(start, "backreferences")
        return literal(self.character())

    def character(self) -> str:
        """Read the rest of an escape sequence for one character."""
        code, octal = _CODE.match(self.text, self.at), _OCTAL.match(self.text, self.at)
        if code or octal:
            match = code or octal
            assert match
            self.at = match.end()
            return chr(int(match[0][1:], 16) if code else int(match[0], 8))
        if self.text[self.at] == "N":
            self.refuse(self.at - 1, "names of characters")
        char = self.take()
        return _CONTROLS.get(char, char)

    def set(self) -> Node:
        """Read a class of characters after its bracket."""
        negated = self.skip("^")
        ranges: list[tuple[str, str]] = []
        tests: list[Chars] = []
        first = True
        while first or self.text[self.at] != "]":
            first = False
            low = self.member()
            if isinstance(low, Chars):
                tests.append(low)
                continue
            high: str | Chars = low
            if self.text[self.at] == "-" and self.text[self.at + 1] != "]":
                self.at += 1
                high = self.member()
            assert isinstance(high, str)
            ranges.append((low, high))
        self.at += 1
        return Chars(tuple(ranges), negated, tuple(chars.includes for chars in tests))

    def member(self) -> str | Chars:
        """Read a character of a class, or an escape for several."""
        char = self.take()
        if char != "\\":
            return char
        if self.text[self.at].lower() in _CATEGORIES:
            node = self.escape()
            assert isinstance(node, Chars)
            return node
        if self.text[self.at] == "b":
            self.at += 1
            return "\b"
        return self.character()

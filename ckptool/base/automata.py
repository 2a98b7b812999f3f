"""Automata: a pattern as a tree of nodes, matched in time linear in the text, whatever the pattern and the text.

A backtracking matcher, such as that of ``re``, takes exponential time for some patterns and keys. Here all states that
the pattern can be in are followed at once, and each set of states that occurs is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from .errors import TargetError

#: States of one pattern: far more than anybody types.
_MOST_STATES: Final = 20_000
#: Transitions that are remembered: a pattern that meets more begins again.
_MOST_KNOWN: Final = 50_000


class Node(Protocol):
    """A part of a pattern."""

    def build(self, automaton: Automaton, then: int) -> int:
        """Add the states of this part, which lead to the state ``then``; return the first."""

    def mirrored(self) -> Node:
        """Return the part that matches the reversed texts."""


class Chars(NamedTuple):
    """One character: in one of the ranges, or one for which a test is true; or, negated, any other."""

    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False
    tests: tuple[Callable[[str], bool], ...] = ()

    def includes(self, char: str) -> bool:
        inside = any(low <= char <= high for low, high in self.ranges) or any(test(char) for test in self.tests)
        return inside != self.negated

    def build(self, automaton: Automaton, then: int) -> int:
        return automaton.add((then,), self)

    def mirrored(self) -> Node:
        return self


class Edge(NamedTuple):
    """The begin or the end of the text."""

    begin: bool

    def build(self, automaton: Automaton, then: int) -> int:
        return automaton.add((then,), self)

    def mirrored(self) -> Node:
        return Edge(not self.begin)


class Concat(NamedTuple):
    """Parts one after the other."""

    parts: tuple[Node, ...] = ()

    def build(self, automaton: Automaton, then: int) -> int:
        for part in reversed(self.parts):
            then = part.build(automaton, then)
        return then

    def mirrored(self) -> Node:
        return Concat(tuple(part.mirrored() for part in reversed(self.parts)))


class Choice(NamedTuple):
    """One of several parts."""

    options: tuple[Node, ...]

    def build(self, automaton: Automaton, then: int) -> int:
        return automaton.add(tuple(option.build(automaton, then) for option in self.options))

    def mirrored(self) -> Node:
        return Choice(tuple(option.mirrored() for option in self.options))


class Repeat(NamedTuple):
    """A part, ``least`` to ``most`` times, or any number of times from ``least`` on."""

    part: Node
    least: int = 0
    most: int | None = None

    def build(self, automaton: Automaton, then: int) -> int:
        if self.most is None:
            loop = automaton.add(())
            automaton.lead(loop, (self.part.build(automaton, loop), then))
            then = loop
        end = then
        for _ in range((self.most or 0) - self.least):
            then = automaton.add((self.part.build(automaton, then), end))
        for _ in range(self.least):
            before, then = then, self.part.build(automaton, then)
            if before == then:
                break  # an empty part
        return then

    def mirrored(self) -> Node:
        return self._replace(part=self.part.mirrored())


def literal(text: str) -> Node:
    """Return the node that matches this text alone."""
    return Concat(tuple(Chars(((char, char),)) for char in text))


ANY: Final = Chars(negated=True)
ANY_TEXT: Final = Repeat(ANY)


class Automaton:
    """A pattern, ready to match texts."""

    def __init__(self, pattern: Node) -> None:
        #: Of each state what it takes, None for nothing, and the states that follow. State 0 is the end.
        self._takes: list[Chars | Edge | None] = [None]
        self._targets: list[tuple[int, ...]] = [()]
        self._sets: dict[frozenset[int], _States] = {}
        self._known = 0
        first = pattern.build(self, 0)
        self._start = _States(self, [first], begin=True)

    def add(self, targets: tuple[int, ...], takes: Chars | Edge | None = None) -> int:
        """Add a state, and return its number."""
        if len(self._takes) == _MOST_STATES:
            raise TargetError(f"the pattern is too long: it has more than {_MOST_STATES:,} states")
        self._takes.append(takes)
        self._targets.append(targets)
        return len(self._takes) - 1

    def lead(self, state: int, targets: tuple[int, ...]) -> None:
        """Let a state lead to others."""
        self._targets[state] = targets

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        states = self._start
        for char in text:
            states = states[char]
        return states.accept

    def ends(self, text: Sequence[str], start: int = 0) -> Iterator[int]:
        """Yield each place at which a match that begins at ``start`` can end."""
        states = self._start
        for place in range(start, len(text)):
            if states.accept:
                yield place
            states = states[text[place]]
            if not states.members:
                return
        if states.accept:
            yield len(text)

    def reached(self, states: Sequence[int], begin: bool, end: bool) -> frozenset[int]:
        """Return the states that are reached from these without a character."""
        seen: set[int] = set()
        work = list(states)
        while work:
            state = work.pop()
            if state in seen:
                continue
            seen.add(state)
            takes = self._takes[state]
            if takes is None or (isinstance(takes, Edge) and (begin if takes.begin else end)):
                work += self._targets[state]
        return frozenset(seen)

    def after(self, members: frozenset[int], char: str) -> _States:
        """Return the states that follow when the character is taken."""
        self._known += 1
        if self._known > _MOST_KNOWN:
            self._known = 0
            for known in [*self._sets.values(), self._start]:
                known.clear()
            self._sets.clear()
        targets: list[int] = []
        for state in members:
            takes = self._takes[state]
            if isinstance(takes, Chars) and takes.includes(char):
                targets += self._targets[state]
        states = _States(self, targets)
        return self._sets.setdefault(states.members, states)


class _States(dict[str, "_States"]):
    """A set of states, and the set that each character leads to, computed when it is first asked for."""

    __slots__ = ("_automaton", "accept", "members")

    def __init__(self, automaton: Automaton, states: Sequence[int], begin: bool = False) -> None:
        self._automaton = automaton
        self.members = automaton.reached(states, begin, end=False)
        #: Whether a text that ends here matches.
        self.accept = 0 in automaton.reached(states, begin, end=True)

    def __missing__(self, char: str) -> _States:
        states = self[char] = self._automaton.after(self.members, char)
        return states

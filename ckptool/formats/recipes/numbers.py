"""The numbers of a recipe, such as how many heads there are: from a model's configuration, or from other numbers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ...base.errors import MalformedError
from ...base.lazy import regex
from ...base.text import quoted
from ...files.archives import read_object
from .names import MOST_DIGITS

#: Files beside the weights that describe a model, the most trusted first.
CONFIGURATIONS: Final = ("config.json", "params.json")
_TOKEN: Final = regex(r"\s*(?:(\d+)|([A-Za-z][A-Za-z_]*)|([-+*/()]))")
#: The largest number that is believed.
_LARGEST: Final = 1 << 40
#: Where a configuration may keep the numbers of a model, besides its top.
_INNER: Final = ("", "model", "text_config", "args", "dims", "config")


def configurations(paths: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the content of each file that describes a model, once; files with other names or contents are skipped."""
    for path in dict.fromkeys(paths):
        if os.path.basename(path) in CONFIGURATIONS and (content := read_object(path)) is not None:
            yield content


def known_numbers(
    places: Mapping[str, Sequence[str]], facts: Sequence[Mapping[str, Any]], known: Iterable[tuple[str, int]] = ()
) -> dict[str, int]:
    """Return the known numbers, those in ``facts``, and what follows: each by the first of its places that works.

    A place is a path of keys, such as "num_attention_heads"; one that counts only if another field is not false, such
    as "num_query_groups if group_query_attention"; or a formula of other numbers, such as "=e / h".
    """
    found = dict(known)
    before = -1
    while len(found) > before:
        before = len(found)
        for symbol, each in places.items():
            if symbol not in found:
                values = (_value(place, facts, found) for place in each)
                value = next((value for value in values if value is not None), None)
                # An earlier place may become known through other numbers, so formulas wait for one more round.
                if value is not None:
                    found[symbol] = value
    return found


def _value(place: str, facts: Sequence[Mapping[str, Any]], known: Mapping[str, int]) -> int | None:
    if place.startswith("=#"):
        return None  # counted in the names of the tensors
    if place.startswith("="):
        return formula(place[1:], known)
    place, _, condition = place.partition(" if ")
    value = fact(place, facts)
    held = not condition or fact(condition, facts) in (None, True)
    return value if held and type(value) is int and 0 < value < _LARGEST else None


def fact(path: str, facts: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of a field in the first configuration that has it, or None."""
    values = (_at(each, f"{inner}.{path}" if inner else path) for each in facts for inner in _INNER)
    return next((value for value in values if value is not None), None)


def described(
    fields: Mapping[str, Any], numbers: Mapping[str, int], facts: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration that ``fields`` describe, and the fields whose values are not known.

    A field is a value, or a table: ``from`` says where the value is found; ``if`` names a field of ``facts`` without
    which it is left out; ``without`` names a tensor whose absence it states.
    """
    found: dict[str, Any] = {}
    unknown = []
    for field, how in fields.items():
        if not isinstance(how, Mapping):
            found[field] = how
        elif "without" in how:
            found[field] = how["without"] not in names
        elif "if" not in how or fact(how["if"], facts):
            places = [how["from"]] if isinstance(how["from"], str) else how["from"]
            values = (formula(place[1:], numbers) if place[:1] == "=" else fact(place, facts) for place in places)
            found[field] = next((value for value in values if value is not None), None)
            unknown += [field] if found[field] is None else []
    return found, unknown


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def formula(text: str, known: Mapping[str, int]) -> int | None:
    """Return the value of a formula with + - * / and parentheses; None if a symbol is unknown or a division leaves a
    rest.

    Raise MalformedError for a text that is no formula.
    """
    tokens: list[str] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None or len(match[1] or "") > MOST_DIGITS:
            raise MalformedError(f"{quoted('=' + text)} is not a formula of numbers with + - * / ( )")
        tokens.append(match[0].strip())
        at = match.end()
    stream = iter([*tokens, ""])
    parser = _Parser(stream, known, text)
    value = parser.sum()
    if parser.token:
        raise parser.error()
    return value


def _believed(value: int) -> int | None:
    """Return a number, or None if no model has one so large."""
    return value if abs(value) < _LARGEST else None


class _Parser:
    """A formula, read from left to right; ``token`` is the next word, "" at the end."""

    def __init__(self, stream: Iterator[str], known: Mapping[str, int], text: str) -> None:
        self._stream, self._known, self._text = stream, known, text
        self._depth = 0
        self.token = next(stream)

    def error(self) -> MalformedError:
        return MalformedError(f"{quoted('=' + self._text)} is not a formula of numbers with + - * / ( )")

    def _next(self) -> str:
        token, self.token = self.token, next(self._stream, "")
        return token

    def sum(self) -> int | None:
        value = self._product()
        while self.token in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            other = self._product()
            value = None if value is None or other is None else _believed(value + sign * other)
        return value

    def _product(self) -> int | None:
        value = self._factor()
        while self.token in ("*", "/") and self.token:
            divides = self._next() == "/"
            other = self._factor()
            if value is None or other is None:
                value = None
            elif divides:
                value = None if not other or value % other else value // other
            else:
                value = _believed(value * other)
        return value

    def _factor(self) -> int | None:
        token = self._next()
        if token == "(" and self._depth < 8:
            self._depth += 1
            value = self.sum()
            self._depth -= 1
            if self._next() != ")":
                raise self.error()
            return value
        if token.isdigit():
            return int(token)
        if not token[:1].isalpha():
            raise self.error()
        return self._known.get(token)

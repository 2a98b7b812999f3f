"""The numbers of a recipe, such as how many heads there are: from a model's configuration, or from other numbers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ...base.errors import MalformedError, RefusedError
from ...base.lazy import regex
from ...base.text import join_limited, quoted
from ...files.archives import read_object
from .names import MOST_DIGITS
from .recipe import Recipe

#: Files beside the weights that describe a model, the most trusted first.
CONFIGURATIONS: Final = ("config.json", "params.json")
#: A formula, its terms, and the factors of a term.
_WORD: Final = rf"\s*(?:[0-9]{{1,{MOST_DIGITS}}}|[A-Za-z][A-Za-z_]*)\s*"
_FORMULA: Final = regex(rf"{_WORD}(?:[-+*/]{_WORD})*\Z")
_TERM: Final = regex(r"([-+]?)([^-+]+)")
_FACTOR: Final = regex(r"([*/]?)\s*(\w+)")
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
    as "num_query_groups if group_query_attention"; or a formula of other numbers, such as "=e / h", perhaps one that
    counts only where a field is false, such as "=h unless group_query_attention". Raise RefusedError if two
    configurations, or two fields of one, have different values of a number.
    """
    found = dict(known)
    for symbol, each in places.items():
        found_at = ((place, _value(place, [item], {})) for place in each if place[:1] != "=" for item in facts)
        stated = {value: place for place, value in found_at if value is not None}
        if len(stated) > 1:
            (one, first), (other, second), *_ = stated.items()
            what = f"its configuration says both {first} = {one:,} and {second} = {other:,}"
            raise RefusedError(what, next=f"correct the one that is wrong: the number of {symbol}")
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
        text, _, condition = place[1:].partition(" unless ")
        return formula(text, known) if not condition or fact(condition, facts) is False else None
    place, _, condition = place.partition(" if ")
    value = fact(place, facts)
    held = not condition or fact(condition, facts) in (None, True)
    return value if held and type(value) is int and 0 < value < _LARGEST else None


def contradicted(places: Mapping[str, Sequence[str]], known: Mapping[str, int]) -> str:
    """Return a number that differs from the formula that alone defines it, or ""."""
    for symbol, each in places.items():
        defined = symbol in known and all(place[:1] == "=" and place[1:2] != "#" for place in each)
        if defined and any(formula(place[1:], known) not in (None, known[symbol]) for place in each):
            return symbol
    return ""


def model_type(facts: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the field and the type of the model, or the class of diffusers, that each configuration states."""
    for each in facts:
        stated = ((field, each.get(field)) for field in ("model_type", "_class_name"))
        yield from ((field, value) for field, value in stated if isinstance(value, str))


def refuse_other_models(recipe: Recipe, facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise RefusedError if the configuration describes a model that a recipe does not fit."""
    leave = "leave `--to-names=` out"
    types = recipe.model_types[0]
    for field, kind in model_type(facts) if types else ():
        if kind not in types:
            what = f"its configuration says {field} = {kind!r}, and {recipe.a} is a layout of {join_limited(types)}"
            raise RefusedError(f"{what}: other models compute otherwise", next=leave)
    for why, field, unless, needed, _ in recipe.refusals:
        value = fact(field, facts) if field else None
        # ">=max_position_embeddings" fits numbers that are at least another field.
        least = [fact(each[2:], facts) for each in unless if isinstance(each, str) and each[:2] == ">="]
        reaches = type(value) is int and any(type(each) is int and value >= each for each in least)
        if value is not None and value not in unless and not reaches:
            raise RefusedError(f"{why} ({field} = {value!r}), unlike a model of {recipe.b}", next=leave)
        if value is None and needed:
            step = "give the configuration of the model in a JSON file: `--config config.json`"
            raise RefusedError(f"{field} is not known, and other values of it mean another layout", next=step)


def fact(path: str, facts: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of a field in the first configuration that has it, or None."""
    values = (_at(each, f"{inner}.{path}" if inner else path) for each in facts for inner in _INNER)
    return next((value for value in values if value is not None), None)


def described(
    fields: Mapping[str, Any], numbers: Mapping[str, int], facts: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return the configuration that ``fields`` describe, the fields whose values are not known, and the fields that
    ``facts`` lacks, with the values that they get.

    A field is a value, or a table: ``from`` says where the value is found; ``if`` names a field of ``facts`` without
    which it is left out; ``absent`` is the value otherwise, "null" for null; ``without`` names a tensor whose absence
    it states.
    """
    found: dict[str, Any] = {}
    unknown, absent = [], dict[str, Any]()
    for field, how in fields.items():
        if not isinstance(how, Mapping):
            found[field] = how
        elif "without" in how:
            found[field] = how["without"] not in names
        elif "if" not in how or fact(how["if"], facts):
            places = [how["from"]] if isinstance(how["from"], str) else how["from"]
            values = (formula(place[1:], numbers) if place[:1] == "=" else fact(place, facts) for place in places)
            found[field] = next((value for value in values if value is not None), None)
            if found[field] is None and "absent" in how:
                found[field] = absent[field] = None if how["absent"] == "null" else how["absent"]
            elif found[field] is None:
                unknown.append(field)
    return found, unknown, absent


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def formula(text: str, known: Mapping[str, int]) -> int | None:
    """Return the value of a formula of numbers and symbols with + - * /. Return None if a symbol is unknown, a division
    leaves a rest, or no model has a number so large. Raise MalformedError for a text that is no formula."""
    if not _FORMULA.match(text):
        raise MalformedError(f"{quoted('=' + text)} is not a formula of numbers with + - * /")
    total = 0
    for sign, product in _TERM.findall(text):
        value = 1
        for operator, word in _FACTOR.findall(product):
            other = int(word) if word.isdigit() else known.get(word)
            if other is None or (operator == "/" and (not other or value % other)):
                return None
            value = value // other if operator == "/" else value * other
            if abs(value) >= _LARGEST:
                return None
        total += -value if sign == "-" else value
    return total if abs(total) < _LARGEST else None

"""Recipes as TOML files: rules of names and axes on two sides, checked when they are read.

A recipe is data. It is bounded in size and number of rules, and nothing in it is run.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

from ...base import toml
from ...base.errors import MalformedError
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, quoted, words
from ...files.archives import read_bytes
from . import names
from .axes import Axes, Leaf, Tag, leaves
from .axes import parsed as parsed_axes
from .names import NamePattern

#: The hole that stands for any text, the same in all names of a rule.
_ANY: Final = "{*}"
#: The folder of the built-in recipes.
TABLES: Final = os.path.join(os.path.dirname(__file__), "tables")
#: The most bytes of a recipe, and the most rules in it once all choices are spelled out.
_MAX_BYTES: Final = 1 << 20
_MAX_RULES: Final = 10_000
_MAX_PAIRS: Final = 100_000
_KEYS: Final = words(
    "a b base source ignored rest numbers rule refuse files stacked prefixes config config_a model_types note tied"
)
_CONFIGS: Final = ("config", "config_a")
#: The lines of a head.
_HEAD: Final = regex(r'^(a|b|files) = "(.+)"$', re.M)
_EXAMPLE: Final = 'as in a = "blocks.{L}.qkv.weight : (e|e|e), i" and b = ["blocks.{L}.q.weight : e, i", ...]'
_MORE: Final = frozenset(("parts", "optional", "one_way", "where"))
_RULE_KEYS: Final = _MORE | {"a", "b"}
#: How the tensors of several parts are one tensor, other than by their axes.
PARTS: Final = {
    "one": "one part has the tensor, the others do not",
    "sum": "the whole is the sum of the parts",
    "mean": "the whole is the mean of the parts",
}


class Pattern(NamedTuple):
    """The tensors of one side of a rule: their names, and their axes, None for a tensor that only gets another name."""

    name: NamePattern
    axes: Axes | None


class Pair(NamedTuple):
    """A block of a tensor on side b, the block of side a that makes it, and the places of their patterns."""

    target: int
    into: Leaf
    source: int
    of: Leaf


class Condition(NamedTuple):
    """A tensor that a model has, or lacks, where a rule applies."""

    name: NamePattern
    there: bool


class Rule(NamedTuple):
    """Tensors on side a, and the tensors on side b that they become. ``number`` is the place in the file, from 1.

    ``loops`` are the symbols that names of both sides have: the rule applies to each of their values. Symbols in the
    names of one side only are axes of tensors on the other side. ``optional``: a model may lack these tensors;
    ``by_layer``: so may some of its layers. ``one_way``: the inverse leaves the rule out, because another one does it.
    ``where`` has a condition for side a and one for side b: the rule applies where the one for its own side holds.
    ``parts`` is a key of ``PARTS``, or "".
    """

    number: int
    a: tuple[Pattern, ...]
    b: tuple[Pattern, ...]
    optional: bool
    one_way: bool
    loops: frozenset[str]
    pairs: tuple[Pair, ...]
    by_layer: bool = False
    where: tuple[Condition | None, ...] = (None, None)
    parts: str = ""

    def reversed(self, numbers: frozenset[str]) -> Rule:
        """Return the rule from side b to side a."""
        return with_pairs(self._replace(a=self.b, b=self.a, where=self.where[::-1]), numbers)

    def with_prefix(self, prefix: str, side: int = 0) -> Rule:
        """Return the rule with a prefix before all names on side a (0) or b (1)."""
        if not prefix:
            return self
        patterns = tuple(each._replace(name=names.parsed(prefix + each.name.text)) for each in (self.a, self.b)[side])
        where, own = list(self.where), self.where[side]
        where[side] = own and own._replace(name=names.parsed(prefix + own.name.text))
        rule = self._replace(where=tuple(where))
        return rule._replace(b=patterns) if side else rule._replace(a=patterns)

    def holds(self, tensors: Container[str], known: Mapping[str, int]) -> bool:
        """Return whether the rule applies among tensors with these names."""
        own = self.where[0]
        return own is None or (own.name.filled(known) in tensors) is own.there


class Refusal(NamedTuple):
    """Models that the recipe does not fit, and why. They have a value in ``field`` of the configuration that is not in
    ``unless`` (``needed``: or lack the field), or names without a rule that the glob ``name`` fits."""

    why: str
    field: str
    unless: tuple[object, ...]
    needed: bool
    name: str


class Recipe(NamedTuple):
    """Rules from names of the family ``a`` to names of the family ``b``.

    ``numbers`` says for each number where it is found; ``ignored`` are names of either side that the other side does
    not have, with * for any text. ``rest``: tensors without a rule stay as they are, otherwise they are refused.
    ``refusals`` describe models that the recipe does not fit. ``config`` has the fields of a ``config.json`` for
    side b: values, or tables that say where a value is found. ``source`` says where the facts are from. ``files``: the
    names of the files of parts, with {p} for the number of the part. ``prefixes``: what precedes names on side a in
    files with several models; the inverse writes the first one. ``model_types`` has the types of models, as a
    ``config.json`` states them, that side a and side b describe; an empty one means any model. ``tied`` maps ignored
    names to the names of the tensors that they must be equal to. ``note`` is for the report.
    """

    a: str
    b: str
    source: str
    numbers: Mapping[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    rest: bool
    refusals: tuple[Refusal, ...]
    config: Mapping[str, Any]
    files: str
    path: str
    prefixes: tuple[str, ...] = ("",)
    config_a: Mapping[str, Any] = {}
    model_types: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    note: str = ""
    tied: Mapping[str, str] = {}

    def expanded(self, tensors: Iterable[str]) -> Recipe:
        """Return the recipe with a rule for each text that ``{*}`` stands for, and one prefix, which its rules have."""
        if self.prefixes != ("",):
            tensors = list(tensors)
            prefix = next((each for each in self.prefixes if any(name.startswith(each) for name in tensors)), "")
            prefixed = self._replace(rules=tuple(rule.with_prefix(prefix) for rule in self.rules), prefixes=("",))
            return prefixed.expanded(tensors)._replace(prefixes=(prefix,))
        if not any(_ANY in rule.a[0].name.text for rule in self.rules):
            return self
        tensors, symbols = list(tensors), frozenset(self.numbers)
        rules: list[Rule] = []
        for rule in self.rules:
            if _ANY not in rule.a[0].name.text:
                rules.append(rule)
                continue
            found = {text: None for pattern in rule.a for text in _texts_in(pattern.name, tensors)}
            for text in found:
                own, others = (
                    tuple(each._replace(name=names.parsed(each.name.text.replace(_ANY, text))) for each in side)
                    for side in (rule.a, rule.b)
                )
                rules.append(with_pairs(rule._replace(a=own, b=others), symbols))
        return self._replace(rules=tuple(rules))

    def reversed(self) -> Recipe:
        """Return the recipe from side b to side a."""
        symbols = frozenset(self.numbers)
        rules = (rule.reversed(symbols) for rule in self.rules if not rule.one_way)
        prefix = self.prefixes[0]
        # The inverse of the inverse finds its conditions under the prefix, too.
        named = (rule.with_prefix(prefix, 1) for rule in rules)
        turned = self._replace(a=self.b, b=self.a, config=self.config_a, config_a=self.config)
        return turned._replace(rules=tuple(named), prefixes=("",), model_types=self.model_types[::-1])


class Index:
    """The patterns of the rules' side a: by their names, or by the skeletons of names with holes."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._found: dict[str, list[tuple[int, int]]] = {}
        self.rules = rules
        for at, rule in enumerate(rules):
            for place, pattern in enumerate(rule.a):
                key = pattern.name.skeleton if pattern.name.sums else pattern.name.texts[0]
                self._found.setdefault(key, []).append((at, place))

    def matches(self, name: str) -> Iterator[tuple[int, int, list[int]]]:
        """Yield each fitting pattern: the indices of the rule and the pattern, and the numbers in the holes."""
        for key in dict.fromkeys((name, names.skeleton(name))):
            for at, place in self._found.get(key, ()):
                numbers = self.rules[at].a[place].name.numbers_in(name)
                if numbers is not None:
                    yield at, place, numbers


def _texts_in(pattern: NamePattern, tensors: Iterable[str]) -> Iterator[str]:
    """Yield the text for which ``{*}`` gives each name; a word behind it is whole: {*}up_proj is not gate_up_proj."""
    before, _, after = (names.parsed(part) for part in pattern.text.partition(_ANY))
    whole = r"(?<!\w)" if after.text[:1].isalnum() and not before.text[-1:].isalnum() else ""
    expression = re.compile(f"{before.expression}(?P<text>.*){whole}{after.expression}")
    for match in map(expression.fullmatch, tensors):
        if match is not None and "{" not in match["text"]:
            yield match["text"]


def read_recipe(path: str) -> Recipe:
    """Read a recipe from a TOML file; raise MalformedError, with the number of the rule, for any other file."""
    return parsed_recipe(read_bytes(path, _MAX_BYTES), path)


def parsed_recipe(text: str | bytes, path: str = "") -> Recipe:
    """Return the recipe in a text; ``path`` is for errors, which are those of ``read_recipe``."""
    data = text.encode() if isinstance(text, str) else text
    try:
        return _recipe(toml.parsed(data, path, "the recipe"), path)
    except MalformedError as error:
        error.path = path
        raise


@cache
def built_in(name: str) -> Recipe:
    """Return a built-in recipe by the name of its file; raise MalformedError for an unknown name."""
    if name not in built_in_names():
        raise MalformedError(f"there is no built-in recipe {quoted(name)}; there are {join_limited(built_in_names())}")
    return read_recipe(_path(name))


@cache
def built_in_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(name.removesuffix(".toml") for name in os.listdir(TABLES) if name.endswith(".toml"))


class Head(NamedTuple):
    """What the first lines of a built-in recipe say: its two families, and the names of files of parts, or ""."""

    a: str = ""
    b: str = ""
    files: str = ""


@cache
def built_in_heads() -> dict[str, Head]:
    """Return the head of each built-in recipe by its name, without parsing its rules."""
    heads = {}
    for name in built_in_names():
        text = read_bytes(_path(name), _MAX_BYTES).decode()
        heads[name] = Head(**dict(_HEAD.findall(text.partition("\n[")[0])))
    return heads


def _path(name: str) -> str:
    return os.path.join(TABLES, f"{name}.toml")


@cache
def built_in_both_ways(name: str) -> tuple[tuple[Recipe, Recipe], ...]:
    """Return a built-in recipe and its inverse, each with its own inverse behind it."""
    inverse = built_in(name).reversed()
    return (built_in(name), inverse), (inverse, inverse.reversed())


def _recipe(content: dict[str, Any], path: str) -> Recipe:
    unknown = sorted(content.keys() - _KEYS)
    if unknown:
        raise MalformedError(f"a recipe has no key {quoted(unknown[0])}; it has {', '.join(sorted(_KEYS))}")
    base = built_in(_text(content, "base")) if "base" in content else None
    numbers = dict(base.numbers) if base else {}
    for symbol, places in _table(content, "numbers").items():
        numbers[symbol] = (places,) if isinstance(places, str) else _texts(places, f"numbers.{symbol}")
    symbols = frozenset(numbers)
    rules = [*base.rules] if base else []
    for number, item in enumerate(_list(content, "rule"), 1):
        try:
            rules += parsed_rules(number, item, _text(content, "stacked"), symbols)
        except MalformedError as error:
            error.what = f"rule {number}: {error.what}"
            raise
        if len(rules) > _MAX_RULES or sum(len(rule.pairs) for rule in rules[-_MAX_RULES:]) > _MAX_PAIRS:
            raise MalformedError(f"a recipe has at most {_MAX_RULES:,} rules, and {_MAX_PAIRS:,} sections in them")
    ignored = (*(base.ignored if base else ()), *_texts(content.get("ignored", []), "ignored"))
    if not rules:
        raise MalformedError("it has no rule: each is a [[rule]] with a and b", next=_EXAMPLE)
    rest = content.get("rest", "keep" if base and base.rest else "refuse")
    if rest not in ("keep", "refuse"):
        raise MalformedError("rest is what becomes of tensors without a rule: keep or refuse")
    refusals = (*(base.refusals if base else ()), *map(_refusal, _list(content, "refuse")))
    families = [_text(content, side) or (getattr(base, side) if base else side) for side in ("a", "b")]
    configs = [{**(getattr(base, key) if base else {}), **_config(_table(content, key))} for key in _CONFIGS]
    return Recipe(
        a=families[0],
        b=families[1],
        source=_text(content, "source"),
        numbers=numbers,
        rules=tuple(rules),
        ignored=ignored,
        rest=rest == "keep",
        refusals=refusals,
        config=configs[0],
        files=_text(content, "files"),
        path=path,
        prefixes=_texts(content.get("prefixes", []), "prefixes") or (base.prefixes if base else ("",)),
        config_a=configs[1],
        model_types=_model_types(content, base),
        note=_text(content, "note"),
        tied={name: _text(_table(content, "tied"), name) for name in _table(content, "tied")},
    )


def _model_types(content: Mapping[str, Any], base: Recipe | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the types of models on both sides: those stated, named by families such as "hf:llama", or of the base."""
    stated = content.get("model_types", [])
    if isinstance(stated, dict):
        return _texts(stated.get("a", []), "model_types.a"), _texts(stated.get("b", []), "model_types.b")
    found = _texts(stated, "model_types")
    families = (_text(content, side).partition("hf:") for side in ("a", "b"))
    found = found or tuple(model for before, library, model in families if library and not before)
    return (found, found) if found or base is None else base.model_types


def _config(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    for field, how in fields.items():
        try:
            json.dumps(how, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise MalformedError(f"config.{field} is not a value that JSON has") from None
        if isinstance(how, dict):
            texts = (how.get("without", ""), how.get("if", ""), *_texts(how.get("from", ""), f"config.{field}.from"))
            known = {*how} & {"from", "without"} and not {*how} - {"from", "if", "absent", "without"}
            if not known or not all(isinstance(text, str) for text in texts):
                raise MalformedError(f"config.{field} is a table with from and perhaps if or absent, or with without")
    return fields


def parsed_rules(number: int, item: object, stacked: str = "", numbers: frozenset[str] = frozenset()) -> Iterator[Rule]:
    """Yield the rules of a [[rule]]: one, or one for each choice in its names, and the same for stacked layers."""
    if not isinstance(item, dict) or not {"a", "b"} <= item.keys() or item.keys() - _RULE_KEYS:
        what = f"it has a and b, each a text or a list of texts, and perhaps {', '.join(sorted(_MORE))}"
        raise MalformedError(what, next=_EXAMPLE)
    parts = _text(item, "parts")
    if parts and parts not in PARTS:
        raise MalformedError(f"parts is one of {', '.join(map(quoted, PARTS))}")
    a, b = (_texts(item[side], side) for side in ("a", "b"))
    if not a or not b:
        raise MalformedError("it needs a tensor on each side")
    optional, one_way = item.get("optional", False), item.get("one_way", False) is True
    if optional not in (True, False, "layer"):
        raise MalformedError('optional is true, or "layer" for tensors that some layers have')
    # The condition is that a tensor is there, or with "not" before its name is not.
    conditions = [_text(_table(item, "where"), side) for side in "ab"]
    where = tuple(
        Condition(names.parsed(text.removeprefix("not ")), not text.startswith("not ")) if text else None
        for text in conditions
    )
    for texts in names.choices([*a, *b]):
        patterns = tuple(map(_pattern, texts))
        own, others = patterns[: len(a)], patterns[len(a) :]
        for side, place in ((own, 0), (others, 1)):
            known = frozenset[str].intersection(*(each.name.symbols for each in side))
            condition = where[place]
            if condition is not None and condition.name.symbols - known:
                raise MalformedError("the names in where have no other holes than those on their side")
        rule = Rule(number, own, others, bool(optional), one_way, frozenset(), (), optional == "layer", where, parts)
        yield with_pairs(rule, numbers)
        if stacked and all(stacked in text for text in texts[: len(a)]):
            own = tuple(_stacked(text, stacked) for text in texts[: len(a)])
            yield with_pairs(rule._replace(a=own, one_way=True), numbers)


def _stacked(text: str, stacked: str) -> Pattern:
    """Return the pattern of all layers as one tensor: its name lacks the number, which is its first axis."""
    holes = [each.symbols for each in names.parsed(stacked).sums]
    if len(holes) != 1 or len(holes[0]) != 1:
        raise MalformedError("stacked is the part of a name with the number of a layer, as in 'layers.{L}.'")
    ((symbol,),) = holes
    name, _, axes = text.replace(stacked, stacked.replace(f"{{{symbol}}}.", "")).partition(" : ")
    return _pattern(f"{name} : {symbol}, {axes}")


def _refusal(item: object) -> Refusal:
    keys = item.keys() - {"needed"} if isinstance(item, dict) else set[str]()
    if not isinstance(item, dict) or keys not in ({"field", "unless", "why"}, {"name", "why"}):
        raise MalformedError("each [[refuse]] has why, and either name or field and unless (a list of values)")
    unless = item.get("unless", [])
    if not isinstance(unless, list):
        raise MalformedError("unless is a list of values")
    needed = item.get("needed", False) is True
    return Refusal(_text(item, "why"), _text(item, "field"), tuple(unless), needed, _text(item, "name"))


def _pattern(text: str) -> Pattern:
    name, colon, axes = text.rpartition(" : ")
    if not colon and text.endswith(" :"):
        name, colon, axes = text[:-2], ":", ""
    return Pattern(names.parsed((name if colon else text).strip()), parsed_axes(axes) if colon else None)


def with_pairs(rule: Rule, numbers: frozenset[str]) -> Rule:
    """Return a rule with its loops and pairs; raise MalformedError if the sides do not belong together."""
    a, b = rule.a, rule.b
    ours, theirs = (frozenset[str]().union(*(each.name.symbols for each in side)) - numbers for side in (a, b))
    if len({_ANY in pattern.name.text for pattern in (*a, *b)}) > 1:
        raise MalformedError("{*} stands for the same text in all names of a rule, so all have it or none")
    loops = ours & theirs
    plain = [pattern.axes is None for pattern in (*a, *b)]
    if any(plain):
        if len(plain) != 2 or not all(plain) or ours != theirs:
            raise MalformedError("a rule without axes renames one tensor; several need axes, as in 'name : o, i'")
        return rule._replace(loops=loops, pairs=())
    for side, name_axes in ((a, ours - loops), (b, theirs - loops)):
        for pattern in side:
            missing = (name_axes | loops) - pattern.name.symbols
            if missing:
                raise MalformedError(f"{quoted(pattern.name.text)} has no {{{min(missing)}}}, unlike its neighbours")
    pairs = tuple(_pairs(a, b, ours - loops, theirs - loops))
    return rule._replace(loops=loops, pairs=pairs)


def _pairs(a: Sequence[Pattern], b: Sequence[Pattern], ours: frozenset[str], theirs: frozenset[str]) -> Iterator[Pair]:
    """Pair each block of side b with the first block of side a that has the same factors."""
    free: dict[frozenset[tuple[Tag, int]], list[tuple[int, Leaf]]] = {}
    for place, pattern in enumerate(a):
        for leaf in leaves(pattern.axes or ()):
            if not leaf.is_padding:
                free.setdefault(_content(leaf, ours), []).append((place, leaf))
    for target, pattern in enumerate(b):
        for leaf in leaves(pattern.axes or ()):
            if leaf.is_padding:
                continue
            found = free.get(_content(leaf, theirs))
            if not found:
                factors = " ".join(each.symbol or str(each.number) for each in leaf.factors)
                axes = quoted(f"{pattern.name.text} : {factors}")
                raise MalformedError(f"nothing on the other side has the axes of {axes}")
            source, of = found.pop(0)
            for symbol in ours:
                if sum(each.symbol == symbol for each in leaf.factors) != 1 or not _is_outside(leaf, symbol):
                    what = f"{symbol} is in names, so it must be an axis of the other side, not inside of ( )"
                    raise MalformedError(what)
            yield Pair(target, leaf, source, of)
    left = [place for found in free.values() for place, _ in found]
    if left:
        raise MalformedError(f"nothing on the other side takes all of {quoted(a[left[0]].name.text)}")


def _content(leaf: Leaf, name_axes: frozenset[str]) -> frozenset[tuple[Tag, int]]:
    tags = Counter(leaf.tags)
    tags.update((symbol, 0, 0) for symbol in name_axes)
    return frozenset(tags.items())


def _is_outside(leaf: Leaf, symbol: str) -> bool:
    first = (each.outer + each.sections[at][:1] + each.inner for each, at in zip(leaf.axes, leaf.sections))
    return any(factor.symbol == symbol for factors in first for factor in factors)


def _text(content: Mapping[str, Any], key: str) -> str:
    return cast(str, _typed(content, key, str, "a text"))


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    return cast("list[Any]", _typed(content, key, list, f"a list: each is a [[{key}]]"))


def _table(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", _typed(content, key, dict, "a table"))


def _typed(content: Mapping[str, Any], key: str, kind: type, noun: str) -> object:
    value = content.get(key, kind())
    if not isinstance(value, kind):
        raise MalformedError(f"{key} is {noun}")
    return value


def _texts(value: object, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MalformedError(f"{key} is a text or a list of texts")
    return tuple(value)

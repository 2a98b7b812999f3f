"""The modules that LoRAs change, under two names: side a as the authors of the model call them, side b as diffusers or
transformers do.

A family is a TOML file in ``loras``. It names a recipe, whose rules for linear and convolution weights it takes, or has
rules of its own in the same language. Names with "_" in place of dots are found, too: no two modules of a family have
the same.

Sources: diffusers (``loaders/lora_conversion_utils.py``), sd-scripts (``networks/lora*.py``), musubi-tuner
(``networks/convert_lora.py``), ComfyUI (``comfy/lora.py``, ``comfy/utils.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import chain, product
from typing import Any, Final

from ...base import toml
from ...base.records import NamedTuple
from ...files.archives import read_bytes
from . import names
from .names import NamePattern
from .recipe import Condition, Rule, built_in, parsed_rules

_TABLES: Final = os.path.join(os.path.dirname(__file__), "loras")
_MAX_BYTES: Final = 1 << 16
_WEIGHT: Final = ".weight"
_ANY: Final = "{*}"


class ModuleRule(NamedTuple):
    """A module on side a, and the modules on side b that it becomes.

    ``shares`` are the relative numbers of rows of several modules on side b. ``swapped``: the halves of the rows change
    places. ``one_way``: side a is only read. ``where`` is a condition on the model, with names of side b.
    """

    a: NamePattern
    b: tuple[NamePattern, ...]
    shares: tuple[int, ...]
    swapped: bool
    one_way: bool
    where: Condition | None

    @property
    def sides(self) -> tuple[tuple[NamePattern, ...], tuple[NamePattern, ...]]:
        """The names on both sides."""
        return (self.a,), self.b


class Place(NamedTuple):
    """Where a family has a module: the rule, the side (0 or 1), the place on it, and the numbers in the name."""

    rule: ModuleRule
    side: int
    at: int
    values: Mapping[str, int]

    def names(self, side: int) -> tuple[str, ...]:
        """Return the names of the modules on a side."""
        return tuple(pattern.filled(self.values) for pattern in self.rule.sides[side])


class Family:
    """A family of models: see the TOML files.

    ``name`` is for people, ``key`` for ``lora:kohya:KEY``. ``model`` is unet, transformer, text_encoder or model (any
    other). ``kohya`` and ``comfyui`` are the sides (0 or 1) whose names these programs use. ``without`` are globs of
    modules on side b that it lacks, ``context`` the columns of the keys of its cross attention, ``text_encoders`` how
    many it has; 0 for any. ``is_usual``: if the names fit other families, too, this one is meant.
    """

    def __init__(self, key: str, content: Mapping[str, Any]) -> None:
        self.key, self.name, self.model = key, str(content["name"]), str(content["model"])
        self.kohya, self.comfyui = ("ab".index(content[name]) for name in ("kohya", "comfyui"))
        self.context, self.text_encoders = int(content.get("context", 0)), int(content.get("text_encoders", 0))
        self.is_usual = content.get("usual") is True
        self._content = content

    @cached_property
    def rules(self) -> list[ModuleRule]:
        """The rules, one for each name on side a."""
        content = self._content
        same = ({"a": text, "b": text} for text in content.get("same", ()))
        own = (parsed_rules(number, item) for number, item in enumerate((*content.get("rule", ()), *same), 1))
        every = chain(built_in(content["recipe"]).rules if "recipe" in content else (), *own)
        inner, sizes = content.get("inner", ()), content.get("sizes", {})
        return [each for rule in every for each in _module_rules(rule, inner, sizes)]

    @cached_property
    def _index(self) -> Mapping[tuple[bool, str], list[tuple[ModuleRule, int, int, NamePattern]]]:
        found: dict[tuple[bool, str], list[tuple[ModuleRule, int, int, NamePattern]]] = {}
        for rule, side in product(self.rules, (1, 0)):
            for at, pattern in enumerate(rule.sides[side] if not (rule.one_way and side) else ()):
                for dotless in (False, True):
                    known = names.parsed(pattern.text.replace(".", "_")) if dotless else pattern
                    found.setdefault((dotless, known.skeleton), []).append((rule, side, at, known))
        return found

    def places(self, module: str, *, dotless: bool) -> list[Place]:
        """Return the places of a module; ``dotless`` names have "_" for dots. Several differ in their conditions."""
        found, has = [], self._content.get("has", ())
        for rule, side, at, pattern in self._index.get((dotless, names.skeleton(module)), ()):
            values, where = pattern.values_in(module, {}), rule.where
            if values is not None and not (where and has and (where.name.filled(values) in has) is not where.there):
                found.append(Place(rule, side, at, values))
        return sorted(found, key=lambda place: -place.side)

    def lacks(self, module: str) -> bool:
        """Return whether no model of the family has this module of side b."""
        return any(fnmatchcase(module, pattern) for pattern in self._content.get("without", ()))


@cache
def families() -> Mapping[str, Family]:
    """Return the families by their keys."""
    found = {}
    for file in sorted(os.listdir(_TABLES)):
        key, path = file.removesuffix(".toml"), os.path.join(_TABLES, file)
        found[key] = Family(key, toml.parsed(read_bytes(path, _MAX_BYTES), path, "the table"))
    return found


def _module_rules(rule: Rule, inner: Sequence[str], sizes: Mapping[str, int]) -> Iterator[ModuleRule]:
    """Yield the rules between modules that a rule between tensors stands for; none for other tensors than weights."""
    texts = [pattern.name.text for pattern in (*rule.a, *rule.b)]
    replaced = [[text.removesuffix(_WEIGHT) for text in texts]]
    if _ANY in texts[0]:
        replaced = [[text.replace(_ANY, each) for text in texts] for each in inner]
    elif texts[0].endswith((".bias", _WEIGHT, "scale")) and not all(text.endswith(_WEIGHT) for text in texts):
        return
    parts, others = (
        [factors[0].symbol for factors in pattern.axes[0].sections if factors] if pattern.axes else []
        for pattern in (rule.a[0], rule.b[0])
    )
    shares = tuple(sizes.get(symbol, 1) for symbol in parts) if len(rule.b) > 1 else (1,)
    for text, *rest in replaced:
        swapped = len(rest) == 1 and parts != others
        a, *b = map(names.parsed, (text, *rest))
        yield ModuleRule(a, tuple(b), shares, swapped, rule.one_way, rule.where[1])

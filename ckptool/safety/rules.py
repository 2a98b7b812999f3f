"""The tables by which text is judged, read from ``text_rules.json`` and ``plain_keys.json`` when first needed.

A source of the libraries that read a key stands beside it; ``fixtures/generators/plain_keys.py`` makes the second file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..base.records import NamedTuple
from ..base.text import words

#: Rules whose keys have plain values in most files: a module of the library itself, a name without a repository.
_OTHERWISE_PLAIN = frozenset(("outside", "kernel", "true"))


class ActingRule(NamedTuple):
    """A key on which a ``loader`` acts, ``when`` its value is of some kind; ``known`` are harmless modules."""

    when: str
    verdict: str
    loader: str
    known: tuple[str, ...]


def table(name: str) -> dict[str, Any]:
    """Return the content of a JSON file beside this module."""
    with open(os.path.join(os.path.dirname(__file__), f"{name}.json"), encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


@cache
def _own() -> dict[str, Any]:
    return table("text_rules")


@cache
def acting_rules() -> Mapping[str, tuple[ActingRule, ...]]:
    """Return the rules for keys on which loaders act, by key."""
    acting: dict[str, tuple[ActingRule, ...]] = {}
    for row in _own()["acting_keys"]:
        rule = ActingRule(row["when"], row["verdict"], row["loader"], tuple(row.get("known", "").split()))
        acting.update({key: (*acting.get(key, ()), rule) for key in row["keys"].split()})
    return acting


@cache
def plain_keys() -> frozenset[str]:
    """Return the keys whose texts the libraries of the field only compare or show, unless an acting rule applies."""
    keys = frozenset(table("plain_keys")["keys"]).union(*map(words, _own()["keys"].values()))
    return keys | {key for key, every in acting_rules().items() if {rule.when for rule in every} <= _OTHERWISE_PLAIN}


@cache
def word_lists(part: str = "words") -> Mapping[str, frozenset[str]]:
    """Return the other lists by name: those for "words" or for the "template"."""
    return {name: words(text) for name, text in _own()[part].items()}

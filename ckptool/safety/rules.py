"""The words of a verdict on what loading a file may do, and the tables by which text is judged.

The tables are read from ``text_rules.json`` and ``plain_keys.json`` when first needed. A source of the libraries that
read a key stands beside it; ``fixtures/generators/plain_keys.py`` makes the second file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from ..base.findings import PROGRAM
from ..base.lazy import table
from ..base.records import NamedTuple
from ..base.text import words

#: Every pickle names only globals on torch's weights_only list, or there is no pickle; nothing is run.
WEIGHTS_ONLY: Final = "weights-only"
#: Something acts on the machine when it is unpickled.
UNSAFE: Final = "unsafe"
#: A pickle names something that is not on the list, or cannot be followed to its end.
UNKNOWN: Final = "unknown"
#: All verdicts, the worst first.
VERDICTS: Final = (UNSAFE, PROGRAM, UNKNOWN, WEIGHTS_ONLY)


class ActingRule(NamedTuple):
    """A key on which a ``loader`` acts if it has a ``value``, or is ``filled`` in any way, ``beside`` other keys.

    ``plain``: other texts under this key are data.
    """

    value: re.Pattern[str]
    filled: bool
    beside: frozenset[str]
    plain: bool
    verdict: str
    loader: str


@cache
def _own() -> dict[str, Any]:
    return table("safety/text_rules")


@cache
def acting_rules() -> Mapping[str, tuple[ActingRule, ...]]:
    """Return the rules for keys on which loaders act, by key."""
    acting: dict[str, tuple[ActingRule, ...]] = {}
    for row in _own()["acting_keys"]:
        how = re.compile(row["value"], re.S), row.get("filled", False), words(row.get("beside", ""))
        rule = ActingRule(*how, "otherwise" in row, row["verdict"], row["loader"])
        acting.update({key: (*acting.get(key, ()), rule) for key in row["keys"].split()})
    return acting


@cache
def plain_keys() -> frozenset[str]:
    """Return the keys whose texts the libraries of the field only compare or show, unless an acting rule applies."""
    keys = words(" ".join(table("safety/plain_keys")["keys"])).union(*map(words, _own()["keys"].values()))
    return keys | {key for key, every in acting_rules().items() if all(rule.plain for rule in every)}


@cache
def word_lists(part: str = "words") -> Mapping[str, frozenset[str]]:
    """Return the other lists by name: those for "words" or for the "template"."""
    return {name: words(text) for name, text in _own()[part].items()}

"""JSON in which a name stands once: the last of two would win silently, and another reader may take the first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["DoubledError", "strict_json"]


class DoubledError(ValueError):
    """An object has a name twice; the name is the message."""


def strict_json(text: str, parse_int: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; ``parse_int`` makes something else of an integer.

    Raises DoubledError where an object has a name twice, ValueError for what is no JSON, NaN and Infinity included, and
    RecursionError where it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_int=parse_int)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise DoubledError(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")

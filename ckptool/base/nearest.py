"""What was meant by a name or a pattern that is not there: the nearest of those that are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice, repeat
from typing import Final

from .globs import REGEX, Glob
from .limits import LIMITS
from .patterns import escaped, glob_parts
from .prefixes import common_length

#: Names that are compared letter by letter: those that begin or end most alike.
_COMPARED: Final = 500
#: Names that a pattern is tried on.
_TRIED: Final = 50_000
#: Characters that are compared: what is longer was not typed.
_TYPED: Final = 300


def nearest(wanted: str, names: Collection[str], most: int = 3) -> list[str]:
    """Return the names that are spelled most like the one wanted, the nearest first: one if it is very near."""
    short = [name for name in dict.fromkeys(names) if len(name) <= _TYPED]
    if len(wanted) > _TYPED:
        return []

    def likeness(name: str) -> int:
        return max(common_length(name, wanted), common_length(name[::-1], wanted[::-1]))

    if len(short) > _COMPARED:
        short = nlargest(_COMPARED, short, key=likeness)
    return get_close_matches(wanted, short, 1, 0.85) or get_close_matches(wanted, short, most, 0.6)


def nearest_pattern(pattern: str, keys: Iterable[str], paths: Iterable[str] = ()) -> str:
    """Return a pattern like this one that matches one of the keys, or else one of the paths; "" if there is none."""
    for names in (keys, paths):
        tried = list(islice((name for name in names if len(name) <= LIMITS.path_chars), _TRIED))
        candidates = _regexes(pattern[len(REGEX) :]) if pattern.startswith(REGEX) else _globs(pattern, tried)
        for candidate in candidates:
            if any(map(Glob(candidate).matches, tried, tried if names is paths else repeat(""))):
                return candidate
    return ""


def did_you_mean(pattern: str, keys: Iterable[str], paths: Iterable[str] = ()) -> str:
    """Return ``; did you mean ...?`` for a pattern that matches neither a key nor a path, "" if nothing is near."""
    near = nearest_pattern(pattern, keys, paths)
    return f"; did you mean {near!r}?" if near else ""


def _regexes(body: str) -> Iterator[str]:
    yield f"{REGEX}.*(?:{body})"
    yield f"{REGEX}(?:{body}).*"
    yield f"{REGEX}.*(?:{body}).*"


def _globs(pattern: str, names: Sequence[str]) -> Iterator[str]:
    parts = glob_parts(pattern)
    plain = all(part.text is not None for part in parts)
    if plain:
        yield f"{pattern}.*"
    for ending in ("", ".*") if plain else ("",):
        yield from _deeper(f"{pattern}{ending}", names)
    for at in (at for at, char in enumerate(pattern) if char == "."):
        yield f'{pattern[:at]}["{pattern[at + 1 :]}"]'  # as a path spells a key with dots
    rest = pattern
    while "." in rest:
        rest = rest.partition(".")[2]
        if rest[:1] not in ("", "*", "?", "[", "{", ".") and "}" not in rest[: rest.find("{")]:
            yield rest
    yield from _misspelled(pattern, names)


def _deeper(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the pattern behind a prefix of whole segments: the one that every match has, else any."""
    anywhere = Glob(f"*.{pattern}")
    matches = [name for name in names if anywhere.matches(name)]
    if not matches:
        return
    name, whole = matches[0], Glob(pattern)
    head = next(name[: at + 1] for at, char in enumerate(name) if char == "." and whole.matches(name[at + 1 :]))
    if all(match.startswith(head) and whole.matches(match[len(head) :]) for match in matches):
        yield escaped(head) + pattern
    yield f"*.{pattern}"


def _misspelled(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the pattern with its first segments, up to the first wildcard, replaced by similar ones."""
    head, rest = "", ""
    for part in glob_parts(pattern):
        if part.text is None or rest:
            rest += part.source
        else:
            head += part.text
    dot = len(head) if not rest else head.rfind(".")
    if dot <= 0:
        return
    head, rest = head[:dot], head[dot:] + rest
    count = head.count(".") + 1
    beginnings = {".".join(name.split(".", count)[:count]): None for name in names}
    lower = {beginning.lower(): beginning for beginning in reversed(beginnings)}
    if head.lower() in lower:
        yield escaped(lower[head.lower()]) + rest
    yield from (escaped(near) + rest for near in nearest(head, beginnings))
    if count == 1:
        for near in nearest(head, {segment: None for name in names for segment in name.split(".")}):
            yield from _deeper(escaped(near) + rest, names)

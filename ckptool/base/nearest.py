"""Suggest names and patterns close to one that matched nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice, repeat
from os.path import commonprefix
from typing import Final

from .globs import REGEX, Glob, escaped, is_pattern
from .lazy import regex
from .limits import LIMITS
from .suffixes import WEIGHTS

#: The most names to compare letter by letter; of more, those with the longest common beginning or end are compared.
_COMPARED: Final = 500
#: The most names that a suggested pattern is tried on.
_TRIED: Final = 50_000
#: The most names to compare with the name of a missing file.
_BESIDE: Final = 10_000
#: A word in a name; dots, underscores and brackets are between words.
_WORD: Final = regex(r"[^\W_]+")
#: The longest name to compare, in characters; nobody typed a longer one.
_TYPED: Final = 300


def nearest(wanted: str, names: Collection[str], most: int = 3) -> list[str]:
    """Return up to ``most`` names with the most similar spelling, nearest first.

    A very similar name is returned alone. A name that contains ``wanted``, such as ``model_ema`` for ``ema``, or is
    contained in it, comes before one that is only spelled alike. Return an empty list if nothing is similar, or
    ``wanted`` is too long.
    """
    short = [name for name in dict.fromkeys(names) if len(name) <= _TYPED]
    if len(wanted) > _TYPED:
        return []
    asked = _words(wanted)
    words = {name: _words(name) for name in short}
    containing = [name for name in short if asked and asked <= words[name]]
    containing = containing or [name for name in short if words[name] and words[name] < asked]

    def likeness(name: str) -> int:
        return max(len(commonprefix(pair)) for pair in ((name, wanted), (name[::-1], wanted[::-1])))  # noqa: RUF071

    if len(short) > _COMPARED:
        short = nlargest(_COMPARED, short, key=likeness)
    return (
        get_close_matches(wanted, short, 1, 0.85)
        or sorted(containing, key=len)[:most]
        or get_close_matches(wanted, short, most, 0.6)
    )


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(name.lower()))


def file_near(path: str) -> str:
    """Return the path of the file that a missing one may be meant for, or "".

    It is ``model.pth.tar`` or ``model.safetensors`` for ``model.pth``, otherwise a name with a similar spelling.
    """
    folder, wanted = os.path.split(path)
    try:
        with os.scandir(folder or os.curdir) as listing:
            names = sorted(entry.name for entry in islice(listing, _BESIDE))
    except OSError:
        return ""
    stem = wanted.partition(".")[0]
    longer = [name for name in names if wanted and name.startswith(f"{wanted}.")]
    longer = longer or [name for name in names if stem and name.startswith(f"{stem}.") and name.endswith(WEIGHTS)]
    near = get_close_matches(wanted, longer or names, 1, 0 if longer else 0.8)
    return os.path.join(folder, near[0]) if near else ""


def nearest_pattern(pattern: str, keys: Iterable[str], paths: Iterable[str] = ()) -> str:
    """Return a similar pattern that matches one of the keys, or else one of the paths; "" if none matches."""
    for names in (keys, paths):
        tried = list(islice((name for name in names if len(name) <= LIMITS.path_chars), _TRIED))
        for candidate in _similar(pattern, tried):
            if any(map(Glob(candidate).matches, tried, tried if names is paths else repeat(""))):
                return candidate
    return ""


def _similar(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """Yield patterns: deeper, at any depth, without the first segment, and with a first segment of similar spelling."""
    if pattern.startswith(REGEX):
        yield f"{REGEX}.*(?:{pattern[len(REGEX) :]}).*"
        return
    head, dot, rest = pattern.partition(".")
    yield from (f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
    if rest[:1] not in ("", "*"):
        yield rest
    yield from (
        escaped(near) + dot + rest
        for near in nearest(head, {name.partition(".")[0] for name in names if '"' not in name})
    )
    if not is_pattern(pattern):
        yield from map(escaped, nearest(pattern, names, 1))


def did_you_mean(pattern: str, keys: Iterable[str], paths: Iterable[str] = ()) -> str:
    """Return ``; did you mean ...?`` with a similar pattern that matches a key or a path, or "" if none does."""
    near = nearest_pattern(pattern, keys, paths)
    return f"; did you mean {near!r}?" if near else ""

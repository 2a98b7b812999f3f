"""Suggest names and patterns close to one that matched nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice, repeat
from typing import Final

from .errors import UnreadableError
from .globs import REGEX, Glob, is_pattern
from .lazy import regex
from .limits import LIMITS
from .patterns import escaped
from .prefixes import common_length
from .steps import command
from .suffixes import WEIGHTS

#: The most names to compare letter by letter; of more, those with the longest common beginning or end are compared.
_COMPARED: Final = 500
#: The most names that a suggested pattern is tried on.
_TRIED: Final = 50_000
#: The most names to compare with the name of a missing file, and the most files of a pattern that a command lists.
_BESIDE: Final = 10_000
_LISTED: Final = 50
#: Characters of globs.
_MAGIC: Final = frozenset("*?[")
#: A word in a name; dots, underscores and brackets are between words.
_WORD: Final = regex(r"[^\W_]+")
#: The longest name to compare, in characters; nobody typed a longer one.
_TYPED: Final = 300


def nearest(wanted: str, names: Collection[str], most: int = 3) -> list[str]:
    """Return up to ``most`` names with the most similar spelling, nearest first.

    A very similar name is returned alone, and a name with the same words, such as ``model_ema`` for ``ema``, before one
    that is only spelled alike. Return an empty list if nothing is similar, or ``wanted`` is too long.
    """
    short = [name for name in dict.fromkeys(names) if len(name) <= _TYPED]
    if len(wanted) > _TYPED:
        return []

    def likeness(name: str) -> int:
        return max(common_length(name, wanted), common_length(name[::-1], wanted[::-1]))

    named = _with_words(wanted, short, most)
    if len(short) > _COMPARED:
        short = nlargest(_COMPARED, short, key=likeness)
    return get_close_matches(wanted, short, 1, 0.85) or named or get_close_matches(wanted, short, most, 0.6)


def _with_words(wanted: str, names: Collection[str], most: int) -> list[str]:
    """Return up to ``most`` names that have every word of ``wanted``, shortest first, none inside another of them.

    If there are none, and ``wanted`` has no dots, return the names whose every word it has.
    """
    words = _words(wanted)
    if not words:
        return []
    split = {name: _words(name) for name in names}
    having = [name for name, each in split.items() if words <= each]
    if not having and "." not in wanted:
        having = [name for name, each in split.items() if each and each < words]
    chosen: list[str] = []
    for name in sorted(having, key=len):
        if len(chosen) == most:
            break
        if not name.startswith(tuple(f"{each}." for each in chosen)):
            chosen.append(name)
    return chosen


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(name.lower()))


def nearest_file(wanted: str, names: Sequence[str]) -> str:
    """Return the name of the file that a missing one may be meant for, or "".

    It is ``model.pth.tar`` or ``model.safetensors`` for ``model.pth``, otherwise a name with a similar spelling.
    """
    stem = wanted.partition(".")[0]
    for start, ends in ((wanted, ()), (stem, WEIGHTS)):
        longer = [
            name for name in names if start and name.startswith(f"{start}.") and (not ends or name.endswith(ends))
        ]
        if longer:
            return longer[0] if len(longer) == 1 else next(iter(get_close_matches(wanted, longer, 1, 0)), "")
    return next(iter(get_close_matches(wanted, names, 1, 0.8)), "")


def files_of(pattern: str) -> tuple[str, ...]:
    """Return the files of one folder that a glob stands for; () if there are none, or many."""
    folder, name = os.path.split(pattern)
    if not _MAGIC & {*name} or _MAGIC & {*folder}:
        return ()  # many folders would have to be searched
    from glob import iglob

    found = sorted(islice(iglob(pattern), _LISTED + 1))
    return tuple(found) if len(found) <= _LISTED else ()


def file_near(name: str) -> str:
    """Return the path of the file beside a missing one that has a similar name, or ""."""
    folder, wanted = os.path.split(name)
    try:
        with os.scandir(folder or os.curdir) as listing:
            names = sorted(entry.name for entry in islice(listing, _BESIDE))
    except OSError:
        return ""
    near = nearest_file(wanted, names)
    return os.path.join(folder, near) if near else ""


def missing_file(reason: str, name: str, near: str) -> UnreadableError:
    """Return the error for a missing file that may be meant for the file ``near``."""
    what, step = f"{reason}; is it {near!r}?", command("inspect", near)
    return UnreadableError(what, path=name, next=step)


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

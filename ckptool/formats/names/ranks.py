"""Names of rank files: which files of a folder differ only in a rank number."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Final, TypeVar

from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.suffixes import TORCH
from ...files.folders import Folder

_RANK: Final = regex(r"(?<![a-z])rank[_.-]?(\d{1,6})(?!\d)", re.I)
_WORLD: Final = regex(r"(?<![a-z])world[_.-]?size[_.-]?(\d{1,6})(?!\d)", re.I)
_NUMBER: Final = regex(r"(?<!\d)\d{1,6}(?!\d)")
#: Numbers with this many digits or more are not ranks.
_DIGITS: Final = 7
#: The most ranks that are believed and checked for completeness.
MAX_RANKS: Final = 1 << 16
#: Separators between the parts of a name.
_BETWEEN: Final = "_.- "

_Key = TypeVar("_Key", bound=Hashable)


class StepFolder(NamedTuple):
    """The folder of one training step, its names, and the parent folder whose file names it as the latest (None if the
    user named the step folder)."""

    folder: Folder
    names: frozenset[str]
    above: Folder | None


class RankSet(NamedTuple):
    """Files that differ in one number, by that number.

    ``label`` is the rest of the name ("optim" for ``optim_world_size_4_rank_0.pt``). ``world`` is the number of ranks
    in the name, 0 if it has none. ``named``: the name calls the number a rank. ``template`` is the name with NUL in
    place of the number. ``twice`` are pairs of files with the same number.
    """

    label: str
    world: int
    named: bool
    files: dict[int, str]
    template: str
    twice: tuple[tuple[str, str], ...] = ()

    def name_of(self, number: int) -> str:
        """Return the file name of a rank, whether or not it exists."""
        before, _, after = self.template.partition("\0")
        first = next(iter(self.files.values()))
        return with_number(first, len(before), len(first) - len(after), number)

    @property
    def pattern(self) -> str:
        """The file name with ``*`` in place of the number."""
        return self.template.replace("\0", "*")

    def rank_of(self, root: str, number: int) -> int:
        """Return the number in the name under which a file was saved, which torch records as the archive's folder.

        ``root`` is that folder; ``number`` is returned if it has none.
        """
        before, _, after = os.path.splitext(self.template)[0].partition("\0")
        middle = root.removeprefix(before).removesuffix(after)
        digits = middle.isascii() and middle.isdigit() and len(middle) < _DIGITS
        return int(middle) if digits and root == before + middle + after else number


def with_number(name: str, begin: int, end: int, number: int) -> str:
    """Return a name with another number between two of its characters, with leading zeros if it has some there."""
    return f"{name[:begin]}{number:0{end - begin if name[begin] == '0' else 1}d}{name[end:]}"


def by_number(pairs: Iterable[tuple[_Key, str]]) -> tuple[dict[_Key, str], list[tuple[str, str]]]:
    """Return files by number (the first one in name order), and the pairs of files with the same number, such as
    ``mp_rank_0`` and ``mp_rank_00``."""
    files: dict[_Key, str] = {}
    ordered = sorted(pairs, key=lambda pair: pair[1])
    firsts = [files.setdefault(number, name) for number, name in ordered]
    return files, [(first, name) for first, (_, name) in zip(firsts, ordered) if first != name]


def numbered(pattern: re.Pattern[str], names: Iterable[str]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (the numbers in it, name) for each name that the pattern matches, if all its numbers may be ranks."""
    for match in filter(None, map(pattern.match, names)):
        groups = [group for group in match.groups() if group is not None]
        if all(len(group) < _DIGITS for group in groups):
            yield tuple(map(int, groups)), match[0]


def rank_sets(names: Collection[str]) -> list[RankSet]:
    """Return the sets of files whose names say "rank", in name order."""
    templates: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(torch_files(names)):
        match = _RANK.search(name)
        if match:
            template = name[: match.start(1)] + "\0" + name[match.end(1) :]
            templates.setdefault(template, []).append((int(match[1]), name))
    sets = []
    for template, pairs in templates.items():
        files, twice = by_number(pairs)
        world = _WORLD.search(template)
        label, ranks = _label(_RANK_WORD.sub("\0", _WORLD.sub("\0", template))), int(world[1]) if world else 0
        sets.append(RankSet(label, ranks, True, dict(sorted(files.items())), template, tuple(twice)))
    return sets


_RANK_WORD: Final = regex(r"(?<![a-z])rank[_.-]?\0", re.I)


def numbered_sets(names: Collection[str]) -> list[RankSet]:
    """Return the sets of at least two files that differ in one number, large sets first.

    Such names may mean anything: only the content of the files decides.
    """
    templates: dict[str, dict[int, str]] = {}
    for name in sorted(torch_files(names)):
        for match in _NUMBER.finditer(name):
            template = name[: match.start()] + "\0" + name[match.end() :]
            templates.setdefault(template, {})[int(match[0])] = name
    sets = []
    for template, files in templates.items():
        if len(files) > 1:
            sets.append(RankSet(_label(template), 0, False, dict(sorted(files.items())), template))
    return sorted(sets, key=lambda rank_set: -len(rank_set.files))


def mates(names: Collection[str], among: Collection[str]) -> set[str]:
    """Return the files in a folder, ``among``, whose set contains at least two of ``names``."""
    sets = [*rank_sets(among), *numbered_sets(among)]
    files = [set(rank_set.files.values()) for rank_set in sets]
    return {name for own in files if len(own.intersection(names)) > 1 for name in own}


def torch_files(names: Collection[str]) -> Iterator[str]:
    """Yield the names with a suffix of ``torch.save`` files, without hidden files."""
    return (name for name in names if name.endswith(TORCH) and not name.startswith("."))


def _label(template: str) -> str:
    stem = next(
        template.removesuffix(suffix) for suffix in sorted(TORCH, key=len, reverse=True) if template.endswith(suffix)
    )
    return "_".join(part for piece in stem.split("\0") if (part := piece.strip(_BETWEEN)))

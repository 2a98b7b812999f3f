"""Numbers in file names: the files of a folder that differ only in a rank number, and the parts of a checkpoint.

Sources: Meta's llama (``consolidated.NN.pth``), torchtune (``FormattedCheckpointFiles`` and ``hf_model_NNNN_E.pt``),
DeepSeek-V3 (``inference/convert.py``), nanotron (``serialize/utils.py``), metaseq (``reshard_mp.py``), fairseq
(``-shardN``), GPT-NeoX (``layer_LL-model_NN-model_states.pt``), vLLM (``sharded_state_loader.py``), huggingface_hub
(``-NNNNN-of-NNNNN``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Final, TypeVar

from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.suffixes import TORCH, WEIGHTS
from ...files.folders import Folder

_RANK: Final = regex(r"(?<![a-z])rank[_.-]?(\d{1,6})(?!\d)", re.I)
_WORLD: Final = regex(r"(?<![a-z])world[_.-]?size[_.-]?(\d{1,6})(?!\d)", re.I)
_NUMBER: Final = regex(r"(?<!\d)(\d{1,6})(?!\d)")
#: Numbers with this many digits or more are not ranks or parts.
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
        ``root`` is that folder; ``number`` is returned if it has none."""
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
    sets = []
    for template, pairs in _templates(names, _RANK, 1).items():
        files, twice = by_number(pairs)
        world = _WORLD.search(template)
        label, ranks = _label(_RANK_WORD.sub("\0", _WORLD.sub("\0", template))), int(world[1]) if world else 0
        sets.append(RankSet(label, ranks, True, dict(sorted(files.items())), template, tuple(twice)))
    return sets


_RANK_WORD: Final = regex(r"(?<![a-z])rank[_.-]?\0", re.I)


def numbered_sets(names: Collection[str]) -> list[RankSet]:
    """Return the sets of at least two files that differ in one number, large sets first. Such names may mean anything:
    only the content of the files decides."""
    sets = []
    for template, pairs in _templates(names, _NUMBER).items():
        files = dict(pairs)
        if len(files) > 1:
            sets.append(RankSet(_label(template), 0, False, dict(sorted(files.items())), template))
    return sorted(sets, key=lambda rank_set: -len(rank_set.files))


def _templates(
    names: Collection[str], number: re.Pattern[str], most: int | None = None
) -> dict[str, list[tuple[int, str]]]:
    """Return (number, name) by template, for the first ``most`` numbers in each name."""
    templates: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(torch_files(names)):
        for match in islice(number.finditer(name), most):
            template = name[: match.start(1)] + "\0" + name[match.end(1) :]
            templates.setdefault(template, []).append((int(match[1]), name))
    return templates


def mates(names: Collection[str], among: Collection[str]) -> set[str]:
    """Return the files in a folder, ``among``, whose set contains at least two of ``names``."""
    sets = [*rank_sets(among), *numbered_sets(among)]
    files = [set(rank_set.files.values()) for rank_set in sets]
    return {name for own in files if len(own.intersection(names)) > 1 for name in own}


def torch_files(names: Collection[str]) -> Iterator[str]:
    """Yield the names with a suffix of ``torch.save`` files, without hidden files."""
    return (name for name in names if name.endswith(TORCH) and not name.startswith("."))


def _label(template: str) -> str:
    stem = template.removesuffix(max(filter(template.endswith, TORCH), key=len))
    return "_".join(part for piece in stem.split("\0") if (part := piece.strip(_BETWEEN)))


#: How parts relate: slices of the same tensors, or shards with different tensors. ``RANKS`` and ``NUMBERED`` are
#: undecided by name: ranks with the same tensors have slices, numbered files with the same tensors are each complete.
SLICES, SHARDS, RANKS, NUMBERED = "slices", "shards", "ranks", "numbered"


class _Scheme(NamedTuple):
    """A naming scheme for parts: ``mark`` matches the groups ``number`` and, where names have it, ``of`` (the total).
    ``first`` is the lowest number."""

    mark: re.Pattern[str]
    first: int
    kind: str


_SCHEMES: Final = (
    (r"(?<![a-z])[a-z]{2}[-_.]?rank[-_.]?(?P<number>\d{1,6})[-_]of[-_](?P<of>\d{1,6})(?!\d)", 0, SLICES),
    (r"\Aconsolidated\.(?P<number>\d\d)(?!\d)", 0, SLICES),
    (r"\Amodel(?P<number>\d{1,6})-mp(?P<of>\d{1,6})(?!\d)", 0, SLICES),
    (r"model_part-(?P<number>\d{1,6})(?!\d)", 0, SLICES),
    (r"\Alayer_\d{1,6}-model_(?P<number>\d{1,6})-model_states", 0, SLICES),
    (r"\Ashard-(?P<number>\d{5})-model-\d{5}-of-\d{5}", 1, SLICES),
    (r"\Ahf_model_(?P<number>\d{4})_\d+(?!\d)", 1, SHARDS),
    (r"[-_.](?P<number>\d{3,6})[-_]of[-_](?P<of>\d{3,6})(?!\d)", 1, SHARDS),
    (r"[-_.](?P<number>\d{1,2})[-_]of[-_](?P<of>\d{1,2})(?!\d)", 1, NUMBERED),
    (r"(?<![a-z])rank[-_.]?(?P<number>\d{1,6})(?!\d)", 0, RANKS),
    (r"(?<![a-z])(?:shard|part)[-_.]?(?P<number>\d{1,6})(?!\d)", 0, RANKS),
)


class NamedParts(NamedTuple):
    """The numbered files of one checkpoint: ``files`` by number, and ``every`` number that should exist. ``kind`` says
    how the parts relate. ``missing`` are the names of the missing files."""

    files: Mapping[int, str]
    every: range
    kind: str
    missing: Sequence[str]


def keeps_number(output: str, path: str) -> bool:
    """Return whether an output's name has the same part number as ``path``, such as ``consolidated.00``."""
    own, its = ({match[0] for _, match in marks(os.path.basename(name))} for name in (path, output))
    return own <= its if own else False


#: Each of these marks contains one of these words, in any case. Most names have none.
_WORDS: Final = ("rank", "consolidated", "model", "shard", "part", "of")


@cache
def _schemes() -> tuple[_Scheme, ...]:
    """Return the naming schemes; compiled on first use, because most names have no number."""
    return tuple(_Scheme(re.compile(mark, re.I), first, kind) for mark, first, kind in _SCHEMES)


def marks(name: str) -> Iterator[tuple[_Scheme, re.Match[str]]]:
    """Yield (scheme, match) for each part number in a name."""
    lower = name.lower()
    may_be_part = name.endswith(WEIGHTS) and (any(word in lower for word in _WORDS) or not name.isascii())
    for scheme in _schemes() if may_be_part else ():
        for match in scheme.mark.finditer(name):
            if int(match.groupdict().get("of") or 2) > 1:
                yield scheme, match


def named_parts(name: str, names: Collection[str]) -> NamedParts | None:
    """Return the parts among ``names`` that belong with the file ``name``, which is one of them. Returns None if the
    name has no part number, or has the first number and no other parts exist."""
    for scheme, match in marks(name):
        before, after = name[: match.start("number")], name[match.end("number") :]
        files = {int(match["number"]): name}
        for other in sorted(names):
            middle = other[len(before) : len(other) - len(after)]
            same = other.startswith(before) and other.endswith(after)
            if same and middle.isascii() and middle.isdigit() and len(middle) < _DIGITS:
                files.setdefault(int(middle), other)
        parts = _parts(scheme, match, files)
        if parts is not None:
            return parts
    return None


def _parts(scheme: _Scheme, match: re.Match[str], files: Mapping[int, str]) -> NamedParts | None:
    """Return the parts with these files, or None if one file with the first number is all."""
    of = match.groupdict().get("of")
    first = min(scheme.first, *files)
    last = max(*files, int(of) - 1 + first if of else 0)
    if last == first and not of:
        return None
    every = range(first, last + 1)
    absent = islice((number for number in every if number not in files), LIMITS.listed)
    missing = [with_number(match.string, *match.span("number"), number) for number in absent]
    return NamedParts(dict(sorted(files.items())), every, scheme.kind, missing)


def shards_of_folder(names: Collection[str]) -> list[NamedParts]:
    """Return the sets of shards among file names; the set with the highest number is last."""
    sets: dict[str, tuple[_Scheme, re.Match[str], dict[int, str]]] = {}
    weights = (name for name in names if name.endswith(WEIGHTS))
    marked = [(name, found) for name in weights if (found := list(marks(name)))]  # few of many names have a number
    for name, found in sorted(marked, key=lambda item: _natural(item[0])):
        if any(scheme.kind != SHARDS for scheme, _ in found):
            continue  # a shard of one rank's slices is not a shard of the whole
        for scheme, match in found:
            template = name[: match.start("number")] + "\0" + name[match.end("number") :]
            sets.setdefault(template, (scheme, match, {}))[2].setdefault(int(match["number"]), name)
    every = (_parts(*parts) for parts in sets.values())
    return [parts for parts in every if parts is not None]


def _natural(name: str) -> list[str]:
    """Return a sort key that puts 9 before 10."""
    return [f"{len(part):06d}{part}" if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def join_advice(parts: NamedParts) -> str:
    """Return a message on how the parts become one checkpoint."""
    if parts.kind == SHARDS:
        return "all parts together are the checkpoint"
    return "each part has slices of the tensors, and joining them takes a recipe for the model"

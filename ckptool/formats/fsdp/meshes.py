"""Folders of ``torch.save`` files written by the ranks of a mesh, with FSDP, tensor parallelism, or both.

The tensors record their place: DTensors of FSDP2 and tensor parallelism, ShardedTensors of FSDP1. Sources:
torch/distributed/tensor/placement_types.py, torch/distributed/fsdp/_state_dict_utils.py. File names:
accelerate/utils/fsdp_utils.py (``save_fsdp_model``), verl/utils/checkpoint/fsdp_checkpoint_manager.py.

Files may also be named by a pattern, which is the path of their checkpoint: with one ``*``, or one list like ``{0,2}``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from fnmatch import translate
from itertools import islice, takewhile
from typing import Final

from ...base.errors import CkptoolError, MalformedError
from ...base.findings import DAMAGED, FLAT_MESSAGE, FLAT_PARAMETERS, INCOMPLETE, INNER, OTHER_FILES, RANK_SETS, Finding
from ...base.steps import command
from ...base.text import join_limited, pluralize
from ...checkpoint.container import RankSave
from ...checkpoint.objects import mapping
from ...checkpoint.sharding import Mesh, ShardingSummary, read_mesh_ranks, sharding_summary
from ...checkpoint.survey import survey
from ...checkpoint.tensors import TensorReader
from ...files.folders import Folder, open_folder
from ...files.sources import FolderSource
from ...files.zips.reader import read_archive
from ...pickles.nodes import Ref
from .. import folder_format, may_be_pattern, read_container
from ..folders import opening
from ..joined import RankFile, RankFiles, lost_ranks
from ..names.hf import model_files
from ..names.numbered import RankSet, mates, numbered_sets, rank_sets, torch_files
from .merging import Merge

#: Files of a set that are tried until one can be read.
_TRIED: Final = 4
_MAX_RANKS: Final = 1 << 20
#: Names in a folder that are examined for other checkpoints.
_MOST_NAMES: Final = 4096
#: Files of a set whose ranks are read when some files may be missing.
_COMPARED: Final = 64
#: The most sets that are examined: a folder may have thousands of numbered files.
_MOST_SETS: Final = 64
#: Bytes of a pickle that are searched for class names; they appear with its first tensor.
_SEARCHED: Final = 4 << 20
_CLASSES: Final = (b"ShardedTensor", b"DTensor")
#: Keys in the states of optimizers and schedulers.
_TRAINING: Final = (b"param_groups", b"last_epoch")
#: Finding code: rank files are missing, but the other files have everything they held.
ABSENT_COPIES: Final = "absent-copies"
_CONFIG: Final = "fsdp_config.json"
#: verl's folder with the model's configuration and tokenizer.
_MODEL: Final = "huggingface"


class Meshes(RankFiles):
    """Rank files whose tensors record their place. With several sets, each is an entry of the whole, under its
    label."""

    format = "rank-files"

    def __init__(self, folder: Folder, sets: Sequence[RankSet], stack: ExitStack) -> None:
        super().__init__(folder)
        merges = []
        saved = {os.path.splitext(name)[0]: name for rank_set in sets for name in rank_set.files.values()}
        #: The problems that concern everything. The problems of one set concern only its tensors.
        foreign: list[Finding] = []
        for rank_set in sets:
            merge = Merge(self, rank_set.label if len(sets) > 1 else "")
            self.problems = merge.problems
            self.note_twice(rank_set.twice)
            bare: list[tuple[RankFile, int]] = []
            for number, name in rank_set.files.items():
                file = self.open_file(name, stack)
                if file is not None:
                    named = saved.get(file.container.root, name)
                    what = f"{name} was saved under the name of {named}"
                    if named != name and named in rank_set.files.values():  # the tensors record the rank
                        self.note("renamed", "warning", what, name)
                    elif named != name:
                        self.note_lost(f"{what}: it is in the place of another", name)
                    rank = rank_set.rank_of(file.container.root, number)
                    if mapping(file.graph, file.graph.root) is None:
                        bare.append((file, rank))
                    else:
                        merge.add(file, rank)
            self.problems = foreign if merge.ranks else merge.problems
            for file, rank in bare:
                if self.problems is foreign:
                    self.note_lost(f"{file.name} holds no dict, and the other files of its set do", file.name)
                else:
                    merge.add(file, rank)
            merges.append(merge)
        if not any(merge.ranks for merge in merges):
            raise self.errors[0]
        meshes = {mesh: None for merge in merges for mesh in merge.meshes}
        highest = (rank + 1 for mesh in meshes for rank in mesh.members)
        world = max([0, *highest, *(mesh.ranks for mesh in meshes), *(rank_set.world for rank_set in sets)])
        for rank_set, merge in zip(sets, merges):
            self.problems = merge.problems
            self._find_absent(rank_set, merge, meshes, world)
        complete = not any(merge.absent or merge.odd for merge in merges)
        in_order = complete and {mesh.shape for mesh in meshes} == {(len(sets[0].files),)}
        # A rank may hold no part of a parameter, and then no state for it either.
        sizes = {size for merge in merges for size in merge.parameters}
        roots: list[tuple[str, Ref]] = []
        placed = foreign
        for rank_set, merge in zip(sets, merges):
            before = set(self._tensors)
            built: list[Finding] = []
            self.problems = built
            roots += [(merge.label, merge.build(in_order, sizes))] if merge.ranks else []
            self.problems = merge.problems
            lost = any(self._tensors[key] is None for key in self._tensors.keys() - before)
            # A mesh with fewer ranks is one of several: the others may hold tensors that no file here names.
            everywhere = {mesh.ranks for mesh in merge.meshes} == {merge.world}
            whole = merge.is_sure and everywhere and not (lost or merge.odd or self.problems)
            self._note_absent(rank_set, merge, whole)
            grafted = (key for key, (name, _, _) in self._grafted.items() if name in rank_set.files.values())
            storages = frozenset((*(self._tensors.keys() - before), *grafted))
            # A damaged pickle may have lost storages and other values.
            placed += [
                problem._replace(storages=None if problem.code == DAMAGED else problem.storages or storages)
                for problem in (*merge.problems, *built)
            ]
        self.problems = placed
        self.build(self.builder.mapping(roots) if len(sets) > 1 else roots[0][1])
        ranks = max(merge.world for merge in merges) or len(sets[0].files)
        self._note_meshes(merges, meshes, ranks)
        spread = [merge.is_optimizer for merge in merges if merge.parts]
        #: Whether all that is spread over the ranks is the state of an optimizer.
        self.only_optimizer = bool(spread) and all(spread)
        step = next((merge.step for merge in merges if merge.step), None)
        self.rank_save = RankSave(ranks, step[1] if step and "epoch" not in step[0] else None)
        kinds = join_limited(list(dict.fromkeys(kind for merge in merges for kind in merge.kinds)))
        over = join_limited(list(dict.fromkeys(mesh.words for mesh in meshes)), most=3)
        numbers = f"{pluralize(len(self.files), 'file')}, {pluralize(sum(merge.parts for merge in merges), 'part')}"
        state = self.completeness if complete else "incomplete"
        self.writer = (
            f"{kinds} over {over}{f', {step[0]} {step[1]}' if step else ''}:"
            f" {numbers} of {pluralize(ranks, 'rank')}, {state}"
        )
        if any(merge.flat for merge in merges):
            self.note(FLAT_PARAMETERS, "warning", FLAT_MESSAGE)

    def _note_meshes(self, merges: Sequence[Merge], meshes: Collection[Mesh], ranks: int) -> None:
        unordered = next((merge.unordered for merge in merges if merge.unordered), None)
        if unordered is not None:
            mesh, name = unordered
            order = join_limited(list(map(str, mesh.members)), most=8)
            what = f"the mesh in {name} has its ranks in the order {order}: parts are joined in this order, as DCP does"
            self.note("mesh-order", "warning", f"{what}; full_tensor() of torch joins them in the order of the ranks")
        whole = max((mesh.world for mesh in meshes), default=0)
        if whole > ranks and any(mesh.outer for mesh in meshes):
            outer = join_limited(list(dict.fromkeys(name for mesh in meshes for name in mesh.outer)))
            what = f"the mesh is part of one of {whole:,} ranks, which has {outer} as well"
            self.note("part-of-mesh", "warning", f"{what}: others may have more tensors")

    def _find_absent(self, rank_set: RankSet, merge: Merge, meshes: Collection[Mesh], world: int) -> None:
        strays = merge.without if merge.parts else {}
        for name in strays.values():
            self.note_lost(f"{name} has no part of a tensor, and the others of its set do", name)
        ranks = {rank for rank in merge.ranks if rank >= 0}.difference(strays)
        numbers = rank_set.files.keys() - strays.keys()
        twice = [names for rank, names in merge.ranks.items() if rank >= 0 and len(names) > 1]
        for names in twice:
            self.note_lost(f"{join_limited(names)} are of one rank: one was put in the place of another", names[1])
        expected = _expected(rank_set, meshes, world, (*ranks, *numbers) if rank_set.named else ())
        there = {*rank_set.files, *ranks} if rank_set.named else merge.named_ranks or expected
        merge.world, merge.absent = len(expected), sorted(expected - there)
        merge.odd = bool(twice or strays) or sum(map(len, merge.ranks.values())) < len(rank_set.files)

    def _note_absent(self, rank_set: RankSet, merge: Merge, whole: bool) -> None:
        """Report ranks without a file. ``whole``: the other files have everything these ranks held."""
        if merge.absent:
            name_of = rank_set.name_of if rank_set.named else "rank {}".format
            what = lost_ranks(pluralize(merge.world, "rank"), merge.absent, name_of)
            name = rank_set.name_of(merge.absent[0]) if rank_set.named else ""
            if whole:
                self.note(ABSENT_COPIES, "warning", f"{what}; the other files have all parts of every tensor", name)
            else:
                self.note_lost(what, name)


def _expected(rank_set: RankSet, meshes: Collection[Mesh], world: int, numbers: Collection[int]) -> set[int]:
    """Return the ranks that saved a set, by file names or else by the meshes. All stages of a pipeline are expected.
    Any other mesh within a larger one may have been saved alone, because the rest of the larger mesh holds copies."""
    members = {rank for mesh in meshes for rank in mesh.members}
    stages = [mesh.world for mesh in meshes if mesh.is_of_stage]
    if not rank_set.world and members and not stages and all(mesh.outer for mesh in meshes):
        return members
    count = rank_set.world or max([world, *stages, *(number + 1 for number in numbers)])
    return members.union(range(min(count, _MAX_RANKS)))


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether there are rank files whose tensors are spread over ranks."""
    return bool(_sets(folder, names))


def _sets(folder: Folder, names: Collection[str]) -> list[RankSet]:
    sets = rank_sets(names)[:_MOST_SETS]
    spread = [rank_set for rank_set in sets if _mentions(folder, rank_set, _CLASSES)]
    if not spread:
        return _labelled(_numbered(folder, names))
    first = spread[0]
    others = set(names).difference(*(rank_set.files.values() for rank_set in sets))
    ranks = max((rank_set.files.keys() for rank_set in spread), key=len)
    # Files without spread tensors, such as optimizer files, may belong to the same save.
    alike = [own for own in sets if own.world == first.world]
    few = [own for own in alike if own.files.keys() <= ranks and (len(own.files) > 1 or len(ranks) == 1)]
    sets = [own for own in sets if own in spread or own in (alike if first.world else few)]
    sets += [rank_set._replace(world=first.world) for rank_set in _numbered(folder, others, first.files.keys())]
    of_one = all(rank_set.world for rank_set in sets) or all(rank_set.files.keys() <= ranks for rank_set in spread)
    return _labelled(sets) if of_one else []


def _numbered(folder: Folder, names: Collection[str], like: Collection[int] | None = None) -> list[RankSet]:
    """Return sets of numbered files of one save: mesh ranks, and training states with the same numbers. Next to files
    named as ranks, with the numbers ``like``, training states alone are enough."""
    sets: list[RankSet] = []
    taken: set[str] = set()
    every = numbered_sets(names)[:_MOST_SETS]
    for wanted in (_CLASSES, _TRAINING):
        for rank_set in every:
            own, numbers = set(rank_set.files.values()), rank_set.files.keys()
            if wanted is _CLASSES:  # numbers may be missing: the tensors record their rank
                alike = like is None or not numbers.isdisjoint(like)
            else:
                alike = like is not None and numbers <= {*like}
            if not alike or not taken.isdisjoint(own) or not _mentions(folder, rank_set, wanted):
                continue
            if wanted is _TRAINING or _is_one_save(folder, rank_set):
                sets.append(rank_set)
                taken |= own
                like = rank_set.files.keys()
    return sorted(sets, key=lambda rank_set: rank_set.template)


def _labelled(sets: list[RankSet]) -> list[RankSet]:
    labels = [rank_set.label for rank_set in sets]
    return [
        rank_set if labels.count(rank_set.label) == 1 else rank_set._replace(label=rank_set.template.replace("\0", "N"))
        for rank_set in sets
    ]


def _mentions(folder: Folder, rank_set: RankSet, words: Sequence[bytes]) -> bool:
    return any(_has_word(folder, name, words) for name in islice(rank_set.files.values(), _TRIED))


def _has_word(folder: Folder, name: str, words: Sequence[bytes]) -> bool:
    try:
        with closing(folder.open(name)) as source:
            at, size = 0, source.size
            if source.read(0, 4) == b"PK\x03\x04":
                archive = read_archive(source)
                record = archive.find("data.pkl")
                _, at, size = archive.payload(record) if record else (source, 0, 0)
            data = source.read(at, min(size, _SEARCHED))
    except CkptoolError:
        return False
    return any(word in data for word in words)


def _is_one_save(folder: Folder, rank_set: RankSet) -> bool:
    """Return whether numbered files are from several ranks of one mesh, not from one rank at several times."""
    names = list(rank_set.files.values())
    ends = [_summary(folder, name) for name in (names[0], names[-1])]
    named = all(end is not None and end.expected == len(names) for end in ends)
    if named and len({rank for end in ends if end for rank in end.ranks}) != 1:
        return True  # read two files of thousands
    summaries = [found for name in names[:_COMPARED] if (found := _summary(folder, name))]
    ranks = [rank for found in summaries for rank in found.ranks]
    if any(len(found.ranks) != 1 for found in summaries):
        return False
    members = {rank for found in summaries for mesh in found.meshes for rank in mesh.members}
    most = max([len(members), *(found.expected for found in summaries)])
    return len(names) <= most and (len(set(ranks)) > 1 or len(ranks) == 1 < len(names) == most)


def _summary(folder: Folder, name: str) -> ShardingSummary | None:
    try:
        with closing(folder.open(name)) as source:
            container = read_container(source)
            reader = TensorReader(container.graph)
            read_mesh_ranks(container, reader)
            return sharding_summary(reader, survey(container.graph, reader).tensors)
    except CkptoolError:
        return None


def read(folder: Folder) -> tuple[FolderSource, Meshes]:
    """Open a folder of rank files; raise MalformedError if none of its files can be read."""
    source, container = read_files(folder.path, folder, folder.names(strict=True))
    if container.only_optimizer:
        what = "the rank files here hold the state of an optimizer, and no file holds the model"
        container.problems.append(Finding(INCOMPLETE, "error", what))
    return source, container


def read_files(path: str, folder: Folder, names: Collection[str]) -> tuple[FolderSource, Meshes]:
    """Open some files of a folder as the checkpoint ``path``; raise MalformedError if none of them can be read."""
    sets = _sets(folder, names)
    worlds = {rank_set.world for rank_set in sets}
    if len(worlds) > 1:
        numbers = join_limited([str(world) for world in sorted(worlds)])
        what = f"there are rank files of {numbers} ranks: {join_limited([rank_set.pattern for rank_set in sets])}"
        step = command("inspect", folder.join(sets[0].pattern))
        raise MalformedError(what, path=path, next="name those of one save: " + step)
    with opening(path) as stack:
        container = Meshes(folder, sets, stack)
    if len(sets) > 1:
        what = join_limited([f"{rank_set.label} ({rank_set.pattern})" for rank_set in sets], most=9)
        container.note(RANK_SETS, "note", f"{len(sets):,} sets of rank files, an entry for each: {what}")
    container.problems += _left_out(folder, names, sets)
    inner = folder.inner(_MODEL)
    place = inner if "config.json" in inner.names() else folder
    files = model_files(place.names()) if "config.json" in place.names() else []
    beside = [place.join(name) for name in files if name != _CONFIG]
    return FolderSource(path, container.files, beside, folder=folder.path), container


def _left_out(folder: Folder, names: Collection[str], sets: Sequence[RankSet]) -> list[Finding]:
    """Return notes on other torch files and checkpoints in the folder, and an error for each with parts of tensors."""
    taken = {name for rank_set in sets for name in rank_set.files.values()}
    others = set(torch_files(names)) - taken - {name for rank_set in sets for pair in rank_set.twice for name in pair}
    files: dict[str, list[str]] = {}
    left = set(others)
    for rank_set in [*rank_sets(others), *numbered_sets(others)]:
        own = set(rank_set.files.values())
        if len(own) > 1 and own <= left:
            left -= own
            files[rank_set.pattern] = sorted(own)
    files |= {name: [name] for name in sorted(left)}
    problems = []
    for pattern, some in islice(files.items(), _MOST_SETS):
        found = (_summary(folder, name) for name in some[:_TRIED] if _has_word(folder, name, _CLASSES))
        if part := next((own for own in found if own is not None and own.partial), None):
            what = f"{pattern} has parts of tensors that {part.owner} saved, and is not read: other parts are not there"
            problems.append(Finding(INCOMPLETE, "error", what, folder.join(pattern)))
    for name in sorted(names)[:_MOST_NAMES]:
        inner = folder.inner(name)
        if name not in taken and folder_format(inner, by_names=True) is not None:
            what = f"{name} in this folder is a checkpoint of its own, and not read here"
            problems.append(Finding(INNER, "note", what, inner.path))
    if files:
        words = [f"{name} ({pluralize(len(own), 'file')})" if len(own) > 1 else name for name, own in files.items()]
        what = f"other files in this folder, not read here: {join_limited(words)}"
        problems.append(Finding(OTHER_FILES, "note", what, folder.join(next(iter(files)))))
    return problems


def matching(path: str) -> tuple[Folder, list[str]]:
    """Return the folder of a pattern, and the names in it that match."""
    parent, pattern = os.path.split(path)
    folder = open_folder(parent)
    before, brace, rest = pattern.partition("{")
    inner, _, after = rest.partition("}")
    patterns = [before + part + after for part in inner.split(",")] if brace else [pattern]
    matches = re.compile("|".join(map(translate, patterns))).match
    return folder, sorted(name for name in folder.names() if matches(name))


def of_one_save(path: str) -> bool:
    """Return whether a path is a pattern whose files are all ranks of one save."""
    if not may_be_pattern(path):
        return False
    folder, names = matching(path)
    found = {name for rank_set in _sets(folder, names) for name in rank_set.files.values()}
    return len(names) > 1 and found == {*names}


def read_pattern(path: str) -> tuple[FolderSource, Meshes] | None:
    """Open the files of a pattern as one checkpoint; None if they are not ranks of one save."""
    if not of_one_save(path):
        return None
    folder, names = matching(path)
    return read_files(path, folder, names)


def pattern_of(paths: Sequence[str]) -> str:
    """Return the pattern for files that are exactly the ranks of one save, or "" if they are not. Names alone exclude
    most other files; otherwise some of the files are opened."""
    folders = {os.path.dirname(path) for path in paths}
    names = {os.path.basename(path) for path in paths}
    if len(folders) != 1 or not 1 < len(names) == len(paths) or any(set("*?[]{},!") & set(name) for name in names):
        return ""
    folder = folders.pop()
    among = open_folder(folder).names()
    if not mates(names, names) == mates(names, among) == names:
        return ""
    pattern = os.path.join(folder, pattern_among(names, among))
    return pattern if of_one_save(pattern) else ""


def pattern_among(names: Collection[str], among: Collection[str]) -> str:
    """Return a pattern that matches exactly these names among the names in a folder."""
    start = _common(names)
    end = _common([name[len(start) :][::-1] for name in names])[::-1]
    matches = re.compile(translate(f"{start}*{end}")).match
    if all(name in names for name in among if matches(name)):
        return f"{start}*{end}"
    inner = sorted((name[len(start) : len(name) - len(end)] for name in names), key=lambda part: (len(part), part))
    return f"{start}{{{','.join(inner)}}}{end}"


def _common(texts: Collection[str]) -> str:
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts))
    return "".join(characters[0] for characters in alike)

"""A folder with the parts of one model, such as ``consolidated.00.pth``, read as one checkpoint.

Each part has a share of the tensors. The files do not record how a tensor was cut: a built-in recipe, which has all the
names, says so. A tensor that the recipe does not cut must be the same in all parts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

from ...base.errors import CkptoolError, MalformedError, NotACheckpointError, RefusedError, UnreadableError
from ...base.findings import UNJOINED
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import RankSave
from ...checkpoint.graph_editor import without_views
from ...checkpoint.objects import values_of
from ...checkpoint.tensors import TensorReader, contiguous_strides
from ...files.archives import read_bytes
from ...files.pool import open_pooled
from ...files.sources import FolderSource
from ...pickles.nodes import Ref
from .. import read_container
from ..folders import listed, opening
from ..joined.container import JoinedTensor, RankFile, RankFiles, copy_in, rows
from ..names.hf import companions
from ..pieces.chunks import Chunk, Rows, RowSource
from ..pieces.copies import CopyPair
from ..recipes.axes import is_cut
from ..recipes.evaluation import Output, View, fits, joined
from ..recipes.numbers import known_numbers
from ..recipes.recipe import Index, Pattern, Recipe, built_in, built_in_names

#: Files beside the parts that describe the model.
_CONFIGS: Final = ("params.json", "config.json")
_MAX_BYTES: Final = 1 << 20
_MAX_PARTS: Final = 1 << 12


class _Files(NamedTuple):
    """The files of a folder that the names of a recipe fit, in the order of their numbers."""

    recipes: tuple[Recipe, ...]
    files: tuple[str, ...]
    missing: tuple[str, ...]


@cache
def _templates() -> dict[str, tuple[Recipe, ...]]:
    """Return the recipes of models in parts, by the pattern of their files."""
    found: dict[str, tuple[Recipe, ...]] = {}
    for recipe in map(built_in, built_in_names()):
        if recipe.files:
            found[recipe.files] = (*found.get(recipe.files, ()), recipe)
    return found


def _files(names: Collection[str]) -> _Files | None:
    """Return the parts among the names of a folder, or None if there are not several."""
    for template, recipes in _templates().items():
        pattern = re.compile(re.escape(template).replace(re.escape("{p}"), r"(\d{1,4})") + r"\Z")
        numbers = {int(match[1]): name for name in sorted(names) if (match := pattern.match(name))}
        if len(numbers) > 1 and max(numbers) < _MAX_PARTS:
            width = len(numbers[min(numbers)]) - len(template) + len("{p}")
            every = range(max(numbers) + 1)
            missing = (template.replace("{p}", f"{at:0{width}d}") for at in every if at not in numbers)
            return _Files(recipes, tuple(numbers[at] for at in sorted(numbers)), tuple(missing))
    return None


class Parts(RankFiles):
    """The parts of one model. Everything but tensors is taken from the first part."""

    format = "parts"

    def __init__(self, folder: str, found: _Files, stack: ExitStack) -> None:
        super().__init__(folder)
        self.parts_words = pluralize(len(found.files), "part")
        for name in found.missing:
            self._note_incomplete(f"{name} is missing", name)
        opened = [self.open_file(name, stack) for name in found.files]
        files = [file for file in opened if file is not None]
        if not files:
            raise self.errors[0]
        self._values = {file.name: values_of(file.graph, file.graph.root) for file in files}
        first = files[0]
        tensors = {name: ref for name, ref in self._values[first.name].items() if first.reader.tensor(ref) is not None}
        facts = list(_facts(folder))
        self.recipe = self._fitting(found.recipes, files, tensors, facts)
        self._index = Index(self.recipe.rules)
        self._known = known_numbers(self.recipe.numbers, facts)
        for name, ref in tensors.items():
            whole = self._whole(name, files)
            if whole is not None:
                self.put(first, ref, whole)
        self._note_others(files, tensors)
        self.build(self.graft(first, first.graph.root))
        self.rank_save = RankSave(len(found.files) + len(found.missing))
        self.writer = f"{self.recipe.a}, {pluralize(len(found.files), 'part')}"

    def _fitting(
        self, recipes: Sequence[Recipe], files: Sequence[RankFile], names: Collection[str], facts: Sequence[Any]
    ) -> Recipe:
        """Return the recipe whose names and shapes fit; raise NotACheckpointError if no recipe has the names."""
        named = [recipe for recipe in recipes if fits(recipe, list(names))]
        if not named:
            raise NotACheckpointError("no recipe has the names of its tensors", kind="parts")
        refusals: list[CkptoolError] = []
        for recipe in named:
            try:
                self._check(recipe, files, known_numbers(recipe.numbers, facts))
            except (RefusedError, MalformedError) as error:
                refusals.append(error)
                continue
            return recipe
        self._note(UNJOINED, "error", refusals[0].what, refused=True)
        return named[0]

    def _check(self, recipe: Recipe, files: Sequence[RankFile], known: Mapping[str, int]) -> None:
        """Raise RefusedError if the shapes of the joined tensors contradict each other or the configuration."""
        index, known = Index(recipe.rules), dict(known)
        for name in self._values[files[0].name]:
            pattern = _pattern(recipe, index, name)
            views = self._views(name, files)
            if pattern is None or pattern.axes is None or not views:
                continue
            view = next(iter(views.values()))
            shape = joined(pattern, views, known).shape if is_cut(pattern.axes) else view.shape
            for dimension, size in zip(pattern.axes, shape):
                found = dimension.solved(size, known)
                if found is None:
                    what = f"{quoted(name)} of {pluralize(len(views), 'part')} has the shape {list(shape)}"
                    raise RefusedError(f"{what}, unlike a model of {recipe.a}")
                known |= {symbol: value for symbol, value in found.items() if symbol in recipe.numbers}

    def _views(self, name: str, files: Sequence[RankFile]) -> dict[str, View]:
        """Return the tensor in each part, as if it were contiguous."""
        views = {}
        for file in files:
            ref = self._values[file.name].get(name, -1)
            tensor = file.reader.tensor(ref) if ref >= 0 else None
            if tensor is not None:
                views[file.name] = View(tensor.shape, contiguous_strides(tensor.shape))
        return views

    def _whole(self, name: str, files: Sequence[RankFile]) -> Ref | None:
        """Return the joined tensor, or None without a usable part; report parts that do not fit together."""
        places: dict[str, tuple[RankFile, Ref, Rows]] = {}
        for file in files:
            ref = self._values[file.name].get(name, -1)
            if ref < 0:
                self._note_incomplete(f"{file.name} has no {quoted(name)}", file.name)
                continue
            try:
                places[file.name] = file, ref, rows(file, ref)
            except MalformedError as error:
                self._note(UNJOINED, "error", f"{quoted(name)} in {file.name}: {error.what}", file.name, refused=True)
        pattern = _pattern(self.recipe, self._index, name)
        own = next(iter(places.values()))[2] if places else None
        if own is None:
            return None
        if len(places) < len(files):
            return self.add_tensor(name, JoinedTensor(own.dtype, own.shape, own.shape, lambda: ()), whole=False)
        odd = next((file for file, (_, _, place) in places.items() if place.dtype != own.dtype), "")
        if odd:
            self._note(UNJOINED, "error", f"{quoted(name)} has another dtype in {odd}", odd, refused=True)
        if pattern is None or pattern.axes is None or not is_cut(pattern.axes):
            return self._same(name, places)
        try:
            self._refuse_copies(name, pattern, list(places.values()))
            output = joined(pattern, {file: _view(place) for file, (_, _, place) in places.items()}, self._known)
        except RefusedError as error:
            self._note(UNJOINED, "error", error.what, refused=True)
            return self.add_tensor(name, JoinedTensor(own.dtype, own.shape, own.shape, lambda: ()), whole=False)
        chunks = _chunks(output, {file: place for file, (_, _, place) in places.items()})
        return self.add_tensor(name, JoinedTensor(own.dtype, output.shape, output.grid, lambda: chunks), whole=not odd)

    def _same(self, name: str, places: Mapping[str, tuple[RankFile, Ref, Rows]]) -> Ref:
        """Return a tensor that all parts have in full: the one in the first part, once the others are compared."""
        (file, ref, own), *others = places.values()
        size = _size(own)
        for other, its, place in others:
            if place.shape != own.shape:
                what = f"{quoted(name)} has the shape {list(own.shape)} in {file.name}, and {list(place.shape)} in"
                self._note(UNJOINED, "error", f"{what} {other.name}", other.name, refused=True)
                break
            self.copies.add(CopyPair(name, copy_in(file, ref, own), copy_in(other, its, place), size))
        chunk = Chunk(((0,) * len(own.shape), own.shape), own.source, own.begin)
        return self.add_tensor(name, JoinedTensor(own.dtype, own.shape, own.shape, lambda: (chunk,)))

    def _refuse_copies(self, name: str, pattern: Pattern, places: Sequence[tuple[RankFile, Ref, Rows]]) -> None:
        """Raise RefusedError if there are more parts than heads, so that several parts have the same head."""
        cut = {each.symbol for dimension in pattern.axes or () for each in dimension.outer[:1] if each.cut}
        counts = [self._known[symbol] for symbol in cut & self._known.keys()]
        if any(count % len(places) for count in counts):
            what = f"{quoted(name)} has {min(counts):,} heads for {len(places):,} parts, so some parts have copies"
            raise RefusedError(f"{what}: they are not joined")
        unknown = cut & self.recipe.numbers.keys() - self._known.keys()
        (file, ref, own), (other, its, place) = places[:2]
        pair = CopyPair(name, copy_in(file, ref, own), copy_in(other, its, place), _size(own))
        if unknown and own.shape == place.shape and pair.by_checksum() is True:
            field = next(field for field in self.recipe.numbers[min(unknown)])
            what = f"{quoted(name)} is the same in {file.name} and {other.name}, and {field} is not known"
            raise RefusedError(f"{what}: put the params.json of the model beside them")

    def _note_others(self, files: Sequence[RankFile], tensors: Collection[str]) -> None:
        """Report tensors that only other parts have."""
        for file in files[1:]:
            more = [
                name
                for name, ref in self._values[file.name].items()
                if name not in tensors and file.reader.tensor(ref) is not None
            ]
            if more:
                names = join_limited([quoted(name) for name in more], most=3)
                self._note_incomplete(f"{files[0].name} has no {names}, which {file.name} has", file.name)


def _pattern(recipe: Recipe, index: Index, name: str) -> Pattern | None:
    """Return the pattern of side a that a name fits, or None for a name that the recipe ignores."""
    return next((recipe.rules[at].a[place] for at, place, _ in index.matches(name)), None)


def _size(place: Rows) -> int:
    return prod(place.shape) * place.dtype.itemsize


def _view(place: Rows) -> View:
    return View(place.shape, contiguous_strides(place.shape))


def _chunks(output: Output, places: Mapping[str, Rows]) -> list[Chunk]:
    """Return the blocks of a joined tensor as chunks of the files."""
    chunks = []
    for block in output.blocks:
        place = places[block.source]
        width = place.dtype.itemsize
        begin = place.begin + block.begin * width
        if block.stride in ((), (1,)):
            chunks.append(Chunk(block.box, place.source, begin))
        else:
            source = RowSource(place.source, begin, block.shape, block.stride, width, output.name)
            chunks.append(Chunk(block.box, source, 0))
    return chunks


def _facts(folder: str) -> list[Mapping[str, Any]]:
    """Return the objects in the files that describe the model."""
    found: list[Mapping[str, Any]] = []
    for name in _CONFIGS:
        with suppress(UnreadableError, ValueError, RecursionError):
            value = json.loads(read_bytes(os.path.join(folder, name), _MAX_BYTES))
            if isinstance(value, dict):
                found.append(value)
    return found


def sniff(path: str, names: Collection[str]) -> bool:
    """Return whether there are several parts, and a recipe has the names in the first one."""
    found = _files(names)
    if found is None:
        return False
    try:
        with closing(open_pooled(os.path.join(path, found.files[0]))) as source:
            graph = read_container(source).graph
            reader = TensorReader(without_views(graph))
            values = values_of(graph, graph.root)
            tensors = [name for name, ref in values.items() if reader.tensor(ref) is not None]
            return any(fits(recipe, tensors) for recipe in found.recipes)
    except CkptoolError:
        return False


def read(path: str) -> tuple[FolderSource, Parts]:
    """Open a folder of parts; raise MalformedError if none of its files can be read."""
    names = listed(path)
    found = _files(names)
    if found is None:
        raise NotACheckpointError("it has no parts of a model", path=path, kind="parts")
    with opening(path) as stack:
        container = Parts(path, found, stack)
    beside = [os.path.join(path, name) for name in {*companions(names), *(names & {*_CONFIGS})}]
    return FolderSource(path, container.files, sorted(beside)), container

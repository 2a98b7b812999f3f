"""A folder with the parts of one model, such as ``consolidated.00.pth``, read as one checkpoint.

Each part has a share of the tensors, in one file or several. The files do not record how a tensor was cut: a built-in
recipe, which has all the names, says so. A tensor that the recipe does not cut must be the same in all parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache
from math import prod
from typing import Any, Final

from ..base.errors import CkptoolError, MalformedError, NotACheckpointError, RefusedError, UnreadableError
from ..base.findings import UNJOINED
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.container import RankSave
from ..checkpoint.graph_editor import without_views
from ..checkpoint.objects import values_of
from ..checkpoint.tensors import TensorReader, contiguous_strides
from ..files.archives import parsed_object
from ..files.folders import Folder
from ..files.sources import FolderSource, Source, Span
from ..formats import read_container
from ..pickles.nodes import Ref
from ..values.numeric import ROUNDED, to_numbers
from .folders import opening
from .joined import RankFile, RankFiles, rows
from .names.hf import companions
from .names.numbered import with_number
from .pieces import CopyPair, Rows, strided_chunk
from .recipes.axes import is_cut
from .recipes.evaluation import Output, UnknownError, View, fits, joined
from .recipes.numbers import CONFIGURATIONS, known_numbers, model_type
from .recipes.recipe import Index, Pattern, Recipe, Rule, built_in, built_in_heads

_MAX_BYTES: Final = 1 << 20
#: The most files of all parts together, missing ones included.
_MAX_FILES: Final = 1 << 16
#: The most bytes of a section that are compared with the next part's.
_SAMPLE: Final = 1 << 12


#: The tensors of a part by name, each with its file.
_Part = dict[str, tuple[RankFile, Ref]]


class _Files(NamedTuple):
    """The files in a folder that the names of a recipe fit, for each part in the order of their numbers. ``prefixes``:
    what precedes the names of tensors in a file, by its name. ``twice``: pairs of files for one place."""

    recipes: tuple[Recipe, ...]
    parts: tuple[tuple[str, ...], ...]
    prefixes: Mapping[str, str]
    missing: tuple[str, ...]
    twice: tuple[tuple[str, str], ...]


@cache
def _templates() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, head in built_in_heads().items():
        if head.files:
            found[head.files] = (*found.get(head.files, ()), name)
    return found


def _files(names: Collection[str]) -> _Files | None:
    for template, recipes in _templates().items():
        texts = re.split(r"\{(\w)\}", template)
        holes = texts[1::2]
        pattern = re.compile(r"(\d{1,6})".join(map(re.escape, texts[::2])) + r"\Z")
        found: dict[tuple[int, int], str] = {}
        prefixes: dict[str, str] = {}
        totals: dict[int, str] = {}
        twice: list[tuple[str, str]] = []
        matches = {name: match for name in sorted(names) if (match := pattern.match(name))}
        group, count = holes.index("p") + 1, 0
        for name, match in matches.items():
            own = dict(zip(holes, map(int, match.groups())))
            at, total = own["p"], own.get("n", 0)
            number = next((number for hole, number in own.items() if hole not in "pn"), 0)
            count = max(count, at + 1, total)
            prefixes[name] = f"{number}." if "L" in own else ""
            # Two files for one place, or of two totals, are from two saves.
            if (at, number) in found or (totals and total not in totals):
                twice.append((found.get((at, number)) or next(iter(totals.values())), name))
            totals.setdefault(total, name)
            found[at, number] = name
        numbers = sorted({number for _, number in found})
        if len(found) > 1 and count * len(numbers) <= _MAX_FILES:
            grid = [[(at, number) for number in numbers] for at in range(count)]  # each part has a file of each number
            parts = (tuple(found[place] for place in places if place in found) for places in grid)
            lost = (place for places in grid for place in places if place not in found)
            like = {number: name for (_, number), name in found.items()}
            missing = tuple(with_number(like[number], *matches[like[number]].span(group), at) for at, number in lost)
            if "L" in holes:  # GPT-NeoX has no layer 1, and none before the last norm; only a head may follow that
                name, last = next(iter(matches)), numbers[-1] - 1 - (numbers[-2:-1] == [numbers[-1] - 1])
                gaps = sorted({*range(numbers[0], numbers[-1])}.difference(numbers, (1, last)))
                missing += tuple(with_number(name, *matches[name].span(holes.index("L") + 1), gap) for gap in gaps)
            return _Files(tuple(map(built_in, recipes)), tuple(filter(None, parts)), prefixes, missing, tuple(twice))
    return None


class Parts(RankFiles):
    """The parts of one model. Everything but tensors is taken from the first part."""

    format = "parts"

    def __init__(self, folder: Folder, found: _Files, stack: ExitStack) -> None:
        super().__init__(folder)
        self.parts_words = pluralize(len(found.prefixes), "part")
        self.note_twice(found.twice)
        for name in found.missing:
            self.note_lost(f"{name} is missing", name)
        self._parts = [part for files in found.parts if (part := self._part(files, found.prefixes, stack))]
        if not self._parts:
            raise self.errors[0] if self.errors else NotACheckpointError("its parts have no tensors", kind="parts")
        tensors = dict.fromkeys(name for part in self._parts for name in part)
        facts: list[Any] = []
        for name in CONFIGURATIONS:
            with suppress(UnreadableError):
                content = parsed_object(folder.read(name, _MAX_BYTES))
                facts += [content] if content is not None else []
        self.recipe, self._known = self._fitting(found.recipes, tensors, facts)
        self._index = Index(self.recipe.rules)
        wholes = {name: ref for name in tensors if (ref := self._whole(name)) is not None}
        first, _ = next(iter(self._parts[0].values()))
        own = {name: ref for name, (file, ref) in self._parts[0].items() if file is first}
        if any(found.prefixes.values()):
            root = self.builder.mapping(list(wholes.items()))
        else:
            # The first file has everything but tensors; it gets the tensors of other files.
            for name in own.keys() & wholes.keys():
                self.put(first, own[name], wholes[name])
            root = self.graft(first, first.graph.root)
            more = [part for name, ref in wholes.items() if name not in own for part in (self.builder.add(name), ref)]
            self.extend(root, more)
        self.build(root)
        self.rank_save = RankSave(len(found.parts), recorded=bool(self._stated) or "{n}" in self.recipe.files)
        self.writer = f"{self.recipe.a}, {pluralize(len(found.parts), 'part')}"

    def _part(self, files: Sequence[str], prefixes: Mapping[str, str], stack: ExitStack) -> _Part:
        tensors: _Part = {}
        for file in [opened for name in files if (opened := self.open_file(name, stack)) is not None]:
            for own, ref in file.values.items():
                name = prefixes[file.name] + own
                if file.reader.tensor(ref) is None:
                    continue
                if name in tensors:
                    other = tensors[name][0].name
                    what = f"{other} and {file.name} both have {quoted(name)}: one of them is from another save"
                    self._note_unjoined(what, file.name)
                tensors[name] = file, ref
        return tensors

    def _fitting(
        self, recipes: Sequence[Recipe], names: Collection[str], facts: Sequence[Any]
    ) -> tuple[Recipe, dict[str, int]]:
        named = [recipe for recipe in recipes if fits(recipe, self._parts[0])]
        if not named:
            raise NotACheckpointError("no recipe has the names of its tensors", kind="parts")
        # The parts of other models are cut in the same way, if they have the same names.
        types = {kind for _, kind in model_type(facts)}
        named.sort(key=lambda recipe: not types <= {*recipe.model_types[0]})
        refusals: list[tuple[int, Recipe, CkptoolError]] = []
        for recipe in named:
            checked: list[str] = []
            try:
                known = known_numbers(recipe.numbers, facts)
                return recipe, self._check(recipe, names, known, checked)
            except (RefusedError, MalformedError) as error:
                refusals.append((len(checked), recipe, error))
        _, recipe, best = max(refusals, key=lambda item: item[0])
        self._note_unjoined(best.what)
        return recipe, known_numbers(recipe.numbers, facts)

    def _check(
        self, recipe: Recipe, names: Collection[str], known: Mapping[str, int], checked: list[str]
    ) -> dict[str, int]:
        """Return the numbers that the shapes of the joined tensors tell. Add the names that fit to ``checked``. Raise
        RefusedError if the shapes contradict each other or the configuration."""
        self._stated = frozenset(known)
        index, known = Index(recipe.rules), dict(known)
        before = -1
        # One tensor may tell the numbers that another one needs.
        while len(known) > before:
            before = len(known)
            checked.clear()
            for name in names:
                rule, pattern = _pattern(index, name)
                views = self._views(name)
                if rule is None or pattern is None or pattern.axes is None:
                    continue
                try:
                    shape = next(iter(views.values())).shape
                    if rule.parts != "one" and is_cut(pattern.axes):
                        shape = _joined(name, pattern, views, known).shape
                except UnknownError:
                    continue
                for dimension, size in zip(pattern.axes, shape):
                    found = dimension.solved(size, known)
                    if found is None:
                        what = f"{quoted(name)} of {pluralize(len(views), 'part')} has the shape {list(shape)}"
                        raise RefusedError(f"{what}, unlike a model of {recipe.a}")
                    known |= {symbol: value for symbol, value in found.items() if symbol in recipe.numbers}
                checked.append(name)
            known = known_numbers(recipe.numbers, [], known.items())
        return known

    def _views(self, name: str) -> dict[str, View]:
        views = {}
        for file, ref in (part[name] for part in self._parts if name in part):
            tensor = file.reader.tensor(ref)
            assert tensor is not None
            views[file.name] = _view(tensor.shape)
        return views

    def _whole(self, name: str) -> Ref | None:
        places: dict[str, Rows] = {}
        rule, pattern = _pattern(self._index, name)
        one = rule is not None and rule.parts == "one"
        owner = next(part[name][0].name for part in self._parts if name in part)
        for part in self._parts:
            if name in part:
                file, ref = part[name]
                try:
                    places[file.name] = rows(file, ref)
                except MalformedError as error:
                    self._note_unjoined(f"{quoted(name)} in {file.name}: {error.what}", file.name)
            elif not one:
                file, _ = next(iter(part.values()))
                self.note_lost(f"{file.name} has no {quoted(name)}, which {owner} has", file.name)
        if not places:
            return None
        own, *others = places.values()
        odd = next((other for other in others if other[:2] != own[:2]), None)
        summed = rule is not None and rule.parts in ("sum", "mean") and len(places) > 1
        if odd is not None:
            what = f"{quoted(name)} is {own.dtype.name} {list(own.shape)} in {own.file}"
            self._note_unjoined(f"{what}, and {odd.dtype.name} {list(odd.shape)} in {odd.file}", odd.file)
        elif summed and own.dtype.name not in ROUNDED:
            odd = own
            self._note_unjoined(f"{quoted(name)} is {own.dtype.name}, which has no sum")
        if odd is not None or (len(places) < len(self._parts) and not one):
            return self.add_tensor(name, own.dtype, own.shape)
        if rule is not None and summed:
            divisor = len(places) if rule.parts == "mean" else 1
            spans = [Span(place.source, place.begin, place.size) for place in places.values()]
            source = SumSource(spans, own.dtype.name, own.dtype.itemsize, divisor, name)
            return self.add_rows(name, own._replace(source=source, begin=0))
        if one or not others or pattern is None or pattern.axes is None or not is_cut(pattern.axes):
            for other in others:
                self.copies.add(CopyPair(name, own, other))
            return self.add_rows(name, own)
        try:
            self._refuse_copies(name, pattern, [*places.values()])
            output = _joined(name, pattern, {file: _view(place.shape) for file, place in places.items()}, self._known)
            if any(len(dimension.sections) > 1 and not dimension.cut for dimension in pattern.axes):
                _refuse_equal_sections(name, output, places)
        except RefusedError as error:
            self._note_unjoined(error.what)
            return self.add_tensor(name, own.dtype, own.shape)
        chunks = []
        for block in output.blocks:
            place = places[block.source]
            begin = place.begin + block.begin * place.dtype.itemsize
            chunks.append(strided_chunk(block.box, place, begin, block.shape, block.stride, name))
        return self.add_tensor(name, own.dtype, output.shape, lambda: chunks, output.grid)

    def _note_unjoined(self, message: str, where: str = "") -> None:
        self.note(UNJOINED, "error", message, where, refused=True)

    def _refuse_copies(self, name: str, pattern: Pattern, places: Sequence[Rows]) -> None:
        """Raise RefusedError if there are more parts than heads, so that several parts have the same head."""
        cut = {each.symbol for dimension in pattern.axes or () for each in dimension.outer[:1] if each.cut}
        counts = [self._known[symbol] for symbol in cut & self._known.keys()]
        if any(count % len(places) for count in counts):
            what = f"{quoted(name)} has {min(counts):,} heads for {len(places):,} parts, so some parts have copies"
            raise RefusedError(f"{what}: they are not joined")
        unknown = cut & self.recipe.numbers.keys() - self._stated
        one, other = places[:2]
        pair = CopyPair(name, one, other)
        start = one._replace(shape=(min(one.size, _SAMPLE) // one.dtype.itemsize,))
        sample = CopyPair(name, start, other, by_chance=True)
        if unknown and one.shape == other.shape and (pair.by_checksum() is True or sample.by_value()):
            field = next(field for field in self.recipe.numbers[min(unknown)])
            what = f"{quoted(name)} is the same in {one.file} and {other.file}, and {field} is not known"
            raise RefusedError(f"{what}: put the params.json of the model beside them")


def _joined(name: str, pattern: Pattern, views: Mapping[str, View], known: Mapping[str, int]) -> Output:
    (first, own), *others = views.items()
    odd = next(((file, list(view.shape)) for file, view in others if view.shape != own.shape), None)
    if odd is not None:
        what = f"{quoted(name)} has the shape {list(own.shape)} in {first}, and {odd[1]} in {odd[0]}"
        raise RefusedError(f"{what}: these are not parts of one model")
    try:
        return joined(pattern, tuple(views.items()), frozenset(known.items()))
    except UnknownError:
        raise
    except RefusedError as error:
        cut = {each.symbol for dimension in pattern.axes or () for part in dimension.sections for each in part}
        numbers = join_limited([f"{symbol} = {known[symbol]:,}" for symbol in sorted(cut & known.keys())]) or "its axes"
        what = f"{quoted(name)} has the shape {list(own.shape)} in {first}"
        raise RefusedError(f"{what}, unlike {pluralize(len(views), 'part')} of a model with {numbers}") from error


def _refuse_equal_sections(name: str, output: Output, places: Mapping[str, Rows]) -> None:
    """Raise RefusedError if two parts begin a section with the same rows: copies of one head, as vLLM makes."""
    one, other, *_ = places
    pairs = zip(*([block for block in output.blocks if block.source == file] for file in (one, other)))
    for blocks in pairs:
        width = places[one].dtype.itemsize
        size = min(min(prod(block.shape) for block in blocks) * width, _SAMPLE)
        heads = [
            places[block.source].source.read(places[block.source].begin + block.begin * width, size)
            for block in blocks
            if block.stride in ((), (1,))
        ]
        # Equal constants, such as new biases, are no copies for that reason.
        if len(heads) == 2 and heads[0] == heads[1] != heads[0][:width] * (size // width):
            what = f"{quoted(name)} has the same rows in {one} and {other}: there are more parts than heads of keys"
            raise RefusedError(f"{what}, and copies of heads are not joined")


def _pattern(index: Index, name: str) -> tuple[Rule | None, Pattern | None]:
    at, place, _ = next(index.matches(name), (-1, -1, []))
    return (None, None) if at < 0 else (index.rules[at], index.rules[at].a[place])


def _view(shape: tuple[int, ...]) -> View:
    return View(shape, contiguous_strides(shape))


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether there are several parts, and a recipe has the names in the first one."""
    found = _files(names)
    if found is None:
        return False
    try:
        first, *_ = (name for files in found.parts for name in files)
        with closing(folder.open(first)) as source:
            graph = read_container(source).graph
            reader = TensorReader(without_views(graph))
            values = values_of(graph, graph.root)
            prefix = found.prefixes[first]
            tensors = [prefix + name for name, ref in values.items() if reader.tensor(ref) is not None]
            return any(fits(recipe, tensors) for recipe in found.recipes)
    except CkptoolError:
        return False


def read(folder: Folder) -> tuple[FolderSource, Parts]:
    """Open a folder of parts; raise MalformedError if none of its files can be read."""
    names = folder.names()
    found = _files(names)
    if found is None:
        raise NotACheckpointError("it has no parts of a model", path=folder.path, kind="parts")
    with opening(folder.path) as stack:
        container = Parts(folder, found, stack)
    beside = [folder.join(name) for name in {*companions(names), *(names & {*CONFIGURATIONS})}]
    return FolderSource(folder.path, container.files, sorted(beside)), container


#: The most bytes of each tensor in memory at once.
_BLOCK: Final = 1 << 16


class SumSource(Source):
    """The sums of tensors of one dtype, divided by ``divisor``: computed in float64, rounded once. ``terms`` are their
    elements, row by row."""

    def __init__(self, terms: Sequence[Span], dtype: str, width: int, divisor: int, name: str) -> None:
        self.name, self.size = name, terms[0].size
        self.terms, self.dtype, self.width, self.divisor = tuple(terms), dtype, width, divisor

    def read(self, offset: int, size: int) -> bytes:
        end = max(min(offset + size, self.size), offset)
        begin = offset - offset % self.width
        stored, blocks = ROUNDED[self.dtype], []
        for at in range(begin, end, _BLOCK):
            count = min(_BLOCK, end - at + -(end - at) % self.width)
            columns = [to_numbers(span.source.read(span.offset + at, count), self.dtype) for span in self.terms]
            blocks += [stored(sum(numbers) / self.divisor) for numbers in zip(*columns)]
        return b"".join(blocks)[offset - begin : end - begin]

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        for span in self.terms:
            yield span._replace(offset=span.offset + offset, size=min(size, self.size - offset))

"""Apply a recipe to the names and shapes of tensors: the tensors that come out, and the bytes that they take.

Nothing is read. An output is a tensor that moves as it is, or blocks: strided views of inputs, each in a box.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, Final

from ...base.errors import RefusedError
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, quoted
from ..pieces import Box
from .axes import PADDING, all_tags, grid_of, merged, part_and_whole, sizes, steps_of
from .names import NamePattern, parsed
from .numbers import contradicted, known_numbers, refuse_other_models
from .recipe import Index, Pair, Pattern, Recipe, Rule, with_pairs

#: The most outputs, and blocks of one output.
_MOST: Final = 1 << 20


class UnfitError(RefusedError):
    """The names of the tensors show that the recipe does not fit the model."""


class UnknownError(RefusedError):
    """A number of the model is not known."""


class View(NamedTuple):
    """A tensor's shape and strides, in elements. ``kind`` is not "dense" for a tensor that can only move as a whole."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str = "dense"


class Block(NamedTuple):
    """A part of an output: the ``box`` in its grid that the block fills, and where its elements are. They are a view of
    the tensor ``source``: shape, strides, and the distance from the tensor's first element, all in elements."""

    box: Box
    source: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Output(NamedTuple):
    """A tensor that comes out. ``sources`` are the names of the tensors it is made of. Without ``blocks`` the only
    source moves as it is. ``grid`` is the shape in factors, in which boxes are. ``rule`` is the number of the rule,
    ``place`` the place of the first input among all tensors."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    grid: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    rule: int = 0
    place: int = 0


class Result(NamedTuple):
    """The outputs, notes for people, numbers of the model, and the names of the other tensors. The recipe ignores some,
    has no rule for the ``rest``, and ``apart`` are the tensors of other models in the file."""

    outputs: list[Output]
    ignored: list[str]
    rest: list[str]
    notes: list[str]
    apart: list[str]
    numbers: Mapping[str, int]


class _Use(NamedTuple):
    """One application of a rule: the values of its loops, and its tensors by (pattern, values of axes in the name)."""

    rule: Rule
    loops: dict[str, int]
    tensors: dict[tuple[int, tuple[int, ...]], str]
    first: int


def apply(
    recipe: Recipe,
    tensors: Mapping[str, View],
    facts: Sequence[Mapping[str, Any]],
    known: Mapping[str, int] = MappingProxyType({}),
) -> Result:
    """Apply a recipe from side a to side b; raise RefusedError for a tensor or a number that is missing."""
    return _Application(recipe, tensors, facts, known).result()


@lru_cache(maxsize=64)  # the layers of a model are alike
def joined(pattern: Pattern, parts: tuple[tuple[str, View], ...], known: frozenset[tuple[str, int]]) -> Output:
    """Return the whole of a tensor that is cut over the parts of a checkpoint, by the names of their files, in order.
    ``known`` has numbers of the whole model. Raise RefusedError if the parts differ in shape, or a number is
    missing."""
    part, whole = part_and_whole(pattern.axes or ())
    name = pattern.name.text.replace("{", "").replace("}", "")
    rule = with_pairs(
        Rule(0, (Pattern(parsed("{p}"), part),), (Pattern(parsed(name), whole),), False, False, frozenset(), ()),
        frozenset(),
    )
    recipe = Recipe("", "", "", {}, (rule,), (), False, (), {}, "", "")
    application = _Application(recipe, dict(parts), ())
    shares = {f"{symbol}/p": size // len(parts) for symbol, size in known if size % len(parts) == 0}
    application.known = {**dict(known), **shares}
    use = _Use(rule, {}, {(0, (at,)): file for at, (file, _) in enumerate(parts)}, 0)
    ((_, _, output),) = application.outputs(use)
    return output


def fits(recipe: Recipe, tensors: Collection[str]) -> bool:
    """Return whether the recipe has a rule for some of the names, and for all of them unless it keeps the rest."""
    return named(recipe, tensors)[1]


def named(recipe: Recipe, tensors: Collection[str]) -> tuple[int, bool]:
    """Return for how many names the recipe has a rule, and whether it fits: it ignores or keeps the others, if any."""
    recipe = recipe.expanded(tensors)
    index = Index(recipe.rules)
    left = [name for name in tensors if next(index.matches(name), None) is None]
    whole = recipe.rest or all(_is_ignored(recipe, name) for name in left if name.startswith(recipe.prefixes[0]))
    return len(tensors) - len(left), whole and len(left) < len(tensors)


def covers(recipe: Recipe, tensors: Collection[str]) -> bool:
    """Return whether the recipe has a rule for each of the names that it does not ignore, and for at least one."""
    return fits(recipe._replace(rest=False), tensors)


def _is_ignored(recipe: Recipe, name: str) -> bool:
    return any(fnmatchcase(name.removeprefix(recipe.prefixes[0]), pattern) for pattern in recipe.ignored)


class _Application:
    def __init__(
        self,
        recipe: Recipe,
        tensors: Mapping[str, View],
        facts: Sequence[Mapping[str, Any]],
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.own, self.recipe, self.tensors, self.facts = recipe, recipe.expanded(tensors), tensors, facts
        recipe = self.recipe
        self.notes: list[str] = []
        #: How many values the loops take.
        self.counts: dict[str, int] = {}
        self.symbols = frozenset(recipe.numbers)
        self.index = Index(recipe.rules)
        counts = {
            symbol: places
            for symbol, places in recipe.numbers.items()
            if symbol[0] != "#" and any(place.startswith("=#") for place in places)
        }
        plain = {symbol: places for symbol, places in recipe.numbers.items() if symbol not in counts}
        self.known = known_numbers(plain, facts, known.items())
        for symbol, places in counts.items():
            self.known[symbol] = self._count(symbol, next(place[2:] for place in places if place.startswith("=#")))

    # -- names

    def _count(self, symbol: str, hole: str) -> int:
        """Return how many values a hole takes: {hole} and {symbol-1-hole} both count."""
        values = [-1]
        for name in self.tensors:
            for at, place, numbers in self.index.matches(name):
                for each, number in zip(self.recipe.rules[at].a[place].name.sums, numbers):
                    factors = dict(each.factors)
                    if factors in ({hole: 1}, {hole: -1, symbol: 1}):
                        values.append(number - each.constant - (symbol in factors))
        return max(values) + 1

    def uses(self) -> tuple[list[_Use], list[str], list[str]]:
        """Return how the rules apply, the ignored names, and the names without a rule."""
        found: dict[tuple[int, tuple[tuple[str, int], ...]], _Use] = {}
        ignored: list[str] = []
        rest: list[str] = []
        for at_name, name in enumerate(self.tensors):
            claims = []
            for at, place, _ in self.index.matches(name):
                rule = self.recipe.rules[at]
                values = rule.a[place].name.values_in(name, self.known)
                if values is not None and rule.holds(self.tensors, {**self.known, **values}):
                    claims.append((at, place, values))
            if len(claims) > 1:
                numbers = join_limited([str(self.recipe.rules[at].number) for at, _, _ in claims])
                raise RefusedError(f"{quoted(name)} fits the rules {numbers}: one tensor needs one rule")
            for at, place, values in claims:
                rule = self.recipe.rules[at]
                loops = {symbol: values[symbol] for symbol in sorted(rule.loops)}
                axes = tuple(values[symbol] for symbol in _name_axes(rule.a[place], rule, self.symbols))
                use = found.setdefault((at, tuple(loops.items())), _Use(rule, loops, {}, at_name))
                use.tensors[place, axes] = name
            if not claims:
                (ignored if _is_ignored(self.recipe, name) else rest).append(name)
        return list(found.values()), ignored, rest

    # -- sizes

    def _views(self, use: _Use) -> Iterator[tuple[Pattern, View, str]]:
        for (place, _), name in use.tensors.items():
            if use.rule.a[place].axes is not None:
                yield use.rule.a[place], self.tensors[name], name

    def solved(self, use: _Use) -> dict[str, int]:
        """Return all symbols that the shapes of a use decide, and the known ones."""
        known = dict(self.known)
        for place, pattern in enumerate(use.rule.a):
            for at, symbol in enumerate(_name_axes(pattern, use.rule, self.symbols)):
                known[symbol] = max(known.get(symbol, 0), *(axes[at] + 1 for own, axes in use.tensors if own == place))
        before = -1
        while len(known) > before:
            before = len(known)
            for pattern, view, name in self._views(use):
                axes = pattern.axes or ()
                if len(axes) != len(view.shape):
                    what = f"{quoted(name)} has the shape {list(view.shape)}"
                    raise RefusedError(f"{what}, and rule {use.rule.number} has {pluralize(len(axes), 'dimension')}")
                for dimension, size in zip(axes, view.shape):
                    found = dimension.solved(size, known)
                    if found is None:
                        numbers = [f"{each} = {known[each]:,}" for each in sorted(_symbols(use.rule)) if each in known]
                        what = f"{quoted(name)} of the shape {list(view.shape)} does not fit rule {use.rule.number}"
                        raise RefusedError(f"{what}{' with ' + join_limited(numbers) if numbers else ''}")
                    known |= found
        return known

    def result(self) -> Result:
        refuse_other_models(self.recipe, self.facts)
        uses, ignored, rest = self.uses()
        apart = [name for name in rest if not name.startswith(self.recipe.prefixes[0])]
        rest = [name for name in rest if name.startswith(self.recipe.prefixes[0])]
        for refusal in self.recipe.refusals:
            odd = next((name for name in rest if refusal.name and fnmatchcase(name, refusal.name)), "")
            if odd:
                raise UnfitError(f"{refusal.why}: {quoted(odd)}")
        if rest and not self.recipe.rest:
            what = f"{self.recipe.b} has no name for {join_limited([quoted(name) for name in rest], most=3)}"
            more = 'write a rule for each, or rest = "keep" for tensors that stay' if self.recipe.b == "b" else ""
            raise RefusedError(what, next=more)
        self._check_loops(uses)
        self._check_axes(uses)
        self._check_outputs(uses)
        self._share_numbers(uses)
        for symbol, count in self.counts.items():
            self._check_count(symbol, count)
        outputs: list[tuple[int, int, Output]] = []
        for use in uses:
            outputs += self.outputs(use)
            if len(outputs) > _MOST:
                raise RefusedError(f"the recipe makes more than {_MOST:,} tensors")
        names: dict[str, Output] = {}
        for _, _, output in outputs:
            if output.name in names:
                one, other = names[output.name].sources[0], output.sources[0]
                raise RefusedError(f"{quoted(one)} and {quoted(other)} would both become {quoted(output.name)}")
            names[output.name] = output
        if self.recipe.note:
            self.notes.append(self.recipe.note)
        return Result(_in_order(outputs), ignored, rest, self.notes, apart, self.known)

    def _check_outputs(self, uses: Sequence[_Use]) -> None:
        """Raise RefusedError if nothing becomes a tensor that every model on side b has."""
        made = {pattern.name.text for use in uses for pattern in use.rule.b}
        used = {use.rule.number for use in uses}
        unused = (rule for rule in self.own.rules if rule.number not in used)
        for rule in unused if self.recipe.rest else self.recipe.rules:
            missing = next((each.name for each in rule.b if not rule.optional and each.name.text not in made), None)
            if missing is not None:
                name = missing.filled(dict.fromkeys(missing.symbols, 0) | self.known)
                raise UnfitError(f"a model of {self.recipe.b} has {quoted(name)}, and nothing here becomes that")

    def _share_numbers(self, uses: Sequence[_Use]) -> None:
        """Add the numbers that only shapes tell, from whichever rule tells them; refuse those that contradict."""
        kinds = {
            (use.rule.number, tuple(self.tensors[name].shape for name in use.tensors.values())): use
            for use in uses
            if use.rule.pairs
        }
        before = -1
        while len(self.known) > before:
            before = len(self.known)
            for use in kinds.values() if self.symbols - self.known.keys() else ():
                known = self.solved(use)
                self.known |= {symbol: known[symbol] for symbol in self.symbols & known.keys()}
            self.known = known_numbers(self.recipe.numbers, [], self.known.items())
        odd = contradicted(self.recipe.numbers, self.known)
        if odd:
            formulas = join_limited([place.removeprefix("=") for place in self.recipe.numbers[odd]])
            numbers = [f"{symbol} = {number:,}" for symbol, number in self.known.items() if symbol in formulas.split()]
            what = f"its shapes say {odd} = {self.known[odd]:,}, and {odd} is {formulas} with {join_limited(numbers)}"
            raise RefusedError(what, next="correct the configuration of the model, or get the weights again")

    def _check_loops(self, uses: Sequence[_Use]) -> None:
        """Raise RefusedError if a layer is missing, or lacks a tensor that others have."""
        layers: dict[tuple[str, ...], dict[tuple[int, ...], set[NamePattern]]] = {}
        #: The symbol of the last number in a name, which counts inside of the others.
        inner: dict[tuple[str, ...], str] = {}
        needed = {use.rule.a[0].name for use in uses if not use.rule.optional}
        for use in uses:
            if len(use.loops) > 1:
                holes = (symbol for each in use.rule.a[0].name.sums for symbol in each.symbols if symbol in use.loops)
                inner[tuple(use.loops)] = list(holes)[-1]
            for symbols in dict.fromkeys([*((symbol,) for symbol in use.loops), tuple(use.loops)] if use.loops else ()):
                values = tuple(use.loops[symbol] for symbol in symbols)
                own = layers.setdefault(symbols, {}).setdefault(values, set())
                own |= set() if use.rule.by_layer else {use.rule.a[0].name}
        for symbols, names in layers.items():
            kinds = dict.fromkeys(map(frozenset, names.values()))
            count = max(names)[0] + 1
            # All missing numbers are alike, so the first one is enough: a name may have a number of any size.
            gap = next((value,) for value in range(count + 1) if (value,) not in names)
            every = sorted({*names, gap} - {(count,)}) if len(symbols) == 1 else names
            for values in every:
                own = names.get(values, set())
                other = next((min(kind - own) for kind in kinds if own < kind), None)
                # A layer may lack all tensors of optional rules, as a dense layer has no experts.
                if other is not None and (own or any(kind & needed for kind in kinds)):
                    known = {**dict.fromkeys(other.symbols, 0), **self.known, **dict(zip(symbols, values))}
                    raise RefusedError(f"{quoted(other.filled(known))} is missing, and others like it are there")
            if len(symbols) == 1:
                self.counts[symbols[0]] = len(names)
        for symbol, places in self.recipe.numbers.items():
            count = next((self.counts[place[2:]] for place in places if place[2:] in self.counts), 0)
            if symbol[0] == "#" and count:
                self.known.setdefault(symbol, count)
        for symbols, last in inner.items():
            self._check_groups(layers[symbols], symbols.index(last), last)

    def _check_groups(self, names: Collection[tuple[int, ...]], at: int, symbol: str) -> None:
        groups: dict[tuple[int, ...], set[int]] = {}
        for values in names:
            groups.setdefault(values[:at] + values[at + 1 :], set()).add(values[at])
        for block, own in groups.items():
            self._check_count(symbol, len(own), f"those of block {'.'.join(map(str, block))}")

    def _check_count(self, symbol: str, count: int, names: str = "its names") -> None:
        """Raise RefusedError if a hole has more or fewer values than ``#symbol`` among the numbers says."""
        wanted = self.known.get(f"#{symbol}", count)
        if wanted != count:
            what = f"{names} have {count:,} values of {{{symbol}}}, and its configuration or another tensor says"
            raise RefusedError(f"{what} {wanted:,}", next="get the tensors again that are missing")

    def _check_axes(self, uses: Sequence[_Use]) -> None:
        """Raise RefusedError if a layer has fewer tensors along an axis, such as experts, than another one."""
        highest: dict[tuple[NamePattern, str], dict[int, _Use]] = {}
        for use in uses:
            for place, pattern in enumerate(() if use.rule.by_layer else use.rule.a):
                for at, symbol in enumerate(_name_axes(pattern, use.rule, self.symbols)):
                    last = max((values[at] for own, values in use.tensors if own == place), default=-1)
                    highest.setdefault((pattern.name, symbol), {}).setdefault(last, use)
        for (name, symbol), found in highest.items():
            if len(found) > 1:
                most, use = max(found), found[min(found)]
                known = {**dict.fromkeys(name.symbols, 0), **self.known, **use.loops, symbol: most}
                raise RefusedError(f"{quoted(name.filled(known))} is missing, and others like it are there")

    # -- outputs

    def outputs(self, use: _Use) -> Iterator[tuple[int, int, Output]]:
        rule, layer = use.rule, next(iter(use.loops.values()), -1)
        if not rule.pairs and rule.a[0].axes is None:
            name = use.tensors[0, ()]
            new, shape = _filled(rule.b[0], {**self.known, **use.loops}, name), self.tensors[name].shape
            yield layer, use.first, Output(new, shape, (name,), rule=rule.number, place=use.first)
            return
        known = {**self.solved(use), **use.loops}
        self._check_whole(use, known)
        for symbol in {each for pattern in (*rule.a, *rule.b) for each in _name_axes(pattern, rule, self.symbols)}:
            self._check_count(symbol, known.get(symbol, 0))
        self._settle_padding(use, known)
        for place, pattern in enumerate(rule.b):
            axes = _name_axes(pattern, rule, self.symbols)
            unknown = (_symbols_of(pattern) | set(axes)) - known.keys()
            if unknown:
                raise self._unknown(unknown, next(iter(use.tensors.values())))
            if prod(known[symbol] for symbol in axes) > _MOST:
                raise RefusedError(f"rule {rule.number} makes more than {_MOST:,} tensors")
            for values in product(*(range(known[symbol]) for symbol in axes)):
                here = {**known, **dict(zip(axes, values))}
                own = values[0] if values and layer < 0 else layer
                yield own, use.first, self._output(use, place, pattern, here, set(axes))

    def _unknown(self, symbols: set[str], name: str) -> UnknownError:
        fields = {}
        for symbol in sorted(symbols):
            places = (place for place in self.recipe.numbers.get(symbol, ()) if not place.startswith("="))
            fields[symbol] = next(places, "").partition(" if ")[0]
        # A number without a field of its own follows from the others.
        named = [f"{symbol} ({field})" for symbol, field in fields.items() if field] or list(fields)
        many = len(named) > 1
        what = f"{join_limited(named)} {'are' if many else 'is'} not known, and {quoted(name)} cannot be cut without"
        missing = next((symbol for symbol in sorted(symbols) if symbol not in self.recipe.numbers), "")
        if missing and not any(fields.values()):
            how = f'[numbers] of the recipe says where: {missing} = "num_attention_heads"'
            return UnknownError(what, next=f"{how}; equal parts need none, as (e|e|e), i")
        step = "give the numbers of the model in a JSON file: `--config config.json`"
        return UnknownError(what, next=step)

    def _check_whole(self, use: _Use, known: Mapping[str, int]) -> None:
        for place, pattern in enumerate(use.rule.a):
            axes = _name_axes(pattern, use.rule, self.symbols)
            counts = [known[symbol] for symbol in axes]
            own = {values for at, values in use.tensors if at == place}
            if len(own) < prod(counts):
                values = next(each for number in range(len(own) + 1) if (each := _digits(number, counts)) not in own)
                name = pattern.name.filled({**known, **dict(zip(axes, values))})
                other = next(iter(use.tensors.values()))
                raise RefusedError(f"{quoted(name)} is missing: it belongs with {quoted(other)}")

    def _settle_padding(self, use: _Use, known: dict[str, int]) -> None:
        """Take padding of unknown size for none, and say so; also say where padding ends."""
        symbols = _symbols(use.rule)
        if PADDING not in symbols:
            return
        if known.get(PADDING):
            name, rows = next((name, view.shape[0]) for _, view, name in self._views(use))
            less = rows - known[PADDING]
            self.notes.append(f"{quoted(name)} cut from {rows:,} to {less:,} rows, without its padding")
        if PADDING in known:
            return
        known[PADDING] = 0
        for pattern, view, name in self._views(use):
            for dimension, size in zip(pattern.axes or (), view.shape):
                found = dimension.solved(size, known)
                if found:
                    known |= found
                    self.notes.append(f"{quoted(name)} keeps its {size:,} rows: where its padding begins is not known")

    def _output(self, use: _Use, place: int, pattern: Pattern, known: Mapping[str, int], name_axes: set[str]) -> Output:
        axes = pattern.axes or ()
        first = next(iter(use.tensors.values()))
        name, shape = _filled(pattern, known, first), tuple(dimension.size(known) for dimension in axes)
        grid = tuple(
            size
            for dimension in axes
            for size in (
                *(each.size(known) for each in dimension.outer),
                sum(sizes(each, known) for each in dimension.sections),
                *(each.size(known) for each in dimension.inner),
            )
        )
        blocks: list[Block] = []
        for pair in use.rule.pairs:
            if pair.target == place:
                blocks += self._blocks(use, pair, known, name_axes)
        sources = tuple(dict.fromkeys(block.source for block in blocks)) or (first,)
        if len(sources) == 1 and len(blocks) == 1:
            view, block = self.tensors[sources[0]], blocks[0]
            whole = block.box == ((0,) * len(grid), grid) and block.begin == 0 and view.shape == shape
            if whole and merged(view.shape, view.stride) == merged(block.shape, block.stride):
                return Output(name, shape, sources, rule=use.rule.number, place=use.first)
        return Output(name, shape, sources, grid, tuple(blocks), use.rule.number, use.first)

    def _blocks(self, use: _Use, pair: Pair, known: Mapping[str, int], name_axes: set[str]) -> Iterator[Block]:
        pattern = use.rule.a[pair.source]
        axes = _name_axes(pattern, use.rule, self.symbols)
        for values in product(*(range(known[symbol]) for symbol in axes)):
            source = use.tensors[pair.source, values]
            fixed = dict(zip(axes, values))
            view = self.tensors[source]
            if view.kind != "dense":
                raise RefusedError(f"{quoted(source)} cannot be cut: it is {view.kind}")
            begin, steps = steps_of(pair.of, view.stride, known)
            begin += sum(steps[symbol, 0, 0] * known[symbol] for symbol in name_axes)
            offsets, extents, shape, stride = [], [], [], []
            for factors, at, is_section in grid_of(pair.into, known):
                if is_section:
                    inside = factors[:1] if factors and factors[0].symbol in fixed else ()
                    extents.append(sizes(factors[len(inside) :], known))
                    offsets.append(at + (fixed[inside[0].symbol] * extents[-1] if inside else 0))
                else:
                    symbol = factors[0].symbol
                    offsets.append(fixed.get(symbol, 0))
                    extents.append(1 if symbol in fixed else factors[0].size(known))
            for tag, each in zip(all_tags(pair.into), pair.into.factors):
                if tag is not None and each.symbol not in fixed:
                    shape.append(each.size(known))
                    stride.append(steps[tag])
            yield Block((tuple(offsets), tuple(extents)), source, begin, *merged(tuple(shape), tuple(stride)))


def _digits(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of an element of a grid with ``counts`` along its axes, by its number in row-major order."""
    found = []
    for count in reversed(counts):
        number, index = divmod(number, count)
        found.append(index)
    return tuple(found[::-1])


def _filled(pattern: Pattern, known: Mapping[str, int], source: str) -> str:
    """Return the name of a new tensor; raise RefusedError if a number in it is less than 0."""
    name = pattern.name.filled(known)
    if any(each.value(known) < 0 for each in pattern.name.sums):
        raise RefusedError(f"{quoted(source)} would become {quoted(name)}, and no layer has such a number")
    return name


def _name_axes(pattern: Pattern, rule: Rule, numbers: frozenset[str]) -> list[str]:
    return sorted(pattern.name.symbols - rule.loops - numbers)


def _symbols_of(pattern: Pattern) -> set[str]:
    return {
        each.symbol
        for dimension in pattern.axes or ()
        for part in (dimension.outer, *dimension.sections, dimension.inner)
        for each in part
        if each.symbol
    }


def _symbols(rule: Rule) -> set[str]:
    return set().union(*map(_symbols_of, (*rule.a, *rule.b)))


def _in_order(outputs: Sequence[tuple[int, int, Output]]) -> list[Output]:
    """Return the outputs in the order of a model, by layer (-1: before or behind the layers) and by rule."""
    first = min((place for layer, place, _ in outputs if layer >= 0), default=0)

    def key(item: tuple[int, int, Output]) -> tuple[int, int, int]:
        layer, place, output = item
        return (1, layer, output.rule) if layer >= 0 else (0 if place < first else 2, 0, place)

    return [output for _, _, output in sorted(outputs, key=key)]

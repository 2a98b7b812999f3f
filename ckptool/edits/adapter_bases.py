"""Find where a base holds the weights that an adapter means: tensors, or rows of them, perhaps under other names.

An adapter may use names of another layout of the same model. A built-in recipe gives a base these names, and says which
rows of its tensors each weight is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Final

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..checkpoint.tensors import Tensor
from ..formats.recipes.evaluation import Block, Output, View, apply, fits
from ..formats.recipes.recipe import built_in, built_in_names
from .adapter_changes import WeightChange
from .adapter_names import DOWN, MODELS, UP, WITH_DIFFUSERS, Modules
from .adapter_settings import Adapter

#: The prefix of the diffusion model in a file of a whole pipeline.
_LDM: Final = "model.diffusion_model."


class Place(NamedTuple):
    """Rows of a base tensor: key, first row, how many, and the first wanted row; ``is_part``: not all of its rows."""

    key: str
    first: int
    rows: int
    begin: int
    is_part: bool


class Weight(NamedTuple):
    """A weight that an adapter may mean: its shape, the elements of a row, and its places in the base."""

    shape: tuple[int, ...]
    row: int
    places: tuple[Place, ...]

    def changes(self, change: WeightChange) -> Iterator[WeightChange]:
        """Yield a change of the weight as the change of each tensor in the base that has rows of it."""
        for place in self.places:
            step = change.step
            if len(self.places) > 1 or place.is_part:
                # The second tensor of a product has no row for each row of the weight.
                parts = (
                    part if at == 1 else part.rows(place.begin, place.rows) for at, part in enumerate(step.tensors)
                )
                step = step._replace(tensors=tuple(parts), first_row=place.first, row=self.row)
            yield WeightChange(place.key, step)


def own_weights(base: Mapping[str, Tensor]) -> dict[str, Weight]:
    """Return the tensors of a base as weights, by name. Those with an axis of experts have the rows of all experts."""
    return {name: _whole(name, tensor, tensor.shape) for name, tensor in base.items() if tensor.shape}


def renamed_weights(
    base: Mapping[str, Tensor], library: str, *, both_ways: bool = False
) -> Iterator[tuple[str, dict[str, Weight]]]:
    """Yield the weights of a base by the names that each built-in recipe to ``library`` gives them.

    The first item is the family there, such as "unet". With ``both_ways`` also follow the recipes from the library to
    others. Weights that are not made of whole rows are left out.
    """
    views = {name: View(tensor.shape, tensor.stride) for name, tensor in base.items()}
    for each in built_in_names():
        recipe = built_in(each)
        found, _, family = recipe.b.partition(":")
        if found != library:
            continue
        for turned in (recipe, recipe.reversed()) if both_ways else (recipe,):
            if fits(turned, views):
                with suppress(RefusedError):
                    outputs = apply(turned, views, []).outputs
                    weights = {output.name: _found(output, base) for output in outputs}
                    yield family, {name: weight for name, weight in weights.items() if weight is not None}


def _row(shape: Sequence[int]) -> int:
    """Return the number of elements in a row of a weight. With three axes, each expert has rows of its own."""
    return shape[-1] if len(shape) == 3 else prod(shape[1:])


def _whole(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Weight:
    row = _row(shape)
    return Weight(shape, row, (Place(name, 0, tensor.numel // max(row, 1), 0, is_part=False),))


def _found(output: Output, base: Mapping[str, Tensor]) -> Weight | None:
    """Return a weight that a recipe makes of whole rows of the base; None for any other."""
    if not output.shape:
        return None
    if not output.blocks:
        (source,) = output.sources
        return _whole(source, base[source], output.shape)
    places = [_place(output, block, base[block.source]) for block in output.blocks]
    found = tuple(place for place in places if place is not None)
    return Weight(output.shape, _row(output.shape), found) if len(found) == len(places) else None


def _place(output: Output, block: Block, source: Tensor) -> Place | None:
    """Return the rows that a block moves, or None if it does not move whole rows without changing their order."""
    row = _row(output.shape)
    begins, extents = block.box
    size = prod(extents)
    outer = next((at for at, extent in enumerate(extents) if extent > 1), len(extents))
    in_a_row = tuple(extents[outer + 1 :]) == tuple(output.grid[outer + 1 :])
    begin = 0
    for at, count in zip(begins, output.grid):
        begin = begin * count + at
    aligned = bool(row) and not (begin % row or block.begin % row or size % row)
    if not (in_a_row and aligned and block.stride in ((), (1,))):
        return None
    return Place(block.source, block.begin // row, size // row, begin // row, size != source.numel)


# -- the models of a pipeline


class Match(NamedTuple):
    """The weights of a base by the names of one layout, and the names there of the modules of an adapter.

    ``fits`` counts the modules with a fitting shape; ``is_whole``: all modules are there, and fit. ``is_sure``: the
    layout belongs to one model.
    """

    weights: Mapping[str, Weight]
    names: Mapping[str, str]
    fits: int
    is_whole: bool
    is_sure: bool


def matches(adapter: Adapter, models: Sequence[Modules], base: Mapping[str, Tensor]) -> list[Match | None]:
    """Return where the base holds each model of an adapter, or None for a model of another base."""
    layouts = list(_layouts(base))
    found = [_match(adapter, model, layouts) for model in models]
    is_any = any(match.is_whole for match in found)
    best = max(found, key=lambda match: (match.fits, len(match.names)))
    # A model that the base holds in part is wrong. One that it does not hold belongs to another base.
    used = [match.is_whole or (bool(match.names) and match.is_sure) if is_any else match is best for match in found]
    return [match if wanted else None for match, wanted in zip(found, used)]


def _match(adapter: Adapter, model: Modules, layouts: Sequence[tuple[str, Mapping[str, Weight]]]) -> Match:
    """Return the layout of the base with most of the modules; raise RefusedError if two layouts have them all."""
    best = Match({}, {}, 0, False, False)
    places: set[tuple[tuple[Place, ...], ...]] = set()
    for owner, weights in layouts:
        if owner not in ("", model.model):
            continue
        own = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
        counts = Counter(map(model.form, own))
        # A form of two modules names neither.
        index = {form: name for name in own if counts[form := model.form(name)] == 1}
        names = {module: index[form] for module in model.parts if (form := model.form(module)) in index}
        shapes = [(product_shape(adapter, model.parts[module]), weights[f"{names[module]}.weight"]) for module in names]
        count = sum(shape is None or without_ones(shape) == without_ones(weight.shape) for shape, weight in shapes)
        match = Match(weights, names, count, count == len(model.parts), owner != "")
        if match.is_whole:
            places.add(tuple(weight.places for _, weight in shapes))
        best = max(best, match, key=lambda each: (each.is_whole, each.fits, len(each.names)))
    if len(places) > 1:
        raise adapter.refusal(f"the names of {model.label} mean different weights of the base", WITH_DIFFUSERS)
    return best


def product_shape(adapter: Adapter, parts: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the shape of the weight that two matrices change, or None if one is missing."""
    a, b = (adapter.tensors.get(parts.get(part, "")) for part in (DOWN, UP))
    return (*b.shape[:1], *a.shape[1:]) if a is not None and b is not None else None


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without the 1s behind the second dimension: a convolution of 1x1 is a linear layer."""
    return tuple(shape[:2]) if prod(shape[2:]) == 1 else tuple(shape)


def _layouts(base: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Weight]]]:
    """Yield the names of the base, and those of built-in recipes; first the model of the pipeline, "" for any."""
    own = own_weights(base)
    yield "", own
    for prefix in (_LDM, *(f"{label}." for label in MODELS)):
        inside = {name.removeprefix(prefix): weight for name, weight in own.items() if name.startswith(prefix)}
        if inside:
            yield MODELS.get(prefix[:-1], "unet"), inside
    for family, weights in renamed_weights(base, "diffusers", both_ways=True):
        if family in MODELS:
            yield MODELS[family], {name.removeprefix(_LDM): each for name, each in weights.items()}

"""Find where a base holds the weights that an adapter means: tensors, or rows of them.

An adapter may use names of another layout of the same model. A built-in recipe gives a base these names, and says which
rows of its tensors each weight is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..checkpoint.tensors import Tensor
from ..formats.recipes.evaluation import Block, Output, View, apply, fits
from ..formats.recipes.recipe import built_in, built_in_names
from ..values.torch.adapters import StoredTensor
from .adapter_changes import WeightChange


class Place(NamedTuple):
    """Rows of a tensor in the base: its key, the first row, how many, and which row of the wanted weight comes first.

    ``is_part`` is false if it is the whole tensor.
    """

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


def at_places(change: WeightChange, weight: Weight) -> Iterator[WeightChange]:
    """Yield the change of each tensor in the base that has rows of the weight."""
    for place in weight.places:
        step = change.step
        if len(weight.places) > 1 or place.is_part:
            first, *others = step.tensors
            tensors = (
                rows_of(first, place.begin, place.rows),
                *others[:1],
                *(rows_of(other, place.begin, place.rows) for other in others[1:]),
            )
            step = step._replace(tensors=tensors, first_row=place.first, row=weight.row)
        yield WeightChange(place.key, step)


def rows_of(part: StoredTensor, begin: int, count: int) -> StoredTensor:
    """Return ``count`` rows of a tensor, from ``begin`` on."""
    view = part.view
    rows = view._replace(shape=(count, *view.shape[1:]), offset=view.offset + begin * view.stride[0])
    return part._replace(view=rows)


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
    is_part = size != source.numel
    return Place(block.source, block.begin // row, size // row, begin // row, is_part)

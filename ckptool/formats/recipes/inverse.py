"""Whether a recipe leads back from its result: if it does not, its rules do not describe the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.errors import RefusedError
from ...base.text import quoted
from ...checkpoint.tensors import contiguous_strides
from .evaluation import Result, View, apply
from .recipe import TABLES, Recipe


def _refuse_gaps(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise RefusedError if numbers that count several kinds of modules, as {3B+J+1} does, leave one out."""
    patterns = (pattern.name for rule in recipe.rules for pattern in (*rule.a, *rule.b) if pattern.name.sums)
    heads = {each.texts[0] for each in patterns if any(abs(factor) > 1 for _, factor in each.sums[0].factors)}
    for head in sorted(heads):
        steps = (name[len(head) :].partition(".")[0] for name in names if name.startswith(head))
        found = {int(step) for step in steps if step.isdecimal()}
        gap = next(number for number in range(len(found) + 1) if number not in found)
        if gap < len(found):
            what = f"there would be {quoted(f'{head}{max(found)}')} without {quoted(f'{head}{gap}')}"
            raise RefusedError(f"{what}: the recipe counts blocks of another depth, or one is missing")


def refuse_one_way(
    recipe: Recipe, tensors: Mapping[str, View], facts: Sequence[Mapping[str, Any]], result: Result
) -> None:
    """Raise RefusedError if the inverse of a built-in recipe does not lead back from a result of ``apply``.

    Names may differ once, as those of another version of the same layout do: then they lead to the same result again.
    """
    if not recipe.path.startswith(TABLES):
        return
    _refuse_gaps(recipe.expanded(tensors), [*tensors, *(output.name for output in result.outputs)])
    made = {output.name: View(output.shape, contiguous_strides(output.shape)) for output in result.outputs}
    kept = {name: tensors[name] for name in result.rest}
    what = "the result could not be converted back"
    try:
        inverse = recipe.reversed()._replace(model_types=((), ()))
        back = apply(inverse, made | kept, facts, result.numbers)
        names = {output.name: View(output.shape, contiguous_strides(output.shape)) for output in back.outputs}
        if {*names, *kept} == tensors.keys() - {*result.ignored, *result.apart}:
            return
        again = apply(recipe, names | kept, facts, result.numbers)
    except RefusedError as error:
        raise RefusedError(f"{what}: {error.what}") from error
    shapes = {output.name: output.shape for output in again.outputs}
    odd = sorted({(name, view.shape) for name, view in made.items()} ^ {*shapes.items()})
    if odd:
        raise RefusedError(f"{what}: {quoted(odd[0][0])} would be another tensor")

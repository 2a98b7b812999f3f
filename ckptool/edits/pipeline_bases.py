"""Find the models of a pipeline in a base: by its own names, or by those that a built-in recipe gives its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Final

from ..base.records import NamedTuple
from ..checkpoint.tensors import Tensor
from .adapter_names import MODELS, WITH_DIFFUSERS, Modules
from .adapter_settings import Adapter
from .weight_places import Place, Weight, own_weights, renamed_weights

#: The prefix of the diffusion model in a file of a whole pipeline.
_LDM: Final = "model.diffusion_model."


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
        index = _by_form(model, weights)
        names = {module: index[form] for module in model.parts if (form := model.form(module)) in index}
        fits = 0
        for module, name in names.items():
            shape = product_shape(adapter, model.parts[module])
            fits += shape is None or without_ones(shape) == without_ones(weights[f"{name}.weight"].shape)
        match = Match(weights, names, fits, fits == len(model.parts), owner != "")
        if match.is_whole:
            places.add(tuple(weights[f"{name}.weight"].places for name in names.values()))
        best = max(best, match, key=lambda each: (each.is_whole, each.fits, len(each.names)))
    if len(places) > 1:
        raise adapter.refusal(f"the names of {model.label} mean different weights of the base", WITH_DIFFUSERS)
    return best


def _by_form(model: Modules, weights: Mapping[str, Weight]) -> dict[str, str]:
    """Return the modules with a weight, by the form in which names are compared; without forms of two modules."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    counts = Counter(map(model.form, names))
    return {form: name for name in names if counts[form := model.form(name)] == 1}


def product_shape(adapter: Adapter, parts: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the shape of the weight that two matrices change, or None if one is missing."""
    a, b = (adapter.tensors.get(parts.get(f"lora_{which}.weight", "")) for which in "AB")
    return (*b.shape[:1], *a.shape[1:]) if a is not None and b is not None else None


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without the 1s behind the second dimension: a convolution of 1x1 is a linear layer."""
    return tuple(shape[:2]) if prod(shape[2:]) == 1 else tuple(shape)


def _layouts(base: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Weight]]]:
    """Yield the names of the base itself, and those that built-in recipes give its weights.

    The first item is the model of the pipeline that they belong to, or "" if they may belong to any.
    """
    own = own_weights(base)
    yield "", own
    for prefix in (_LDM, *(f"{label}." for label in MODELS)):
        inside = {name.removeprefix(prefix): weight for name, weight in own.items() if name.startswith(prefix)}
        if inside:
            yield MODELS.get(prefix[:-1], "unet"), inside
    for family, weights in renamed_weights(base, "diffusers", both_ways=True):
        if family in MODELS:
            yield MODELS[family], {name.removeprefix(_LDM): each for name, each in weights.items()}

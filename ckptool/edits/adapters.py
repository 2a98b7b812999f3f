"""Find the weights of a base model that an adapter changes, and describe an adapter.

An adapter may use the names of another layout of the same model. Then a built-in recipe maps each weight to rows of
tensors in the base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Final

from ..base.addresses import is_remote
from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.nearest import nearest
from ..base.records import NamedTuple
from ..base.steps import command
from ..base.text import join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..formats.recipes.evaluation import Output, View, apply, fits
from ..formats.recipes.recipe import built_in, built_in_names
from ..values.numeric import to_numbers
from ..values.torch.adapters import NOT_ADDED, ORDER, AdapterStep
from .adapter_changes import Module, Shape, WeightChange, module_changes
from .adapter_names import DOWN, MODELS, NORMS, PEFT_PREFIX, TABLE, UP, WITH_DIFFUSERS, Modules, Parts, is_of_pipeline
from .adapter_settings import BY_PEFT, CONFIG, Adapter, adapter_config, base_in_header
from .lora_layouts import Renaming

#: Parts whose first dimension is the rank.
_WITH_RANK: Final = (DOWN, "lora_embedding_A", "hada_w1_b")
#: Kinds of adapters for pipelines, by parts that only they have.
_KINDS: Final = {"hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT", "a1": "GLoRA", NORMS: "DoRA"}
#: The prefix of the diffusion model in a file of a whole pipeline.
_LDM: Final = "model.diffusion_model."


def description(checkpoint: Checkpoint) -> str:
    """Return the type, the ranks, the targets and the base of an adapter; "" if its settings are missing."""
    tensors = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    adapter = Adapter(checkpoint, {}, tensors, of_pipeline=is_of_pipeline(tensors.keys()))
    base = base_in_header(checkpoint)
    if not adapter.of_pipeline:
        config: Mapping[str, object] | None = None
        with suppress(RefusedError):
            config = adapter_config(checkpoint)
        if config is None:
            return ""
        bare = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in tensors.items()}
        adapter = adapter._replace(config=config, tensors=bare)
        base = adapter.base_name
    try:
        what = _summary(adapter, adapter.modules(to_merge=not adapter.of_pipeline))
    except RefusedError as error:
        what = str(adapter.config.get("peft_type"))
        if what not in TABLE["without weights"]:
            return f"an adapter{' of an image pipeline' * adapter.of_pipeline}, not a model: {error.what}"
    return f"an adapter ({what}), not a model" + (f"; its base is {quoted(base)}" if base else "")


def _summary(adapter: Adapter, models: Sequence[Modules]) -> str:
    """Return the kind of an adapter, and its ranks and targets; also the layout and the models for a pipeline."""
    modules = [item for model in models for item in model.parts.items()]
    shapes = (adapter.tensors[key].shape for _, each in modules for part, key in each.items() if part in _WITH_RANK)
    ranks = sorted({shape[0] for shape in shapes if len(shape) > 1})
    if not adapter.of_pipeline:
        if adapter.config.get("target_parameters"):  # their matrices have the ranks of all experts
            ranks = [rank for rank in ranks if rank == adapter.config.get("r")]
        rank = f" of rank {join_limited([f'{number:,}' for number in ranks])}" if ranks else ""
        kind = str(adapter.config.get("peft_type", "LORA"))[:40]
        kind = kind if kind != "LORA" else "DoRA" if adapter.is_set("use_dora") else "LoRA"
        changed = [module for module, each in modules if not all(part.startswith("copy.") for part in each)]
        on = join_limited(list(dict.fromkeys(_NESTED.sub("", each).rpartition(".")[2] for each in changed)))
        return f"{kind}{rank}{f' on {on}' if on else ''}"
    every = {part for _, each in modules for part in each}
    kind = next((kind for start, kind in _KINDS.items() if any(part.startswith(start) for part in every)), "LoRA")
    known = ""
    with suppress(RefusedError):
        known = Renaming(models, "diffusers", "", adapter.tensors).base
    keys = [each["alpha"] for _, each in modules if "alpha" in each and adapter.tensors[each["alpha"]].numel == 1]
    keys = [] if is_remote(adapter.checkpoint.path) else keys
    alphas = dict.fromkeys(to_numbers(adapter.stored(key).values, adapter.tensors[key].dtype)[0] for key in keys)
    numbers = {"rank": [f"{rank:,}" for rank in ranks], "alpha": [f"{alpha.real:g}" for alpha in alphas]}
    details = [f"{name} {join_limited(values)}" for name, values in numbers.items() if values]
    details += [f"{pluralize(len(model.parts), 'module')} of {model.label}" for model in models]
    comfyui = any(model.label in ("diffusion_model", "clip_l", "clip_g", "t5xxl") for model in models)
    layout = "kohya" if any(model.dotless for model in models) else "ComfyUI" if comfyui else "diffusers"
    return f"{kind}{f' of {known}' if known else ''} in the layout of {layout}: {', '.join(details)}"


def weight_changes(
    adapter: Adapter, base: Mapping[str, Tensor], path: str
) -> tuple[list[WeightChange], Mapping[str, int]]:
    """Return the changes of the weights of ``base``, a state dict, in the order in which they apply.

    Also return the number of tensors for each other model of a pipeline, which the base does not hold. ``path`` is the
    path of the base. Raise RefusedError unless every other tensor of the adapter is used and fits.
    """
    models = adapter.modules()
    if adapter.of_pipeline:
        return _pipeline_changes(adapter, models, base, path)
    parts = {name: keys for model in models for name, keys in model.parts.items()}
    found: list[WeightChange] = []
    if adapter.config.get("target_parameters"):
        found, used = _parameter_changes(adapter, parts, base, path)
        if not (parts := {name: keys for name, keys in parts.items() if name not in used}):
            return found, {}
    shapes = {key: tensor.shape for key, tensor in base.items()}
    changes = _changes_of(adapter, parts, {}, shapes, path)
    weights = [key.removesuffix(".weight") for key in shapes if key.endswith(".weight") and len(shapes[key]) > 1]
    lacking = [name for name in weights if name not in parts and adapter.targets(name)]
    if lacking:
        message = f"{CONFIG} targets {pluralize(len(lacking), 'module')} of {path} for which it has no tensors"
        step = "get the whole adapter; this one holds " + command("keys", adapter.checkpoint.path)
        raise adapter.refusal(f"{message}: {join_limited(lacking, most=3)}", step)
    return [*changes, *found], {}


def _changes_of(
    adapter: Adapter, parts: Mapping[str, Parts], names: Mapping[str, str], base: Mapping[str, Shape], path: str
) -> list[WeightChange]:
    """Return the changes by the modules of an adapter; ``names`` maps modules to their names in the base."""
    changes: list[WeightChange] = []
    missing: list[str] = []
    for name, keys in parts.items():
        made = module_changes(Module(adapter, name, keys, names.get(name, name), base, path))
        if made is None or (any(key not in base for key, _ in made) and not adapter.is_saved(name)):
            missing.append(name)
        changes += made or ()
    if missing or not any(key in base for key, _ in changes):
        missing = missing or list(parts)
        matched, absent = len(parts) - len(missing), join_limited([quoted(module) for module in missing], most=3)
        wrong = "" if matched else " (wrong base?)"
        message = f"{matched:,} of {pluralize(len(parts), 'module')} matched{wrong}; not in {path}: {absent}"
        there = list(dict.fromkeys(name.rpartition(".")[0] for name in base))
        near = [*nearest(missing[0], there, 1), *there[:1]]
        raise adapter.refusal(f"{message}; names there are like {quoted(near[0])}" if near else message)
    if adapter.weight != 1 and (other := next((key for key, step in changes if step.kind in NOT_ADDED), "")):
        message = f"it replaces or multiplies {quoted(other)}, which a weight of {adapter.weight:g} does not describe"
        raise adapter.refusal(message, "merge it with the weight 1")
    return sorted(changes, key=lambda change: ORDER.index(change[1].kind))


# -- parameters that are not modules, such as the experts of a layer in one tensor (``target_parameters``)
#
# PEFT joins the matrices of all experts into two, without the name of the parameter: settings and shapes identify it.
# Sources: PEFT (``tuners/lora/layer.py``, ParamWrapper; ``tuners/tuners_utils.py``, ``_inject_parameters``).

#: PEFT wraps a module once for each of its parameters. The names of inner wrappers end so.
_NESTED: Final = regex(r"(?:\.base_layer)*\Z")
#: The most experts of a layer; a crafted file may claim any number.
_MOST_EXPERTS: Final = 1 << 14
#: The orders of the two axes after the axis of experts.
_ORDERS: Final = ("out, in", "in, out")


def _parameter_changes(
    adapter: Adapter, parts: Mapping[str, Parts], base: Mapping[str, Tensor], path: str
) -> tuple[list[WeightChange], set[str]]:
    """Return the changes of parameters and the modules used; raise RefusedError if the shapes fit none or several."""
    targets = adapter.config.get("target_parameters")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise adapter.refusal("its target_parameters are not a list of names", BY_PEFT)
    owners: dict[str, list[str]] = {}
    for wrapper in parts:
        owners.setdefault(_NESTED.sub("", wrapper), []).append(wrapper)
    # A recipe makes tensors of experts in the order (experts, out, in). Those in the file may have (experts, in, out).
    layouts = [(own_weights(base), _ORDERS), *((made, _ORDERS[:1]) for _, made in renamed_weights(base, "stacked"))]
    found: list[WeightChange] = []
    used: set[str] = set()
    for module, wrappers in owners.items():
        every = {target: f"{module}.{target.rpartition('.')[2]}" for target in targets}
        # A parameter that the settings name may be in the module.
        names = sorted({name for target, name in every.items() if f".{name}".endswith(f".{target}")})
        pairs = {name: (parts[name][DOWN], parts[name][UP]) for name in wrappers if parts[name].keys() == {DOWN, UP}}
        if not (names and pairs):
            continue
        known, orders = next((each for each in layouts if any(name in each[0] for name in names)), ({}, _ORDERS))
        if not known:
            message = f"{join_limited([quoted(name) for name in names])} not in {path}, nor experts that make it up"
            raise adapter.refusal(f"{message}: another base, or one with experts that no recipe describes", BY_PEFT)
        weights = {name: known[name] for name in names if name in known}
        choices = [_fits(adapter, pair, weights, path) for pair in pairs.values()]
        # All parameters of a module have the same order, so that one that is not square decides for the others.
        orders = tuple(order for order in orders if all(order in {way for _, way in ways} for ways in choices))
        taken: set[str] = set()
        for pair, ways in zip(pairs.values(), choices):
            left = [(name, order) for name, order in ways if order in orders]
            if len(left) != 1 or left[0][0] in taken:
                message = f"{quoted(pair[0])} fits {' and '.join(dict.fromkeys(quoted(name) for name, _ in ways))}"
                raise adapter.refusal(f"{message} in several ways, and the file does not say which", BY_PEFT)
            ((name, order),) = left
            found += _expert_changes(adapter, pair, name, known[name], order)
            taken.add(name)
        used |= pairs.keys()
    return found, used


def _fits(adapter: Adapter, pair: tuple[str, str], weights: Mapping[str, Weight], path: str) -> list[tuple[str, str]]:
    """Return the parameters that two matrices fit, with the order of axes of each; raise RefusedError if none fits."""
    a, b = (adapter.tensors[key].shape for key in pair)
    found = []
    for name, weight in weights.items():
        experts, rows, columns = (1, *weight.shape)[-3:] if len(weight.shape) in (2, 3) else (0, 0, 0)
        if experts and len(a) == len(b) == 2 and a[0] == b[1] and a[0] % experts == 0:
            found += [(name, "out, in")] if (rows, columns) == (b[0], a[1]) else []
            found += [(name, "in, out")] if (rows, columns) == (a[1], b[0]) and len(weight.shape) == 3 else []
    if not found:
        shapes = join_limited([f"{quoted(name)} of {shape_text(weight.shape)}" for name, weight in weights.items()])
        message = f"{quoted(pair[0])} of {shape_text(a)}, and its partner of {shape_text(b)}, do not fit {shapes}"
        raise adapter.refusal(f"{message} in {path}: another base")
    return found


def _expert_changes(
    adapter: Adapter, pair: tuple[str, str], name: str, weight: Weight, order: str
) -> Iterator[WeightChange]:
    """Yield the change of each tensor in the base that holds rows of an expert."""
    a, b = map(adapter.stored, pair)
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if experts > _MOST_EXPERTS:
        raise adapter.refusal(f"{quoted(name)} has {experts:,} experts, and {_MOST_EXPERTS:,} are the most")
    rank = a.view.shape[0] // experts
    adapter.check_rank(pair[0], rank)
    factor = adapter.weight * adapter.scale(name, rank)
    rows = prod(weight.shape[:-1]) // experts
    (height, columns), (down, right) = b.view.shape, b.view.stride
    for expert in range(experts):
        # The columns of an expert in B are as far apart as there are experts.
        offset = b.view.offset + expert * right
        own = b.view._replace(shape=(height, columns // experts), stride=(down, right * experts), offset=offset)
        matrices = b._replace(view=own), a.rows(expert * rank, rank)
        if order == "in, out":
            views = (
                part.view._replace(shape=part.view.shape[::-1], stride=part.view.stride[::-1]) for part in matrices
            )
            second, first = (part._replace(view=view) for part, view in zip(matrices, views))
            matrices = first, second
        step = AdapterStep("product", matrices, factor, round_first=True)
        yield from weight.part(expert * rows, rows).changes(step)


# -- the weights of a base, and their rows


class Place(NamedTuple):
    """Rows of a base tensor: key, first row, how many, and the first wanted row; ``is_part``: not all of its rows."""

    key: str
    first: int
    rows: int
    begin: int
    is_part: bool


class Weight(NamedTuple):
    """A weight that an adapter may mean: its shape, and its places in the base."""

    shape: Shape
    places: tuple[Place, ...] = ()

    @property
    def row(self) -> int:
        """The number of elements in a row. With three axes, each expert has rows of its own."""
        return self.shape[-1] if len(self.shape) == 3 else prod(self.shape[1:])

    def part(self, begin: int, rows: int) -> Weight:
        """Return some rows of the weight."""
        places = []
        for place in self.places:
            first, last = max(place.begin, begin), min(place.begin + place.rows, begin + rows)
            if first < last:
                at = place.first + first - place.begin
                places.append(Place(place.key, at, last - first, first - begin, is_part=True))
        return self._replace(places=tuple(places))

    def changes(self, step: AdapterStep) -> Iterator[WeightChange]:
        """Yield a change of the weight as changes of the tensors in the base that hold its rows."""
        for place in self.places:
            own = step
            if len(self.places) > 1 or place.is_part:
                # The second tensor of a product has no row for each row of the weight.
                parts = [part if n == 1 else part.rows(place.begin, place.rows) for n, part in enumerate(step.tensors)]
                own = step._replace(tensors=tuple(parts), first_row=place.first, row=self.row)
            yield place.key, own


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
    for recipe in map(built_in, built_in_names()):
        target, _, family = recipe.b.partition(":")
        if target != library:
            continue
        for turned in (recipe, recipe.reversed()) if both_ways else (recipe,):
            if fits(turned, views):
                with suppress(RefusedError):
                    found = ((output.name, _weight_of(output, base)) for output in apply(turned, views, []).outputs)
                    yield family, {name: weight for name, weight in found if weight is not None}


def _whole(name: str, tensor: Tensor, shape: Shape) -> Weight:
    rows = tensor.numel // max(Weight(shape).row, 1)
    return Weight(shape, (Place(name, 0, rows, 0, is_part=False),))


def _weight_of(output: Output, base: Mapping[str, Tensor]) -> Weight | None:
    """Return a weight that a recipe makes of whole rows of the base, each block in the same order, or None."""
    if not output.blocks:
        (source,) = output.sources
        return _whole(source, base[source], output.shape)
    row, places = Weight(output.shape).row, []
    for block in output.blocks:
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
        is_part = size != base[block.source].numel
        places.append(Place(block.source, block.begin // row, size // row, begin // row, is_part))
    return Weight(output.shape, tuple(places))


# -- the models of a pipeline


class Match(NamedTuple):
    """The weights of a base by the names of one layout, and the names of an adapter's modules in that layout.

    ``order`` ranks matches: whether all modules are there and fit, the number of those that fit, and the number of
    those that are there. ``is_sure``: the layout belongs to one model.
    """

    weights: Mapping[str, Weight]
    names: Mapping[str, str]
    order: tuple[bool, int, int]
    is_sure: bool


def _pipeline_changes(
    adapter: Adapter, models: Sequence[Modules], base: Mapping[str, Tensor], path: str
) -> tuple[list[WeightChange], Mapping[str, int]]:
    """Return the changes by the models that the base holds whole, and the number of tensors of each other model."""
    every = own_weights(base)
    # The weights of the base under its own names and those of recipes, each with the model, or "" for any.
    layouts: list[tuple[str, Mapping[str, Weight]]] = [("", every)]
    for prefix in (_LDM, *(f"{label}." for label in MODELS)):
        inside = {name.removeprefix(prefix): each for name, each in every.items() if name.startswith(prefix)}
        layouts += [(MODELS.get(prefix[:-1], "unet"), inside)] if inside else []
    for family, weights in renamed_weights(base, "diffusers", both_ways=True):
        if family in MODELS:
            layouts.append((MODELS[family], {name.removeprefix(_LDM): each for name, each in weights.items()}))
    matches = [_match(adapter, model, layouts) for model in models]
    best = max(matches, key=lambda match: match.order)
    found: list[WeightChange] = []
    unused: dict[str, int] = {}
    owners: dict[str, str] = {}
    for model, match in zip(models, matches):
        # A model that the base holds in part is wrong. One that it does not hold belongs to another base.
        is_there = match.order[0] or (bool(match.names) and match.is_sure)
        if not (is_there if best.order[0] else match is best):
            unused[model.label] = sum(map(len, model.parts.values()))
            continue
        own = adapter.of(model)
        own.check_settings()
        shapes = {name: item.shape for name, item in match.weights.items()}
        for module, keys in model.parts.items():
            key, magnitude = f"{match.names.get(module, module)}.weight", keys.get(NORMS, "")
            shape = _product_shape(own, keys)
            if shape and key in shapes and _without_ones(shape) == _without_ones(shapes[key]):
                shapes[key] = shape
            norms = adapter.tensors[magnitude].shape if magnitude else ()
            if shape and len(norms) > 1 and norms[0] != shape[0]:
                what = f"{quoted(magnitude)} has the norms of columns, and only those of rows are supported"
                raise adapter.refusal(what)
        changes = _changes_of(own, model.parts, match.names, shapes, path)
        for key, step in (item for name, each in changes for item in match.weights[name].changes(each)):
            other = owners.setdefault(key, model.label)
            if other != model.label:
                what = f"its models {other} and {model.label} both fit {quoted(key)} of {path}"
                raise adapter.refusal(f"{what}, and the names do not show which is meant", WITH_DIFFUSERS)
            found.append((key, step))
    return found, unused


def _match(adapter: Adapter, model: Modules, layouts: Sequence[tuple[str, Mapping[str, Weight]]]) -> Match:
    """Return the layout of the base with most of the modules; raise RefusedError if two layouts have them all."""
    found = [Match({}, {}, (False, 0, 0), False)]
    places: set[tuple[tuple[Place, ...], ...]] = set()
    for owner, weights in layouts:
        if owner not in ("", model.model):
            continue
        own = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
        counts = Counter(map(model.form, own))
        # A form of two modules names neither.
        index = {form: name for name in own if counts[form := model.form(name)] == 1}
        names = {module: index[form] for module in model.parts if (form := model.form(module)) in index}
        shapes = [(_product_shape(adapter, model.parts[each]), weights[f"{names[each]}.weight"]) for each in names]
        count = sum(shape is None or _without_ones(shape) == _without_ones(weight.shape) for shape, weight in shapes)
        found.append(Match(weights, names, (count == len(model.parts), count, len(names)), owner != ""))
        if count == len(model.parts):
            places.add(tuple(weight.places for _, weight in shapes))
    if len(places) > 1:
        raise adapter.refusal(f"the names of {model.label} mean different weights of the base", WITH_DIFFUSERS)
    return max(found, key=lambda match: match.order)


def _product_shape(adapter: Adapter, parts: Parts) -> Shape | None:
    """Return the shape of the weight that two matrices change, or None if one is missing."""
    a, b = (adapter.tensors.get(parts.get(part, "")) for part in (DOWN, UP))
    return (*b.shape[:1], *a.shape[1:]) if a is not None and b is not None else None


def _without_ones(shape: Sequence[int]) -> Shape:
    """Return a shape without the 1s behind the second dimension: a convolution of 1x1 is a linear layer."""
    return tuple(shape[:2]) if prod(shape[2:]) == 1 else tuple(shape)

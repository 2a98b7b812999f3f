"""Find the weights of a base model that an adapter changes, and describe an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Final

from ..base.addresses import is_remote
from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.nearest import nearest
from ..base.steps import command
from ..base.text import join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..values.numeric import to_numbers
from ..values.torch.adapters import NOT_ADDED, ORDER, AdapterStep, StoredTensor
from .adapter_bases import Match, Weight, matches, own_weights, product_shape, renamed_weights, without_ones
from .adapter_changes import Module, WeightChange, module_changes
from .adapter_names import DOWN, NORMS, PEFT_PREFIX, WITH_DIFFUSERS, Modules, Parts, is_of_pipeline
from .adapter_settings import (
    BY_PEFT,
    CONFIG,
    Adapter,
    adapter_config,
    base_in_header,
    check_rank,
    check_settings,
    scale,
    targets,
)
from .lora_modules import base_of, layout_of

#: Parts whose first dimension is the rank.
_WITH_RANK: Final = (DOWN, "lora_embedding_A", "hada_w1_b")
#: Kinds of adapters for pipelines, by parts that only they have.
_KINDS: Final = {"hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT", "a1": "GLoRA", NORMS: "DoRA"}


def description(checkpoint: Checkpoint) -> str:
    """Return the type, the ranks, the targets and the base of an adapter; "" if its settings are missing."""
    tensors = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    adapter = Adapter(checkpoint, {}, tensors, of_pipeline=is_of_pipeline(tensors.keys()))
    if adapter.of_pipeline:
        return _description_of_lora(adapter)
    with suppress(RefusedError):
        if (config := adapter_config(checkpoint)) is None:
            return ""
        bare = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in tensors.items()}
        adapter = adapter._replace(config=config, tensors=bare)
        parts = [item for model in adapter.modules() for item in model.parts.items()]
        ranks = _ranks(adapter, [each for _, each in parts])
        if adapter.has_parameters:  # their matrices have the ranks of all experts
            ranks = [rank for rank in ranks if rank == config.get("r")]
        rank = f" of rank {join_limited([f'{number:,}' for number in ranks])}" if ranks else ""
        kind = str(config.get("peft_type", "LORA"))[:40]
        kind = kind if kind != "LORA" else "DoRA" if adapter.is_set("use_dora") else "LoRA"
        changed = [module for module, each in parts if not all(part.startswith("copy.") for part in each)]
        on = join_limited(list(dict.fromkeys(each.rpartition(".")[2] for each in changed)))
        return _with_base(f"an adapter ({kind}{rank}{f' on {on}' if on else ''}), not a model", adapter.base_name)
    return ""


def _with_base(what: str, base: str) -> str:
    return f"{what}; its base is {quoted(base)}" if base else what


def _ranks(adapter: Adapter, parts: Iterable[Parts]) -> list[int]:
    shapes = [adapter.tensors[key].shape for each in parts for part, key in each.items() if part in _WITH_RANK]
    return sorted({shape[0] for shape in shapes if len(shape) > 1})


def _description_of_lora(adapter: Adapter) -> str:
    """Return the kind, the layout, the models and the base of a LoRA for a pipeline."""
    try:
        models = adapter.modules(to_merge=False)
    except RefusedError as error:
        return f"an adapter of an image pipeline, not a model: {error.what}"
    parts = [each for model in models for each in model.parts.values()]
    every = {part for each in parts for part in each}
    kind = next((kind for start, kind in _KINDS.items() if any(part.startswith(start) for part in every)), "LoRA")
    base = base_of(models, lambda key: adapter.tensors[key].shape)
    keys = [each["alpha"] for each in parts if "alpha" in each and adapter.tensors[each["alpha"]].numel == 1]
    alphas: list[complex] = []
    if not is_remote(adapter.path):
        alphas = [to_numbers(adapter.stored(key).values, adapter.tensors[key].dtype)[0] for key in keys]
    numbers = {
        "rank": [f"{number:,}" for number in _ranks(adapter, parts)],
        "alpha": [f"{number.real:g}" for number in dict.fromkeys(alphas)],
    }
    details = [f"{name} {join_limited(values)}" for name, values in numbers.items() if values]
    details += [f"{pluralize(len(model.parts), 'module')} of {model.label}" for model in models]
    of = f" of {base}" if base else ""
    what = f"an adapter ({kind}{of} in the layout of {layout_of(models)}: {', '.join(details)}), not a model"
    return _with_base(what, base_in_header(adapter.checkpoint))


def weight_changes(
    adapter: Adapter, base: Mapping[str, Tensor], path: str, weight: float
) -> tuple[list[WeightChange], Mapping[str, int]]:
    """Return the changes of the weights of ``base``, a state dict, in the order in which they apply.

    Also return the number of tensors for each other model of a pipeline, which the base does not hold. ``path`` is the
    path of the base, ``weight`` multiplies the scale. Raise RefusedError unless every other tensor of the adapter is
    used and fits.
    """
    if adapter.of_pipeline:
        return _pipeline_changes(adapter, base, path, weight)
    found: list[WeightChange] = []
    if adapter.has_parameters:
        found, used = parameter_changes(adapter, base, path, weight)
        rest = {key: tensor for key, tensor in adapter.tensors.items() if key not in used}
        if not rest:
            return found, {}
        adapter = adapter._replace(tensors=rest)
    parts = {name: keys for model in adapter.modules() for name, keys in model.parts.items()}
    shapes = {key: tensor.shape for key, tensor in base.items()}
    changes = _changes_of(adapter, parts, {}, shapes, path, weight)
    weights = [key.removesuffix(".weight") for key in shapes if key.endswith(".weight") and len(shapes[key]) > 1]
    lacking = [name for name in weights if name not in parts and targets(adapter, name)]
    if lacking:
        message = f"{CONFIG} targets {pluralize(len(lacking), 'module')} of {path} for which it has no tensors"
        step = "get the whole adapter; this one holds " + command("keys", adapter.path)
        raise adapter.refusal(f"{message}: {join_limited(lacking, most=3)}", step)
    return [*changes, *found], {}


def _changes_of(
    adapter: Adapter,
    parts: Mapping[str, Parts],
    names: Mapping[str, str],
    base: Mapping[str, tuple[int, ...]],
    path: str,
    weight: float,
) -> list[WeightChange]:
    """Return the changes by modules of an adapter, given the parts of each; ``names`` has other names in the base."""
    changes: list[WeightChange] = []
    missing: list[str] = []
    for name, keys in parts.items():
        made = module_changes(Module(adapter, name, keys, names.get(name, name), base, path, weight))
        found = list(made or ())
        if made is None or any(change.key not in base and not change.added for change in found):
            missing.append(name)
        changes += found
    if missing or not any(change.key in base for change in changes):
        missing = missing or list(parts)
        matched, absent = len(parts) - len(missing), join_limited([quoted(module) for module in missing], most=3)
        wrong = "" if matched else " (wrong base?)"
        message = f"{matched:,} of {pluralize(len(parts), 'module')} matched{wrong}; not in {path}: {absent}"
        there = list(dict.fromkeys(name.rpartition(".")[0] for name in base))
        near = [*nearest(missing[0], there, 1), *there[:1]]
        raise adapter.refusal(f"{message}; names there are like {quoted(near[0])}" if near else message)
    if weight != 1 and (other := next((item for item in changes if item.step.kind in NOT_ADDED), None)):
        message = f"it replaces or multiplies {quoted(other.key)}, which a weight of {weight:g} does not describe"
        raise adapter.refusal(message, "merge it with the weight 1")
    return sorted(changes, key=lambda change: ORDER.index(change.step.kind))


# -- adapters for a pipeline


def _pipeline_changes(
    adapter: Adapter, base: Mapping[str, Tensor], path: str, weight: float
) -> tuple[list[WeightChange], Mapping[str, int]]:
    """Return the changes by each model of the adapter that the base holds, and how many tensors other models have."""
    models = adapter.modules()
    found: list[WeightChange] = []
    unused: dict[str, int] = {}
    owners: dict[str, str] = {}
    for model, match in zip(models, matches(adapter, models, base)):
        if match is None:
            unused[model.label] = sum(map(len, model.parts.values()))
            continue
        for change in _placed(adapter, model, match, path, weight):
            other = owners.setdefault(change.key, model.label)
            if other != model.label:
                what = f"its models {other} and {model.label} both fit {quoted(change.key)} of {path}"
                raise adapter.refusal(f"{what}, and names do not tell which of them that is", WITH_DIFFUSERS)
            found.append(change)
    return found, unused


def _placed(adapter: Adapter, model: Modules, match: Match, path: str, weight: float) -> list[WeightChange]:
    """Return the changes by one model; raise RefusedError unless all its modules are in the base and fit."""
    own = adapter.of(model)
    check_settings(own)
    shapes = {name: item.shape for name, item in match.weights.items()}
    for module, keys in model.parts.items():
        key, change, magnitude = (
            f"{match.names.get(module, module)}.weight",
            product_shape(own, keys),
            keys.get(NORMS, ""),
        )
        if change and key in shapes and without_ones(change) == without_ones(shapes[key]):
            shapes[key] = change
        norms = adapter.tensors[magnitude].shape if magnitude else ()
        if change and len(norms) > 1 and norms[0] != change[0]:
            raise adapter.refusal(f"{quoted(magnitude)} has the norms of columns, and only those of rows are supported")
    found = _changes_of(own, model.parts, match.names, shapes, path, weight)
    return [item for change in found for item in match.weights[change.key].changes(change)]


# -- parameters that are not modules, such as the experts of a layer in one tensor (``target_parameters``)
#
# PEFT stores the matrices of all experts in two, without the name of the parameter: settings and shapes tell it.
# Sources: PEFT (``tuners/lora/layer.py``, ParamWrapper; ``tuners/tuners_utils.py``, ``_inject_parameters``).

#: A key: the module, how deep the wrapper of the parameter lies in others, and which of the matrices it is.
_KEY: Final = regex(
    r"(?P<module>.+?)(?P<nested>(?:\.base_layer)*)\.lora_(?P<which>[AB])(?:\.(?!weight\Z|bias\Z)[^.]+)?\.weight\Z"
)
#: The most experts of a layer; a crafted file may claim any number.
_MOST_EXPERTS: Final = 1 << 14
#: The orders of the two axes behind the axis of experts.
_ORDERS: Final = ("out, in", "in, out")


def parameter_changes(
    adapter: Adapter, base: Mapping[str, Tensor], path: str, weight: float
) -> tuple[list[WeightChange], set[str]]:
    """Return the changes of parameters and the keys used; raise RefusedError if shapes do not tell which they are."""
    targets = adapter.config.get("target_parameters")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise adapter.refusal("its target_parameters are not a list of names", BY_PEFT)
    # A recipe makes tensors of experts in the order (experts, out, in). Those in the file may have (experts, in, out).
    layouts = [(own_weights(base), _ORDERS), *((made, _ORDERS[:1]) for _, made in renamed_weights(base, "stacked"))]
    found: list[WeightChange] = []
    used: set[str] = set()
    for module, pairs in _pairs(adapter, targets).items():
        names = sorted({f"{module}.{target.rpartition('.')[2]}" for target in targets if _is_in(module, target)})
        known, orders = next((each for each in layouts if any(name in each[0] for name in names)), ({}, _ORDERS))
        if not known:
            message = f"{join_limited([quoted(name) for name in names])} not in {path}, nor experts that make it up"
            raise adapter.refusal(f"{message}: another base, or one with experts that no recipe describes", BY_PEFT)
        weights = {name: known[name] for name in names if name in known}
        fits = [_fits(adapter, pair, weights, path) for pair in pairs]
        # All parameters of a module have the same order, so that one that is not square decides for the others.
        orders = tuple(order for order in orders if all(order in {way for _, way in ways} for ways in fits))
        taken: set[str] = set()
        for pair, ways in zip(pairs, fits):
            left = [(name, order) for name, order in ways if order in orders]
            if len(left) != 1 or left[0][0] in taken:
                message = f"{quoted(pair[0])} fits {' and '.join(dict.fromkeys(quoted(name) for name, _ in ways))}"
                raise adapter.refusal(f"{message} in several ways, and the file does not say which", BY_PEFT)
            ((name, order),) = left
            found += _expert_changes(adapter, pair, name, known[name], order, weight)
            used |= {*pair}
            taken.add(name)
    return found, used


def _is_in(module: str, target: str) -> bool:
    """Return whether a parameter that the settings name may be in a module."""
    name = f"{module}.{target.rpartition('.')[2]}"
    return name == target or name.endswith(f".{target}")


def _pairs(adapter: Adapter, targets: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the keys of the two matrices of each parameter, A first, by the modules that hold them."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in adapter.tensors:
        match = _KEY.match(key)
        if match is not None and any(_is_in(match["module"], target) for target in targets):
            found.setdefault((match["module"], match["nested"]), {})[match["which"]] = key
    pairs: dict[str, list[tuple[str, str]]] = {}
    for (module, _), keys in found.items():
        if len(keys) < 2:
            raise adapter.refusal(f"{quoted(next(iter(keys.values())))} has no partner: the file is incomplete")
        pairs.setdefault(module, []).append((keys["A"], keys["B"]))
    return pairs


def _fits(adapter: Adapter, pair: tuple[str, str], weights: Mapping[str, Weight], path: str) -> list[tuple[str, str]]:
    """Return the parameters of the shape of two matrices, with their orders of axes; raise RefusedError without any."""
    a, b = (adapter.tensors[key].shape for key in pair)
    found = []
    for name, weight in weights.items():
        *outer, rows, columns = (1, *weight.shape) if len(weight.shape) == 2 else weight.shape
        if len(outer) == 1 and outer[0] and len(a) == len(b) == 2 and a[0] == b[1] and a[0] % outer[0] == 0:
            found += [(name, "out, in")] if (rows, columns) == (b[0], a[1]) else []
            found += [(name, "in, out")] if (rows, columns) == (a[1], b[0]) and len(weight.shape) == 3 else []
    if not found:
        shapes = join_limited([f"{quoted(name)} of {shape_text(weight.shape)}" for name, weight in weights.items()])
        message = f"{quoted(pair[0])} of {shape_text(a)}, and its partner of {shape_text(b)}, do not fit {shapes}"
        raise adapter.refusal(f"{message} in {path}: another base")
    return found


def _expert_changes(
    adapter: Adapter, pair: tuple[str, str], name: str, weight: Weight, order: str, factor: float
) -> Iterator[WeightChange]:
    """Yield the change of each tensor in the base that holds rows of an expert."""
    a, b = map(adapter.stored, pair)
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if experts > _MOST_EXPERTS:
        raise adapter.refusal(f"{quoted(name)} has {experts:,} experts, and {_MOST_EXPERTS:,} are the most")
    rank = a.view.shape[0] // experts
    check_rank(adapter, pair[0], rank)
    factor *= scale(adapter, name, rank)
    rows = prod(weight.shape[:-1]) // experts
    for expert in range(experts):
        own = [a.rows(expert * rank, rank), _columns(b, expert, experts)]
        first, second = (_turned(own[0]), _turned(own[1])) if order == "in, out" else (own[1], own[0])
        for place in weight.places:
            begin, end = max(place.begin, expert * rows), min(place.begin + place.rows, (expert + 1) * rows)
            if begin < end:
                part = first.rows(begin - expert * rows, end - begin)
                at = place.first + begin - place.begin
                step = AdapterStep("product", (part, second), factor, round_first=True, first_row=at, row=weight.row)
                yield WeightChange(place.key, step)


def _columns(part: StoredTensor, begin: int, step: int) -> StoredTensor:
    view = part.view
    columns = view._replace(
        shape=(view.shape[0], view.shape[1] // step),
        stride=(view.stride[0], view.stride[1] * step),
        offset=view.offset + begin * view.stride[1],
    )
    return part._replace(view=columns)


def _turned(part: StoredTensor) -> StoredTensor:
    return part._replace(view=part.view._replace(shape=part.view.shape[::-1], stride=part.view.stride[::-1]))

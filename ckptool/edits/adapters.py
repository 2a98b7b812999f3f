"""Find the weights of a base model that an adapter changes, and describe an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

from ..base.errors import RefusedError
from ..base.nearest import nearest
from ..base.steps import command
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..values.elements import elements
from ..values.numeric import to_numbers
from ..values.torch.adapters import NOT_ADDED, ORDER
from .adapter_bases import Match, matches, product_shape, without_ones
from .adapter_changes import Module, WeightChange, module_changes
from .adapter_names import WITH_DIFFUSERS, Modules, is_of_pipeline, modules
from .adapter_settings import (
    CONFIG,
    Adapter,
    adapter_config,
    base_in_header,
    check_settings,
    scale,
    scale_without_alpha,
    settings_in_header,
    targets,
)
from .expert_adapters import parameter_changes

#: Parts whose first dimension is the rank.
_WITH_RANK: Final = ("lora_A.weight", "lora_embedding_A.weight", "hada_w1_b.weight")


def description(checkpoint: Checkpoint) -> str:
    """Return the type, the ranks, the targets and the base of an adapter; "" if its settings are missing."""
    tensors = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    of_pipeline = is_of_pipeline(tensors.keys())
    try:
        config = {} if of_pipeline else adapter_config(checkpoint)
        if config is None:
            return ""
        models = modules(tensors.keys(), None if of_pipeline else config.get("peft_type", ""))
    except RefusedError as error:
        return f"an adapter of an image pipeline, not a model: {error.what}" if of_pipeline else ""
    adapter = Adapter(checkpoint, config, tensors, of_pipeline)
    parts = [(module, each) for model in models for module, each in model.parts.items()]
    firsts = [tensors[key].shape for _, each in parts for part, key in each.items() if part in _WITH_RANK]
    ranks = {shape[0] for shape in firsts if len(shape) > 1}
    if adapter.has_parameters:  # their matrices have the ranks of all experts
        ranks &= {config.get("r")}
    rank = f" of rank {join_limited([f'{number:,}' for number in sorted(ranks)])}" if ranks else ""
    kind = str(config.get("peft_type", "LORA"))[:40]
    kind = kind if kind != "LORA" else "DoRA" if adapter.is_set("use_dora") else "LoRA"
    if of_pipeline:
        named = [f"{pluralize(len(model.parts), 'module')} of {model.label}" for model in models]
        on, name = " and ".join(named), base_in_header(checkpoint)
    else:
        changed = [module for module, each in parts if not all(part.startswith("copy.") for part in each)]
        on, name = join_limited(list(dict.fromkeys(each.rpartition(".")[2] for each in changed))), adapter.base_name
    what = f"an adapter ({kind}{rank}{f' on {on}' if on else ''}), not a model"
    return f"{what}; its base is {quoted(name)}" if name else what


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
    changes = _changes_of(adapter, parts, base, path, weight)
    weights = [name.removesuffix(".weight") for name, tensor in base.items() if len(tensor.shape) > 1]
    lacking = [name for name in weights if f"{name}.weight" in base and name not in parts and targets(adapter, name)]
    if lacking:
        message = f"{CONFIG} targets {pluralize(len(lacking), 'module')} of {path} for which it has no tensors"
        step = "get the whole adapter; this one holds " + command("keys", adapter.path)
        raise adapter.refusal(f"{message}: {join_limited(lacking, most=3)}", step)
    return [*changes, *found], {}


def _changes_of(
    adapter: Adapter, parts: Mapping[str, Mapping[str, str]], base: Mapping[str, Tensor], path: str, weight: float
) -> list[WeightChange]:
    """Return the changes by modules of an adapter, given the key of each tensor by module and part."""
    changes: list[WeightChange] = []
    missing: list[str] = []
    for name, keys in parts.items():
        made = module_changes(Module(adapter, name, base, path, weight), keys)
        found = list(made or ())
        if made is None or any(change.key not in base and not change.added for change in found):
            missing.append(name)
        changes += found
    if missing or not any(change.key in base for change in changes):
        raise _wrong_base(adapter, missing or list(parts), len(parts), base, path)
    if weight != 1 and (other := next((item for item in changes if item.step.kind in NOT_ADDED), None)):
        message = f"it replaces or multiplies {quoted(other.key)}, which a weight of {weight:g} does not describe"
        raise adapter.refusal(message, "merge it with the weight 1")
    return sorted(changes, key=lambda change: ORDER.index(change.step.kind))


def _wrong_base(
    adapter: Adapter, missing: Sequence[str], number: int, base: Mapping[str, Tensor], path: str
) -> RefusedError:
    """Return the error about modules that the base lacks, with a name that it has."""
    matched, absent = number - len(missing), join_limited([quoted(module) for module in missing], most=3)
    wrong = "" if matched else " (wrong base?)"
    message = f"{matched:,} of {pluralize(number, 'module')} matched{wrong}; not in {path}: {absent}"
    there = list(dict.fromkeys(name.rpartition(".")[0] for name in base))
    near = [*nearest(missing[0], there, 1), *there[:1]]
    return adapter.refusal(f"{message}; names there are like {quoted(near[0])}" if near else message)


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
            unused[model.label] = model.tensors
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
    own = adapter._replace(config=settings_in_header(adapter.checkpoint, model))
    check_settings(own)
    scales: dict[str, float] = {}
    parts: dict[str, Mapping[str, str]] = {}
    shapes = {name: item.shape for name, item in match.weights.items()}
    for module, keys in model.parts.items():
        name = match.names.get(module, module)
        parts[name] = keys
        scales[name] = _scale(own, module, keys, model.alphas.get(module, ""))
        change, magnitude = product_shape(adapter, keys), keys.get("lora_magnitude_vector.weight", "")
        if change and f"{name}.weight" in shapes and without_ones(change) == without_ones(shapes[f"{name}.weight"]):
            shapes[f"{name}.weight"] = change
        norms = adapter.tensors[magnitude].shape if magnitude else ()
        if change and len(norms) > 1 and norms[0] != change[0]:
            raise adapter.refusal(f"{quoted(magnitude)} has the norms of columns, and only those of rows are supported")
    wanted = {name: Tensor("dense", "float32", shape, (), 0, "", "cpu", False) for name, shape in shapes.items()}
    found = _changes_of(own._replace(scales=scales), parts, wanted, path, weight)
    return [item for change in found for item in match.weights[change.key].changes(change)]


def _scale(adapter: Adapter, module: str, parts: Mapping[str, str], alpha: str) -> float:
    """Return the factor of a product: alpha divided by the rank, from the settings of diffusers, or else 1."""
    shape = adapter.tensors[parts["lora_A.weight"]].shape if "lora_A.weight" in parts else ()
    rank = shape[0] if shape else 0
    if not alpha:
        return scale(adapter, module, rank) if adapter.config else scale_without_alpha(adapter, rank)
    tensor = adapter.tensors[alpha]
    value: object = None
    if tensor.numel == 1 and rank > 0:
        (value,) = to_numbers(b"".join(elements(adapter.stored(alpha).storage, tensor)), tensor.dtype)
    if not isinstance(value, int | float) or not isfinite(value):
        raise adapter.refusal(f"{quoted(alpha)} is not a finite number")
    return float(value) / rank

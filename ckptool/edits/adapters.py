"""Read a PEFT adapter: its settings, its tensors, and the changes that it makes to the weights of a base model.

Names, settings and defaults come from PEFT (``tuners/lora/config.py``, ``tuners/lora/layer.py``,
``utils/save_and_load.py``, ``utils/other.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.nearest import nearest
from ..base.prefixes import adapter_keys
from ..base.steps import NextStep, Setting, advice, command, is_folder, suggested_output
from ..base.text import join_limited, pluralize, quoted, shape_text, words
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..files.archives import read_object
from ..files.folders import open_folder
from ..files.sources import FolderSource
from ..formats.empty_weights import empty_weights, gather_step
from ..formats.opening import CheckpointOrPath, as_checkpoint
from ..values.torch.adapters import AdapterStep
from .adapter_kinds import LOHA, LOKR, butterfly, hadamard, kronecker, rotation
from .adapter_settings import (
    BY_PEFT,
    CONFIG,
    HEADER_ALPHA,
    HEADER_RANK,
    Adapter,
    AdapterChanges,
    WeightChange,
    check_rank,
    fit,
    has_values_of,
    header_number,
    is_set,
    number_setting,
    scale,
    stored,
    targets,
)
from .storages import refuse_bits

#: PEFT puts this before each key, once.
_PREFIX: Final = "base_model.model."
#: A key: the module that it changes, the part of the adapter, and the adapter's name in a raw state dict.
_KEY: Final = regex(
    r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_E|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2|ia3_l|b?oft_R|boft_s|vera_lambda_[bd]|base_layer"
    r"|modules_to_save|(?:token_adapter\.)?trainable_tokens_delta)(?:\.(?!weight\Z|bias\Z)(?P<name>\w+))?"
    r"(?:\.(?P<last>weight|bias))?\Z"
)
#: Before the name of a parameter in a module that was trained as a whole: the parameter before the training.
_ORIGINAL: Final = ".original_module."
#: The two matrices that all modules of VeRA share.
_PROJECTIONS: Final = ("base_model.vera_A", "base_model.vera_B")
#: Keys of mlx-lm and torchtune, and of LyCORIS for language models.
_OTHERS: Final = regex(r"lora_(?:down|up|mid|a|b)\b|lora\.(?:down|up)|lokr_|hada_|\Alora_(?:unet|te\d?|transformer)_")

#: Types that PEFT can merge, and types that add inputs or layers instead of changing weights.
_MERGEABLE: Final = frozenset(words("BONE C3A FOURIERFT HRA LN_TUNING RANDLORA SHIRA VBLORA"))
_NO_WEIGHTS: Final = frozenset(
    words("ADAPTION_PROMPT CARTRIDGE CPT MULTITASK_PROMPT_TUNING POLY PREFIX_TUNING PROMPT_TUNING P_TUNING XLORA")
)
_TAKEN: Final = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "BOFT", "OFT", "VERA", "TRAINABLE_TOKENS")
#: Settings that do not change the result, or that are read here.
_KNOWN: Final = frozenset(
    words(
        "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules"
        " exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save init_lora_weights"
        " layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_core trainable_token_indices"
        " loftq_config eva_config corda_config lora_ga_config use_dora qalora_group_size runtime_config lora_bias"
        " ensure_weight_tying target_parameters feedforward_modules init_ia3_weights token_indices init_weights"
        " alpha rank_dropout module_dropout init_r target_r tinit tfinal deltaT beta1 beta2 orth_reg_weight total_step"
        " boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout"
        " oft_block_size block_share eps coft use_cayley_neumann num_cayley_neumann_terms"
        " vera_dropout d_initial projection_prng_key save_projection"
        " use_effective_conv2d decompose_both decompose_factor rank_dropout_scale"
    )
)
#: Settings with which PEFT does not merge, or computes something else.
_REFUSED: Final = {
    "layer_replication": "it repeats layers of the base, which share their weights, and PEFT cannot save the merge",
    "alora_invocation_tokens": "an activated LoRA (aLoRA) acts only after its invocation tokens, so it has no merge",
}
#: Initializations that PEFT repeats when it loads the adapter, and that change the base.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INITIAL: Final = ("gaussian", "orthogonal", "eva")
_ORDER: Final = (
    "copy",
    "product",
    "adalora",
    "vera",
    "hadamard",
    "kronecker",
    "butterfly",
    "rotation",
    "scale",
    "sum",
    "rows",
)
#: Kinds of steps that replace or multiply.
_NOT_ADDED: Final = ("copy", "butterfly", "rotation", "scale", "rows")


def module_of(key: str) -> str:
    """Return the name of the module that a tensor of an adapter changes."""
    match = _KEY.match(key)
    return match["module"] if match else key.rpartition(".")[0]


def adapter_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the settings beside the tensors of an adapter, or None if there is no such file."""
    whole = isinstance(checkpoint.source, FolderSource) or is_folder(checkpoint.path)
    folder = checkpoint.path if whole else os.path.dirname(checkpoint.path)
    if open_folder(folder).size(CONFIG) is None:
        return None
    path = os.path.join(folder, CONFIG)
    config = read_object(path)
    if config is None:
        raise RefusedError("it is not a JSON object", path=path)
    return config


def base_name(config: Mapping[str, Any] | None) -> str:
    """Return the name of the base that the settings of an adapter give, or ""."""
    name = (config or {}).get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def description(checkpoint: Checkpoint) -> str:
    """Return the type, the ranks, the targets and the base of an adapter; "" if its settings are missing."""
    try:
        config = adapter_config(checkpoint)
    except RefusedError:
        return ""
    if config is None:
        return ""
    kind = str(config.get("peft_type"))[:40]
    ranks, targets = set[int](), dict[str, None]()
    for entry in checkpoint.survey.tensors:
        match = _KEY.match(entry.key)
        if match is not None and match["part"] not in ("base_layer", "modules_to_save"):
            targets[match["module"].rpartition(".")[2]] = None
            first = match["part"] in ("lora_A", "lora_embedding_A", "hada_w1_b") and len(entry.tensor.shape) > 1
            ranks |= {entry.tensor.shape[0]} if first else set()
    if config.get("target_parameters"):  # their matrices have the ranks of all experts
        ranks &= {config.get("r")}
    dora = "DoRA" if config.get("use_dora") is True else "LoRA"
    what = f"an adapter ({dora if kind == 'LORA' else kind}"
    what += f" of rank {join_limited([f'{rank:,}' for rank in sorted(ranks)])}" if ranks else ""
    what += f" on {join_limited(list(targets))}" if targets else ""
    name = base_name(config)
    return f"{what}), not a model; its base is {quoted(name)}" if name else f"{what}), not a model"


def open_adapter(source: CheckpointOrPath, alpha: float | None = None) -> Adapter:
    """Open an adapter, and check that it has a merge; raise RefusedError if it has none.

    ``alpha`` is used if neither settings nor the header of the file give one.
    """
    checkpoint = as_checkpoint(source)
    config = adapter_config(checkpoint)
    if config is None:
        config = _config_of_header(checkpoint, alpha)
    found = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    tensors = {key.removeprefix(_PREFIX): tensor for key, tensor in found.items()}
    adapter = Adapter(checkpoint, config or {}, tensors, weight_changes)
    if config is None:
        raise _without_config(adapter)
    _check_type(adapter)
    if len(tensors) < len(found):
        raise adapter.refusal("two of its tensors have the same name")
    check_tensors(adapter)
    check_settings(adapter)
    return adapter


def check_tensors(adapter: Adapter) -> None:
    """Raise RefusedError if a tensor of an adapter is empty, or holds no floating-point values."""
    checkpoint = adapter.checkpoint
    if empty := empty_weights(checkpoint):
        raise adapter.refusal(empty, gather_step(checkpoint))
    if len(adapter.tensors) < len(checkpoint.survey.tensors):
        raise adapter.refusal("two of its tensors have the same name")
    for entry in checkpoint.survey.tensors:
        refuse_bits(checkpoint, entry.ref, entry.key)
    for key, tensor in adapter.tensors.items():
        dtype = BY_NAME.get(tensor.dtype)
        if tensor.location == "meta" or (dtype is not None and adapter_keys([key]) and not dtype.floating):
            raise adapter.refusal(f"{quoted(key)} has no floating-point values ({tensor.location}, {tensor.dtype})")
        if tensor.kind != "dense" or not tensor.storage or dtype is None or dtype.packed > 1:
            raise adapter.refusal(f"{quoted(key)} is packed or sparse ({tensor.kind}, {tensor.dtype})")


def _config_of_header(checkpoint: Checkpoint, alpha: float | None) -> Mapping[str, Any] | None:
    """Return the settings of a LoRA with PEFT's names, by the header of its file or by ``alpha``; None without both."""
    names = [entry.key for entry in checkpoint.survey.tensors]
    stated = header_number(checkpoint, HEADER_ALPHA)
    alpha = alpha if stated is None else stated
    if alpha is None or not any(".lora_A." in name for name in names) or any(map(_OTHERS.search, names)):
        return None
    rank = header_number(checkpoint, HEADER_RANK)
    config = {"peft_type": "LORA", "lora_alpha": alpha, "base_model_name_or_path": None}
    config |= {"use_dora": True} if any("lora_magnitude_vector" in name for name in names) else {}
    return config if rank is None else {**config, "r": int(rank)}


def _without_config(adapter: Adapter) -> RefusedError:
    names = list(adapter.tensors)
    if any(_OTHERS.search(name) for name in names):
        message = "it has names as of mlx or torchtune, and only adapters of PEFT, kohya and diffusers can be merged"
        return adapter.refusal(message, "merge it with the library that trained it")
    if not adapter_keys(names):
        return adapter.refusal(f"it is not an adapter: there is no {CONFIG} beside it, and no name of an adapter in it")
    message = f"there is no {CONFIG} beside it, and without lora_alpha the scale of the adapter is not known"
    way = f"put the {CONFIG} that was saved with it into the same folder, or give "
    return adapter.refusal(message, advice(way, Setting("alpha", None), ", its lora_alpha"))


def _check_type(adapter: Adapter) -> None:
    kind = adapter.config.get("peft_type")
    if not isinstance(kind, str):
        raise adapter.refusal(f"its peft_type {json.dumps(kind)[:80]} is not known")
    if kind in _TAKEN:
        return
    if kind in _NO_WEIGHTS:
        raise adapter.refusal(
            f"an adapter of the type {kind} adds inputs or layers, and has no merge", "load it with PEFT"
        )
    if kind in _MERGEABLE:
        raise adapter.refusal(f"adapters of the type {kind} are not supported", BY_PEFT)
    raise adapter.refusal(f"its peft_type {json.dumps(kind)[:80]} is not known")


def check_settings(adapter: Adapter) -> None:
    """Raise RefusedError for a setting with which the result would differ from W + scale * B @ A."""
    config = adapter.config
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise adapter.refusal(reason)
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        message = f"init_lora_weights is {start!r}: PEFT changes the base when it loads this adapter"
        step = "save it again with model.save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        raise adapter.refusal(message, step)
    if isinstance(start, str) and start.lower() not in _INITIAL:
        raise adapter.refusal(f"its init_lora_weights {quoted(start)} is not known", BY_PEFT)
    unknown = sorted(name for name, value in config.items() if value and name not in _KNOWN)
    if unknown:
        raise adapter.refusal(f"{CONFIG} has settings that are not known: {join_limited(unknown)}", BY_PEFT)


def weight_changes(adapter: Adapter, base: Mapping[str, Tensor], path: str, weight: float) -> AdapterChanges:
    """Return the changes of the weights of ``base``, a state dict, in the order in which they apply.

    ``path`` is the path of the base, ``weight`` multiplies the scale. Raise RefusedError unless every tensor of the
    adapter is used and fits.
    """
    modules = _modules(adapter)
    changes = changes_of(adapter, modules, base, path, weight)
    weights = (name.removesuffix(".weight") for name, tensor in base.items() if len(tensor.shape) > 1)
    if lacking := [
        name for name in weights if f"{name}.weight" in base and name not in modules and targets(adapter, name)
    ]:
        message = f"{CONFIG} targets {pluralize(len(lacking), 'module')} of {path} for which it has no tensors"
        step = "get the whole adapter; this one holds " + command("keys", adapter.path)
        raise adapter.refusal(f"{message}: {join_limited(lacking, most=3)}", step)
    return AdapterChanges(changes, {})


def changes_of(
    adapter: Adapter, modules: Mapping[str, Mapping[str, str]], base: Mapping[str, Tensor], path: str, weight: float
) -> list[WeightChange]:
    """Return the changes by modules of an adapter, given the key of each tensor by module and part."""
    changes: list[WeightChange] = []
    missing: list[str] = []
    matched = 0
    for module, parts in modules.items():
        found = list(_module_changes(adapter, module, parts, base, path, weight))
        absent = [change.key for change in found if change.key not in base and not change.added]
        missing += [module] if absent else []
        matched += any(change.key in base for change in found)
        changes += found
    if missing or not matched:
        raise _wrong_base(adapter, missing or list(modules), len(modules), base, path)
    if weight != 1 and (other := next((item for item in changes if item.step.kind in _NOT_ADDED), None)):
        message = f"it replaces or multiplies {quoted(other.key)}, which a weight of {weight:g} does not describe"
        raise adapter.refusal(message, "merge it with the weight 1")
    return sorted(changes, key=lambda change: _ORDER.index(change.step.kind))


def _modules(adapter: Adapter) -> dict[str, dict[str, str]]:
    """Return the keys of the adapter by module and part; a tensor that replaces another has the part ``copy``."""
    modules: dict[str, dict[str, str]] = {}
    names: set[str] = set()
    for key in adapter.tensors:
        if key in _PROJECTIONS and adapter.config.get("peft_type") == "VERA":
            continue
        if _ORIGINAL in key and key.replace(_ORIGINAL, ".") in adapter.tensors:
            continue  # the base's own values, which bias="all" saves beside the trained ones
        match = _KEY.match(key)
        if match is None:
            module, _, last = key.rpartition(".")
            if adapter_keys([key]):
                raise adapter.refusal(f"its tensor {quoted(key)} is not known, and would not be used", BY_PEFT)
            modules.setdefault(module, {})[f"copy.{last}"] = key
            continue
        names |= {match["name"]} if match["name"] else set()
        part, last = match["part"], match["last"] or "weight"
        part = "copy" if part in ("base_layer", "modules_to_save") else part.removeprefix("token_adapter.")
        parts = modules.setdefault(match["module"], {})
        known = parts.get(f"{part}.{last}")
        if known and not has_values_of(stored(adapter, key), stored(adapter, known)):
            raise adapter.refusal(f"{quoted(key)} and {quoted(known)} mean the same tensor")
        parts[f"{part}.{last}"] = key
    if len(names) > 1:
        raise adapter.refusal(f"it holds several adapters: {join_limited(sorted(names))}")
    if not modules:
        raise adapter.refusal("it holds no tensor that changes a weight: the file is incomplete")
    return modules


def _module_changes(
    adapter: Adapter, module: str, parts: Mapping[str, str], base: Mapping[str, Tensor], path: str, weight: float
) -> Iterator[WeightChange]:
    """Yield the changes of one module. Their keys may be missing in the base, which the caller refuses."""
    rest = dict(parts)
    for part, key in parts.items():
        if part.startswith("copy."):
            del rest[part]
            last = part.removeprefix("copy.")
            target = f"{module}.{last}" if module else last
            wanted = base.get(target)
            if wanted is None and last == "bias" and _is_tied_bias(adapter, key, base):
                continue
            fit(adapter, key, adapter.tensors[key].shape, target, wanted, path)
            added = wanted is None and _is_saved(adapter, module)
            yield WeightChange(target, AdapterStep("copy", (stored(adapter, key),)), added)
    a, b = (rest.pop(f"lora_{which}.weight", "") for which in "AB")
    c, d = (rest.pop(f"lora_embedding_{which}.weight", "") for which in "AB")
    for first, second in ((a, b), (c, d)):
        if first or second:
            if not (first and second):
                other = "B" if first else "A"
                raise adapter.refusal(f"{quoted(first or second)} has no partner lora_{other}: the file is incomplete")
            third = rest.pop("lora_E.weight", "") or rest.pop("lora_magnitude_vector.weight", "")
            yield _product(adapter, module, first, second, third, base, path, weight)
    products = {name: rest.pop(f"hada_{name}.weight", "") for name in LOHA}
    if any(products.values()):
        yield hadamard(adapter, module, products, base, path, weight)
    factors = {name: rest.pop(f"lokr_{name}.weight", "") for name in LOKR}
    if any(factors.values()):
        used = {name: key for name, key in factors.items() if key}
        yield kronecker(adapter, module, used, base, path, weight)
    vectors = [rest.pop(f"vera_lambda_{which}.weight", "") for which in "bd"]
    if any(vectors):
        yield _vera(adapter, module, vectors, base, path, weight)
    rotations, scales = rest.pop("boft_R.weight", ""), rest.pop("boft_s.weight", "")
    if rotations or scales:
        yield butterfly(adapter, module, rotations, scales, base, path)
    if key := rest.pop("oft_R.weight", ""):
        yield rotation(adapter, module, key, base, path)
    if bias := rest.pop("lora_B.bias", ""):
        target = f"{module}.bias"
        if f"{module}.weight" in base and target not in base:
            raise adapter.refusal(f"it changes the bias of {quoted(module)}, which has none in the base")
        fit(adapter, bias, adapter.tensors[bias].shape, target, base.get(target), path)
        rank = adapter.tensors[b].shape[-1] if b and adapter.tensors[b].shape else 0
        factor = scale(adapter, module, rank) * weight
        yield WeightChange(target, AdapterStep("sum", (stored(adapter, bias),), factor))
    if rows := rest.pop("trainable_tokens_delta.weight", ""):
        yield _token_rows(adapter, module, rows, base, path)
    if factor_key := rest.pop("ia3_l.weight", ""):
        yield from _scaled(adapter, module, factor_key, base, path)
    if rest:
        raise adapter.refusal(f"its tensor {quoted(next(iter(rest.values())))} is not known, and would not be used")


def _is_tied_bias(adapter: Adapter, key: str, base: Mapping[str, Tensor]) -> bool:
    """Return whether a bias that the base lacks has the values of one that it holds, to which the model ties it."""
    others = (name for name in adapter.tensors if name.endswith(".bias") and name != key and name in base)
    return any(has_values_of(stored(adapter, key), stored(adapter, name)) for name in others)


def _is_saved(adapter: Adapter, module: str) -> bool:
    """Return whether the settings say that a module was trained as a whole, such as a new classifier."""
    saved = adapter.config.get("modules_to_save") or ()
    names = module.split(".")
    return isinstance(saved, list | tuple) and any(isinstance(name, str) and name in names for name in saved)


def _product(
    adapter: Adapter,
    module: str,
    a: str,
    b: str,
    third: str,
    base: Mapping[str, Tensor],
    path: str,
    weight: float,
) -> WeightChange:
    """Return the change by the product of two matrices, checked against the weight.

    ``third`` is the key of the magnitudes of DoRA, or the singular values of AdaLoRA.
    """
    one, two = adapter.tensors[a], adapter.tensors[b]
    target = f"{module}.weight"
    wanted = base.get(target)
    if len(one.shape) < 2 or len(two.shape) < 2 or prod(two.shape[2:]) != 1:
        raise adapter.refusal(f"{quoted(b)} is {shape_text(two.shape)}, which is not the shape of a LoRA matrix")
    rank = one.shape[0]
    if two.shape[1] != rank:
        message = f"{quoted(a)} has {pluralize(rank, 'row')} and {quoted(b)} {pluralize(two.shape[1], 'column')}"
        reason = ": it belongs to a convolution with groups, which cannot be merged" if len(one.shape) > 2 else ""
        raise adapter.refusal(message + reason)
    values = rank if third.endswith("lora_E") else two.shape[0]
    is_adaptive = adapter.config.get("peft_type") == "ADALORA"
    if is_adaptive is not third.endswith("lora_E"):
        raise adapter.refusal(f"{quoted(module)} needs lora_E with AdaLoRA, and cannot have it otherwise")
    if module not in adapter.scales and not is_adaptive:
        check_rank(adapter, a, rank)
    embedding = "lora_embedding_A" in a
    transposed = embedding or (len(one.shape) == 2 and is_set(adapter, "fan_in_fan_out"))
    change = (two.shape[0], *one.shape[1:])
    fit(adapter, a, change[::-1] if transposed else change, target, wanted, path)
    tensors = [stored(adapter, b), stored(adapter, a)]
    if third:
        size = adapter.tensors[third].numel
        if size != values:
            raise adapter.refusal(f"{quoted(third)} has {size:,} elements where {values:,} are needed")
        tensors.append(stored(adapter, third))
    elif is_set(adapter, "use_dora"):
        raise adapter.refusal(f"use_dora is set, and {quoted(module)} has no lora_magnitude_vector")
    if is_adaptive:
        first = number_setting(adapter, "init_r", 12)
        alpha = number_setting(adapter, "lora_alpha", 8)
        factor = (alpha if alpha > 0 else first) * weight
        return WeightChange(target, AdapterStep("adalora", tuple(tensors), factor, transposed, rank=int(first)))
    step = AdapterStep("product", tuple(tensors), scale(adapter, module, rank) * weight, transposed, embedding)
    return WeightChange(target, step)


def _vera(
    adapter: Adapter, module: str, keys: Sequence[str], base: Mapping[str, Tensor], path: str, weight: float
) -> WeightChange:
    """Return the change of VeRA: the product of parts of two shared matrices, whose rows are scaled."""
    if not all(keys):
        raise adapter.refusal(f"{quoted(''.join(keys))} has no partner: the file is incomplete")
    if adapter.config.get("save_projection") is not True or not adapter.tensors.keys() >= set(_PROJECTIONS):
        message = "it lacks the random matrices that its modules share (save_projection is false)"
        raise adapter.refusal(message, BY_PEFT)
    tensors = [adapter.tensors[key] for key in (*_PROJECTIONS, *keys)]
    if [len(tensor.shape) for tensor in tensors] != [2, 2, 1, 1]:
        raise adapter.refusal(f"{quoted(keys[0])} and the shared matrices do not have the shapes of VeRA")
    (rank, inner), (most, width), (out,), (length,) = (tensor.shape for tensor in tensors)
    if not rank == width == length or most < out:
        raise adapter.refusal(f"{quoted(keys[0])} and {quoted(keys[1])} do not fit the shared matrices")
    check_rank(adapter, _PROJECTIONS[0], rank)
    target, transposed = f"{module}.weight", is_set(adapter, "fan_in_fan_out")
    wanted = base.get(target)
    if wanted is not None and len(wanted.shape) == 2:
        inner = min(inner, wanted.shape[0 if transposed else 1])
    fit(adapter, keys[0], (inner, out) if transposed else (out, inner), target, wanted, path)
    a, b, *vectors = (stored(adapter, key) for key in (*_PROJECTIONS, *keys))
    a, b = a._replace(view=a.view._replace(shape=(rank, inner))), b._replace(view=b.view._replace(shape=(out, rank)))
    return WeightChange(target, AdapterStep("vera", (b, a, *vectors), weight, transposed))


def _token_rows(adapter: Adapter, module: str, key: str, base: Mapping[str, Tensor], path: str) -> WeightChange:
    """Return the change of an embedding by trained rows."""
    given = adapter.config.get("trainable_token_indices") or adapter.config.get("token_indices")
    if isinstance(given, dict):
        given = next((rows for name, rows in given.items() if f".{module}".endswith(f".{name}")), None)
    rows = given if isinstance(given, list) and all(type(row) is int for row in given) else []
    tensor, wanted = adapter.tensors[key], base.get(f"{module}.weight")
    if len(tensor.shape) != 2 or len(rows) != tensor.shape[0]:
        message = (
            f"{quoted(key)} is {shape_text(tensor.shape)}, and {CONFIG} lists {pluralize(len(rows), 'token')} for it"
        )
        raise adapter.refusal(message)
    if wanted is not None:
        fit(adapter, key, (wanted.shape[0], tensor.shape[1]), f"{module}.weight", wanted, path)
        if outside := [row for row in rows if not 0 <= row < wanted.shape[0]]:
            message = f"it was trained for token {max(outside):,}, and the base has {wanted.shape[0]:,}"
            raise adapter.refusal(message, "resize the vocabulary of the base first")
    return WeightChange(f"{module}.weight", AdapterStep("rows", (stored(adapter, key),), rows=tuple(rows)))


def _scaled(adapter: Adapter, module: str, key: str, base: Mapping[str, Tensor], path: str) -> Iterator[WeightChange]:
    """Yield the changes by a factor of IA3: of the weight, and of the bias unless the factor is for the input."""
    shape, wanted, bias = adapter.tensors[key].shape, base.get(f"{module}.weight"), base.get(f"{module}.bias")
    forward = len(shape) == 2 and shape[0] == 1
    if len(shape) != 2 or 1 not in shape:
        raise adapter.refusal(f"{quoted(key)} is {shape_text(shape)}: only IA3 of linear layers can be merged", BY_PEFT)
    transposed = is_set(adapter, "fan_in_fan_out")
    if wanted is not None:
        sizes = wanted.shape[::-1] if transposed else wanted.shape
        axis = 1 if forward else 0
        if len(sizes) != 2 or sizes[axis] != shape[axis]:
            fit(adapter, key, shape[::-1] if transposed else shape, f"{module}.weight", wanted, path)
    step = AdapterStep("scale", (stored(adapter, key),), transposed=transposed)
    yield WeightChange(f"{module}.weight", step)
    if not forward and bias is not None:
        fit(adapter, key, (shape[0],), f"{module}.bias", bias, path)
        yield WeightChange(f"{module}.bias", step._replace(transposed=False))


def _wrong_base(
    adapter: Adapter, missing: Sequence[str], number: int, base: Mapping[str, Tensor], path: str
) -> RefusedError:
    """Return the error about modules that the base lacks, with the nearest name or the prefix that would help."""
    there = {name.rpartition(".")[0] for name in base}
    known = [name.removesuffix(missing[0]) for name in sorted(there) if name.endswith(f".{missing[0]}")]
    longer = next((prefix for prefix in known if all(prefix + module in there for module in missing)), "")
    renamed, step = suggested_output(path, "renamed"), NextStep()
    if shorter := _common(missing[0], there, missing):
        step = command("add-module", path, add_prefix=shorter, output=renamed)
    elif longer:
        step = command("strip-module", path, strip_prefix=longer, output=renamed)
    matched = number - len(missing)
    wrong = "" if matched else " (wrong base?)"
    message = f"{matched:,} of {pluralize(number, 'module')} matched{wrong}; not in {path}: "
    message += join_limited([quoted(module) for module in missing], most=3)
    near = nearest(missing[0], there, 1)
    message += f"; the nearest name there is {quoted(near[0])}" if near else ""
    return adapter.refusal(message, "give the base the names of the adapter: " + step if step else "")


def _common(module: str, there: Iterable[str], modules: Sequence[str]) -> str:
    """Return the prefix without which all modules are in the base, or ""."""
    known = set(there)
    steps = module.split(".")
    for count in range(1, len(steps)):
        prefix = ".".join(steps[:count]) + "."
        if all(each.startswith(prefix) and each[len(prefix) :] in known for each in modules):
            return prefix
    return ""

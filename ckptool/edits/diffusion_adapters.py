"""LoRAs for an image pipeline, in the names of kohya or diffusers: one file for a U-Net and text encoders.

kohya writes the name of a module with "_" for its dots. The way back is not unique, so each name of the base is written
that way and looked up. A base in another layout, such as a single file of Stable Diffusion, is looked up by the names
that a built-in recipe gives it.

Sources: sd-scripts (``networks/lora.py``, ``networks/merge_lora.py``), diffusers (``utils/state_dict_utils.py``,
``loaders/lora_conversion_utils.py``), ComfyUI (``comfy/lora.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import Any, Final

from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.steps import Setting, advice
from ..base.text import cut, join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..files.archives import parsed_object
from ..values.elements import elements, storage_reader
from ..values.numeric import to_numbers
from .adapter_settings import HEADER_ALPHA, HEADER_RANK, Adapter, AdapterChanges, WeightChange, header_number, scale
from .adapters import changes_of, check_settings, check_tensors
from .weight_places import Place, Weight, at_places, own_weights, renamed_weights

#: The models of a pipeline, by what kohya and diffusers call them in the names of an adapter.
_MODELS: Final = {
    "unet": "unet",
    "transformer": "unet",
    "diffusion_model": "unet",
    "te": "text_encoder",
    "te1": "text_encoder",
    "text_encoder": "text_encoder",
    "te2": "text_encoder_2",
    "text_encoder_2": "text_encoder_2",
    "te3": "text_encoder_3",
    "text_encoder_3": "text_encoder_3",
}
#: A name: the model, and the rest of it. The first LoRAs of diffusers have the names of a U-Net alone.
_MODEL: Final = regex(
    r"(?:lora_(?P<kohya>unet|te[123]?|transformer)_"
    r"|(?P<diffusers>unet|transformer|diffusion_model|text_encoder(?:_[23])?)\."
    r"|(?=(?:down_blocks|mid_block|up_blocks)\.))(?P<rest>.+)"
)
#: The rest: the module, and what the tensor is to it.
_PART: Final = regex(
    r"(?P<module>.+?)(?:(?P<old>_lora)\.(?:down|up)|\.lora(?:_linear_layer)?\.(?:down|up)"
    r"|\.(?:lora_down|lora_up|lora_[AB](?:\.default)?|lora_magnitude_vector|dora_scale|alpha))(?:\.(?:weight|bias))?\Z"
)
_FIRST: Final = regex(r"(?:down|lora_A(?:\.default)?)\.weight\Z")
_SECOND: Final = regex(r"(?:up|lora_B(?:\.default)?)\.(weight|bias)\Z")
#: Modules whose LoRA early versions of diffusers wrote behind the attention, in a U-Net and in a text encoder.
_OLD: Final = {
    False: {"to_out": "to_out.0"},
    True: {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"},
}
#: Other kinds of adapters, by a part of their names.
_OTHER_KINDS: Final = {
    "lora_mid": "LoCon with lora_mid (a Tucker decomposition)",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    ".a1.": "GLoRA",
    ".b1.": "GLoRA",
    ".diff": "full differences (.diff)",
    ".w_norm": "norms (.w_norm)",
}
#: Text encoders have this before their names, or lack it since transformers 5.
_TEXT_MODEL: Final = "text_model."
#: The prefix of the diffusion model in a file of a whole pipeline.
_LDM: Final = "model.diffusion_model."
#: Where diffusers keeps the settings of PEFT, and trainers the name of the base.
_SETTINGS: Final = "lora_adapter_metadata"
WITH_DIFFUSERS: Final = "with diffusers: pipe.load_lora_weights(), pipe.fuse_lora(), pipe.save_pretrained()"
_BASES: Final = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture")


class Layout(NamedTuple):
    """The weights of a base by the names that an adapter may use. ``models`` are the models that they may belong to."""

    models: frozenset[str]
    weights: Mapping[str, Weight]

    def by_form(self, model: Modules) -> dict[str, str]:
        """Return the modules with a weight, by the form in which names are compared; without names of two modules."""
        counts: Counter[str] = Counter()
        found = {}
        for name in self.weights:
            if name.endswith(".weight"):
                module = name.removesuffix(".weight")
                form = model.form(module)
                counts[form] += 1
                found[form] = module
        return {form: module for form, module in found.items() if counts[form] == 1}


def folders(label: str) -> list[str]:
    """Return the names that the folder of a model may have in a pipeline."""
    return [*dict.fromkeys((label, _MODELS[label], *(("transformer",) if _MODELS[label] == "unet" else ())))]


class Modules(NamedTuple):
    """The modules of one model of a pipeline.

    ``label`` is the model's name in the adapter. ``parts`` has the key of each tensor by module and part, with the
    names of parts as in PEFT. ``alphas`` has the keys of numbers by module. ``dotless``: names have "_" for dots.
    ``bare``: names lack the label.
    """

    label: str
    parts: Mapping[str, Mapping[str, str]]
    alphas: Mapping[str, str]
    dotless: bool
    bare: bool = False

    @property
    def model(self) -> str:
        """The model of the pipeline: "unet" also for a diffusion transformer."""
        return _MODELS[self.label]

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return sum(map(len, self.parts.values())) + len(self.alphas)

    def form(self, module: str) -> str:
        """Return a name in the form in which names of the adapter and the base are compared."""
        name = module.replace(".", "_") if self.dotless else module
        prefix = _TEXT_MODEL.replace(".", "_") if self.dotless else _TEXT_MODEL
        return name.removeprefix(prefix) if self.model != "unet" else name


class _Match(NamedTuple):
    """The names in a layout for modules of an adapter. ``is_whole``: all modules are there, and have fitting shapes."""

    layout: Layout
    names: Mapping[str, str]
    fits: int
    is_whole: bool


def has_pipeline_names(names: Sequence[str]) -> bool:
    """Return whether names are those that kohya or diffusers give to an adapter: all have a model, some a matrix."""
    return all(map(_MODEL.match, names)) and any(
        _PART.match(name) or any(kind in name for kind in _OTHER_KINDS) for name in names
    )


def base_of(metadata: Mapping[str, str]) -> str:
    """Return the name of the base in the metadata of an adapter, or ""."""
    return next((metadata[key] for key in _BASES if metadata.get(key, "None") != "None"), "")


def settings(metadata: Mapping[str, str], model: Modules) -> Mapping[str, Any]:
    """Return the settings of PEFT that diffusers stored for a model, empty without any.

    Their names begin with the label of the model if the names of its tensors do (diffusers/loaders/peft.py). Raise
    RefusedError if they are not an object of JSON.
    """
    text = metadata.get(_SETTINGS, "{}")
    found = parsed_object(text)
    if found is None:
        raise RefusedError(f"its metadata {_SETTINGS!r} is not a JSON object: {quoted(cut(text))}", next=WITH_DIFFUSERS)
    start = f"{model.label}."
    own = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
    return own or ({name: value for name, value in found.items() if "." not in name} if model.bare else own)


def modules(names: Sequence[str]) -> list[Modules]:
    """Return the modules of each model that an adapter changes; raise RefusedError for a name that is not known."""
    found: dict[str, Modules] = {}
    keys: dict[str, tuple[dict[str, dict[str, str]], dict[str, str]]] = {}
    for key in names:
        start = _MODEL.match(key)
        part = _PART.match(start["rest"]) if start else None
        if start is None or part is None:
            kind = next((kind for text, kind in _OTHER_KINDS.items() if text in key), "")
            reason = f"is of the kind {kind}, which is not supported" if kind else "is not known, and would not be used"
            raise RefusedError(f"its tensor {quoted(key)} {reason}", next=WITH_DIFFUSERS)
        label = start["kohya"] or start["diffusers"] or "unet"
        parts, alphas = keys.setdefault(label, ({}, {}))
        found.setdefault(
            label, Modules(label, parts, alphas, bool(start["kohya"]), not (start["kohya"] or start["diffusers"]))
        )
        module = part["module"].replace(".processor.", ".").removesuffix(".processor")
        if part["old"]:
            before, dot, last = module.rpartition(".")
            module = before + dot + _OLD[_MODELS[label] != "unet"].get(last, last)
        second = _SECOND.search(key)
        name = f"lora_B.{second[1]}" if second else "lora_magnitude_vector.weight"
        name = "lora_A.weight" if _FIRST.search(key) else name
        own, name = (alphas, module) if key.endswith(".alpha") else (parts.setdefault(module, {}), name)
        if name in own:
            raise RefusedError(f"{quoted(key)} and {quoted(own[name])} mean the same tensor")
        own[name] = key
    for model in found.values():
        if alone := next((key for module, key in model.alphas.items() if module not in model.parts), ""):
            raise RefusedError(f"{quoted(alone)} has no matrices beside it: the file is incomplete")
    return [*found.values()]


def open_pipeline_adapter(checkpoint: Checkpoint) -> Adapter:
    """Open an adapter with the names of kohya or diffusers."""
    config = {"base_model_name_or_path": base_of(checkpoint.container.metadata)}
    tensors = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    adapter = Adapter(checkpoint, config, tensors, _changes)
    check_tensors(adapter)
    return adapter


def pipeline_description(checkpoint: Checkpoint) -> str:
    """Return the ranks, the modules and the base of an adapter with the names of kohya or diffusers."""
    tensors = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    try:
        models = modules([*tensors])
    except RefusedError as error:
        return f"an adapter of an image pipeline, not a model: {error.what}"
    firsts = [parts.get("lora_A.weight", "") for model in models for parts in model.parts.values()]
    ranks = {tensors[key].shape[0] for key in firsts if key and tensors[key].shape}
    rank = f" of rank {join_limited([f'{rank:,}' for rank in sorted(ranks)])}" if ranks else ""
    counts = [f"{pluralize(len(model.parts), 'module')} of {model.label}" for model in models]
    name = base_of(checkpoint.container.metadata)
    what = f"an adapter (LoRA{rank} on {' and '.join(counts)}), not a model"
    return f"{what}; its base is {quoted(name)}" if name else what


# -- the weights that an adapter means


def _changes(adapter: Adapter, base: Mapping[str, Tensor], path: str, weight: float) -> AdapterChanges:
    """Return the changes by each model of the adapter that the base holds, and how many tensors other models have."""
    try:
        models = modules([*adapter.tensors])
    except RefusedError as error:
        error.path = adapter.path
        raise
    layouts = list(_layouts(base))
    matches = [_match(adapter, model, layouts) for model in models]
    is_any = any(match.is_whole for match in matches)
    best = max(matches, key=lambda match: (match.fits, len(match.names)))
    found: list[WeightChange] = []
    unused: dict[str, int] = {}
    owners: dict[str, str] = {}
    for model, match in zip(models, matches):
        # A model that the base holds in part is wrong. One that it does not hold belongs to another base.
        partly = bool(match.names) and len(match.layout.models) == 1
        if not (match.is_whole or partly if is_any else match is best):
            unused[model.label] = model.tensors
            continue
        for change in _placed(adapter, model, match, path, weight):
            other = owners.setdefault(change.key, model.label)
            if other != model.label:
                what = f"its models {other} and {model.label} both fit {quoted(change.key)} of {path}"
                raise adapter.refusal(f"{what}, and names do not tell which of them that is", WITH_DIFFUSERS)
            found.append(change)
    return AdapterChanges(found, unused)


def _match(adapter: Adapter, model: Modules, layouts: Sequence[Layout]) -> _Match:
    """Return the layout of the base with most of the modules; raise RefusedError if two layouts have them all."""
    best = _Match(layouts[0], {}, 0, is_whole=False)
    places: dict[tuple[tuple[Place, ...], ...], None] = {}
    for layout in layouts:
        if model.model not in layout.models:
            continue
        index = layout.by_form(model)
        names = {module: index[form] for module in model.parts if (form := model.form(module)) in index}
        weights = {module: layout.weights[f"{name}.weight"] for module, name in names.items()}
        fits = sum(_fits(adapter, model.parts[module], weights[module].shape) for module in names)
        match = _Match(layout, names, fits, fits == len(model.parts))
        if match.is_whole:
            places[tuple(weights[module].places for module in names)] = None
        best = max(best, match, key=lambda each: (each.is_whole, each.fits, len(each.names)))
    if len(places) > 1:
        raise adapter.refusal(f"the names of {model.label} mean different weights of the base", WITH_DIFFUSERS)
    return best


def _fits(adapter: Adapter, parts: Mapping[str, str], shape: Sequence[int]) -> bool:
    change = _change(adapter, parts)
    return change is None or _short(change) == _short(shape)


def _change(adapter: Adapter, parts: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the shape of the weight that two matrices change, or None if one is missing."""
    a, b = (adapter.tensors.get(parts.get(f"lora_{which}.weight", "")) for which in "AB")
    return (*b.shape[:1], *a.shape[1:]) if a is not None and b is not None else None


def _short(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without the 1s behind the second dimension: a convolution of 1x1 is a linear layer."""
    return tuple(shape[:2]) if prod(shape[2:]) == 1 else tuple(shape)


def _placed(adapter: Adapter, model: Modules, match: _Match, path: str, weight: float) -> list[WeightChange]:
    """Return the changes by one model; raise RefusedError unless all its modules are in the base and fit."""
    own = adapter._replace(config=settings(adapter.checkpoint.container.metadata, model))
    check_settings(own)
    scales: dict[str, float] = {}
    parts: dict[str, Mapping[str, str]] = {}
    weights: dict[str, Sequence[int]] = {}
    for name, item in match.layout.weights.items():
        weights[name] = item.shape
    for module, keys in model.parts.items():
        name = match.names.get(module, module)
        parts[name] = keys
        scales[name] = _scale(own, module, keys, model.alphas.get(module, ""))
        change, target = _change(adapter, keys), f"{name}.weight"
        if change is not None and target in weights and _short(change) == _short(weights[target]):
            weights[target] = change
        _check_magnitude(adapter, keys, change)
    wanted = {
        name: Tensor("dense", "float32", tuple(shape), (), 0, "", "cpu", False) for name, shape in weights.items()
    }
    found = changes_of(own._replace(scales=scales), parts, wanted, path, weight)
    return [item for change in found for item in at_places(change, match.layout.weights[change.key])]


def _check_magnitude(adapter: Adapter, parts: Mapping[str, str], change: Sequence[int] | None) -> None:
    """Raise RefusedError for a DoRA that has a magnitude for each column."""
    key = parts.get("lora_magnitude_vector.weight", "")
    shape = adapter.tensors[key].shape if key else ()
    if change and len(shape) > 1 and shape[0] != change[0]:
        raise adapter.refusal(f"{quoted(key)} has the norms of columns, and only those of rows are supported")


def _scale(adapter: Adapter, module: str, parts: Mapping[str, str], alpha: str) -> float:
    """Return the factor of a product: alpha divided by the rank, from the settings of diffusers, or else 1."""
    shape = adapter.tensors[parts["lora_A.weight"]].shape if "lora_A.weight" in parts else ()
    rank = shape[0] if shape else 0
    if not alpha and adapter.config:
        return scale(adapter, module, rank)
    if not alpha and adapter.alpha is not None and rank:
        return adapter.alpha / rank
    if not alpha:
        return _without_alpha(adapter, rank)
    tensor = adapter.tensors[alpha]
    if tensor.numel != 1 or rank < 1:
        raise adapter.refusal(f"{quoted(alpha)} is not a number")
    (value,) = to_numbers(b"".join(elements(storage_reader(adapter.checkpoint, tensor.storage), tensor)), tensor.dtype)
    if not isinstance(value, int | float) or not isfinite(value):
        raise adapter.refusal(f"{quoted(alpha)} is not a finite number")
    return float(value) / rank


def _without_alpha(adapter: Adapter, rank: int) -> float:
    """Return 1, which all readers take without alpha; raise RefusedError if the header states an alpha other than the
    rank."""
    stated = header_number(adapter.checkpoint, HEADER_ALPHA)
    if stated is None or stated == header_number(adapter.checkpoint, HEADER_RANK) or stated == rank:
        return 1.0
    message = f"its header says alpha {stated:g} for the rank {rank:,}, and no tensor has an alpha"
    way = f"{stated:g}, or {rank:,} if it is part of the matrices already"
    raise adapter.refusal(message, advice("give ", Setting("alpha", f"{stated:g}"), f" ({way})"))


def _layouts(base: Mapping[str, Tensor]) -> Iterator[Layout]:
    """Yield the names of the base itself, and those that built-in recipes give to its weights."""
    own = own_weights(base)
    yield Layout(frozenset(_MODELS.values()), own)
    prefixes = (_LDM, *(f"{label}." for label in _MODELS))
    for prefix in prefixes:
        inside = {name.removeprefix(prefix): weight for name, weight in own.items() if name.startswith(prefix)}
        if inside:
            yield Layout(frozenset((_MODELS.get(prefix[:-1], "unet"),)), inside)
    for family, weights in renamed_weights(base, "diffusers", both_ways=True):
        if family in _MODELS:
            yield Layout(
                frozenset((_MODELS[family],)), {name.removeprefix(_LDM): each for name, each in weights.items()}
            )

"""An adapter and a base model: which of its targets the base has, and what becomes of what was trained.

Names and shapes: PEFT (``tuners/lora/layer.py``, ``utils/save_and_load.py``), kohya's sd-scripts (``networks/lora.py``,
names with "_" instead of dots), diffusers, torchtune, mlx-lm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from ...base.lazy import regex
from ...base.prefixes import adapter_keys
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, quoted, shape_text
from .fused import Side
from .names import Cause, Comparison, Shape, Spec, dotless, suffixes

_PEFT: Final = regex(r"\A(?:base_model\.model\.)+")
#: A key of LoRA: the module that it changes, and which of the two matrices it is.
_LORA: Final = regex(
    r"(?P<module>.+?)(?:\.processor)?\.(?P<which>lora_A|lora_B|lora_a|lora_b|lora_embedding_A|lora_embedding_B"
    r"|lora_down|lora_up|lora\.down|lora\.up)(?:\.(?:(?!weight\Z)\w+))?(?:\.weight)?\Z"
)
#: What PEFT puts behind the name of a module that was trained as a whole beside the adapter.
_TRAINED_TOO: Final = ".modules_to_save."
_NUMBER: Final = regex(r"\d+")
_FIRST: Final = frozenset(("lora_A", "lora_a", "lora_embedding_A", "lora_down", "lora.down"))
#: What kohya puts before the name of a module, and diffusers before the part of the pipeline.
_PARTS: Final = regex(r"\A(?:lora_(?:unet|te\d?|transformer)_|(?:unet|transformer|text_encoder(?:_2)?)\.)")


class _Delta(NamedTuple):
    """The two matrices of LoRA for one module; None for one that is missing, or a shape that is not known."""

    first: Shape
    second: Shape

    @property
    def rank(self) -> int:
        return (self.first[0] if len(self.first) > 2 else min(self.first)) if self.first else 0

    def fits(self, weight: Shape) -> bool:
        """Return whether the product has the shape of a weight, of Linear, Conv1D, Embedding or a convolution."""
        if self.first is None or self.second is None or weight is None:
            return True
        if len(self.first) != 2:
            return (self.second[0], *self.first[1:]) == weight
        outer = Counter((*self.first, *self.second)) - Counter({self.rank: 2})
        return len(weight) >= 2 and outer == Counter(weight[:2])


def adapter_causes(own: Side, wanted: Mapping[str, Spec], rest: Comparison) -> list[Cause]:
    """Return what becomes of an adapter that only one side has."""
    ours, theirs = adapter_keys(rest.unexpected), adapter_keys(rest.missing)
    if ours and not adapter_keys(wanted):
        others = len(own.specs) - len(ours)
        deltas = _deltas(ours, own.specs)
        example = quoted(own.label(ours[0]))
        alone = others * 2 <= len(wanted) and others <= len(ours)
        message = _alone(example, deltas, wanted) if alone else _with_base(len(ours), example, deltas, own.specs)
        return [Cause("adapter", message, (), tuple(ours))]
    if not theirs or adapter_keys(own.specs):
        return []
    number = f"{pluralize(len(theirs), 'key')} such as {quoted(theirs[0])}"
    message = f"the model has an adapter, and the file is its base: {number} keep their initial values; load the file"
    message += " before get_peft_model(), or with strict=False"
    if len(theirs) == len(wanted):
        message = "the target is an adapter, not a model: name the adapter first, and its base as the target"
    return [Cause("adapter", message, tuple(theirs))]


def _with_base(number: int, example: str, deltas: Mapping[str, _Delta], own: Iterable[str]) -> str:
    """Say that a file has an adapter beside the base: without it, what was trained is lost."""
    how, trained = "build the PEFT model that was saved", "what"
    if deltas:
        trained = "the LoRA that"
        ranks = _ranks(deltas)
        settings = [f"r={ranks[0]}"] if len(ranks) == 1 else []
        settings += ["lora_alpha=...", f"target_modules={_targets(deltas)}"]
        names = list(own)
        heads = (name.partition(_TRAINED_TOO) for name in names)
        trained_too = list(dict.fromkeys(head.rpartition(".")[2] for head, found, _ in heads if found))
        settings += [f"modules_to_save={trained_too}"] if trained_too else []
        settings += ["use_dora=True"] if any("lora_magnitude_vector" in name for name in names) else []
        how = f"build the model with get_peft_model(model, LoraConfig({', '.join(settings)}))"
    return (
        f"the file is a model with an adapter: {pluralize(number, 'key')} such as {example} have no place in the"
        f" target, and {trained} was trained would be ignored; {how}, load the file into it, and save"
        " model.merge_and_unload()"
    )


def _alone(example: str, deltas: Mapping[str, _Delta], wanted: Mapping[str, Spec]) -> str:
    """Say which modules of the base an adapter changes, and whether they fit."""
    if not deltas:
        return (
            f"the file is an adapter, with keys such as {example}, not a model: load the base, then the adapter with"
            " PeftModel.from_pretrained(model, FOLDER)"
        )
    index = _by_dotless_name(wanted)
    found = {module: _module_in(index, module) for module in deltas}
    absent = [quoted(module) for module, other in found.items() if other is None]
    others = [
        module
        for module, other in found.items()
        if other is not None and not deltas[module].fits(wanted[f"{other}.weight"].shape)
    ]
    ranks = _ranks(deltas)
    rank = f" of rank {join_limited([f'{number:,}' for number in ranks])}" if ranks else ""
    what = f"the file is an adapter (LoRA{rank} on {join_limited(_targets(deltas))}), not a model"
    fits = len(deltas) - len(absent) - len(others)
    if fits == len(deltas):
        every = f"all {fits:,} weights that it changes are" if fits > 1 else "the weight that it changes is"
        return (
            f"{what}, and {every} in the target with a fitting shape: load the target first, then the adapter with"
            " PeftModel.from_pretrained(model, FOLDER), or load_lora_weights() of diffusers; merge-lora makes one model"
            " of both"
        )
    flaws = []
    if others:
        weight = f"{found[others[0]]}.weight"
        factors = [shape_text(shape or ()) for shape in deltas[others[0]][::-1]]
        size = shape_text(wanted[weight].shape or ())
        flaws.append(f"{weight} is {size} there, and the adapter adds {' times '.join(factors)}")
    if absent:
        flaws.append(f"{join_limited(absent, most=2)} {'is' if len(absent) == 1 else 'are'} not there")
    return (
        f"{what}, and was trained for another base: {fits:,} of the {pluralize(len(deltas), 'weight')} that it changes"
        f" fit the target; {'; '.join(flaws)}; adapter_config.json names its base (base_model_name_or_path)"
    )


def _deltas(keys: Iterable[str], own: Mapping[str, Spec]) -> dict[str, _Delta]:
    """Return the matrices of LoRA by the module that they change, as the adapter calls it."""
    deltas: dict[str, _Delta] = {}
    for key in keys:
        match = _LORA.match(key)
        if match is None:
            continue
        module = _PARTS.sub("", _PEFT.sub("", match["module"]))
        delta = deltas.get(module, _Delta(None, None))
        field = "first" if match["which"] in _FIRST else "second"
        deltas[module] = delta._replace(**{field: own[key].shape})
    return deltas


def _ranks(deltas: Mapping[str, _Delta]) -> list[int]:
    return sorted({delta.rank for delta in deltas.values()} - {0})


def _targets(deltas: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(module.rpartition(".")[2] for module in deltas))


def _by_dotless_name(wanted: Iterable[str]) -> dict[str, set[str]]:
    """Map each end of the name of a module with a weight, without dots, to the modules with this end."""
    index: dict[str, set[str]] = {}
    for name in wanted:
        module, dot, last = name.rpartition(".")
        if dot and last == "weight":
            for end in suffixes(module):
                index.setdefault(dotless(end), set()).add(module)
    return index


def _module_in(index: Mapping[str, set[str]], module: str) -> str | None:
    """Return the module of the base that an adapter means: with the same numbers and end, and no other is like it."""
    numbers = _NUMBER.findall(module)
    for end in reversed(suffixes(module)):
        modules = [name for name in index.get(dotless(end), ()) if _NUMBER.findall(name) == numbers]
        exact = [name for name in modules if dotless(name) == dotless(end)]
        if len(modules) == 1 or len(exact) == 1:
            return (exact or modules)[0]
        if modules:
            return None
    return None

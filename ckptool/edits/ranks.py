"""Make a LoRA from the difference of two models, or give one another rank.

Sources: PEFT (``tuners/lora/layer.py``, ``utils/save_and_load.py``, ``utils/other.py``) and sd-scripts
(``networks/extract_lora_from_models.py``, ``networks/resize_lora.py`` with ``sv_fro`` for a part of the norm). No
value is clamped. Resizing keeps the layout, and the scale of each module: its alpha divided by its rank.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import prod, sqrt
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.lazy import regex
from ..base.steps import AnyStep, command, option
from ..base.text import join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Change, Checkpoint, Target, Tied
from ..checkpoint.selection import dotted, normal_path
from ..files.sources import Computed, FolderSource
from ..formats.opening import CheckpointOrPath, as_checkpoint, takes_path
from ..formats.planning import blaming_damage
from ..pickles.nodes import Ref
from ..values.elements import swapped
from ..values.numeric import ROUNDED
from ..values.torch.adapters import StoredTensor
from ..values.torch.compute import cast_elements, rounded_number
from ..values.torch.loads import need_torch
from ..values.torch.low_rank import PARTS, Difference, LowRank, Pair, Product, factor_elements, singular_values
from .adapter_names import DOWN, PEFT_PREFIX, TABLE, UP
from .adapter_settings import ALPHAS, CONFIG, RANKS, open_adapter
from .cast import check_dtype
from .model_config import EMBEDDING, HEAD, LOOKUP
from .recompute import Recomputation, has_arithmetic, named_tensors, quantized_refusal, refuse_bits

#: Texts of a header that another rank or layout makes wrong: hashes, and the settings that diffusers reads.
STALE: Final[Sequence[str]] = TABLE["header"]["stale"]
#: PEFT's settings for an adapter that has none.
NEW_SETTINGS: Final[Mapping[str, Any]] = TABLE["new settings"]
#: PEFT's names of the two matrices of a module, and of an embedding.
_MATRICES: Final = (UP, DOWN), ("lora_embedding_B", "lora_embedding_A")
#: GPT-2's modules whose weight has a row for each input; others with these names have one for each output.
_BY_INPUT: Final = regex(r"(?:\A|\.)(?:c_attn|c_proj|c_fc|q_attn)\Z")
#: Buffers that some versions of a model hold, and others compute.
_BUFFERS: Final = regex(r"(?:\A|\.)(?:inv_freq|position_ids|masked_bias)\Z")


def parse_rank(text: str) -> int:
    """Parse a rank; raise TargetError for another text."""
    if text.isdecimal() and (rank := int(text)):
        return rank
    raise TargetError(f"{text!r} is not a rank", next="`--rank 16`")


def parse_part(text: str | float) -> float:
    """Parse a part of a norm, above 0 and at most 1; raise TargetError for another text or number."""
    with suppress(ValueError):
        if 0 < (part := float(text)) <= 1:
            return part
    raise TargetError(f"{str(text)!r} is not a part of the norm", next="`--keep 0.95`")


# -- the matrices and the folder of a LoRA


def _add(made: dict[str, LowRank], work: Recomputation, module: str, how: LowRank) -> tuple[Ref, Ref]:
    """Add the two matrices of a module to an edit; return B and A."""
    made[module] = how
    dtype, (rows, *inner) = BY_NAME[how.dtype], how.source.shape

    def added(which: int, shape: tuple[int, ...]) -> Ref:
        piece = Computed(prod(shape) * dtype.itemsize, factor_elements, (how, which))
        return work.tensor(f"{module}.{'BA'[which]}", dtype, shape, piece)

    return added(0, (rows, how.rank, *(1 for _ in inner[1:]))), added(1, (how.rank, *inner))


def _kept(made: dict[str, LowRank], edit: str) -> list[Change]:
    """Return a change for each module, with the part of the norm that it keeps, the smallest part first."""
    changes = []
    for module, how in sorted(made.items(), key=lambda item: item[1].pair.value):
        part = how.pair.value * 100 // (PARTS // 100) / 100
        changes.append(Change(edit, module, how.rank, 0, f"rank {how.rank:,} keeps {part:g}% of the norm"))
    return changes


def rank_settings(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings of PEFT for the rank and the alpha of each module: the most frequent, and the others."""
    settings: dict[str, Any] = {}
    for name, pattern, given in (("r", "rank_pattern", ranks), ("lora_alpha", "alpha_pattern", alphas)):
        values = {key: int(value) if value == int(value) else value for key, value in given.items()}
        settings[name] = usual = Counter(values.values()).most_common(1)[0][0]
        settings[pattern] = {
            # A pattern also matches the end of a longer name.
            f"^{key}" if any(other.endswith(f".{key}") for other in values) else key: value
            for key, value in values.items()
            if value != usual
        }
    return settings


def stated(texts: Mapping[str, str], ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, str]:
    """Return the texts of a header that state the rank and the alpha, with those of these modules."""
    pairs = ((RANKS, {*ranks.values()}), (ALPHAS, {*alphas.values()}))
    found = ((texts.keys() & {*names}, f"{min(known):g}" if len(known) == 1 else "Dynamic") for names, known in pairs)
    return {name: text for names, text in found for name in names}


def peft_folder(
    adapter: Checkpoint,
    settings: Mapping[str, Any],
    texts: Mapping[str, str],
    *,
    of_model: bool = False,
    tied: Tied = "",
) -> Checkpoint:
    """Return an adapter that is written as PEFT saves it: a folder with its tensors and its settings.

    It is one file if the name of the output says so. ``texts`` go into the header. ``of_model``: the other files beside
    the input describe a model, and are left out.
    """
    text = json.dumps(dict(settings), indent=2) + "\n"
    beside = adapter.source.beside if of_model and isinstance(adapter.source, FolderSource) else ()
    companions = {**adapter.companions, **dict.fromkeys(map(os.path.basename, beside), b""), CONFIG: text.encode()}
    header = {"format": "pt", **texts, CONFIG: text}  # a file has no other place for the settings
    target = Target("safetensors", metadata=header, shard_size=1 << 62, stem="adapter_model", tied=tied)
    return adapter.replace(companions=companions, texts=header, target=target)


def _dtype_to_write(to_dtype: object) -> str:
    """Return the name of a dtype for the matrices of a LoRA, or raise TargetError."""
    name = check_dtype(str(to_dtype).removeprefix("torch.")).name
    if name not in ROUNDED:
        raise TargetError(f"the matrices of a LoRA are not written as {name}", next="`--to-dtype bfloat16`")
    return name


# -- extract


@takes_path
def extract_lora(
    tuned: Checkpoint,
    base: CheckpointOrPath,
    rank: int = 0,
    *,
    to_dtype: object = None,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Make a LoRA in PEFT's layout: merged into ``base``, it gives the tuned model, as closely as ``rank`` allows.

    Each matrix and convolution that differs gets the closest product of that rank (the smaller side at most); its
    alpha is the rank. Biases and norms that differ are stored whole, as ``modules_to_save`` and biases of PEFT. A
    weight that was only rounded to the dtype of the tuned model does not differ. ``base`` must stay open until the
    result is saved. ``include`` and ``exclude`` choose keys, ``key`` is the path of the state dict. The result is
    float32, or ``to_dtype``. Raise RefusedError if names or shapes differ, if nothing differs, or if PEFT has no place
    for a tensor.

    >>> tuned = ckptool.merge_lora("model.pth", "adapter")
    >>> ckptool.extract_lora(tuned, "model.pth", rank=1).changes[-1].words
    '1 module with a LoRA of rank 1 at most, alpha as the rank'
    """
    if rank < 1:
        raise TargetError("the rank is missing", path=tuned.path, next="`--rank 16`")
    need_torch("computing a low rank", tuned.path)
    base = as_checkpoint(base)
    dtype = "float32" if to_dtype is None else _dtype_to_write(to_dtype)
    with blaming_damage(base):
        return _extracted(_Side(tuned, key), _Side(base, key), rank, dtype, Globs(include, exclude))


class _Side:
    """One of the two models: its tensors by name."""

    def __init__(self, checkpoint: Checkpoint, key: str | None) -> None:
        self.work = work = Recomputation(checkpoint)
        self.path = checkpoint.path
        if key is not None and all(item.path != normal_path(key) for item in checkpoint.state_dicts):
            key = None  # the path is for the other model
        _, self.refs, self.tensors = named_tensors(work.checkpoint, key)
        if work.quantized:
            raise quantized_refusal(work.checkpoint, work.quantized, "they have no difference as numbers")

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor as plain data; raise RefusedError if it has no plain values."""
        tensor = self.tensors[name]
        if tensor.kind != "dense" or not tensor.storage or tensor.location == "meta" or tensor.dtype not in BY_NAME:
            raise RefusedError(f"{quoted(name)} has no plain values ({tensor.kind}, {tensor.location})", path=self.path)
        refuse_bits(self.work.checkpoint, self.refs[name], name)
        return StoredTensor.of(self.work.checkpoint, name, tensor)

    def is_redundant(self, name: str) -> bool:
        """Return whether a tensor is a copy of the embedding, to which the model ties its head, or a known buffer."""
        tied = [other for other in self.tensors if EMBEDDING.search(other)] if HEAD.search(name) else []
        return bool(_BUFFERS.search(name)) or any(self.stored(name).equals(self.stored(other)) for other in tied)


def _common(tuned: _Side, base: _Side, only: Globs) -> list[str]:
    """Return the chosen names; raise RefusedError for a name that only one model has, and for different shapes."""
    chosen, others = ([n for n in side.tensors if not only or only.match(n, n)] for side in (tuned, base))
    for side, other, names in ((tuned, base, chosen), (base, tuned, others)):
        if alone := [name for name in names if name not in other.tensors and not side.is_redundant(name)]:
            what = f"{pluralize(len(alone), 'tensor')} of {side.path} not in {other.path}: {_listed(alone)}"
            step: AnyStep = f"give both models the same names, or leave them out: {option('exclude', alone[0])}"
            raise RefusedError(what, path=side.path, next=step)
    names = [name for name in chosen if name in base.tensors]
    for name in names:
        one, two = tuned.tensors[name].shape, base.tensors[name].shape
        if one != two:
            what = f"{quoted(name)} is {shape_text(one)}, and {shape_text(two)} in {base.path}"
            step = option("exclude", name)
            if (EMBEDDING.search(name) or HEAD.search(name)) and one[1:] == two[1:]:
                step = "resize the base first: " + command("resize", base.path, vocab=str(one[0]), output="resized")
            raise RefusedError(what, path=tuned.path, next=step)
    if not names:
        raise RefusedError("no tensor of both models is chosen", path=tuned.path)
    return names


def _listed(names: Collection[str]) -> str:
    return join_limited([quoted(name) for name in names], most=3)


def _differs(tuned: StoredTensor, base: StoredTensor) -> bool:
    """Return whether two tensors differ after the base is rounded to the dtype of the tuned one."""
    dtypes = base.view.dtype, tuned.view.dtype
    if dtypes[0] == dtypes[1] or not all(BY_NAME[dtype].floating for dtype in dtypes):
        return not tuned.equals(base)
    return cast_elements(base.values, *dtypes)[0] != tuned.values


def _extracted(tuned: _Side, base: _Side, rank: int, dtype: str, only: Globs) -> Checkpoint:
    """Plan the matrices of an adapter, and return it."""
    work = tuned.work
    names = _common(tuned, base, dotted(only, work.checkpoint, base.work.checkpoint))
    differing = [name for name in names if _differs(tuned.stored(name), base.stored(name))]
    if not differing:
        what = f"its values equal those of {base.path}: there is no difference to extract"
        raise RefusedError(what, path=tuned.path)
    norms = {name for name, t in tuned.tensors.items() if name.endswith(".weight") and len(t.shape) == 1}
    attention = [t.shape for name, t in tuned.tensors.items() if name.endswith(".c_attn.weight")]
    # Whether the weights of GPT-2 have a row for each input.
    by_input = bool(attention) and all(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in attention)
    made: dict[str, LowRank] = {}
    items: list[tuple[str, Ref]] = []
    whole, unfit = list[str](), list[str]()
    for name in differing:
        module, _, last = name.rpartition(".")
        shape = tuned.tensors[name].shape
        if last == "weight" and 2 <= len(shape) <= 5 and min(shape[0], prod(shape[1:])) > 1 and shape[1] > 1:
            pair = tuned.stored(name), base.stored(name)
            if not all(has_arithmetic(each.view) for each in pair):
                raise RefusedError(f"{quoted(name)} is {pair[0].view.dtype}, and has no difference", path=tuned.path)
            lookup = len(shape) == 2 and bool(LOOKUP.search(module))
            source = Difference(*pair, lookup or (by_input and bool(_BY_INPUT.search(module))))
            most = min(rank, source.shape[0], prod(source.shape[1:]))
            how = LowRank(source, most, dtype, work.width(BY_NAME[dtype]), 1.0, Pair())
            matrices = zip(_MATRICES[lookup], _add(made, work, module, how))
            items += sorted((f"{PEFT_PREFIX}{module}.{end}", ref) for end, ref in matrices)
        else:
            (whole if last in ("weight", "bias") or f"{module}.weight" in norms else unfit).append(name)
    if unfit:
        what = f"{pluralize(len(unfit), 'tensor')} cannot be part of a LoRA in PEFT's layout: {_listed(unfit)}"
        raise RefusedError(what, path=tuned.path, next=f"leave out: {option('exclude', unfit[0])}")
    if not made:
        what = f"only biases and norms differ, such as {quoted(whole[0])}: there is nothing for a LoRA"
        step = "merge them: " + command("merge", base.path, tuned.path, output="merged")
        raise RefusedError(what, path=tuned.path, next=step)
    for name in whole:
        module, _, last = name.rpartition(".")
        own = f"{module}.base_layer.{last}" if module in made else name
        items.append((PEFT_PREFIX + own, tuned.refs[name]))
    notes = [f"stored whole: {_listed(whole)}"] if whole else []
    if left_out := sorted(tuned.tensors.keys() - {*names}):
        notes.append(f"not compared: {_listed(left_out)}")
    if any(EMBEDDING.search(f"{module}.weight") for module in made) and not any(map(HEAD.search, tuned.tensors)):
        notes.append("a head that is tied to the embedding changes only if the merge keeps it tied")
    what = f"{pluralize(len(made), 'module')} with a LoRA of rank {rank:,} at most, alpha as the rank"
    edited = work.checkpoint.changed(
        work.editor.done(work.editor.mapping(items)),
        [Change("lora-extract", "", len(made), 0, what, tuple(notes))],
        work.added,
        needs_relayout=True,
        others=(base.work.checkpoint,),
        deferred_changes=(partial(_kept, made, "lora-extract"),),
    )
    # PEFT's targets are the last parts of names where these select the same modules.
    matrices_of_base = (name for name, t in base.tensors.items() if name.endswith(".weight") and len(t.shape) > 1)
    others = (module for name in matrices_of_base if (module := name.removesuffix(".weight")) not in made)
    unchanged = {module.rpartition(".")[2] for module in others}
    ends = {module: module.rpartition(".")[2] for module in made}
    saved = dict.fromkeys(name.rpartition(".")[0] for name in whole if not name.endswith(".bias"))
    biased = any(name.endswith(".bias") and name.rpartition(".")[0] not in saved for name in whole)
    ranks = {module: how.rank for module, how in made.items()}
    settings = {
        **NEW_SETTINGS,
        "bias": "all" if biased else "none",
        "fan_in_fan_out": by_input,
        "target_modules": sorted({each if end.isdigit() or end in unchanged else end for each, end in ends.items()}),
        "modules_to_save": list(saved) or None,
        **rank_settings(ranks, ranks),
    }
    return peft_folder(edited, settings, {}, of_model=True)


# -- resize


@takes_path
def resize_lora(
    adapter: Checkpoint,
    rank: int = 0,
    *,
    keep: float | None = None,
    to_dtype: object = None,
    alpha: float | None = None,
) -> Checkpoint:
    """Give each module of a LoRA the closest product of another rank, with the same scale.

    The layout and the names stay: those of PEFT with new settings, of kohya with new ``alpha`` tensors, of diffusers
    without alpha. With ``keep``, each module gets the smallest rank that keeps this part of its Frobenius norm, at most
    ``rank`` if that is given. Beyond the rank of a product, the matrices are filled with zeros. Magnitudes of DoRA,
    biases and modules that were trained whole stay. ``to_dtype`` is the dtype of the matrices, by default their own;
    ``alpha`` is the lora_alpha of an adapter that records none. Raise RefusedError for other kinds than LoRA.

    >>> ckptool.resize_lora("adapter", 2).changes[0].words
    '1 module resized: rank 1 -> 2'
    """
    if rank < 1 and keep is None:
        raise TargetError("a rank is missing", path=adapter.path, next="`--rank 16`, or `--keep 0.95` of the norm")
    part = None if keep is None else parse_part(keep)
    dtype = "" if to_dtype is None else _dtype_to_write(to_dtype)
    found = open_adapter(adapter, alpha)
    kind = found.config.get("peft_type", "LORA")
    if kind != "LORA" or found.config.get("target_parameters"):
        what = f"only LoRA has a rank that can change, and it is {kind if kind != 'LORA' else 'one of experts'}"
        raise found.refusal(what)
    need_torch("computing a low rank", adapter.path)
    work = Recomputation(found.checkpoint)
    made: dict[str, LowRank] = {}
    new: dict[str, Ref] = {}
    before: list[int] = []
    alphas: dict[str, float] = {}
    models = ((model, *item) for model in found.modules() for item in model.parts.items())
    for model, module, keys in models:
        for ends in _MATRICES:
            if not any(end in keys for end in ends):
                continue
            own = found.of(model)
            if lacking := next((end for end in ends if end not in keys), ""):
                raise own.refusal(f"{quoted(module)} has no {lacking}: the file is incomplete")
            own.check_product(keys[ends[1]], keys[ends[0]])
            product = Product(*(own.stored(keys[end]) for end in ends))
            written = dtype or product.a.view.dtype
            if written not in ROUNDED:
                step = "choose the dtype of the result: `--to-dtype bfloat16`"
                raise own.refusal(f"{quoted(product.a.name)} is {written}", step)
            label = f"{model.label}.{module}" if model.label else module
            factor, most = own.product_scale(module, keys), rank if part is None else _enough(product, part, rank)
            alphas[label], fold = factor * (sqrt(most) if own.is_set("use_rslora") else most), 1.0
            if key := keys.get("alpha", ""):
                alpha_dtype = BY_NAME[own.tensors[key].dtype]
                data, stored = rounded_number(alphas[label], alpha_dtype.name)
                if alphas[label] and not stored:
                    data, stored = rounded_number(1.0, alpha_dtype.name)
                data = swapped(data, work.width(alpha_dtype))
                new[key] = work.tensor(key, alpha_dtype, own.tensors[key].shape, data)
                fold = alphas[label] / stored if alphas[label] else 1.0  # makes up for the rounding
            elif own.of_pipeline:
                alphas[label], fold = most, factor
            before.append(product.a.view.shape[0])
            how = LowRank(product, most, written, work.width(BY_NAME[written]), fold, Pair())
            new |= zip((keys[end] for end in ends), _add(made, work, label, how))
    if not made:
        raise found.refusal("it has no product of two matrices")
    state_dict, refs, _ = named_tensors(work.checkpoint, None)
    prefix = "" if found.of_pipeline else PEFT_PREFIX
    work.refill(state_dict, {key: new[bare] for key in refs if (bare := key.removeprefix(prefix)) in new})
    ranks = {module: how.rank for module, how in made.items()}
    what = f"{pluralize(len(ranks), 'module')} resized: rank {_span(before)} -> {_span(ranks.values())}"
    change = Change("lora-resize", "", len(ranks), 0, what)
    edited = work.done([change], deferred_changes=(partial(_kept, made, "lora-resize"),))
    texts = {name: text for name, text in edited.metadata.items() if name not in STALE}
    texts |= stated(texts, ranks, alphas)
    if found.of_pipeline:
        return edited.replace(texts=texts) if texts != edited.metadata else edited
    return peft_folder(edited, {**found.config, **rank_settings(ranks, alphas)}, texts)


def _enough(product: Product, part: float, most: int) -> int:
    """Return the smallest rank of a product that keeps this part of its norm, at most ``most`` unless that is 0."""
    squares = [*accumulate(value * value for value in singular_values(product))]
    # A part of 1 is reached within the rounding of float64.
    wanted = squares[-1] * part**2 * (1 - 1e-12)
    enough = next(count for count, square in enumerate(squares, 1) if square >= wanted)
    return min(enough, most or enough)


def _span(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

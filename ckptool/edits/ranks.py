"""Give a LoRA another rank, in its own layout: PEFT, kohya or diffusers.

Formulas: sd-scripts (``networks/resize_lora.py``, with ``sv_fro`` for a part of the norm). The scale of each module,
which is its alpha divided by its rank, stays the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import prod, sqrt
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import TargetError
from ..base.records import NamedTuple
from ..base.text import pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint, Target
from ..checkpoint.objects import mapping
from ..checkpoint.selection import only_one, selected
from ..files.sources import Computed, FolderSource
from ..formats.opening import takes_path
from ..pickles.nodes import Ref
from ..values.elements import swapped
from ..values.numeric import ROUNDED
from ..values.torch.compute import rounded_number
from ..values.torch.loads import need_torch
from ..values.torch.low_rank import PARTS, LowRank, Product, factor_elements, singular_values
from .adapter_names import DOWN, PEFT_PREFIX, UP, Modules
from .adapter_settings import ALPHAS, CONFIG, RANKS, Adapter, check_product, open_adapter, product_scale
from .cast import check_dtype
from .recompute import Recomputation

#: Texts of a header that another rank makes wrong: hashes, and settings that diffusers reads beside the tensors.
STALE: Final = ("sshs_model_hash", "sshs_legacy_hash", "lora_adapter_metadata")


def parse_rank(text: str) -> int:
    """Parse a rank; raise TargetError for another text."""
    with suppress(ValueError):
        if (rank := int(text)) > 0:
            return rank
    raise TargetError(f"{text!r} is not a rank", next="`--rank 16`")


def parse_part(text: str) -> float:
    """Parse a part of a norm, above 0 and at most 1; raise TargetError for another text."""
    with suppress(ValueError):
        if 0 < (part := float(text)) <= 1:
            return part
    raise TargetError(f"{text!r} is not a part of the norm", next="`--keep 0.95`")


class Factors(NamedTuple):
    """The two matrices of a module; ``parts`` are their names in PEFT."""

    module: str
    how: LowRank
    parts: tuple[str, str] = (UP, DOWN)

    def added(self, work: Recomputation, rows: int, inner: Sequence[int]) -> tuple[Ref, Ref]:
        """Add both tensors to an edit, for a weight with ``rows`` and the shape ``inner`` of a row."""
        dtype, rank = BY_NAME[self.how.dtype], self.how.rank
        shapes = (rows, rank, *(1 for _ in inner[1:])), (rank, *inner)
        b, a = (
            work.tensor(
                f"{self.module}.{part}",
                dtype,
                shape,
                Computed(prod(shape) * dtype.itemsize, factor_elements, (self.how, which)),
            )
            for which, (part, shape) in enumerate(zip(self.parts, shapes))
        )
        return b, a


def kept_changes(edit: str, factors: Sequence[Factors]) -> list[Change]:
    """Return a change for each module, with the part of the norm that it keeps, the smallest part first."""
    made = sorted(factors, key=lambda each: each.how.kept.value)
    texts = (f"{each.how.kept.value * 100 // (PARTS // 100) / 100:g}%" for each in made)
    return [
        Change(edit, each.module, each.how.rank, 0, f"rank {each.how.rank:,} keeps {text} of the norm")
        for each, text in zip(made, texts)
    ]


def rank_settings(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings of PEFT for the rank and the alpha of each module: the most frequent, and the others."""
    settings: dict[str, Any] = {}
    for name, pattern, given in (("r", "rank_pattern", ranks), ("lora_alpha", "alpha_pattern", alphas)):
        values = {key: int(value) if value == int(value) else value for key, value in given.items()}
        (usual, _), *_ = Counter(values.values()).most_common(1)
        settings[name] = usual
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


def of_peft(edited: Checkpoint, config: Mapping[str, Any], texts: Mapping[str, str]) -> Checkpoint:
    """Return an adapter with these settings and texts that is written as a folder of PEFT, or as one file if the name
    of the output says so.
    """
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    # A file has no other place for the settings.
    target = Target(
        "safetensors", metadata={"format": "pt", **texts, CONFIG: text}, shard_size=1 << 62, stem="adapter_model"
    )
    companions = {**edited.companions, CONFIG: text.encode()}
    return edited.replace(companions=companions, texts=target.metadata, target=target)


def dtype_to_write(to_dtype: object) -> str:
    """Return the name of a dtype for the matrices of a LoRA, or raise TargetError."""
    name = check_dtype(str(to_dtype).removeprefix("torch.")).name
    if name not in ROUNDED:
        raise TargetError(f"the matrices of a LoRA are not written as {name}", next="`--to-dtype bfloat16`")
    return name


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
    dtype = "" if to_dtype is None else dtype_to_write(to_dtype)
    found = open_adapter(adapter, alpha)
    kind = found.config.get("peft_type", "LORA")
    if kind != "LORA" or found.has_parameters:
        what = f"only LoRA has a rank that can change, and it is {kind if kind != 'LORA' else 'one of experts'}"
        raise found.refusal(what)
    need_torch("computing a low rank", adapter.path)
    resizing = _Resizing(found, rank, keep, dtype)
    for model in found.modules():
        resizing.add(model)
    return resizing.done()


class _Resizing:
    """An adapter whose modules get other ranks."""

    def __init__(self, adapter: Adapter, rank: int, keep: float | None, dtype: str) -> None:
        self.adapter, self.rank, self.keep, self.dtype = adapter, rank, keep, dtype
        self.work = Recomputation(adapter.checkpoint)
        self.factors: list[Factors] = []
        self.new: dict[str, Ref] = {}
        self.before: list[int] = []
        self.alphas: dict[str, float] = {}

    def add(self, model: Modules) -> None:
        """Add the modules of one model."""
        adapter = self.adapter.of(model)
        for module, keys in model.parts.items():
            for parts in ((UP, DOWN), ("lora_embedding_B", "lora_embedding_A")):
                if any(part in keys for part in parts):
                    self._add_module(adapter, model, module, keys, parts)

    def _add_module(
        self, adapter: Adapter, model: Modules, module: str, keys: Mapping[str, str], parts: tuple[str, str]
    ) -> None:
        if lacking := next((part for part in parts if part not in keys), ""):
            raise adapter.refusal(f"{quoted(module)} has no {lacking}: the file is incomplete")
        b, a = (adapter.stored(keys[part]) for part in parts)
        check_product(adapter, keys[parts[1]], keys[parts[0]])
        rows, old = b.view.shape[0], a.view.shape[0]
        alpha_key, factor = keys.get("alpha", ""), product_scale(adapter, module, keys)
        product = Product(b, a)
        rank = self._rank(product)
        label = f"{model.label}.{module}" if model.label else module
        dtype = self.dtype or a.view.dtype
        if dtype not in ROUNDED:
            raise adapter.refusal(
                f"{quoted(a.name)} is {dtype}", "choose the dtype of the result: `--to-dtype bfloat16`"
            )
        fold = 1.0
        self.alphas[label] = factor * (sqrt(rank) if adapter.is_set("use_rslora") else rank)
        if alpha_key:
            fold = self._with_alpha(alpha_key, self.alphas[label])
        elif adapter.of_pipeline:
            fold, self.alphas[label] = factor, rank
        if fold < 0:
            raise adapter.refusal(f"the scale of {quoted(module)} is negative, and it has no alpha")
        how = LowRank.of(product, rank, dtype, self.work.width(BY_NAME[dtype]), fold)
        made = Factors(label, how, parts)
        self.factors.append(made)
        self.before.append(old)
        self.new |= zip((keys[part] for part in parts), made.added(self.work, rows, a.view.shape[1:]))

    def _rank(self, product: Product) -> int:
        """Return the new rank of a product: the given one, or the smallest that keeps the part of the norm."""
        if self.keep is None:
            return self.rank
        squares = [*accumulate(value * value for value in singular_values(product))]
        # A part of 1 is reached within the rounding of float64.
        wanted = squares[-1] * self.keep**2 * (1 - 1e-12)
        enough = next(count for count, square in enumerate(squares, 1) if square >= wanted)
        return min(enough, self.rank or enough)

    def _with_alpha(self, key: str, alpha: float) -> float:
        """Replace the alpha of a module; return the factor by which its dtype is unable to hold the new one."""
        tensor = self.adapter.tensors[key]
        dtype = BY_NAME[tensor.dtype]
        data, stored = rounded_number(alpha, dtype.name)
        if alpha and not stored:
            data, stored = rounded_number(1.0, dtype.name)
        self.new[key] = self.work.tensor(key, dtype, tensor.shape, swapped(data, self.work.width(dtype)))
        return alpha / stored if alpha else 1.0

    def done(self) -> Checkpoint:
        """Plan the tensors, and return the adapter."""
        work, adapter = self.work, self.adapter
        if not self.factors:
            raise adapter.refusal("it has no product of two matrices")
        state_dict = only_one(work.checkpoint, selected(work.checkpoint, None))
        nodes = work.checkpoint.graph.nodes
        held = mapping(work.checkpoint.graph, state_dict.ref) or ()
        prefix = "" if adapter.of_pipeline else PEFT_PREFIX
        items = [(name, self.new.get(str(nodes[name]).removeprefix(prefix), ref)) for name, ref in held]
        work.editor.refill(state_dict.ref, items)
        ranks = {each.module: each.how.rank for each in self.factors}
        what = f"{pluralize(len(ranks), 'module')} resized: rank {_span(self.before)} -> {_span([*ranks.values()])}"
        edited = work.done(
            [Change("lora-resize", "", len(ranks), 0, what)],
            deferred_changes=(partial(kept_changes, "lora-resize", self.factors),),
        )
        texts = {name: text for name, text in edited.metadata.items() if name not in STALE}
        texts |= stated(texts, ranks, self.alphas)
        if adapter.of_pipeline:
            return edited.replace(texts=texts) if texts != edited.metadata else edited
        config = {**adapter.config, **rank_settings(ranks, self.alphas)}
        if isinstance(edited.source, FolderSource):
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            return edited.replace(companions={**edited.companions, CONFIG: text.encode()}, texts=texts)
        return of_peft(edited, config, texts)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

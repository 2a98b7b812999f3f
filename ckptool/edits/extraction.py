"""Make a LoRA in PEFT's layout from the difference of two models, while the output is written.

Names and settings: PEFT (``tuners/lora/layer.py``, ``utils/save_and_load.py``, ``utils/other.py``). Unlike
``extract_lora_from_models.py`` of sd-scripts it clamps no values, and tells what is no matrix.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.lazy import regex
from ..base.steps import AnyStep, command, option
from ..base.text import join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Change, Checkpoint, Target
from ..checkpoint.selection import dotted, only_one, selected
from ..files.sources import FolderSource
from ..formats.opening import CheckpointOrPath, as_checkpoint, takes_path
from ..formats.planning import blaming_damage
from ..pickles.nodes import Ref
from ..values.elements import elements, reblocked, storage_reader
from ..values.torch.adapters import StoredTensor
from ..values.torch.compute import cast_elements
from ..values.torch.loads import need_torch
from ..values.torch.low_rank import Difference, LowRank
from .adapter_names import PEFT_PREFIX
from .adapter_settings import vector
from .model_config import EMBEDDING, HEAD, LOOKUP
from .ranks import Factors, dtype_to_write, kept_changes, of_peft, rank_settings
from .recompute import Recomputation, has_arithmetic, quantized_refusal, refuse_bits, tensors_of

#: GPT-2's modules whose weight has a row for each input; others with these names have one for each output.
_BY_INPUT: Final = regex(r"(?:\A|\.)(?:c_attn|c_proj|c_fc|q_attn)\Z")
#: Buffers that models of some versions hold, and those of other versions compute.
_BUFFERS: Final = regex(r"(?:\A|\.)(?:inv_freq|position_ids|masked_bias)\Z")


def extract_lora_files(tuned: Checkpoint, bases: Sequence[str], **how: Any) -> Checkpoint:
    """Extract by the path of the only base; if a file is damaged, the error is about the damage."""
    if len(bases) != 1:
        raise TargetError(f"one base is needed, and {len(bases)} are given", next="name it after the tuned model")
    opened = as_checkpoint(bases[0])
    with blaming_damage(opened):
        return extract_lora(tuned, opened, **how)


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
    """Make a LoRA in PEFT's layout from a tuned model and its base: merged, it gives the tuned model, if ``rank`` does.

    Each matrix and convolution that differs gets the closest product of that rank (the smaller side at most); its
    alpha is the rank. Biases and norms that differ are stored whole, as ``modules_to_save`` and biases of PEFT. A
    weight that only was rounded to the dtype of the tuned model does not differ. ``base`` must stay open until the
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
    one, other = _Side(tuned, key), _Side(as_checkpoint(base), key)
    only = dotted(Globs(include, exclude), one.work.checkpoint, other.work.checkpoint)
    names = _common(one, other, only)
    if not names:
        raise RefusedError("no tensor of both models is chosen", path=tuned.path)
    differing = [name for name in names if _differs(one.stored(name), other.stored(name))]
    if not differing:
        what = f"its values equal those of {other.path}: there is no difference to extract"
        raise RefusedError(what, path=tuned.path)
    return _Extraction(one, other, rank, "float32" if to_dtype is None else dtype_to_write(to_dtype), differing).done(
        one.tensors.keys() - {*names}
    )


class _Side:
    """One of the two models: its tensors by name."""

    def __init__(self, checkpoint: Checkpoint, key: str | None) -> None:
        self.work = work = Recomputation(checkpoint)
        self.path = checkpoint.path
        if key is not None and all(item.path != key for item in work.checkpoint.state_dicts):
            key = None
        state_dict = only_one(work.checkpoint, selected(work.checkpoint, key))
        if work.quantized:
            raise quantized_refusal(work.checkpoint, work.quantized, "they have no difference as numbers")
        nodes = work.checkpoint.graph.nodes
        self.refs = {str(nodes[name]): ref for name, ref in state_dict.items}
        self.tensors = tensors_of(work.checkpoint, state_dict)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor as plain data; raise RefusedError if it has no plain values."""
        tensor = self.tensors[name]
        if tensor.kind != "dense" or not tensor.storage or tensor.location == "meta" or tensor.dtype not in BY_NAME:
            raise RefusedError(f"{quoted(name)} has no plain values ({tensor.kind}, {tensor.location})", path=self.path)
        refuse_bits(self.work.checkpoint, self.refs[name], name)
        return StoredTensor(name, storage_reader(self.work.checkpoint, tensor.storage), vector(tensor))

    def is_redundant(self, name: str) -> bool:
        """Return whether a tensor is a copy of the embedding, to which the model ties its head, or a known buffer."""
        tied = [other for other in self.tensors if EMBEDDING.search(other)] if HEAD.search(name) else []
        return bool(_BUFFERS.search(name)) or any(self.stored(name).equals(self.stored(other)) for other in tied)


def _common(tuned: _Side, base: _Side, only: Globs) -> list[str]:
    """Return the chosen names of both models; raise RefusedError for names of one of them, and for other shapes."""

    def chosen(side: _Side) -> list[str]:
        return [name for name in side.tensors if not only or only.match(name, name)]

    for side, other in ((tuned, base), (base, tuned)):
        alone = [name for name in chosen(side) if name not in other.tensors and not side.is_redundant(name)]
        if alone:
            which = join_limited([quoted(name) for name in alone], most=3)
            what = f"{pluralize(len(alone), 'tensor')} of {side.path} not in {other.path}: {which}"
            step: AnyStep = f"give both models the same names, or leave them out: {option('exclude', alone[0])}"
            raise RefusedError(what, path=side.path, next=step)
    names = [name for name in chosen(tuned) if name in base.tensors]
    for name in names:
        one, two = tuned.tensors[name].shape, base.tensors[name].shape
        if one != two:
            what = f"{quoted(name)} is {shape_text(one)}, and {shape_text(two)} in {base.path}"
            step = option("exclude", name)
            if (EMBEDDING.search(name) or HEAD.search(name)) and one[1:] == two[1:]:
                step = "resize the base first: " + command("resize", base.path, vocab=str(one[0]), output="resized")
            raise RefusedError(what, path=tuned.path, next=step)
    return names


def _differs(tuned: StoredTensor, base: StoredTensor) -> bool:
    """Return whether two tensors of one shape differ, after the base is rounded to the dtype of the tuned one."""
    dtypes = base.view.dtype, tuned.view.dtype
    width = min(BY_NAME[dtype].itemsize for dtype in dtypes)
    if dtypes[0] != dtypes[1] and not all(BY_NAME[dtype].floating for dtype in dtypes):
        return True
    if (tuned.storage.body, tuned.view) == (base.storage.body, base.view):
        return False
    step = (1 << 20) // width
    mine, theirs = (
        reblocked(elements(each.storage, each.view), step * BY_NAME[each.view.dtype].itemsize) for each in (tuned, base)
    )
    if dtypes[0] != dtypes[1]:
        theirs = (cast_elements(data, *dtypes)[0] for data in theirs)
    return any(one != other for one, other in zip_longest(mine, theirs))


class _Extraction:
    """The adapter that is made of two models."""

    def __init__(self, tuned: _Side, base: _Side, rank: int, dtype: str, differing: Sequence[str]) -> None:
        self.tuned, self.base, self.rank, self.dtype, self.differing = tuned, base, rank, dtype, differing
        attention = [t.shape for name, t in tuned.tensors.items() if name.endswith(".c_attn.weight")]
        #: Whether the weights of GPT-2 have a row for each input.
        self.by_input = bool(attention) and all(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in attention)
        self.factors: list[Factors] = []
        self.whole: list[str] = []

    def done(self, left_out: Collection[str]) -> Checkpoint:
        """Plan the matrices, and return the adapter."""
        work, items = self.tuned.work, list[tuple[str, Ref]]()
        unfit = []
        for name in self.differing:
            module, _, last = name.rpartition(".")
            shape = self.tuned.tensors[name].shape
            if last == "weight" and 2 <= len(shape) <= 5 and min(shape[0], prod(shape[1:])) > 1 and shape[1] > 1:
                items += self._low_rank(module)
            elif last in ("weight", "bias") or self._is_norm(module):
                self.whole.append(name)
            else:
                unfit.append(name)
        if unfit:
            which = join_limited([quoted(name) for name in unfit], most=3)
            what = f"{pluralize(len(unfit), 'tensor')} cannot be part of a LoRA in PEFT's layout: {which}"
            raise RefusedError(what, path=self.tuned.path, next=f"leave out: {option('exclude', unfit[0])}")
        if not self.factors:
            what = f"only biases and norms differ, such as {quoted(self.whole[0])}: there is nothing for a LoRA"
            raise RefusedError(
                what,
                path=self.tuned.path,
                next="merge them: " + command("merge", self.base.path, self.tuned.path, output="merged"),
            )
        modules = {each.module for each in self.factors}
        for name in self.whole:
            module, _, last = name.rpartition(".")
            own = f"{module}.base_layer.{last}" if module in modules else name
            items.append((PEFT_PREFIX + own, self.tuned.refs[name]))
        graph = work.editor.done(work.editor.mapping(items))
        what = f"{pluralize(len(modules), 'module')} with a LoRA of rank {self.rank:,} at most, alpha as the rank"
        edited = work.checkpoint.changed(
            graph,
            [Change("lora-extract", "", len(modules), 0, what, self._notes(left_out))],
            work.added,
            needs_relayout=True,
            others=(self.base.work.checkpoint,),
            deferred_changes=(partial(kept_changes, "lora-extract", self.factors),),
            target=Target("safetensors"),
        )
        # The files beside a tuned model describe the model.
        beside = edited.source.beside if isinstance(edited.source, FolderSource) else ()
        edited = edited.replace(companions=dict.fromkeys(map(os.path.basename, beside), b""))
        return of_peft(edited, self._config(modules), {})

    def _low_rank(self, module: str) -> Iterator[tuple[str, Ref]]:
        """Add the matrices of a module; yield their names and references."""
        name, work = f"{module}.weight", self.tuned.work
        tuned, base = self.tuned.stored(name), self.base.stored(name)
        if not all(has_arithmetic(each.view) for each in (tuned, base)):
            raise RefusedError(f"{quoted(name)} is {tuned.view.dtype}, and has no difference", path=self.tuned.path)
        shape = tuned.view.shape
        lookup = len(shape) == 2 and bool(LOOKUP.search(module))
        turned = lookup or (self.by_input and bool(_BY_INPUT.search(module)))
        rank = min(self.rank, shape[0], prod(shape[1:]))
        how = LowRank.of(Difference(tuned, base, turned), rank, self.dtype, work.width(BY_NAME[self.dtype]))
        made = Factors(module, how, ("lora_embedding_B", "lora_embedding_A")) if lookup else Factors(module, how)
        self.factors.append(made)
        rows, inner = (shape[1], shape[:1]) if turned else (shape[0], shape[1:])
        pairs = zip(made.parts, made.added(work, rows, inner))
        yield from sorted((f"{PEFT_PREFIX}{module}.{part}", ref) for part, ref in pairs)

    def _config(self, modules: Collection[str]) -> dict[str, Any]:
        """Return the settings of PEFT."""
        every = [
            n.rpartition(".")[0] for n, t in self.base.tensors.items() if n.endswith(".weight") and len(t.shape) > 1
        ]
        unchanged = {each.rpartition(".")[2] for each in every if each not in modules}
        last = {module: module.rpartition(".")[2] for module in modules}
        short = {module: name for module, name in last.items() if not (name.isdigit() or name in unchanged)}
        saved = dict.fromkeys(name.rpartition(".")[0] for name in self.whole if not name.endswith(".bias"))
        biased = any(name.endswith(".bias") and name.rpartition(".")[0] not in saved for name in self.whole)
        ranks = {each.module: each.how.rank for each in self.factors}
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": None,
            "inference_mode": True,
            "bias": "all" if biased else "none",
            "fan_in_fan_out": self.by_input,
            "lora_dropout": 0.0,
            "target_modules": sorted({short.get(module, module) for module in modules}),
            "modules_to_save": list(saved) or None,
            **rank_settings(ranks, ranks),
        }

    def _is_norm(self, module: str) -> bool:
        weight = self.tuned.tensors.get(f"{module}.weight")
        return weight is not None and len(weight.shape) == 1

    def _notes(self, left_out: Collection[str]) -> tuple[str, ...]:
        notes = []
        if self.whole:
            notes.append(f"stored whole: {join_limited([quoted(name) for name in self.whole], most=3)}")
        if left_out:
            notes.append(f"not compared: {join_limited([quoted(name) for name in sorted(left_out)], most=3)}")
        if any(EMBEDDING.search(f"{each.module}.weight") for each in self.factors) and not any(
            HEAD.search(name) for name in self.tuned.tensors
        ):
            notes.append("a head that is tied to the embedding changes only if the merge keeps it tied")
        return tuple(notes)

"""Merge adapters into the weights of a base model; only the weights that they change are computed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, Final, Literal

from ..base.addresses import is_folder
from ..base.dtypes import BY_NAME
from ..base.errors import CkptoolError, RefusedError, TargetError, adding_path
from ..base.lazy import regex
from ..base.steps import NextStep, as_step, command, suggested_output
from ..base.text import pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.tensors import Tensor, is_contiguous
from ..files.sources import Computed
from ..formats.names.hf import ADAPTER_CONFIG
from ..formats.opening import CheckpointOrPath, as_checkpoint, opened, takes_path
from ..formats.planning import blaming_damage
from ..pickles.nodes import Ref
from ..values.numeric import ROUNDED
from ..values.torch.adapters import AdapterStep, StoredTensor, merged_elements
from ..values.torch.loads import check_torch
from .adapter_names import is_of_pipeline, modules
from .adapter_settings import BY_PEFT, Adapter, merge_step, open_adapter, settings, taken_apart, unmerged
from .adapters import description, weight_changes
from .model_config import CONFIG, EMBEDDING, HEAD, config_fields
from .ranks import peft_folder
from .recompute import Recomputation, named_tensors, one_for_each, quantized_refusal, refuse_bits

_BEFORE: Final = "merge into the weights before quantization"
_TIED: Final = "tie_word_embeddings"
#: Language models; the head of causal ones is called ``lm_head.weight``.
_GENERATES: Final = regex(r"CausalLM|LMHead|Generation|MaskedLM")
_CAUSAL: Final = regex(r"CausalLM|LMHeadModel")
_NEW_HEAD: Final = "lm_head.weight"


@takes_path
def merge_lora(
    base: Checkpoint,
    *adapters: CheckpointOrPath,
    weights: Sequence[float] | None = None,
    alpha: float | None = None,
    key: str | None = None,
    config: str | os.PathLike[str] | None = None,
    adapter: str | None = None,
    keep: Literal["base", "adapter"] | None = None,
) -> Checkpoint:
    """Merge adapters of PEFT, kohya or diffusers into a base model, one after the other.

    An adapter is a folder with ``adapter_config.json``, the file with its tensors beside that, or the LoRA of a
    pipeline. It must stay open until the result is saved. ``weights`` has one factor for each adapter, ``alpha`` is
    the lora_alpha of adapters that record none, ``key`` is the path of the state dict, ``config`` the path of the
    settings of a single adapter. Values are equal to those of PEFT's ``merge_and_unload()``. Raise RefusedError if an
    adapter has no merge or does not fit the base, TargetError for invalid weights.

    Without adapters, the base is a model with an unmerged adapter inside, as the state dict of a PEFT model.
    ``adapter`` names one of several. ``keep`` takes the model apart instead: "base" is the model without the adapter,
    "adapter" the folder that PEFT would save.

    >>> ckptool.merge_lora("model.pth", "adapter").changes[0].words
    'adapter: merged 1, replaced 0, unused 0'
    """
    factors = one_for_each(len(adapters) or 1, "adapter", weights)
    if not all(factors):
        raise TargetError("the weights must be numbers other than 0", next="`--weights 1,0.5`")
    if keep not in (None, "base", "adapter"):
        raise TargetError(f"{keep!r} is not a part of the model", next="`--keep base` or `--keep adapter`")
    if adapters:
        if unsuitable := next((name for name, each in (("adapter", adapter), ("keep", keep)) if each is not None), ""):
            raise TargetError(f"`--{unsuitable}` is for a model with an adapter inside", next="name no other adapter")
        if (found := unmerged(base)) is not None:
            message = f"it has an unmerged adapter inside ({found.words})"
            raise RefusedError(message, path=base.path, next="merge that first: " + merge_step(base, found))
        if config is not None and len(adapters) > 1:
            raise TargetError("`--config=` is for one adapter", next="put each adapter_config.json beside its adapter")
        given = None if config is None else settings(base, config)
        every = [open_adapter(each, alpha, given)._replace(weight=own) for each, own in zip(adapters, factors)]
        check_torch("merging an adapter", base.path)
        return _merged(base, every, key)
    parts = taken_apart(base, key, adapter, to_merge=keep is None)
    if parts is None:
        raise TargetError("an adapter to merge is needed", next="name its folder after the base")
    model, part, notes = parts
    number = len(part.survey.tensors)
    if keep == "base":
        what = f"the base model without its adapter: {pluralize(number, 'tensor')} left out"
        return model.replace(changes=(*model.changes, Change("lora-merge", key or "", number, 0, what, notes)))
    given = settings(base, config)
    if keep == "adapter":
        with adding_path(base.path):
            modules([entry.key for entry in part.survey.tensors])  # refused if a tensor lacks its partner
        if given is None:
            what = f"PEFT needs {ADAPTER_CONFIG} beside an adapter, and it is not beside the model"
            raise RefusedError(what, path=base.path, next="name it with `--config=`")
        if given.get("bias", "none") != "none":
            notes = (*notes, "biases that were trained with it stay in the base model: keep that one too")
        what = f"the adapter as PEFT saves it: {pluralize(number, 'tensor')}"
        change = Change("lora-merge", key or "", number, 0, what, notes)
        return peft_folder(part.replace(changes=(*model.changes, change)), given, {}, of_model=True, tied="keep-first")
    own = open_adapter(part, alpha, given)._replace(in_model=True, weight=factors[0])
    exact = own.config.get("peft_type") == "LORA" and not own.config.get("target_parameters")
    if not exact and any(tensor.dtype in ("float16", "bfloat16") for tensor in own.tensors.values()):
        raise own.refusal("PEFT merges an adapter of this type in 16 bits, with other roundings", BY_PEFT)
    check_torch("merging an adapter", base.path)
    return _merged(model, [own], key, notes)


def merge_lora_files(
    checkpoint: Checkpoint, adapters: Sequence[str], *, dequantize: bool = False, **how: Any
) -> Checkpoint:
    """Merge adapters, given their paths, and name a damaged file; ``dequantize`` makes the base plain first."""
    if dequantize:
        from .dequantize import dequantize as plain_of

        checkpoint = plain_of(checkpoint)
    found = [as_checkpoint(path) for path in adapters]
    with blaming_damage(*found):
        return merge_lora(checkpoint, *found, **how)


def parse_alpha(text: str) -> float:
    """Parse a number; raise TargetError for another text."""
    with suppress(ValueError):
        if isfinite(value := float(text)):
            return value
    raise TargetError(f"{text!r} is not a number", next="`--alpha 16`")


def merge_verdict(base: CheckpointOrPath, adapter: Checkpoint) -> tuple[NextStep, str]:
    """Return the command that merges an adapter into a base, empty if it does not fit, and a remark."""
    if (found := unmerged(adapter)) is not None:
        step = merge_step(adapter, found)
        return step if step.commands else NextStep(), ""
    what = f"the file is {description(adapter)}"
    try:
        with opened(base) as checkpoint:
            (change, *_) = _merged(checkpoint, [open_adapter(adapter)], None).changes
            output = suggested_output(checkpoint.path, "merged")
            step = command("lora merge", checkpoint.path, adapter.path, output=output)
    except CkptoolError as error:
        of_pipeline = is_of_pipeline([entry.key for entry in adapter.survey.tensors])
        return NextStep(), f"{what}; it does not fit the target: {error.what}" if of_pipeline else ""
    fits = f"ckptool lora merge makes one model of both, and changes {pluralize(change.number, 'weight')} of the target"
    return step, "; ".join((what, fits, *map(str, change.notes)))


def step_with_base(adapter: Checkpoint) -> NextStep:
    """Return the command that merges an adapter into the base that it names, or a sentence if the base is not here."""
    with suppress(CkptoolError):
        found = open_adapter(adapter)
        found.modules()  # refused if it has no merge
        name = found.base_name
        folder = adapter.path if is_folder(adapter.path) else os.path.dirname(adapter.path)
        paths = (name, os.path.normpath(os.path.join(folder, name))) if name else ()
        if here := next((path for path in paths if os.path.exists(path)), ""):
            return merge_verdict(here, adapter)[0]
        return as_step("ckptool lora merge merges it into its base, once that is on this disk")
    return NextStep()


def _merged(base: Checkpoint, adapters: Sequence[Adapter], key: str | None, notes: Sequence[str] = ()) -> Checkpoint:
    merge = _Merge(base, key)
    changes = [merge.add(adapter) for adapter in adapters]
    # An adapter inside the base is no other checkpoint.
    others = [adapter.checkpoint for adapter in adapters if adapter.checkpoint.source is not base.source]
    return merge.done(changes, others, notes)


class _Merge:
    """The weights of one state dict with the changes that adapters make to them."""

    def __init__(self, base: Checkpoint, key: str | None) -> None:
        self.work = work = Recomputation(base)
        self.path = base.path
        self.config = config_fields(base)
        self.state_dict, self.refs, self.tensors = named_tensors(work.checkpoint, key)
        if work.quantized and base.container.in_blocks:
            raise quantized_refusal(base, work.quantized, "an adapter cannot be added to these")
        if work.quantized or self.config.get("quantization_config"):
            sign = work.quantized.words if work.quantized else f"{CONFIG} has a quantization_config"
            message = f"the base is quantized ({sign}), and an adapter cannot be added to such weights"
            plain = "`--dequantize` turns them back first" if work.quantized.is_reversible else _BEFORE
            raise RefusedError(message, path=self.path, next=plain)
        #: The steps of each weight, by its key.
        self.steps: dict[str, list[AdapterStep]] = {}
        #: Weights that the file does not hold: heads, which start from the embedding, and those that an adapter adds.
        self.heads: set[str] = set()
        self.added: set[str] = set()
        names = [name for name, tensor in self.tensors.items() if EMBEDDING.search(name) and len(tensor.shape) == 2]
        self._embedding = names[0] if len(names) == 1 else ""
        architectures = self.config.get("architectures")
        self._architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        inner = self.config.get("text_config")
        said = [part.get(_TIED) for part in (self.config, inner) if isinstance(part, dict)]
        tied = next((each for each in said if isinstance(each, bool)), True)
        #: Whether the embedding may also be the head, which the file then lacks.
        self._headless = tied and not any(map(HEAD.search, self.tensors)) and self._embedding != ""
        #: Whether an adapter changes the embedding alone, to which the model ties its head.
        self._alone = False

    def add(self, adapter: Adapter) -> Change:
        """Add the changes of one adapter; return what to report about it."""
        base, heads = {**self.tensors}, set[str]()
        if self._headless and not adapter.of_pipeline and not any(map(HEAD.search, base)):
            modules = {name for model in adapter.modules() for name in model.parts}
            heads = {key for key in (f"{name}.weight" for name in modules) if HEAD.search(key)}
            base |= dict.fromkeys(heads, base[self._embedding])
        changes, unused = weight_changes(adapter, base, self.path)
        # A tied head that gets the same rows as the embedding stays tied.
        own = [step for key, step in changes if key == self._embedding]
        same = [step for key, step in changes if key in heads]
        if len(own) == len(same) and all(
            one.kind == other.kind == "rows" and one.rows == other.rows and one.tensors[0].equals(other.tensors[0])
            for one, other in zip(own, same)
        ):
            changes = [(key, step) for key, step in changes if key not in heads]
        changed = {key for key, step in changes if step.kind != "rows"}
        together, head = adapter.is_set("ensure_weight_tying"), any(map(HEAD.search, changed))
        if together and head and self._headless:
            message = "ensure_weight_tying is set, and the adapter changes the head that is tied to the embedding"
            raise adapter.refusal(message, BY_PEFT)
        tied = self._headless and bool(_GENERATES.search(self._architecture))
        self._alone |= tied and self._embedding in changed and not head and not together
        for key, step in changes:
            old = base.get(key, step.tensors[0].view)
            if key not in self.tensors:
                (self.heads if key in base else self.added).add(key)
                self.tensors[key] = old
            dtype = old.dtype
            if old.kind not in ("dense", "quantized") or old.location == "meta" or dtype not in BY_NAME:
                message = f"{quoted(key)} has no plain values ({old.kind}, {old.location})"
                raise RefusedError(message, path=self.path)
            if old.kind == "quantized" or (step.kind != "copy" and dtype not in ROUNDED):
                message = f"{quoted(key)} is {dtype}, to which an adapter cannot be added"
                raise RefusedError(message, path=self.path, next=_BEFORE)
            self.steps.setdefault(key, []).append(step)
        whole = {key for key, step in changes if step.kind == "copy"}
        merged = len({key for key, step in changes if step.kind != "copy"})
        added = len(whole - base.keys())
        weight = f" with the weight {adapter.weight:g}" if adapter.weight != 1 else ""
        path = adapter.checkpoint.path
        summary = f"{path}{weight}: merged {merged:,}, replaced {len(whole) - added:,}, "
        summary += f"{f'added {added:,}, ' if added else ''}unused {sum(unused.values()):,}"
        where = "the base does not hold that model; merge the adapter into that one too"
        notes = [f"{pluralize(number, 'tensor')} of {label} not used: {where}" for label, number in unused.items()]
        name, last = adapter.base_name, os.path.realpath(self.path).split(os.sep)[-2:]
        if not name and path != self.path:
            notes.append("the adapter does not say which base it was trained on")
        elif path != self.path and os.path.basename(name.rstrip("/")) not in last:
            what = "names and shapes fit, but check that it is this base"
            notes.append(f"the adapter was trained on {quoted(name)}: {what}")
        return Change("lora-merge", "", len(dict(changes)), 0, summary, tuple(notes))

    def done(self, changes: Sequence[Change], adapters: Sequence[Checkpoint], notes: Sequence[str]) -> Checkpoint:
        """Plan the bytes of each changed weight, and return the merged checkpoint, with ``notes`` in the last change.

        A weight that shares its storage gets one of its own. So does a tied head if only the embedding changes.
        """
        if self._alone and not self.heads and not self.added:
            if not _CAUSAL.search(self._architecture):
                message = f"an adapter changes {quoted(self._embedding)}, to which {CONFIG} ties other weights"
                raise RefusedError(message, path=self.path, next="untie them first, with transformers")
            self.heads.add(_NEW_HEAD)
            self.tensors[_NEW_HEAD] = self.tensors[self._embedding]
            self.steps[_NEW_HEAD] = [step for step in self.steps[self._embedding] if step.kind == "rows"]
        work = self.work
        new: dict[str, Ref] = {}
        for key, steps in self.steps.items():
            source = self._embedding if key in self.heads else key
            if key in self.added:
                weight = steps[0].tensors[0]._replace(name=key)
            else:
                refuse_bits(work.checkpoint, self.refs[source], source)
                weight = StoredTensor.of(work.checkpoint, source, self.tensors[key])
            tensor, dtype = weight.view, BY_NAME[weight.view.dtype]
            if row := max((step.row for step in steps), default=0):
                if not is_contiguous(tensor):
                    raise RefusedError(f"{quoted(source)} is not contiguous, and rows of it change", path=self.path)
                weight = weight._replace(view=tensor._replace(shape=(tensor.numel // row, row), stride=(row, 1)))
            size = tensor.numel * dtype.itemsize
            piece = Computed(size, merged_elements, (weight, dtype, tuple(steps), work.width(dtype), 0, size))
            if key in self.refs and self._owns(tensor, {step.kind for step in steps} == {"rows"}):
                work.replace(work.storage(tensor.storage, key), piece)
            else:
                new[key] = work.tensor(key, dtype, self.tensors[key].shape, piece, tensor.location)
        if new:
            work.refill(self.state_dict, new)
        untied = self.heads or (self._headless and any(map(HEAD.search, self.added)))
        config = self.config
        if untied:
            way = f"{CONFIG} says {_TIED} false now" if config else f"set {_TIED} to false in the model's {CONFIG}"
            notes = (*notes, f"the head differs from the embedding, and becomes weights of its own: {way}")
        *before, last = changes
        edited = work.done([*before, last._replace(notes=(*notes, *last.notes))], others=adapters)
        if not (untied and config):
            return edited
        own, inner = {**config, _TIED: False}, config.get("text_config")
        if isinstance(inner, dict) and _TIED in inner:
            own["text_config"] = {**inner, _TIED: False}
        text = json.dumps(own, indent=2) + "\n"
        return edited.replace(companions={**edited.companions, CONFIG: text.encode()})

    def _owns(self, tensor: Tensor, together: bool) -> bool:
        """Return whether a tensor fills its storage, and is alone there or changes ``together`` with the others."""
        item = self.work.storage(tensor.storage)
        whole = item.view is not None and is_contiguous(tensor) and tensor.offset == 0
        size = self.work.checkpoint.body(tensor.storage)
        full = size is not None and size.size == tensor.numel * item.storage.dtype.itemsize
        entries = [entry for entry in self.work.checkpoint.survey.tensors if entry.tensor.storage == tensor.storage]
        return whole and full and not self.work.is_pinned(tensor.storage) and (together or len(entries) == 1)

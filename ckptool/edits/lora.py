"""Merge PEFT adapters into the weights of a base model; only the weights that they change are computed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import isfinite, nan, prod
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import CkptoolError, RefusedError, TargetError
from ..base.lazy import regex
from ..base.steps import NextStep, as_step, command, is_folder, suggested_output
from ..base.text import pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.objects import mapping
from ..checkpoint.selection import only_one, selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, is_contiguous
from ..files.folders import folder_at
from ..files.sources import Computed
from ..formats.opening import CheckpointOrPath, opened, takes_path
from ..formats.planning import blaming_damage
from ..pickles.nodes import Ref
from ..values.elements import storage_reader
from ..values.torch.adapters import AdapterStep, StoredTensor, merged_elements
from ..values.torch.loads import need_torch
from .adapter_changes import WeightChange
from .adapter_names import folders, is_of_pipeline
from .adapter_settings import BY_PEFT, Adapter, has_values_of, open_adapter, vector
from .adapters import description, weight_changes
from .model_config import CONFIG, EMBEDDING, HEAD, config_fields
from .recompute import Recomputation
from .storages import refuse_bits

#: Dtypes of weights to which a change can be added.
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
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
) -> Checkpoint:
    """Merge PEFT adapters into a base model, one after the other.

    An adapter is a folder with ``adapter_config.json``, or the file with its tensors beside that; it must stay open
    until the result is saved. ``weights`` has one factor for each adapter, ``alpha`` is the lora_alpha of adapters that
    record none, ``key`` is the path of the state dict.
    Values are equal to those of PEFT's ``merge_and_unload()``. Raise RefusedError if an adapter has no merge or does
    not fit the base, TargetError for invalid weights.

    >>> ckptool.merge_lora("model.pth", "adapter").changes[0].words
    'adapter: merged 1, replaced 0, unused 0'
    """
    factors = _factors(adapters, weights)
    found = [open_adapter(adapter, alpha) for adapter in adapters]
    need_torch("merging an adapter", base.path)
    return _merged(base, found, factors, key)


def merge_step(base: CheckpointOrPath, adapter: Checkpoint) -> NextStep:
    """Return the command that merges an adapter into a base, or an empty step if they do not fit."""
    return merge_verdict(base, adapter)[0]


def merge_verdict(base: CheckpointOrPath, adapter: Checkpoint) -> tuple[NextStep, str]:
    """Return the command that merges an adapter into a base, empty if they do not fit.

    Also say what the adapter is and what it changes. Return "" for an adapter of PEFT that does not fit.
    """
    of_pipeline = is_of_pipeline([entry.key for entry in adapter.survey.tensors])
    what = f"the file is {description(adapter)}"
    try:
        with opened(base) as checkpoint:
            merged = _merged(checkpoint, [open_adapter(adapter)], [1.0], None)
            output = suggested_output(checkpoint.path, "merged")
            step = command("merge-lora", checkpoint.path, adapter.path, output=output)
    except CkptoolError as error:
        return NextStep(), f"{what}; it does not fit the target: {error.what}" if of_pipeline else ""
    number = pluralize(merged.changes[0].number, "weight")
    fits = f"merge-lora makes one model of both, and changes {number} of the target"
    return step, "; ".join((what, fits, *map(str, merged.changes[0].notes)))


def step_with_base(adapter: Checkpoint) -> NextStep:
    """Return the command that merges an adapter into the base that it names, or a sentence if that is not here."""
    with suppress(CkptoolError):
        name = open_adapter(adapter).base_name
        folder = adapter.path if is_folder(adapter.path) else os.path.dirname(adapter.path)
        paths = (name, os.path.normpath(os.path.join(folder, name))) if name else ()
        if here := next((path for path in paths if os.path.exists(path)), ""):
            return merge_step(here, adapter)
        return as_step("merge-lora merges it into its base, once that is on this disk")
    return NextStep()


def _merged(base: Checkpoint, adapters: Sequence[Adapter], factors: Sequence[float], key: str | None) -> Checkpoint:
    """Return the base with the changes of all adapters; nothing is read but metadata."""
    work = Recomputation(base)
    state_dict = _state_dict(work.checkpoint, key)
    nodes = work.checkpoint.graph.nodes
    refs = {str(nodes[name]): (name, ref) for name, ref in state_dict.items}
    tensors = {name: tensor for name, (_, ref) in refs.items() if (tensor := work.reader.tensor(ref)) is not None}
    config = config_fields(base)
    _refuse_quantized(work, config)
    merge = _Merge(work, state_dict, tensors, config)
    changes = [merge.add(adapter, factor) for adapter, factor in zip(adapters, factors)]
    merge.untie()
    merge.compute(refs)
    edited = work.done(changes, others=[adapter.checkpoint for adapter in adapters])
    return _with_own_head(edited, config) if merge.untied else edited


def merge_lora_files(checkpoint: Checkpoint, adapters: Sequence[str], **how: Any) -> Checkpoint:
    """Merge adapters by their paths; if a file is damaged, the error is about the damage."""
    try:
        found = [open_adapter(path, how.get("alpha")).checkpoint for path in adapters]
    except RefusedError as error:
        step = merge_step(adapters[0], checkpoint) if len(adapters) == 1 else NextStep()
        if not step:
            raise
        raise RefusedError("it is an adapter, and the base comes first", path=checkpoint.path, next=step) from error
    with blaming_damage(*found):
        return merge_lora(checkpoint, *found, **how)


class _Merge:
    """The weights of one state dict with the changes that adapters make to them."""

    def __init__(
        self, work: Recomputation, state_dict: StateDict, tensors: dict[str, Tensor], config: Mapping[str, Any]
    ) -> None:
        self.work, self.state_dict, self.tensors = work, state_dict, tensors
        self.path = work.original.path
        #: The steps of each weight, by its key.
        self.steps: dict[str, list[AdapterStep]] = {}
        #: Weights that the file does not hold: for each, the key of the tensor that it starts from, or "".
        self.sources: dict[str, str] = {}
        names = [name for name, tensor in tensors.items() if EMBEDDING.search(name) and len(tensor.shape) == 2]
        self._embedding = names[0] if len(names) == 1 else ""
        architectures = config.get("architectures")
        self._architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        #: Whether the embedding may also be the head, which the file then lacks.
        headless = not any(map(HEAD.search, tensors)) and _says_tied(config) is not False
        self._headless = headless and self._embedding != ""
        #: Whether an adapter changes the embedding alone, to which the model ties its head.
        self._alone = False

    @property
    def untied(self) -> bool:
        """Whether the result has a head of its own, and the base has none."""
        return any(self.sources.values()) or (self._headless and any(map(HEAD.search, self.sources)))

    def add(self, adapter: Adapter, factor: float) -> Change:
        """Add the changes of one adapter; return what to report about it."""
        base = {**self.tensors, **{key: self.tensors[source] for key, source in self.sources.items() if source}}
        heads = {} if any(map(HEAD.search, base)) else self._heads(adapter)
        for head in heads:
            base[head] = self.tensors[self._embedding]
        changes, unused = weight_changes(adapter, base, self.path, factor)
        changes = self._without_equal_head(changes, heads)
        self._check_tied(adapter, {change.key for change in changes if change.step.kind != "rows"})
        for change in changes:
            if change.added and change.key not in self.tensors:
                self.tensors[change.key] = change.step.tensors[0].view
                self.sources[change.key] = ""
            elif change.key not in self.tensors:
                self.sources[change.key] = self._embedding
            old = base.get(change.key, change.step.tensors[0].view)
            dtype = old.dtype
            if old.kind not in ("dense", "quantized") or old.location == "meta" or dtype not in BY_NAME:
                message = f"{quoted(change.key)} has no plain values ({old.kind}, {old.location})"
                raise RefusedError(message, path=self.path)
            if old.kind == "quantized" or (change.step.kind != "copy" and dtype not in _DTYPES):
                message = f"{quoted(change.key)} is {dtype}, to which an adapter cannot be added"
                raise RefusedError(message, path=self.path, next=_BEFORE)
            self.steps.setdefault(change.key, []).append(change.step)
        return _report(adapter, changes, unused, factor, self.work.original)

    def _heads(self, adapter: Adapter) -> set[str]:
        """Return the key of the head that an adapter changes and the base has only as its embedding."""
        if adapter.of_pipeline or not self._headless:
            return set()
        modules = {name for model in adapter.modules() for name in model.parts}
        return {key for key in (f"{name}.weight" for name in modules) if HEAD.search(key)}

    def _without_equal_head(self, changes: list[WeightChange], heads: Collection[str]) -> list[WeightChange]:
        """Leave out changes of a tied head that gets the same rows as the embedding: it stays tied."""
        own = [change.step for change in changes if change.key == self._embedding]
        same = [change for change in changes if change.key in heads]
        equal = len(own) == len(same) and all(map(_are_same_rows, own, (change.step for change in same)))
        return [change for change in changes if change.key not in heads] if equal else changes

    def _check_tied(self, adapter: Adapter, changed: set[str]) -> None:
        """Note whether an adapter changes only one of a tied pair."""
        together = adapter.config.get("ensure_weight_tying") is True
        head = any(map(HEAD.search, changed))
        if together and head and self._headless:
            message = "ensure_weight_tying is set, and the adapter changes the head that is tied to the embedding"
            raise adapter.refusal(message, BY_PEFT)
        tied = self._headless and bool(_GENERATES.search(self._architecture))
        self._alone |= tied and self._embedding in changed and not head and not together

    def untie(self) -> None:
        """Give the model a head of its own if an adapter changes the embedding and not the head that is tied to it."""
        if self._alone and not self.sources:
            if not _CAUSAL.search(self._architecture):
                message = f"an adapter changes {quoted(self._embedding)}, to which {CONFIG} ties other weights"
                raise RefusedError(message, path=self.path, next="untie them first, with transformers")
            self.sources[_NEW_HEAD] = self._embedding
            self.steps[_NEW_HEAD] = [step for step in self.steps[self._embedding] if step.kind == "rows"]

    def compute(self, refs: Mapping[str, tuple[Ref, Ref]]) -> None:
        """Plan the bytes of each changed weight. A weight that shares its storage gets one of its own."""
        work = self.work
        new: dict[str, Ref] = {}
        for key, steps in self.steps.items():
            source = self.sources.get(key, key) or key
            tensor = vector(self.tensors[source])
            if source in refs:
                refuse_bits(work.checkpoint, refs[source][1], source)
            piece, dtype = self._piece(source, tensor, steps)
            only_rows = {step.kind for step in steps} == {"rows"}
            if key in refs and self._owns(tensor, only_rows):
                work.replace(work.storage(tensor.storage, key), piece)
            else:
                new[key] = work.tensor(key, dtype, self.tensors[source].shape, piece, tensor.location)
        if new:
            graph = work.checkpoint.graph
            held = mapping(graph, self.state_dict.ref) or ()
            items = [(name, new.pop(str(graph.nodes[name]), ref)) for name, ref in held]
            items += [(work.editor.add(name), ref) for name, ref in new.items()]
            work.editor.refill(self.state_dict.ref, items)

    def _owns(self, tensor: Tensor, together: bool) -> bool:
        """Return whether a tensor is all of its storage, and no other tensor reads it; or may change ``together``."""
        item = self.work.storage(tensor.storage)
        whole = item.view is not None and is_contiguous(tensor) and tensor.offset == 0
        size = self.work.checkpoint.body(tensor.storage)
        full = size is not None and size.size == tensor.numel * item.storage.dtype.itemsize
        entries = [entry for entry in self.work.checkpoint.survey.tensors if entry.tensor.storage == tensor.storage]
        return whole and full and not self.work.is_pinned(tensor.storage) and (together or len(entries) == 1)

    def _piece(self, source: str, tensor: Tensor, steps: Sequence[AdapterStep]) -> tuple[Computed, Any]:
        work, dtype = self.work, BY_NAME[tensor.dtype]
        added = source in self.sources
        storage = steps[0].tensors[0].storage if added else storage_reader(work.checkpoint, tensor.storage)
        size = prod(tensor.shape) * dtype.itemsize
        row = max((step.row for step in steps), default=0)
        if row and not is_contiguous(tensor):
            raise RefusedError(f"{quoted(source)} is not contiguous, and rows of it change", path=self.path)
        view = tensor._replace(shape=(tensor.numel // row, row), stride=(row, 1)) if row else tensor
        weight = StoredTensor(source, storage, view)
        parameters = weight, dtype, tuple(steps), work.width(dtype), 0, size
        return Computed(size, merged_elements, parameters), dtype


def _are_same_rows(one: AdapterStep, other: AdapterStep) -> bool:
    """Return whether two steps replace the same rows by the same values."""
    rows = one.kind == other.kind == "rows" and one.rows == other.rows
    return rows and has_values_of(one.tensors[0], other.tensors[0])


def parse_alpha(text: str) -> float:
    """Parse a number; raise TargetError for another text."""
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise TargetError(f"{text!r} is not a number", next="`--alpha 16`")
    return value


def _factors(adapters: Sequence[object], weights: Sequence[float] | None) -> list[float]:
    """Return one finite factor for each adapter; raise TargetError for others."""
    if not adapters:
        raise TargetError("an adapter to merge is needed", next="name its folder after the base")
    factors = [1.0] * len(adapters) if weights is None else [float(weight) for weight in weights]
    if len(factors) != len(adapters):
        message = f"{pluralize(len(factors), 'weight')} for {pluralize(len(adapters), 'adapter')}"
        raise TargetError(message, next="give one for each: `--weights 1,0.5`")
    if not all(isfinite(factor) and factor for factor in factors):
        raise TargetError("the weights must be numbers other than 0", next="`--weights 1,0.5`")
    return factors


def _state_dict(checkpoint: Checkpoint, key: str | None) -> StateDict:
    return only_one(checkpoint, selected(checkpoint, key))


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config ties the head to the embedding; None if it does not say."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(part.get(_TIED), bool):
            return bool(part[_TIED])
    return None


def _with_own_head(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Say that the head is not tied to the embedding any more, and write so into ``config.json``, if there is one."""
    last = checkpoint.changes[-1]
    way = f"{CONFIG} says {_TIED} false now" if config else f"set {_TIED} to false in the model's {CONFIG}"
    note = f"the head differs from the embedding, and becomes weights of its own: {way}"
    checkpoint = checkpoint.replace(changes=(*checkpoint.changes[:-1], last._replace(notes=(*last.notes, note))))
    if not config:
        return checkpoint
    inner = config.get("text_config")
    untied = {**config, _TIED: False}
    if isinstance(inner, dict) and _TIED in inner:
        untied["text_config"] = {**inner, _TIED: False}
    text = json.dumps(untied, indent=2, ensure_ascii=False) + "\n"
    return checkpoint.replace(companions={**checkpoint.companions, CONFIG: text.encode()})


def _refuse_quantized(work: Recomputation, config: Mapping[str, Any]) -> None:
    if work.quantized or config.get("quantization_config"):
        sign = work.quantized.words if work.quantized else "config.json has a quantization_config"
        message = f"the base is quantized ({sign}), and an adapter cannot be added to such weights"
        raise RefusedError(message, path=work.original.path, next=_BEFORE)


def _report(
    adapter: Adapter, changes: Sequence[WeightChange], unused: Mapping[str, int], factor: float, base: Checkpoint
) -> Change:
    """Return the summary for one adapter, and the notes on its base."""
    merged = len({change.key for change in changes if change.step.kind not in ("copy",)})
    added = len({change.key for change in changes if change.added})
    replaced = len({change.key for change in changes if change.step.kind == "copy"}) - added
    weight = f" with the weight {factor:g}" if factor != 1 else ""
    summary = f"{adapter.path}{weight}: merged {merged:,}, replaced {replaced:,}, "
    summary += f"added {added:,}, " if added else ""
    summary += f"unused {sum(unused.values()):,}"
    notes = [_unused_note(adapter, label, number, base) for label, number in unused.items()]
    name = adapter.base_name
    if not name:
        notes.append("the adapter does not say which base it was trained on")
    elif os.path.basename(name.rstrip("/")) not in os.path.realpath(base.path).split(os.sep)[-2:]:
        notes.append(f"the adapter was trained on {quoted(name)}: names and shapes fit, but check that it is this base")
    return Change("merge-lora", "", len({change.key for change in changes}), 0, summary, tuple(notes))


def _unused_note(adapter: Adapter, label: str, number: int, base: Checkpoint) -> str:
    """Say which tensors of an adapter belong to another model of the pipeline, and where they can be merged."""
    note = f"{pluralize(number, 'tensor')} of {label} not used: the base does not hold that model"
    pipeline = os.path.dirname(base.path.rstrip(os.sep))
    siblings = (os.path.join(pipeline, name) for name in folders(label)) if is_folder(base.path) else ()
    sibling = next((path for path in siblings if folder_at(path) is not None), "")
    if not sibling:
        return f"{note}; merge the adapter into that one too"
    return f"{note}; {command('merge-lora', sibling, adapter.path, output=suggested_output(sibling, 'merged'))}"

"""Open an adapter, and read what its settings mean for one module: ranks, scales, targets.

Names, settings and defaults come from PEFT (``tuners/lora/config.py``, ``tuners/lora/layer.py``,
``utils/save_and_load.py``, ``utils/other.py``) and diffusers (``loaders/peft.py``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isfinite, prod, sqrt
from typing import Any, Final

from ..base.addresses import is_folder
from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.prefixes import adapter_keys
from ..base.records import NamedTuple
from ..base.steps import AnyStep, NextStep, as_step, command, option, suggested_output
from ..base.text import cut, join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import only_one, selected
from ..checkpoint.tensors import Tensor
from ..files.archives import parsed_object, read_object
from ..files.folders import open_folder
from ..files.sources import FolderSource
from ..formats.names.hf import ADAPTER_CONFIG
from ..formats.opening import CheckpointOrPath, as_checkpoint
from ..formats.rank_part import GATHER, empty_weights
from ..values.numeric import to_numbers
from ..values.torch.adapters import StoredTensor
from . import adapter_names
from .adapter_names import DOWN, PEFT_PREFIX, TABLE, UNKNOWN, WITH_DIFFUSERS, Inside, Modules, Parts
from .entries import drop_keys, extract
from .keys import by_table
from .recompute import refuse_bits

CONFIG: Final = ADAPTER_CONFIG
#: The parts of an adapter of a pipeline that a merge can use.
_MERGED: Final = ("alpha", "lora_A", "lora_B", "lora_magnitude_vector")
#: Names of alpha and rank in the header of an adapter: of kohya, and of tools that write PEFT's names.
ALPHAS: Final[Sequence[str]] = TABLE["header"]["alpha"]
RANKS: Final[Sequence[str]] = TABLE["header"]["rank"]
#: Where diffusers keeps the settings of PEFT in the header.
_HEADER_SETTINGS: Final = "lora_adapter_metadata"
BY_PEFT: Final = "merge it with PEFT: model.merge_and_unload(), then model.save_pretrained()"
#: Keys of mlx-lm and torchtune, and of LyCORIS for language models.
_OTHERS: Final = regex(r"lora_(?:down|up|mid|a|b)\b|lora\.(?:down|up)|lokr_|hada_|\Alora_(?:unet|te\d?|transformer)_")
#: Limits of rank_pattern and alpha_pattern: characters of a pattern, patterns, and steps to compare all of them with
#: all modules.
_LONGEST_PATTERN: Final = 300
_MOST_PATTERNS: Final = 5000
_MOST_STEPS: Final = 2e10
_compiled: Final = lru_cache(maxsize=_MOST_PATTERNS)(re.compile)
#: A bound for numbers in settings, above any scale.
_LARGEST: Final = 1e30


class Adapter(NamedTuple):
    """An adapter: the checkpoint with its tensors, its settings, and its tensors by key, without PEFT's prefix.

    ``of_pipeline``: it has the names of kohya or diffusers. ``alpha`` is used where the adapter records none.
    ``in_model``: it comes from the state dict of a model, with the dtype in which it was trained. PEFT computes in
    32 bits with others. ``weight`` multiplies its scale in a merge.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    of_pipeline: bool = False
    alpha: float | None = None
    in_model: bool = False
    weight: float = 1.0

    @property
    def base_name(self) -> str:
        """The name of the base that the settings give, or ""."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    def refusal(self, message: str, step: AnyStep = "") -> RefusedError:
        """Return an error about the adapter."""
        return RefusedError(message, path=self.checkpoint.path, next=step)

    def is_set(self, name: str) -> bool:
        """Return whether a setting is true."""
        return self.config.get(name) is True

    def number(self, value: object, name: str) -> float:
        """Return the value of a setting; raise RefusedError if it is not a number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
            raise self.refusal(f"its {name} {json.dumps(value)[:80]} is not a number")
        return value

    def stored(self, key: str) -> StoredTensor:
        """Return a tensor as plain data."""
        return StoredTensor.of(self.checkpoint, key, self.tensors[key])

    def modules(self, *, to_merge: bool = True) -> list[Modules]:
        """Return the modules of each model that it changes; refuse a key that is unknown, or not used by a merge."""
        prefix, way = ("", WITH_DIFFUSERS) if self.of_pipeline else (PEFT_PREFIX, BY_PEFT)
        way = way if to_merge else "give the file of the adapter alone"
        try:
            found = adapter_names.modules(self.tensors, prefix, self.stored)
        except RefusedError as error:
            raise self.refusal(error.what, error.step or way) from error
        for part, key in (item for model in found for parts in model.parts.values() for item in parts.items()):
            if to_merge and self.of_pipeline and not part.startswith(_MERGED):
                raise self.refusal(UNKNOWN.format(quoted(key)), way)
        return found

    def of(self, model: Modules) -> Adapter:
        """Return the adapter with the settings of PEFT that diffusers stored for one model of a pipeline."""
        if not model.label:
            return self
        text = self.checkpoint.container.metadata.get(_HEADER_SETTINGS, "{}")
        if (found := parsed_object(text)) is None:
            message = f"its metadata {_HEADER_SETTINGS!r} is not a JSON object: {quoted(cut(text))}"
            raise self.refusal(message, WITH_DIFFUSERS)
        start = f"{model.label}."  # with which their names begin if the names of its tensors do
        own = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
        bare = {name: value for name, value in found.items() if "." not in name and model.layout == "bare"}
        return self._replace(config=own or bare)

    # -- checks, and the settings of one module

    def check_tensors(self) -> None:
        """Raise RefusedError if a tensor of an adapter is empty, or holds no floating-point values."""
        checkpoint = self.checkpoint
        if empty := empty_weights(checkpoint):
            raise self.refusal(empty, GATHER)
        for entry in checkpoint.survey.tensors:
            refuse_bits(checkpoint, entry.ref, entry.key)
        for key, tensor in self.tensors.items():
            dtype = BY_NAME.get(tensor.dtype)
            if tensor.location == "meta" or (dtype is not None and adapter_keys([key]) and not dtype.floating):
                raise self.refusal(f"{quoted(key)} has no floating-point values ({tensor.location}, {tensor.dtype})")
            if tensor.kind != "dense" or not tensor.storage or dtype is None or dtype.packed > 1:
                raise self.refusal(f"{quoted(key)} is packed or sparse ({tensor.kind}, {tensor.dtype})")

    def check_product(self, down: str, up: str) -> None:
        """Raise RefusedError unless two matrices with these keys have a product with values."""
        (a, b), names = (self.tensors[key].shape for key in (down, up)), f"{quoted(up)} and {quoted(down)}"
        if min(len(a), len(b)) < 2 or not prod(a) * prod(b) or not a[0] == b[1] == prod(b[1:]):
            raise self.refusal(f"shapes that do not fit together: {names}")

    def check_settings(self) -> None:
        """Raise RefusedError for a setting with which the result would differ from W + scale * B @ A."""
        config = self.config
        if reason := next((reason for name, reason in TABLE["refused"].items() if config.get(name)), ""):
            raise self.refusal(reason)
        start = config.get("init_lora_weights", True)
        if changes_base(config):
            message = f"init_lora_weights is {start!r}: PEFT changes the base when it loads this adapter"
            step = "save it again with model.save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            raise self.refusal(message, step)
        if isinstance(start, str) and start.lower() not in TABLE["initial"]:
            raise self.refusal(f"its init_lora_weights {quoted(start)} is not known", BY_PEFT)
        known = " ".join(TABLE["settings"]).split()
        if unknown := sorted(name for name, value in config.items() if value and name not in known):
            raise self.refusal(f"{CONFIG} has settings that are not known: {join_limited(unknown)}", BY_PEFT)

    def product_scale(self, module: str, parts: Parts) -> float:
        """Return the factor of a product: alpha divided by the rank, from the tensor, the settings, or else 1.

        Raise RefusedError if they contradict each other, or if the header states an alpha other than the rank.
        """
        first = next((parts[part] for part in (DOWN, "lora_embedding_A") if part in parts), "")
        rank = self.stored(first).view.shape[0] if first else 0
        if (key := parts.get("alpha", "")) and (tensor := self.tensors[key]):
            alpha = to_numbers(self.stored(key).values, tensor.dtype)[0] if tensor.numel == 1 and rank else None
            if not isinstance(alpha, int | float) or not isfinite(alpha):
                raise self.refusal(f"{quoted(key)} is not a finite number")
            return float(alpha) / rank
        if self.config:
            self.check_rank(first or module, rank)
            return self.scale(module, rank)
        if self.alpha is not None and rank:
            return self.alpha / rank
        stated = _header_number(self.checkpoint, ALPHAS)
        if stated is None or stated in (rank, _header_number(self.checkpoint, RANKS)):
            return 1.0
        message = f"its header says alpha {stated:g} for the rank {rank:,}, and no tensor has an alpha"
        way = f"{stated:g}, or {rank:,} if it is part of the matrices already"
        raise self.refusal(message, f"give {option('alpha', f'{stated:g}')} ({way})")

    def check_rank(self, key: str, rank: int) -> None:
        """Raise RefusedError if ``r`` is set, and neither it nor a value of ``rank_pattern`` is this rank."""
        if "r" not in self.config:
            return
        pattern = self.config.get("rank_pattern") or {}
        ranks = [self.config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
        if rank not in ranks:
            where = _HEADER_SETTINGS if _HEADER_SETTINGS in self.checkpoint.container.metadata else CONFIG
            known = join_limited([json.dumps(number)[:80] for number in ranks])
            raise self.refusal(f"{quoted(key)} has the rank {rank:,}, and {where} says {known}")

    def scale(self, module: str, rank: int, name: str = "lora_alpha") -> float:
        """Return the factor of a product; raise RefusedError without one. ``name`` is the setting of alpha."""
        if rank < 1:
            raise self.refusal(f"{quoted(module)} has the rank {rank}")
        alpha = self.number(self.by_pattern(module, "alpha_pattern", self.config.get(name, 8)), name)
        return float(alpha / sqrt(rank) if self.is_set("use_rslora") else alpha / rank)

    def by_pattern(self, module: str, name: str, default: Any) -> Any:
        """Return the value that the first matching pattern of a setting gives a module, or the default."""
        patterns = self.config.get(name) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise self.refusal(f"its {name} is too large", BY_PEFT)
        for pattern, value in patterns.items():
            try:
                if _matches(pattern, module, len(patterns) * len(self.tensors), anywhere=True):
                    return value
            except ValueError as error:
                raise self.refusal(f"the {name} {quoted(pattern)} {error}", BY_PEFT) from error
        return default

    def targets(self, module: str) -> bool:
        """Return whether the settings name a module as a target, as PEFT decides it; False if they are too complex."""
        config = self.config
        indices, inside = config.get("layers_to_transform"), config.get("layers_pattern")
        if indices is not None:
            numbers = re.findall(r"\.(\d+)\.", module)
            wanted = indices if isinstance(indices, list) else [indices]
            if inside or not numbers or int(numbers[-1]) not in wanted:
                return False
        named = _names(config.get("target_modules"), module) and not _names(config.get("exclude_modules"), module)
        return named and not self.is_saved(module)

    def is_saved(self, module: str) -> bool:
        """Return whether the settings say that a module was trained as a whole, such as a new classifier."""
        saved = self.config.get("modules_to_save")
        return isinstance(saved, list) and any(name in module.split(".") for name in saved)


# -- opening


def open_adapter(
    source: CheckpointOrPath, alpha: float | None = None, config: Mapping[str, Any] | None = None
) -> Adapter:
    """Open an adapter of any library, and check that it has a merge; raise RefusedError if it has none.

    ``config`` are its settings, by default those beside it. ``alpha`` is used if neither settings, tensors nor the
    header of the file give one.
    """
    checkpoint = as_checkpoint(source)
    found = {entry.key: entry.tensor for entry in checkpoint.survey.tensors}
    if len({key.removeprefix(PEFT_PREFIX) for key in found}) < len(checkpoint.survey.tensors):
        raise RefusedError("two of its tensors have the same name", path=checkpoint.path)
    if adapter_names.is_of_pipeline(found.keys()):
        config = {"base_model_name_or_path": base_in_header(checkpoint)}
        adapter = Adapter(checkpoint, config, found, of_pipeline=True, alpha=alpha)
        adapter.check_tensors()
        return adapter
    tensors = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in found.items()}
    given = config or adapter_config(checkpoint) or _config_of_header(checkpoint, found.keys(), alpha)
    adapter = Adapter(checkpoint, given or {}, tensors)
    if given is None:
        if any(map(_OTHERS.search, tensors)):
            what = "it has the names of mlx or torchtune, and only adapters of PEFT, kohya and diffusers can be merged"
            raise adapter.refusal(what, "merge it with the library that trained it")
        what = f"there is no {CONFIG} beside it, and"
        if not adapter_keys(tensors):
            raise adapter.refusal(f"it is not an adapter: {what} no name of an adapter in it")
        way = f"put its {CONFIG} into the same folder, name it with `--config FILE` if the command has it"
        way = f"{way}, or give `--alpha=`, its lora_alpha"
        raise adapter.refusal(f"{what} without lora_alpha the scale of the adapter is not known", way)
    kind = given.get("peft_type")
    if kind in TABLE["without weights"]:
        message = f"an adapter of the type {kind} adds inputs or layers, and has no merge"
        raise adapter.refusal(message, "load it with PEFT")
    if kind not in TABLE["merged"]:
        raise adapter.refusal(f"adapters of the type {json.dumps(kind)[:80]} are not supported", BY_PEFT)
    adapter.check_tensors()
    adapter.check_settings()
    return adapter


def adapter_config(checkpoint: Checkpoint, path: str | None = None) -> Mapping[str, Any] | None:
    """Return the settings at ``path``, beside the tensors of an adapter, or in its header; None without any.

    PEFT reads only the file, and only for a file with its own name. It may be of another adapter for others.
    """
    if path is None:
        whole = isinstance(checkpoint.source, FolderSource) or is_folder(checkpoint.path)
        folder, name = (checkpoint.path, "") if whole else os.path.split(checkpoint.path)
        own = parsed_object(checkpoint.metadata.get(CONFIG, ""))
        if (own and name and not name.startswith("adapter_model.")) or open_folder(folder).size(CONFIG) is None:
            return own
        path = os.path.join(folder, CONFIG)
    if (config := read_object(path)) is None:
        raise RefusedError("it is not a JSON object", path=path)
    return config


def _config_of_header(checkpoint: Checkpoint, keys: Collection[str], alpha: float | None) -> Mapping[str, Any] | None:
    """Return the settings of a LoRA with PEFT's names, from the alpha in its header or ``alpha``, or None."""
    stated = _header_number(checkpoint, ALPHAS)
    alpha = alpha if stated is None else stated
    if alpha is None or not any(".lora_A." in key for key in keys) or any(map(_OTHERS.search, keys)):
        return None
    rank = _header_number(checkpoint, RANKS)
    config = {"peft_type": "LORA", "lora_alpha": alpha, "base_model_name_or_path": None}
    config |= {"use_dora": True} if any("lora_magnitude_vector" in key for key in keys) else {}
    return config if rank is None else {**config, "r": int(rank)}


def changes_base(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT repeats the initialization when it loads the adapter, and so changes the base."""
    start = config.get("init_lora_weights")
    return isinstance(start, str) and start.lower().startswith(tuple(TABLE["initial that changes the base"]))


def _header_number(checkpoint: Checkpoint, names: Sequence[str]) -> float | None:
    for name in names:
        with suppress(ValueError, KeyError):
            return float(checkpoint.container.metadata[name])
    return None


def base_in_header(checkpoint: Checkpoint) -> str:
    """Return the name of the base in the header, or ""."""
    metadata = checkpoint.container.metadata
    return next((metadata[key] for key in TABLE["header"]["base"] if metadata.get(key, "None") != "None"), "")


def _names(given: object, module: str) -> bool:
    """Return whether a list of endings, or a regular expression, names a module."""
    if isinstance(given, list):
        return any(isinstance(name, str) and f".{module}".endswith(f".{name}") for name in given)
    with suppress(ValueError):
        return isinstance(given, str) and _matches(given, module)
    return False


def _matches(pattern: str, module: str, times: int = 1, *, anywhere: bool = False) -> bool:
    """Return whether a regular expression matches a module: its whole name or, ``anywhere``, the last parts of it.

    Raise ValueError for an expression that is not valid, or that may take too many steps for so many comparisons.
    """
    repeated, choices = sum(map(pattern.count, "*+?{")), pattern.count("|") + 1
    is_long = len(pattern) > _LONGEST_PATTERN or re.search(r"\)[*+?{]", pattern)
    if is_long or (len(module) + 1) ** (repeated + 1) * choices ** pattern.count("(") * times > _MOST_STEPS:
        raise ValueError("is too complex")
    try:
        return _compiled(rf"(.*\.)?({pattern})$" if anywhere else pattern).fullmatch(module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not valid: {error}") from error


# -- adapters inside a model


def unmerged(checkpoint: Checkpoint) -> Inside | None:
    """Return the adapters inside the first state dict that has some, or None."""
    nodes = checkpoint.graph.nodes
    found = (adapter_names.inside([str(nodes[name]) for name, _ in item.items]) for item in checkpoint.state_dicts)
    return next(filter(None, found), None)


def merge_step(checkpoint: Checkpoint, found: Inside, keep: str = "") -> NextStep:
    """Return the command that merges the adapter inside a model, or extracts it; a sentence if that needs more."""
    name, does = "ckptool lora merge", "merges it"
    if keep:
        name, does = f"{name} with {option('keep', keep)}", "extracts it"
    if adapter_config(checkpoint) is None:
        what = f"the scale is only in the {CONFIG} that was saved with it: put that beside it"
        return as_step(f"{what}, and {name} {does}")
    if len(found.adapters) > 1:
        return as_step(f"{name} takes one of its adapters, {found.words}, with `--adapter NAME`")
    output = suggested_output(checkpoint.path, keep or "merged", ".safetensors" if keep else "")
    return command("lora merge", checkpoint.path, output=output, keep=keep)


def taken_apart(
    checkpoint: Checkpoint, key: str | None, name: str | None = None, *, to_merge: bool = False
) -> tuple[Checkpoint, Checkpoint, tuple[str, ...]] | None:
    """Return the base model, the adapter with the names that PEFT saves, and notes; None without an adapter inside.

    ``key`` is the path of the state dict, ``name`` the adapter's. ``to_merge``: modules that were trained as a whole
    are in the base already. Raise RefusedError for several adapters without a name, and if a key is not known.
    """
    place = only_one(checkpoint, selected(checkpoint, key))
    every = [str(checkpoint.graph.nodes[ref]) for ref, _ in place.items]
    found = adapter_names.inside(every)
    if found is None:
        return None
    if name not in found.adapters and (name is not None or len(found.adapters) > 1):
        what = f"it holds {pluralize(len(found.adapters), 'adapter')}, {found.words}"
        what = what if name is None else f"{what}, and none is called {quoted(name)}"
        raise RefusedError(what, path=checkpoint.path, next=f"name one with `--adapter {next(iter(found.adapters))}`")
    if unknown := adapter_keys(found.base.values()):
        raise RefusedError(UNKNOWN.format(quoted(unknown[0])), path=checkpoint.path, next=BY_PEFT)
    names, own = {**found.base}, {**found.adapters[name or next(iter(found.adapters))]}
    others = sum(map(len, found.adapters.values())) - len(own)
    notes = (f"{pluralize(others, 'tensor')} of other adapters left out",) if others else ()
    trained = {key: name.removeprefix(PEFT_PREFIX) for key, name in own.items() if ".modules_to_save." in key}
    if to_merge:
        own = {key: name for key, name in own.items() if key not in trained}
        names = {key: name for key, name in names.items() if name not in {*trained.values()}} | trained
    if lacking := sorted({*trained.values()} - {*names.values()}):
        which = join_limited([quoted(name) for name in lacking])
        notes = (*notes, f"the base has no {which}: only the trained one is there")
    base, alone = (drop_keys(checkpoint, place.path, {*every} - each.keys()) for each in (names, own))
    beside = {**checkpoint.companions, CONFIG: b""}
    base = by_table(base, names, key=key).replace(changes=checkpoint.changes, companions=beside)
    return base, by_table(extract(alone, place.path) if place.path else alone, own), notes


def settings(checkpoint: Checkpoint, path: str | os.PathLike[str] | None) -> Mapping[str, Any] | None:
    """Return the settings of an adapter inside a model, from the file at ``path`` or beside the model, or None."""
    config = adapter_config(checkpoint, None if path is None else os.fspath(path))
    # The model already has the base that an initialization changes.
    return {**config, "init_lora_weights": True} if config and changes_base(config) else config

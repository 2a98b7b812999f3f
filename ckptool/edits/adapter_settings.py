"""What the settings of an adapter mean for one module: ranks, scales and shapes.

Names and defaults come from PEFT (``tuners/lora/config.py``, ``tuners/lora/layer.py``, ``utils/other.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import inf, sqrt
from types import MappingProxyType
from typing import Any, Final

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.steps import AnyStep, command, suggested_output
from ..base.text import join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..values.elements import elements, storage_reader
from ..values.torch.adapters import AdapterStep, StoredTensor

CONFIG: Final = "adapter_config.json"
#: Names of alpha and rank in the header of an adapter: of kohya, and of tools that write PEFT's names.
HEADER_ALPHA: Final = ("lora_alpha", "ss_network_alpha", "network_alpha", "alpha")
HEADER_RANK: Final = ("r", "lora_rank", "ss_network_dim", "network_dim", "rank")
BY_PEFT: Final = "merge it with PEFT: model.merge_and_unload(), then model.save_pretrained()"
#: Limits of rank_pattern and alpha_pattern: characters of a pattern, patterns, and steps to compare all of them with
#: all modules.
_LONGEST_PATTERN: Final = 300
_MOST_PATTERNS: Final = 5000
_MOST_STEPS: Final = 2e10
#: A scale that no adapter has.
_LARGEST: Final = 1e30


class Adapter(NamedTuple):
    """An adapter: the checkpoint with its tensors, its settings, and its tensors by key, without PEFT's prefix.

    ``changes`` finds the weights of a base that it changes, as ``weight_changes`` does for PEFT. ``scales`` has the
    factors of modules whose settings do not give them. ``alpha`` is used where the adapter records none.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    changes: Callable[[Adapter, Mapping[str, Tensor], str, float], AdapterChanges]
    scales: Mapping[str, float] = MappingProxyType({})
    alpha: float | None = None

    @property
    def path(self) -> str:
        """The path of the adapter."""
        return self.checkpoint.path

    def refusal(self, message: str, step: AnyStep = "") -> RefusedError:
        """Return an error about the adapter."""
        return RefusedError(message, path=self.path, next=step)


class WeightChange(NamedTuple):
    """A change of one weight: its key in the base, and the step. ``added`` is true if the base lacks the key."""

    key: str
    step: AdapterStep
    added: bool = False


class AdapterChanges(NamedTuple):
    """The changes by an adapter, and the number of tensors for each other model that the base does not hold."""

    changes: list[WeightChange]
    unused: Mapping[str, int]


def header_number(checkpoint: Checkpoint, names: Sequence[str]) -> float | None:
    """Return the number that the header of a safetensors file has under the first of these names, or None."""
    metadata = checkpoint.container.metadata
    for name in names:
        with suppress(ValueError, KeyError):
            return float(metadata[name])
    return None


def number_setting(adapter: Adapter, name: str, default: float) -> float:
    """Return a number of the settings; raise RefusedError if it is something else."""
    value = adapter.config.get(name, default)
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
        raise adapter.refusal(f"its {name} {json.dumps(value)[:80]} is not a number")
    return float(value)


def is_set(adapter: Adapter, name: str) -> bool:
    """Return whether a setting is true."""
    return adapter.config.get(name) is True


def check_rank(adapter: Adapter, key: str, rank: int) -> None:
    """Raise RefusedError if neither ``r`` nor ``rank_pattern`` has a rank. Without ``r``, any is right."""
    if "r" not in adapter.config:
        return
    pattern = adapter.config.get("rank_pattern") or {}
    ranks = [adapter.config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    if rank not in ranks:
        known = join_limited([str(number) for number in ranks])
        raise adapter.refusal(f"{quoted(key)} has the rank {rank:,}, and {CONFIG} says {known}")


def scale(adapter: Adapter, module: str, rank: int, name: str = "lora_alpha") -> float:
    """Return the factor of a product; raise RefusedError if the settings do not give one. ``name`` is the setting."""
    if module in adapter.scales:
        return adapter.scales[module]
    alpha = by_pattern(adapter, module, "alpha_pattern", adapter.config.get(name, 8))
    if type(alpha) not in (int, float) or not -_LARGEST < alpha < _LARGEST or rank < 1:
        raise adapter.refusal(f"its {name} {json.dumps(alpha)[:80]} is not a number")
    return float(alpha / sqrt(rank) if is_set(adapter, "use_rslora") else alpha / rank)


def by_pattern(adapter: Adapter, module: str, name: str, default: Any) -> Any:
    """Return the value that the first matching pattern of a setting gives a module, or the default."""
    patterns = adapter.config.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
        raise adapter.refusal(f"its {name} is too large", BY_PEFT)
    comparisons = len(patterns) * len(adapter.tensors)
    for pattern, value in patterns.items():
        if len(pattern) > _LONGEST_PATTERN or _steps(pattern, len(module)) * comparisons > _MOST_STEPS:
            raise adapter.refusal(f"the {name} {quoted(pattern)} is too complex", BY_PEFT)
        try:
            matches = _compiled(pattern).match(module)
        except (re.error, OverflowError, RecursionError) as error:
            raise adapter.refusal(f"the {name} {quoted(pattern)} is not valid: {error}") from error
        if matches:
            return value
    return default


def targets(adapter: Adapter, module: str) -> bool:
    """Return whether the settings name a module as a target, as PEFT decides it; False if they are too complex."""
    config = adapter.config
    indices, inside = config.get("layers_to_transform"), config.get("layers_pattern")
    if indices is not None:
        numbers = re.findall(r"\.(\d+)\.", module)
        wanted = indices if isinstance(indices, list) else [indices]
        if inside or not numbers or int(numbers[-1]) not in wanted:
            return False
    saved = config.get("modules_to_save") or ()
    kept = isinstance(saved, list) and not {*saved}.isdisjoint(module.split("."))
    return (
        not kept and _names(config.get("target_modules"), module) and not _names(config.get("exclude_modules"), module)
    )


def _names(given: object, module: str) -> bool:
    """Return whether a list of endings, or a regular expression, names a module."""
    if isinstance(given, list):
        return any(isinstance(name, str) and f".{module}".endswith(f".{name}") for name in given)
    if not isinstance(given, str) or len(given) > _LONGEST_PATTERN or _steps(given, len(module)) > _MOST_STEPS:
        return False
    try:
        return re.fullmatch(given, module) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def _steps(pattern: str, length: int) -> float:
    """Return how many steps ``re`` takes at most to compare a pattern with a name; infinity for repeated groups."""
    if re.search(r"\)[*+?{]", pattern):
        return inf
    repeated = sum(map(pattern.count, "*+?{"))
    steps: int = (length + 1) ** (repeated + 1) * (pattern.count("|") + 1) ** pattern.count("(")
    return steps


@lru_cache(maxsize=_MOST_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression by which PEFT compares a pattern with the names of modules."""
    return re.compile(rf"(.*\.)?({pattern})$")


def stored(adapter: Adapter, key: str) -> StoredTensor:
    """Return a tensor of an adapter as plain data."""
    tensor = adapter.tensors[key]
    return StoredTensor(key, storage_reader(adapter.checkpoint, tensor.storage), vector(tensor))


def has_values_of(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have the same shape and bytes."""
    if one.view.shape != other.view.shape or one.view.dtype != other.view.dtype:
        return False
    first, second = (b"".join(elements(part.storage, part.view)) for part in (one, other))
    return first == second


def vector(tensor: Tensor) -> Tensor:
    """Return a tensor without dimensions as one with a single element, and others unchanged."""
    return tensor if tensor.shape else tensor._replace(shape=(1,), stride=(1,))


def fit(adapter: Adapter, key: str, shape: Sequence[int], target: str, wanted: Tensor | None, path: str) -> None:
    """Raise RefusedError if a change has another shape than the weight of the base."""
    if wanted is None or tuple(shape) == wanted.shape:
        return
    rows = len(shape) == 2 == len(wanted.shape) and shape[1] == wanted.shape[1]
    if rows and re.search(r"embed|wte|lm_head|token", target):
        message = f"the adapter has {pluralize(shape[0], 'token')} ({quoted(key)}), the base {wanted.shape[0]:,}"
        resized = command("resize", path, vocab=str(shape[0]), output=suggested_output(path, "resized"))
        raise adapter.refusal(message, "resize the base first: " + resized)
    here, there = shape_text(shape), shape_text(wanted.shape)
    message = f"{quoted(key)} changes a weight of {here}, and {quoted(target)} of {path} is {there}: another base"
    raise adapter.refusal(message)

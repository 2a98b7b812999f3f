"""Recognise weights without values, as one rank of DeepSpeed ZeRO-3 saves them without gathering.

With ZeRO-3, each rank holds a slice of every parameter, and the parameter itself has the shape (0,) while unused
(``free_param`` in deepspeed/runtime/zero/partition_parameters.py). Buffers and small parameters stay whole
(``stage3_param_persistence_threshold``).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from math import prod
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..base.prefixes import adapter_keys
from ..base.steps import as_step, folder_of
from ..base.text import join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import is_address
from ..files.folders import open_folder
from ..files.sources import FolderSource
from .rank_part import part_of

#: The next step for empty weights. No edit of the file can help, but DeepSpeed's folder has all slices.
GATHER: Final = as_step(
    "save again on all ranks, with trainer.save_model(), or convert the folder global_stepN of DeepSpeed"
)
_EMPTY: Final = (0,)
Shapes: TypeAlias = dict[str, tuple[int, ...]]
_ADAPTER_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG, _CONFIG = "adapter_config.json", "config.json"
#: Other tensors of a module that have one element per row of its weight.
_BESIDE: Final = ("bias", "running_mean", "running_var", "weight_g", "weight_scale")


def empty_weights(checkpoint: Checkpoint) -> str:
    """Return a message about weights that have no values, or "" if they have values.

    Tensors of size 0 are legitimate as buffers, and as parameters of a module whose tensors all have size 0. They
    contradict the model if every weight is empty, if other tensors of the module have elements, or if most weights are
    empty.
    """
    if checkpoint.traits.assembled:
        return ""  # the ranks recorded the shapes of the whole tensors
    survey = checkpoint.survey
    if survey.tensors and not any(entry.tensor.shape == _EMPTY for entry in survey.tensors):
        return ""
    names = _names_beside(checkpoint)
    adapter = _ADAPTER_CONFIG in names or os.path.basename(checkpoint.path) in _ADAPTER_FILES
    if not survey.tensors:
        return "the adapter is empty: it has no tensor" if adapter else ""
    if (part := part_of(checkpoint)) is not None and part.code == "weights-elsewhere":
        return ""  # the slices are in other files of the DeepSpeed folder
    state_dicts: dict[int, Shapes] = {}
    for entry in survey.tensors:
        dtype = BY_NAME.get(entry.tensor.dtype)
        if entry.state_dict >= 0 and dtype is not None and dtype.floating:
            state_dicts.setdefault(entry.state_dict, {})[entry.key] = entry.tensor.shape
    found = (_emptied(shapes, adapter or _CONFIG in names, adapter) for shapes in state_dicts.values())
    return next((message for message in found if message), "")


def _emptied(shapes: Shapes, sure: bool, adapter: bool) -> str:
    """Return the message about one state dict, or "". ``sure``: no weight of this folder may be empty."""
    weights = [name for name in shapes if name.rpartition(".")[2] == "weight" or adapter_keys([name])]
    empty = [name for name in weights if shapes[name] == _EMPTY]
    cause = "it was saved on one rank of DeepSpeed ZeRO-3, without gathering the weights"
    if empty and all(shape == _EMPTY for shape in shapes.values()):
        what = "the adapter is empty: all its tensors have" if adapter else "it holds no weights: every tensor has"
        return f"{what} the shape [0]; {cause}"
    bad = [name for name in empty if sure or adapter_keys([name]) or any(_sizes_beside(name, shapes))]
    if not bad and len(empty) * 2 > len(weights):
        bad = [name for name in empty if not _sizes_beside(name, shapes)]  # nn.LayerNorm(0) has an empty bias
    if not bad:
        return ""
    count = f"{len(bad):,} of {pluralize(len(weights), 'weight')}"
    return f"{count} have the shape [0]: {join_limited(bad, most=3)}; {cause}"


def _sizes_beside(name: str, shapes: Shapes) -> list[int]:
    module = name.rpartition(".")[0]
    return [prod(shapes[key]) for other in _BESIDE if (key := f"{module}.{other}") in shapes]


def _names_beside(checkpoint: Checkpoint) -> Collection[str]:
    if isinstance(checkpoint.source, FolderSource):
        return {os.path.basename(path) for path in checkpoint.source.beside}
    if is_address(checkpoint.path):
        return ()
    folder = open_folder(folder_of(checkpoint.path))
    names = [name for name in (_CONFIG, _ADAPTER_CONFIG) if folder.size(name) is not None]
    if not names:
        return ()
    from .names.hf import weights_of  # only if there is a configuration

    return names if weights_of([os.path.basename(checkpoint.path)]) is not None else ()

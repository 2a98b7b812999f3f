"""Recognise folders that training frameworks write with one part per rank, and name their missing parts.

Only the framework knows how the tensors in such a folder are split, unless ckptool joins them. See ``names.deepspeed``
and ``names.megatron``. Here are also the names of ``torch.distributed.checkpoint`` (DCP), and of programs that save
several DCP folders at once. Sources: torch/distributed/checkpoint/filesystem.py; accelerate, ``utils/fsdp_utils.py``
(``save_fsdp_model``, ``save_fsdp_optimizer``). The Trainer of transformers writes accelerate's folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from ...base.errors import NotACheckpointError, UnreadableError
from ...base.lazy import regex
from ...base.text import quoted
from ...files.folders import Folder
from ..folders import read_tag
from . import deepspeed as deepspeed_files
from . import megatron as megatron_files

_TAG: Final = regex(r"global_step\d+\Z")


def training_folder(folder: Folder) -> NotACheckpointError | None:
    """Return the error that describes a DeepSpeed or Megatron folder, or None for any other folder. Reads file names,
    and one file of each kind."""
    names = folder.names()
    if error := deepspeed_files.explain(folder, names) or megatron_files.explain(folder, names):
        return error
    if "latest" in names or "zero_to_fp32.py" in names:
        return _latest_step(folder, names, "latest", _TAG, deepspeed_files.explain)
    if megatron_files.LATEST in names:
        return _latest_step(folder, names, megatron_files.LATEST, megatron_files.ITERATION, megatron_files.explain)
    return None


def _latest_step(
    folder: Folder,
    names: Collection[str],
    tag_file: str,
    pattern: re.Pattern[str],
    explain: Callable[[Folder, Collection[str]], NotACheckpointError | None],
) -> NotACheckpointError | None:
    """Return the error for the step that ``tag_file`` names as the latest, or else the last step in the folder."""
    steps = sorted((name for name in names if pattern.match(name)), key=lambda name: (len(name), name))
    tag = read_tag(folder, tag_file) if tag_file in names else ""
    tag = megatron_files.tag_of(tag) if tag_file == megatron_files.LATEST else tag
    step = tag if tag in names else next(reversed(steps), "")
    inner = folder.inner(step)
    error = explain(inner, inner.names()) if step else None
    if error is not None:
        error.what += f"; the step is {quoted(step)}" + (f", one of {len(steps):,}" if len(steps) > 1 else "")
        error.what += f", and {tag_file} says {quoted(tag)}, which is not there" if tag and tag != step else ""
        error.path = folder.path
    return error


DATA: Final = ".distcp"
#: The metadata of a rank that was saved without the others.
OF_RANK: Final = regex(r"__(\d+)\.metadata\Z")
DATA_OF_RANK: Final = regex(r"__(\d+)_\d+\.distcp\Z")
#: accelerate's folders of models and optimizers, with their numbers.
_OF_FSDP: Final = regex(r"(pytorch_model_fsdp|optimizer)_(\d{1,4})\Z")


def are_files(names: Collection[str]) -> bool:
    """Return whether these file names are those found in a DCP folder."""
    if any(name.endswith(DATA) for name in names):
        return True
    metadata = [name for name in names if name in (".metadata", ".metadata.tmp") or OF_RANK.match(name)]
    return bool(metadata) and all(name.startswith(".") or name in metadata for name in names)


def fsdp_folders(folder: Folder, names: Collection[str]) -> list[str]:
    """Return the DCP folders of one save by accelerate, models first; [] if there is no model."""
    found = []
    for match in filter(None, map(_OF_FSDP.match, names)):
        try:
            inside = folder.inner(match[0]).names(strict=True)
        except UnreadableError:
            continue
        if are_files(inside):
            found.append((match[1] == "optimizer", int(match[2]), match[0]))
    folders = [name for _, _, name in sorted(found)]
    return folders if folders and not folders[0].startswith("optimizer") else []

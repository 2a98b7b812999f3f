"""Recognise folders that training frameworks write with one part per rank, and name their missing parts.

Only the framework knows how the tensors in such a folder are split, unless ckptool joins them. See
``names.deepspeed`` and ``names.megatron``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from ...base.errors import NotACheckpointError
from ...base.lazy import regex
from ...base.text import quoted
from ...files.folders import Folder
from ..folders import read_tag
from . import deepspeed as deepspeed_files
from . import megatron as megatron_files

_TAG: Final = regex(r"global_step\d+\Z")


def training_folder(folder: Folder) -> NotACheckpointError | None:
    """Return the error that describes a DeepSpeed or Megatron folder, or None for any other folder.

    Reads file names, and one file of each kind.
    """
    names = folder.names()
    if error := deepspeed_files.explain(folder, names) or megatron_files.explain(folder, names):
        return error
    if "latest" in names or "zero_to_fp32.py" in names:
        return _latest_step(folder, names, "latest", _TAG, deepspeed_files.explain)
    if megatron_files.LATEST in names:
        return _latest_step(folder, names, megatron_files.LATEST, megatron_files.ITERATION, megatron_files.explain)
    return None


_Explain: TypeAlias = "Callable[[Folder, Collection[str]], NotACheckpointError | None]"


def _latest_step(
    folder: Folder, names: Collection[str], tag_file: str, pattern: re.Pattern[str], explain: _Explain
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

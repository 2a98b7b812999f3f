"""File and folder names of ``torch.distributed.checkpoint`` (DCP), and of programs that save several DCP folders at
once.

Sources: torch/distributed/checkpoint/filesystem.py; accelerate, ``utils/fsdp_utils.py`` (``save_fsdp_model``,
``save_fsdp_optimizer``). The Trainer of transformers writes accelerate's folders.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ...base.errors import UnreadableError
from ...base.lazy import regex
from ...files.folders import Folder

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

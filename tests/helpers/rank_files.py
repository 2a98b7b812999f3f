"""Files of the ranks of a mesh, made by one process that is one rank after the other, without the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def save_ranks(
    folder: Path, world: int, make: Callable[[int], object], pattern: str = "model_rank{}.pt", *, legacy: bool = False
) -> Path:
    """Save in a folder what ``make(rank)`` returns as each rank."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            torch.save(make(rank), folder / pattern.format(rank), _use_new_zipfile_serialization=not legacy)
        finally:
            dist.destroy_process_group()
    return folder

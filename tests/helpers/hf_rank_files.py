"""Ranks of torch.distributed that save by ``HuggingFaceStorageWriter``: run as a script, gloo on this machine.

python hf_rank_files.py FOLDER RANKS     a folder in FOLDER for each of MODES
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

#: Options of the writer.
MODES: dict[str, dict[str, Any]] = {
    "rank0": {},
    "ranks": {"save_distributed": True},
    "files": {"save_distributed": True, "fqn_to_index_mapping": {"up": 1, "down": 2, "small": 1, "same": 2, "one": 2}},
    "consolidated": {"save_distributed": True, "enable_consolidation": True},
}


def whole() -> dict[str, torch.Tensor]:
    """The tensors: cut along either dimension, replicated, with nothing for some ranks, a scalar. torch cannot
    consolidate integers."""
    torch.manual_seed(0)
    made = {"up": torch.randn(7, 5), "down": torch.randn(4, 6).bfloat16(), "small": torch.randn(1, 3)}
    return made | {"same": torch.arange(5.0), "one": torch.tensor(3.0)}


def work(rank: int, folder: str, ranks: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        places = {"up": Shard(0), "down": Shard(1), "small": Shard(0), "same": Replicate()}
        for mode, options in MODES.items():
            made: dict[str, torch.Tensor | DTensor] = dict(whole())
            if mode != "rank0":
                made |= {name: distribute_tensor(made[name], mesh, [place]) for name, place in places.items()}
            if rank == 0 or mode != "rank0":
                writer = dcp.HuggingFaceStorageWriter(os.path.join(folder, mode), **options)
                dcp.save(made, storage_writer=writer, no_dist=mode == "rank0")
            dist.barrier()
    finally:
        dist.destroy_process_group()


def write(folder: Path, ranks: int) -> None:
    """Run this script."""
    subprocess.run([sys.executable, __file__, str(folder), str(ranks)], check=True, capture_output=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        meeting = os.path.join(scratch, "meeting")
        # Forked processes need not import torch again.
        mp.start_processes(work, (sys.argv[1], int(sys.argv[2]), meeting), int(sys.argv[2]), start_method="fork")

"""Several processes of torch.distributed, which save or load a checkpoint: run as a script, gloo on this machine.

python dcp_ranks.py save FOLDER RANKS        the state of fixtures/generators/make_dcp.py
python dcp_ranks.py alone FOLDER RANKS       the same, each rank with metadata of its own
python dcp_ranks.py load FOLDER RANKS OUT    into tensors that are split over so many ranks; OUT is a torch file
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
from torch.distributed.tensor import DTensor, distribute_tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "fixtures" / "generators"))


def blank(value: Any) -> Any:
    """The same object without the values: what a program that loads a checkpoint has."""
    if isinstance(value, DTensor):
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        return distribute_tensor(zeros, value.device_mesh, value.placements)
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return "nothing yet"


def full(value: Any) -> Any:
    """The same object with whole tensors."""
    if isinstance(value, DTensor):
        return value.full_tensor().contiguous()
    if isinstance(value, dict):
        return {key: full(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [full(inner) for inner in value]
    return value


def work(rank: int, mode: str, folder: str, ranks: int, out: str, meeting: str) -> None:
    from make_dcp import state

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        made = state(ranks)
        if mode == "load":
            made = blank(made)
            dcp.load(made, checkpoint_id=folder)
            loaded = full(made)
            if rank == 0:
                torch.save(loaded, out)
        else:
            dcp.save(made, checkpoint_id=folder, use_collectives=mode == "save")
    finally:
        dist.destroy_process_group()


def ranks(*arguments: str) -> None:
    """Run this script."""
    subprocess.run([sys.executable, str(HERE / "dcp_ranks.py"), *arguments], check=True, capture_output=True)


def main(mode: str, folder: str, number: str, out: str = "") -> None:
    with tempfile.TemporaryDirectory() as scratch:
        meeting = os.path.join(scratch, "meeting")
        # Forked processes need not import torch again.
        mp.start_processes(work, (mode, folder, int(number), out, meeting), int(number), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a conversion says is the same in every run, whatever Python's hash seed is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from conftest import ROOT


def test_the_order_of_tensors_that_share_memory(tmp_path: Path) -> None:
    several = [torch.ones(2) * number for number in range(9)]
    # One item holds all of them beside a set, the others are tensors of their own.
    named = {f"t{number}": tensor for number, tensor in enumerate(several)}
    torch.save({"all": (tuple(several), {1}), **named}, tmp_path / "a.pth")
    words = "convert a.pth -o out --to-format dcp --dry-run --format json --allow-loss all"
    command = [sys.executable, "-m", "ckptool", *words.split()]
    said = set()
    for seed in ("0", "1", "2", "3"):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        said.add(subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout)
    assert len(said) == 1

"""``sanitize``: a file that plain ``torch.load(path)`` takes."""

from __future__ import annotations

from typing import Any

import click

from .. import api
from ..checkpoint.checkpoint import Checkpoint
from .editing import Job, account, edit_all
from .options import paths, writing

EPILOG = """\b
Examples:
  ckptool sanitize training.pth -o training.plain.pth
  ckptool sanitize training.pth --dry-run
  ckptool sanitize whole_model.pth --as-state-dict -o weights.pth
  ckptool sanitize strange.pth --drop-unknown -o plain.pth
  ckptool sanitize fsdp.rank0.pth --local-parts -o part0.pth
"""


@click.command(epilog=EPILOG)
@paths
@click.option("--as-state-dict", is_flag=True, help="Replace a pickled module by its state dict.")
@click.option("--drop-unknown", is_flag=True, help="Drop what cannot be converted, and name it.")
@click.option("--local-parts", is_flag=True, help="Replace a DTensor or ShardedTensor by the part of its rank.")
@writing
def sanitize(paths: tuple[str, ...], as_state_dict: bool, drop_unknown: bool, local_parts: bool, **how: Any) -> int:
    """Make a checkpoint that plain torch.load(path) of torch 2.6 and later loads, without running it.

    Objects of other classes become dicts of their attributes; numpy scalars become numbers, numpy arrays tensors, paths
    and dates strings, functions and classes their names, and pickle protocol 4 becomes 2. Tensors stay as they are.
    Each change is printed with its path. What has no plain form is refused.
    """

    pickled: dict[str, bool] = {}

    def edit(checkpoint: Checkpoint) -> Checkpoint:
        pickled[checkpoint.path] = checkpoint.pickled
        return api.sanitize(checkpoint, as_state_dict=as_state_dict, drop_unknown=drop_unknown, local_parts=local_parts)

    def words(report: dict[str, Any]) -> list[str]:
        if report["changed"]:
            return account(report)
        if pickled[report["path"]] and (report["output"] or "").endswith(".safetensors"):
            return ["  nothing to do but to rename it: torch.load reads what ends in .safetensors as safetensors"]
        return ["  nothing to do: torch.load takes it; the output is the input, byte for byte"]

    return edit_all(Job("sanitize", edit, words=words), paths, **how)

"""Compare optimizers' parameter groups, as ``Optimizer.load_state_dict`` does: their number and their sizes.

Source: ``torch/optim/optimizer.py``, ``Optimizer.load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias, TypedDict

from ...base.text import pluralize
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import list_items
from ..optimizers import BUFFERS, optimizers
from .names import Spec

#: The number of parameters in each group, by the path of the optimizer.
GroupSizes: TypeAlias = Mapping[str, tuple[int, ...]]

_FLOATS: Final = ("float", "bfloat", "complex")


class OptimizerReport(TypedDict):
    """An optimizer at ``path``: its group sizes here and in the target, and whether they are equal."""

    path: str
    have: list[int]
    wanted: list[int]
    fits: bool


def group_sizes(checkpoint: Checkpoint) -> GroupSizes:
    """Return how many parameters each group of each optimizer has."""
    nodes = checkpoint.graph.nodes
    return {
        optimizer.path: tuple(len(list_items(nodes[group.params])) for group in optimizer.groups)
        for optimizer in optimizers(checkpoint.graph)
    }


def compare_optimizers(have: GroupSizes, wanted: GroupSizes) -> list[OptimizerReport]:
    """Compare the optimizers of two checkpoints at equal paths, or the only optimizer of each."""
    partners = {path: path for path in have if path in wanted}
    if not partners and len(have) == len(wanted) == 1:
        partners = dict(zip(have, wanted))
    return [
        {"path": path, "have": [*have[path]], "wanted": [*wanted[other]], "fits": have[path] == wanted[other]}
        for path, other in partners.items()
    ]


def other_number(have: GroupSizes, tensors: Mapping[str, Spec], tied: Mapping[str, str]) -> list[str]:
    """Return notes on optimizers whose number of parameters differs from the model's, if its optimizer is unknown.

    Names and dtypes only suggest which tensors are parameters, and an optimizer may omit frozen ones, so this is a note
    and not a verdict.
    """
    names = [name for name, spec in tensors.items() if spec.dtype.startswith(_FLOATS) and name not in tied]
    parameters = sum(name.rpartition(".")[2] not in BUFFERS for name in names)
    return [
        f"the optimizer at {path or '.'!r} has the state of {pluralize(sum(sizes), 'parameter')}, the target has"
        f" {parameters:,}: an optimizer of all of them does not load it"
        for path, sizes in have.items()
        if names and sum(sizes) not in (parameters, len(names))
    ]


def mismatch(report: OptimizerReport) -> str:
    """Describe how the groups differ, quoting torch's message."""
    have, wanted = report["have"], report["wanted"]
    name = f"optimizer at {report['path'] or '.'!r}"
    if len(have) != len(wanted):
        return (
            f"{name}: {pluralize(len(have), 'parameter group')} here, {len(wanted):,} in the target; load_state_dict"
            ' says "loaded state dict has a different number of parameter groups"'
        )
    at = next(number for number, (ours, theirs) in enumerate(zip(have, wanted)) if ours != theirs)
    which = f" in group {at}" if len(have) > 1 else ""
    return (
        f"{name}: {pluralize(have[at], 'parameter')}{which} here, {wanted[at]:,} in the target; load_state_dict"
        " says \"loaded state dict contains a parameter group that doesn't match the size of optimizer's group\""
    )

"""The JSON of a match, schema ``ckptool.match/1``: counts, and a comparison of optimizers' parameter groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from ...base.records import TypedDict
from ...base.text import join_limited, pluralize
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import list_items
from ..optimizers import optimizers
from .pairing import Comparison, Mismatch

#: Maximum number of modules in the table, and of segments in their names.
_GROUPS: Final = 12
_DEEPEST: Final = 6


class MismatchReport(TypedDict):
    """A key in both, with the two descriptions that differ: 64x3 and 10x3, float16 and float32."""

    key: str
    have: str
    wanted: str


class Differences(TypedDict):
    """How many keys load, and which do not; ``filled_in`` are batch norm counters that torch fills in itself."""

    loads: int
    missing: list[str]
    unexpected: list[str]
    size_mismatches: list[MismatchReport]
    dtype_differences: list[MismatchReport]
    filled_in: list[str]


class ModuleReport(TypedDict):
    """Counts of a module's keys by outcome."""

    module: str
    loads: int
    missing: int
    unexpected: int
    size_mismatches: int


class CauseReport(TypedDict):
    """A reason why keys do not load, such as "vocabulary" or "transposed", and what helps."""

    kind: str
    message: str


class FixOption(TypedDict):
    """An option of ``ckptool edit``; a flag has the value true."""

    option: str
    value: str | bool


class Fix(Differences):
    """The edit that makes most keys load, and the differences that remain after it.

    ``command`` performs the edit ("" if no command can). ``left_out`` lists entries beside the extracted state dict.
    """

    complete: bool
    steps: list[FixOption]
    dropped: list[str]
    left_out: list[str]
    notes: list[str]
    command: str


class MatchAnswer(Differences):
    """Whether the checkpoint loads unchanged, and the differences.

    ``target_kind`` is checkpoint, lock, model, error or names. ``placed`` is true if the state dict is at the same path
    as the target's. ``keys`` and ``wanted`` count the keys in the file and in the target. ``optimizers`` lists the
    optimizers that both have. ``causes`` name the reasons for differences that no edit solves, and what helps;
    ``advice`` covers the others.
    """

    target: str
    target_kind: str
    state_dict: str
    target_state_dict: str
    strict: bool
    fits: bool
    placed: bool
    keys: int
    wanted: int
    modules: list[ModuleReport]
    optimizers: list[OptimizerReport]
    causes: list[CauseReport]
    fix: Fix | None
    advice: str
    notes: list[str]


class MatchReport(MatchAnswer):
    """The report of ``ckptool match``, schema ``ckptool.match/1``."""

    schema: Literal["ckptool.match/1"]
    path: str
    next: str


def differences(comparison: Comparison) -> Differences:
    """Return the differences of a comparison as JSON."""
    return {
        "loads": len(comparison.loads),
        "missing": comparison.missing,
        "unexpected": comparison.unexpected,
        "size_mismatches": _mismatches(comparison.sizes),
        "dtype_differences": _mismatches(comparison.dtypes),
        "filled_in": comparison.filled,
    }


def _mismatches(mismatches: Sequence[Mismatch]) -> list[MismatchReport]:
    return [{"key": item.key, "have": item.have, "wanted": item.wanted} for item in mismatches]


def module_reports(comparison: Comparison) -> list[ModuleReport]:
    """Return counts by module, named by as many segments as give at most a dozen groups, but at least one."""
    outcomes = {
        "loads": comparison.loads,
        "missing": comparison.missing,
        "unexpected": comparison.unexpected,
        "size_mismatches": [mismatch.key for mismatch in comparison.sizes],
    }
    modules = {name: name.split(".")[:-1] for names in outcomes.values() for name in names}
    depth = 1
    while depth < _DEEPEST and len({tuple(parts[: depth + 1]) for parts in modules.values()}) <= _GROUPS:
        depth += 1
    groups: dict[str, Counter[str]] = {}
    for outcome, names in outcomes.items():
        for name in names:
            groups.setdefault(".".join(modules[name][:depth]), Counter())[outcome] += 1
    return [
        {
            "module": name,
            "loads": counts["loads"],
            "missing": counts["missing"],
            "unexpected": counts["unexpected"],
            "size_mismatches": counts["size_mismatches"],
        }
        for name, counts in groups.items()
    ]


#: The number of parameters in each group, by the path of the optimizer.
GroupSizes: TypeAlias = Mapping[str, tuple[int, ...]]


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
    """Compare the optimizers of two checkpoints at equal paths, or the only optimizer of each.

    Torch compares the number of groups and their sizes (torch/optim/optimizer.py, ``Optimizer.load_state_dict``).
    """
    partners = {path: path for path in have if path in wanted}
    if not partners and len(have) == len(wanted) == 1:
        partners = dict(zip(have, wanted))
    return [
        {"path": path, "have": [*have[path]], "wanted": [*wanted[other]], "fits": have[path] == wanted[other]}
        for path, other in partners.items()
    ]


def mismatch(report: OptimizerReport) -> str:
    """Describe how the groups differ."""
    have, wanted = ([f"{size:,}" for size in report[side]] for side in ("have", "wanted"))
    return (
        f"optimizer at {report['path'] or '.'!r}: groups of {join_limited(have)} parameters here, of"
        f" {join_limited(wanted)} in the target, which load_state_dict refuses"
    )


def not_strict(comparison: Comparison) -> str:
    """Describe what happens to missing or unexpected keys with strict=False."""
    if not comparison.missing:
        return f"{pluralize(len(comparison.unexpected), 'key')} would be ignored"
    number, names = pluralize(len(comparison.missing), "key"), join_limited(comparison.missing, most=3)
    return f"{number} of the model would stay untrained, with initial values: {names}"

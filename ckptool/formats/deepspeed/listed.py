"""The parameters that an optimizer's state in a DeepSpeed file lists: it numbers them, and has tensors of their shapes.

Where no file names the parameters, their number and shapes tell whether files are missing. Source: torch/optim
(``Optimizer.state_dict``, the states of each optimizer), DeepSpeed ``runtime/pipe/module.py`` (``save_state_dict``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from ...base.records import NamedTuple
from ...base.text import words
from ...checkpoint.objects import list_items, values_of
from ...pickles.nodes import Ref
from ..joined.container import RankFile, rows
from ..pieces.copies import is_one_value
from .states import base_optimizer, group_states

Shape: TypeAlias = tuple[int, ...]

#: States that have the shape of their parameter.
_LIKE_PARAMETER: Final = words("exp_avg exp_avg_sq momentum_buffer square_avg sum state1")
#: Entries of optimizers that flatten the parameters of a group.
_FLAT: Final = words("fp32_groups_flat fp32_flat_groups single_partition_of_fp32_groups")


class Listed(NamedTuple):
    """The parameters of one file: their number, and the shapes of those that have a state, each with the checksum that
    is recorded for it (0 if none is, or if all its values are equal)."""

    number: int
    shapes: Sequence[tuple[Shape, int]]


class Lacking(NamedTuple):
    """How many listed parameters of each shape have no tensor, and how many in all. ``spare`` counts the tensors that
    are not listed, such as buffers and frozen parameters."""

    shapes: Counter[Shape]
    number: int
    spare: int


def listed_in(file: RankFile, values: Mapping[str, Ref]) -> Listed | None:
    """Return the parameters that the entry ``optimizer`` of a file lists; None if it has none, or flat vectors."""
    graph = file.graph
    own = values_of(graph, values["optimizer"]) if "optimizer" in values else {}
    if not own or own.keys() & _FLAT:
        return None
    base = own if {"state", "param_groups"} <= own.keys() else base_optimizer(graph, own)
    groups = list_items(graph.nodes[base["param_groups"]]) if base else ()
    params = [values_of(graph, group).get("params", -1) for group in groups]
    if not params or -1 in params:
        return None
    shapes = []
    for state in group_states(graph, base).values():
        ref = next((state[slot] for slot in _LIKE_PARAMETER if slot in state), -1)
        tensor = file.reader.tensor(ref) if ref >= 0 else None
        if tensor is not None:
            shapes.append((tensor.shape, _checksum(file, ref)))
    return Listed(sum(len(list_items(graph.nodes[ref])) for ref in params), shapes)


def _checksum(file: RankFile, ref: Ref) -> int:
    tensor = file.reader.tensor(ref)
    place = rows(file, ref)
    if tensor is None or is_one_value(place.source, place.begin, tensor.own_bytes, place.dtype.itemsize):
        return 0
    return file.container.stored(tensor.storage).crc or 0


def without_tensors(every: Iterable[Listed], there: Sequence[Shape]) -> Lacking:
    """Return the listed parameters that are not among the tensors that are there.

    The copies of a tied parameter on several stages count once: they have equal states.
    """
    wanted: Counter[Shape] = Counter()
    seen: set[tuple[Shape, int]] = set()
    number = 0
    for listed in every:
        own = [item for item in listed.shapes if not item[1] or item not in seen]
        wanted.update(shape for shape, _ in own)
        number += len(own) + listed.number - len(listed.shapes)
        seen.update(own)
    shapes = wanted - Counter(there)
    lost = max(shapes.total(), number - len(there))
    return Lacking(shapes, lost, len(there) - number + lost)

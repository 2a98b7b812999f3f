"""LoRAs of parameters that are not modules, such as the experts of a layer in one tensor (``target_parameters``).

PEFT stores the matrices of all experts in two, and not the name of the parameter: the settings and the shapes tell it.
Sources: PEFT (``tuners/lora/layer.py``, ParamWrapper; ``tuners/tuners_utils.py``, ``_inject_parameters``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Final

from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import join_limited, quoted, shape_text
from ..checkpoint.tensors import Tensor
from ..values.torch.adapters import AdapterStep, StoredTensor
from .adapter_bases import Weight, own_weights, renamed_weights
from .adapter_changes import WeightChange
from .adapter_settings import BY_PEFT, Adapter, check_rank, scale

#: A key: the module, how deep the wrapper of the parameter lies in others, and which of the matrices it is.
_KEY: Final = regex(
    r"(?P<module>.+?)(?P<nested>(?:\.base_layer)*)\.lora_(?P<which>[AB])(?:\.(?!weight\Z|bias\Z)\w+)?\.weight\Z"
)
#: The most experts of a layer; a crafted file may claim any number.
_MOST_EXPERTS: Final = 1 << 14
#: The orders of the two axes behind the axis of experts.
_ORDERS: Final = ("out, in", "in, out")


class _Pair(NamedTuple):
    """The keys of the two matrices of one parameter."""

    a: str
    b: str


def parameter_changes(
    adapter: Adapter, base: Mapping[str, Tensor], path: str, weight: float
) -> tuple[list[WeightChange], set[str]]:
    """Return the changes of parameters, and the keys of the adapter that they use.

    Raise RefusedError if shapes do not tell which parameter two matrices belong to, or the base does not hold it.
    """
    targets = adapter.config.get("target_parameters")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise adapter.refusal("its target_parameters are not a list of names", BY_PEFT)
    # A recipe makes tensors of experts in the order (experts, out, in). Those in the file may have (experts, in, out).
    layouts = [(own_weights(base), _ORDERS), *((made, _ORDERS[:1]) for _, made in renamed_weights(base, "stacked"))]
    found: list[WeightChange] = []
    used: set[str] = set()
    for module, pairs in _pairs(adapter, targets).items():
        names = sorted({f"{module}.{target.rpartition('.')[2]}" for target in targets if _is_in(module, target)})
        known, orders = next((each for each in layouts if any(name in each[0] for name in names)), ({}, _ORDERS))
        if not known:
            message = f"{join_limited([quoted(name) for name in names])} not in {path}, nor experts that make it up"
            raise adapter.refusal(f"{message}: another base, or one with experts that no recipe describes", BY_PEFT)
        weights = {name: known[name] for name in names if name in known}
        fits = [_fits(adapter, pair, weights, path) for pair in pairs]
        # All parameters of a module have the same order, so that one that is not square decides for the others.
        orders = tuple(order for order in orders if all(order in {way for _, way in ways} for ways in fits))
        taken: set[str] = set()
        for pair, ways in zip(pairs, fits):
            left = [(name, order) for name, order in ways if order in orders]
            if len(left) != 1 or left[0][0] in taken:
                message = f"{quoted(pair.a)} fits {' and '.join(dict.fromkeys(quoted(name) for name, _ in ways))}"
                raise adapter.refusal(f"{message} in several ways, and the file does not say which", BY_PEFT)
            ((name, order),) = left
            found += _expert_changes(adapter, pair, name, known[name], order, weight)
            used |= {pair.a, pair.b}
            taken.add(name)
    return found, used


def _is_in(module: str, target: str) -> bool:
    """Return whether a parameter that the settings name may be in a module."""
    name = f"{module}.{target.rpartition('.')[2]}"
    return name == target or name.endswith(f".{target}")


def _pairs(adapter: Adapter, targets: list[str]) -> dict[str, list[_Pair]]:
    """Return the matrices of each module that holds parameters."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in adapter.tensors:
        match = _KEY.match(key)
        if match is not None and any(_is_in(match["module"], target) for target in targets):
            found.setdefault((match["module"], match["nested"]), {})[match["which"]] = key
    pairs: dict[str, list[_Pair]] = {}
    for (module, _), keys in found.items():
        if len(keys) < 2:
            raise adapter.refusal(f"{quoted(next(iter(keys.values())))} has no partner: the file is incomplete")
        pairs.setdefault(module, []).append(_Pair(keys["A"], keys["B"]))
    return pairs


def _fits(adapter: Adapter, pair: _Pair, weights: Mapping[str, Weight], path: str) -> list[tuple[str, str]]:
    """Return the parameters that have the shape of two matrices, each with its order of axes.

    Raise RefusedError if there are none.
    """
    a, b = (adapter.tensors[key].shape for key in (pair.a, pair.b))
    found = []
    for name, weight in weights.items():
        *outer, rows, columns = (1, *weight.shape) if len(weight.shape) == 2 else weight.shape
        if len(outer) == 1 and outer[0] and len(a) == len(b) == 2 and a[0] == b[1] and a[0] % outer[0] == 0:
            found += [(name, "out, in")] if (rows, columns) == (b[0], a[1]) else []
            found += [(name, "in, out")] if (rows, columns) == (a[1], b[0]) and len(weight.shape) == 3 else []
    if not found:
        shapes = join_limited([f"{quoted(name)} of {shape_text(weight.shape)}" for name, weight in weights.items()])
        message = f"{quoted(pair.a)} of {shape_text(a)}, and its partner of {shape_text(b)}, do not fit {shapes}"
        raise adapter.refusal(f"{message} in {path}: another base")
    return found


def _expert_changes(
    adapter: Adapter, pair: _Pair, name: str, weight: Weight, order: str, factor: float
) -> Iterator[WeightChange]:
    """Yield the change of each tensor in the base that holds rows of an expert."""
    a, b = adapter.stored(pair.a), adapter.stored(pair.b)
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if experts > _MOST_EXPERTS:
        raise adapter.refusal(f"{quoted(name)} has {experts:,} experts, and {_MOST_EXPERTS:,} are the most")
    rank = a.view.shape[0] // experts
    check_rank(adapter, pair.a, rank)
    factor *= scale(adapter, name, rank)
    rows = prod(weight.shape[:-1]) // experts
    for expert in range(experts):
        own = [a.rows(expert * rank, rank), _columns(b, expert, experts)]
        first, second = (_turned(own[0]), _turned(own[1])) if order == "in, out" else (own[1], own[0])
        for place in weight.places:
            begin, end = max(place.begin, expert * rows), min(place.begin + place.rows, (expert + 1) * rows)
            if begin < end:
                part = first.rows(begin - expert * rows, end - begin)
                at = place.first + begin - place.begin
                step = AdapterStep("product", (part, second), factor, round_first=True, first_row=at, row=weight.row)
                yield WeightChange(place.key, step)


def _columns(part: StoredTensor, begin: int, step: int) -> StoredTensor:
    """Return every column of a matrix with this distance, from ``begin`` on."""
    view = part.view
    columns = view._replace(
        shape=(view.shape[0], view.shape[1] // step),
        stride=(view.stride[0], view.stride[1] * step),
        offset=view.offset + begin * view.stride[1],
    )
    return part._replace(view=columns)


def _turned(part: StoredTensor) -> StoredTensor:
    """Return the transpose of a matrix."""
    return part._replace(view=part.view._replace(shape=part.view.shape[::-1], stride=part.view.stride[::-1]))

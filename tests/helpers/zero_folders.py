"""Folders as DeepSpeed writes them, cut here by the rules of ZeRO from tensors that are whole."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: The names and tensors of a group of parameters.
Group = dict[str, Tensor]
_MODULE = "deepspeed.utils.tensor_fragment"


class Model(NamedTuple):
    """What is saved: parameters by group in the order in which they are flattened, with moments of the same shapes.

    ``frozen`` parameters and ``buffers`` are whole, ``aliases`` are second names of parameters. ``paddings`` are the
    elements behind each parameter of a group.
    """

    groups: Sequence[Group]
    moments: dict[str, Sequence[Group]]
    frozen: Group = {}  # noqa: RUF012 (never changed)
    buffers: Group = {}  # noqa: RUF012
    aliases: dict[str, str] = {}  # noqa: RUF012
    paddings: Sequence[Sequence[int]] = ()

    @property
    def weights(self) -> Group:
        """Every parameter that is trained."""
        return {name: value for group in self.groups for name, value in group.items()}

    @property
    def whole(self) -> Group:
        """The state dict that the files are parts of."""
        own = {**self.weights, **self.frozen, **self.buffers}
        return own | {alias: own[kept] for alias, kept in self.aliases.items()}


def random_model(shapes: Sequence[Sequence[tuple[int, ...]]], moments: Sequence[str] = ("exp_avg",)) -> Model:
    """A model with a group for each list of shapes."""
    names = [[f"layer{number}.{place}.weight" for place in range(len(own))] for number, own in enumerate(shapes)]

    def values() -> list[Group]:
        return [{name: torch.randn(shape) for name, shape in zip(*pair)} for pair in zip(names, shapes)]

    return Model(values(), {name: values() for name in moments})


class Fragment:
    """Stands for ``deepspeed.utils.tensor_fragment.fragment_address``, under whose name it is pickled."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Fragment if module == _MODULE else super().find_class(module, name)


class Unpickled:
    """A module for ``torch.load`` that knows the class of DeepSpeed."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)
    __name__ = "pickle"


@contextmanager
def deepspeed() -> Iterator[None]:
    Fragment.__module__, Fragment.__qualname__ = _MODULE, "fragment_address"
    parts = _MODULE.split(".")
    modules = {".".join(parts[: count + 1]): ModuleType(parts[count]) for count in range(len(parts))}
    modules[_MODULE].fragment_address = Fragment  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def write_zero(
    folder: Path,
    model: Model,
    ranks: int,
    stage: int,
    *,
    step: int = 3,
    stripped: bool = True,
    change: Callable[[dict[str, Any]], object] = lambda _: None,
) -> Path:
    """Write the folder of a step as stage 1, 2 or 3 does; ``stripped`` without the padding at the end of a group.

    ``change`` changes what the optimizer of each rank saves.
    """
    folder.mkdir(parents=True)
    module = {name: value.bfloat16() for name, value in {**model.weights, **model.frozen}.items()}
    module |= model.buffers
    module |= {alias: module[kept] for alias, kept in model.aliases.items()}
    shared = {
        "buffer_names": list(model.buffers),
        "param_shapes": [{name: value.shape for name, value in group.items()} for group in model.groups],
        "frozen_param_shapes": {name: value.shape for name, value in model.frozen.items()},
        "global_steps": step,
        "skipped_steps": 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    if stage < 3:
        frozen = {name: module[name] for name in model.frozen}
        own = {"module": module, "shared_params": model.aliases, "frozen_param_fragments": frozen, **shared}
        torch.save(own, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        if stage == 3:
            frozen = {name: _part(module[name], rank, ranks) for name in model.frozen}
            empty = {name: value if name in model.buffers else value.new_empty(0) for name, value in module.items()}
            aliases = model.aliases if rank == 0 else {}
            own = {"module": empty, "shared_params": aliases, "frozen_param_fragments": frozen, **shared}
            torch.save(own, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        own = _third(model, rank, ranks, step) if stage == 3 else _second(model, rank, ranks, step, stripped)
        state = {"zero_stage": stage, **own}
        change(state)
        saved = {"optimizer_state_dict": state, "ds_version": "0.19.8"}
        with deepspeed():
            torch.save(saved, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def _base(moments: dict[str, list[Tensor]], groups: int, step: int) -> dict[str, Any]:
    """The state of an optimizer of flat tensors."""
    state = {
        number: {"step": torch.tensor(float(step)), **{name: own[number] for name, own in moments.items()}}
        for number in range(groups)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [number]} for number in range(groups)]}


def _part(value: Tensor, rank: int, ranks: int) -> Tensor:
    """What stage 3 gives a rank of a tensor: equal parts, the last of them padded."""
    count = -(-value.numel() // ranks)
    flat = torch.cat([value.flatten(), value.new_full((count * ranks - value.numel(),), -7)])
    return flat[rank * count : (rank + 1) * count].clone()


def _third(model: Model, rank: int, ranks: int, step: int) -> dict[str, Any]:
    def flats(groups: Sequence[Group]) -> list[Tensor]:
        return [torch.cat([_part(value, rank, ranks) for value in group.values()]) for group in groups]

    moments = {name: flats(groups) for name, groups in model.moments.items()}
    return {
        "partition_count": ranks,
        "fp32_flat_groups": flats(model.groups),
        "optimizer_state_dict": _base(moments, len(model.groups), step),
    }


def _second(model: Model, rank: int, ranks: int, step: int, stripped: bool) -> dict[str, Any]:
    places: list[dict[str, Fragment]] = []

    def flats(groups: Sequence[Group], strip: bool) -> list[Tensor]:
        found = []
        places.clear()
        for number, group in enumerate(groups):
            paddings = model.paddings[number] if model.paddings else [0] * len(group)
            pairs = zip(group.values(), paddings)
            parts = [part for value, more in pairs for part in (value.flatten(), torch.ones(more))]
            used = sum(map(len, parts))
            whole = torch.cat([*parts, torch.full((-used % (2 * ranks),), -7.0)])
            count = len(whole) // ranks
            begin, end = rank * count, (rank + 1) * count
            places.append({})
            at = 0
            for (name, value), more in zip(group.items(), paddings):
                low, high = max(at, begin), min(at + value.numel(), end)
                if low < high:
                    places[-1][name] = Fragment(low - begin, high - low)
                at += value.numel() + more
            found.append(whole[begin : max(min(end, used), begin) if strip else end].clone())
        return found

    moments = {name: flats(groups, False) for name, groups in model.moments.items()}
    return {
        "partition_count": [ranks] * len(model.groups),
        "single_partition_of_fp32_groups": flats(model.groups, stripped),
        "base_optimizer_state": _base(moments, len(model.groups), step),
        "param_slice_mappings": places,
        **({"param_alignment_paddings": [list(own) for own in model.paddings]} if model.paddings else {}),
    }

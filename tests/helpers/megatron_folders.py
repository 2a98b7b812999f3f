"""Folders as Megatron-LM saves them for each rank, cut by hand from a whole model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Model = Mapping[str, torch.Tensor]


def arguments(tensor: int, pipeline: int, **values: object) -> Namespace:
    own = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "num_attention_heads": 4}
    return Namespace(**(own | values))


def part_of(name: str, value: torch.Tensor, rank: int, ranks: int, gated: bool) -> torch.Tensor:
    """What a tensor-parallel rank has of a tensor."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(ranks, 1)[rank].clone()
    if not any(part in name for part in ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")):
        return value.clone()
    if "norm" in name:
        return value.clone()
    if gated and "linear_fc1" in name:
        return torch.cat([half.chunk(ranks)[rank] for half in value.chunk(2)])
    return value.chunk(ranks)[rank].clone()


def of_stage(model: Model, stage: int, stages: int, layers: int) -> dict[str, torch.Tensor]:
    """The tensors of a stage of the pipeline, whose layers are counted from 0."""
    each = layers // stages
    own = {}
    for name, value in model.items():
        if ".layers." in name:
            before, _, after = name.partition(".layers.")
            number, _, rest = after.partition(".")
            if int(number) // each == stage:
                own[f"{before}.layers.{int(number) % each}.{rest}"] = value
        elif stage == (0 if name.startswith("embedding.") else stages - 1):
            own[name] = value
    return own


def save_megatron(
    folder: Path, model: Model, args: Namespace, layers: int, *, gated: bool = True, iteration: int = 7, **beside: Any
) -> Path:
    """Save the ranks' files of one iteration, which becomes the latest; return the folder of it."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    own = folder / f"iter_{iteration:07d}"
    for stage in range(pipeline):
        values = of_stage(model, stage, pipeline, layers)
        for rank in range(tensor):
            inner = own / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            inner.mkdir(parents=True)
            parts = {name: part_of(name, value, rank, tensor, gated) for name, value in values.items()}
            state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, "model": parts, **beside}
            torch.save(state, inner / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return own

"""A file that is one part of a checkpoint in several files: what it is of it, and the folder that is the whole."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from ..base.steps import folder_of
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import list_items, values_of
from ..checkpoint.sharding import sharding_summary
from ..checkpoint.tensors import TensorReader
from ..files.archives import is_address
from ..files.sources import FileSource

#: A shard, as huggingface_hub and transformers name them.
_SHARD: Final = re.compile(r"-(\d{5})-of-(\d{5})\b.*\.(safetensors|bin)\Z")
#: The folder of a rank, as Megatron-LM names it.
_MEGATRON_RANK: Final = re.compile(r"mp_rank_\d")
#: What DeepSpeed writes at the root of its files of a model, and of an optimizer.
_DEEPSPEED: Final = frozenset(("ds_version", "dp_world_size", "optimizer_state_dict"))
_ZERO: Final = frozenset(("partition_count", "fp32_flat_groups", "single_partition_of_fp32_groups"))
_TOGETHER: Final = "the files of all ranks together are the checkpoint"
_FOLDER: Final = "the folder of all is the checkpoint"

#: How a job makes whole tensors of its parts, with FSDP of both kinds and with tensor parallelism.
WHOLE: Final = (
    "have the job save whole tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
    " of torch.distributed.checkpoint.state_dict"
)


class Part(NamedTuple):
    """What a file is of a larger checkpoint: ``code``, ``level`` and ``message`` are those of a finding.

    ``folder`` is the path of the whole, "" where the files beside it are not known to be it. ``cut`` says that what
    is in it makes no model by itself: what is made of it alone is of no use.
    """

    code: str
    level: str
    message: str
    folder: str
    cut: bool = True


def part_of(checkpoint: Checkpoint) -> Part | None:
    """Return what the file of a checkpoint is a part of; None for a file that is all there is.

    No other file is opened. Edits do not make a part whole, except that tensors may be replaced by what is in it.
    """
    if is_address(checkpoint.path) or not isinstance(checkpoint.source, FileSource):
        return _spread(checkpoint, "")
    folder = folder_of(checkpoint.path)
    return _deepspeed(checkpoint, folder) or _megatron(checkpoint) or _spread(checkpoint, folder) or _shard(checkpoint)


def _deepspeed(checkpoint: Checkpoint, folder: str) -> Part | None:
    """Return what a file of DeepSpeed is: of an optimizer, of a model of stage 3, of one model-parallel rank."""
    graph = checkpoint.container.graph
    values = values_of(graph, graph.root)
    if _DEEPSPEED.isdisjoint(values):
        return None
    from .ranks.deepspeed_files import OPTIMIZER, whole_number

    own = values_of(graph, values["optimizer_state_dict"]) if "optimizer_state_dict" in values else {}
    if not _ZERO.isdisjoint(own):
        name = OPTIMIZER.match(os.path.basename(checkpoint.path))
        count = whole_number(graph, own["partition_count"]) if "partition_count" in own else 0
        stage = whole_number(graph, own["zero_stage"]) if "zero_stage" in own else 0
        owner = f"rank {name[1]}" if name else "one rank"
        message = (
            f"it is what {owner}{f' of {count:,}' if count else ''} has of the optimizer of DeepSpeed's ZeRO"
            f"{f' stage {stage}' if stage else ''}: flat vectors, in which no parameter has a name; {_FOLDER}"
        )
        return Part("rank-part", "warning", message, folder)
    module = values_of(graph, values["module"]) if "ds_version" in values and "module" in values else {}
    reader = TensorReader(graph)
    buffers = (
        {graph.nodes[ref] for ref in list_items(graph.nodes[values["buffer_names"]])}
        if "buffer_names" in values
        else ()
    )
    tensors = [tensor for name, ref in module.items() if name not in buffers and (tensor := reader.tensor(ref))]
    if tensors and all(0 in tensor.shape for tensor in tensors):
        message = "its parameters are empty: with ZeRO stage 3 the weights are in the optimizer's files"
        return Part("weights-elsewhere", "warning", f"{message}; {_FOLDER}", folder)
    ranks = whole_number(graph, values["mp_world_size"]) if "mp_world_size" in values else 1
    if tensors and ranks > 1:
        message = f"it is what one of {ranks:,} model-parallel ranks of DeepSpeed has of the model; {_FOLDER}"
        return Part("rank-part", "warning", message, folder)
    return None


def _megatron(checkpoint: Checkpoint) -> Part | None:
    """Return what the file of one rank of Megatron-LM is: it has a part of each tensor, or some of the layers."""
    folder = os.path.dirname(os.path.realpath(checkpoint.path))
    if not _MEGATRON_RANK.match(os.path.basename(folder)):
        return None
    from .ranks.megatron_args import arguments, number

    own = arguments(checkpoint.container.graph)
    ranks = number(own, "tensor_model_parallel_size") * number(own, "pipeline_model_parallel_size")
    if ranks < 2:
        return None
    message = f"it is what one of {ranks:,} ranks of Megatron-LM has of the model: {_FOLDER}"
    # The path as it was typed, where that has the folders in it.
    above = folder_of(folder_of(checkpoint.path))
    if os.path.realpath(above) != os.path.dirname(folder):
        above = os.path.dirname(folder)
    return Part("rank-part", "warning", message, above)


def _spread(checkpoint: Checkpoint, folder: str) -> Part | None:
    """Return what a file with a rank's part of DTensors or ShardedTensors is."""
    shards = sharding_summary(checkpoint.survey.reader, checkpoint.survey.tensors)
    if shards is None or not shards.partial:
        return None
    number, every = shards.partial, shards.partial == len(checkpoint.survey.tensors)
    share = "1 tensor is" if number == 1 else f"{'all' if every else f'{number:,}'} tensors are"
    message = f"{share} what {shards.owner} had of larger ones, spread over {shards.over}: {_TOGETHER}"
    ranks = max((mesh.ranks for mesh in shards.meshes), default=0)
    return Part("shards", "warning", message, _whole_of_ranks(checkpoint, folder, ranks) if folder else "")


def _whole_of_ranks(checkpoint: Checkpoint, folder: str, ranks: int) -> str:
    """Return the path of what all ranks saved, by the names beside a file; "" if these do not say it.

    It is the folder, or the pattern of the files where other runs saved there as well. No other file is opened.
    """
    from .ranks.names import numbered_sets, rank_sets

    name = os.path.basename(checkpoint.path)
    names = os.listdir(folder)
    sets = rank_sets(names)
    own = next((files for files in sets if name in files.files.values()), None)
    if own is None:
        numbered = numbered_sets(names)
        together = any(name in files.files.values() and len(files.files) == ranks for files in numbered)
        return folder if together else ""
    worlds = {files.world for files in sets}
    # Files of other ranks are of other saves.
    if len(worlds) == 1 and (own.world or all(files.files.keys() == own.files.keys() for files in sets)):
        return folder
    return os.path.join(folder, own.pattern) if own.world and len(own.files) > 1 else ""


def _shard(checkpoint: Checkpoint) -> Part | None:
    """Return what one of several shards is, by its name."""
    shard = _SHARD.search(os.path.basename(checkpoint.path))
    if shard is None or int(shard[2]) < 2:
        return None
    message = f"it is shard {int(shard[1])} of {int(shard[2])}: the rest of the checkpoint is in its folder"
    return Part("shard", "note", message, folder_of(checkpoint.path), cut=False)

"""Recognise a file that is one part of a larger checkpoint, and find the folder that holds the whole; recognise weights
without values, as one rank of DeepSpeed ZeRO-3 saves them without gathering.

With ZeRO-3, each rank holds a slice of every parameter, and the parameter itself has the shape (0,) while unused
(``free_param`` in deepspeed/runtime/zero/partition_parameters.py). Buffers and small parameters stay whole
(``stage3_param_persistence_threshold``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from math import prod
from typing import Any, Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..base.errors import CkptoolError, UnreadableError
from ..base.lazy import regex
from ..base.prefixes import adapter_keys
from ..base.records import NamedTuple
from ..base.steps import as_step, folder_of
from ..base.text import join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import values_of
from ..checkpoint.sharding import ShardingSummary, has_sharded, read_mesh_ranks, sharding_summary
from ..checkpoint.tensors import TensorReader
from ..files.archives import is_address, parsed_object
from ..files.folders import Folder, open_folder
from ..files.sources import FolderSource
from .names.numbered import NUMBERED, RANKS, SHARDS, SLICES, NamedParts, join_advice, marks, named_parts

#: The most bytes of a ``params.json``.
_LONGEST_JSON: Final = 1 << 20
#: The number of a shard as huggingface_hub writes it: such files hold different tensors.
_SHARD: Final = regex(r"-\d{5}-of-\d{5}")
#: The folder of one Megatron-LM rank.
_MEGATRON_RANK: Final = regex(r"mp_rank_\d")
#: An argument of every run of Megatron-LM, which hardly any other file names.
_MEGATRON_ARGUMENT: Final = "num_attention_heads"
#: Root keys of DeepSpeed's model and optimizer files.
_DEEPSPEED: Final = frozenset(("ds_version", "dp_world_size", "optimizer_state_dict"))
_ZERO: Final = frozenset(("partition_count", "fp32_flat_groups", "single_partition_of_fp32_groups"))
#: Parameters of the experts of a DeepSpeed model, which it saves in a file for each expert.
_EXPERTS: Final = ".deepspeed_experts."
_TOGETHER: Final = "the files of all ranks together are the checkpoint"
_FOLDER: Final = "the folder with the files of all ranks is the checkpoint"

#: How a job saves whole tensors, with FSDP1, FSDP2 or tensor parallelism.
WHOLE: Final = (
    "have the job save whole tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
    " of torch.distributed.checkpoint.state_dict"
)


class Part(NamedTuple):
    """A file that is one part of a larger checkpoint. ``code``, ``level`` and ``message`` are the fields of its
    finding.

    - ``folder``: the path of the whole, "" if the folder of the file is not known to be the whole.
    - ``cut``: the file alone makes no usable model, so outputs made from it alone are useless.
    - ``others``: real paths of the other parts, if no part is missing and together they have all tensors.
    - ``tensors_whole``: each tensor in the file is complete.
    - ``alone``: other parts are missing, by the names in the folder, or the folder of the whole is unknown.
    """

    code: str
    level: str
    message: str
    folder: str
    cut: bool = True
    others: tuple[str, ...] = ()
    tensors_whole: bool = False
    alone: bool = False

    @property
    def whole(self) -> str:
        """How to get the whole checkpoint if no folder is known to hold it."""
        return WHOLE if self.code == "shards" else "put it back into its folder, next to the files of all other ranks"


def part_of(checkpoint: Checkpoint) -> Part | None:
    """Return the larger checkpoint that a file belongs to, or None for a complete file. Opens one other file if the
    names do not say whether the parts hold slices of the same tensors. Edits do not complete a part."""
    if is_address(checkpoint.path) or checkpoint.source.identity is None:
        return _spread(checkpoint, None)
    folder = open_folder(folder_of(checkpoint.path))
    return (
        _deepspeed(checkpoint, folder)
        or _megatron(checkpoint)
        or _spread(checkpoint, folder)
        or _named(checkpoint, folder)
    )


def _deepspeed(checkpoint: Checkpoint, folder: Folder) -> Part | None:
    graph, file = checkpoint.container.graph, os.path.basename(checkpoint.path)
    expert = _EXPERTS in "\n".join(graph.strings)
    if _DEEPSPEED.isdisjoint(graph.strings) and not expert and not file.endswith("model_states.pt"):
        return None
    from . import folder_format
    from .names.deepspeed import EXPERT, LAYER, OPTIMIZER, RANK_MODEL, items_in, number_in

    values, names = values_of(graph, graph.root), folder.names()
    message, code, lost, whole = "", "rank-part", False, True
    own = values_of(graph, values["optimizer_state_dict"]) if "optimizer_state_dict" in values else {}
    module = values_of(graph, values["module"]) if "ds_version" in values and "module" in values else {}
    buffers = {graph.nodes[ref] for ref in items_in(graph, values, "buffer_names")}
    reader, layer, name = TensorReader(graph), LAYER.match(file), OPTIMIZER.match(file)
    tensors = [tensor for name, ref in module.items() if name not in buffers and (tensor := reader.tensor(ref))]

    def count(*kinds: re.Pattern[str]) -> int:
        return min(sum(kind.match(other) is not None for other in names) for kind in kinds)

    if not _ZERO.isdisjoint(own):
        ranks, stage = number_in(graph, own, "partition_count"), number_in(graph, own, "zero_stage")
        message = f"it holds the optimizer partition of {f'rank {name[1]}' if name else 'one rank'}"
        message += f"{f' of {ranks:,}' if ranks else ''} from DeepSpeed ZeRO{f' stage {stage}' if stage else ''}"
        message, lost = f"{message}: flat vectors without parameter names", count(OPTIMIZER) < ranks
    elif tensors and all(0 in tensor.shape for tensor in tensors):
        message = "its parameters are empty: with ZeRO stage 3 the weights are in the optimizer's files"
        code, lost = "weights-elsewhere", count(OPTIMIZER, RANK_MODEL) < number_in(graph, values, "dp_world_size", 1)
    elif tensors and (ranks := number_in(graph, values, "mp_world_size")) > 1:
        message = f"it holds the model part of one of {ranks:,} model-parallel ranks of DeepSpeed"
    else:
        if tensors and number_in(graph, values, "num_experts") and not any(_EXPERTS in str(name) for name in module):
            message = "it lacks the experts of the model, which DeepSpeed saves in files of their own"
        elif checkpoint.state_dicts and expert and all(_EXPERTS in name for name in values):
            message = "it holds one expert of a model that DeepSpeed saved"
        elif checkpoint.state_dicts and layer is not None and not layer[2]:
            message = "it holds one layer of a model that DeepSpeed saved"
        whole = bool(message) and folder_format(folder) is not None and (not tensors or any(map(EXPERT.match, names)))
    place = folder.path if whole else ""
    return Part(code, "warning", f"{message}; {_FOLDER}", place, alone=lost or not whole) if message else None


def _megatron(checkpoint: Checkpoint) -> Part | None:
    if _MEGATRON_ARGUMENT not in checkpoint.container.graph.strings:
        return None
    from .names.megatron import arguments, number

    own = arguments(checkpoint.container.graph)
    tensor, pipeline = (number(own, f"{way}_model_parallel_size") for way in ("tensor", "pipeline"))
    folder = os.path.dirname(os.path.realpath(checkpoint.path))
    named = _MEGATRON_RANK.match(os.path.basename(folder)) is not None
    if tensor * pipeline < 2 or not (named or _lacks_weights(checkpoint, own, tensor, pipeline)):
        return None
    message = f"it holds the model part of one of {tensor * pipeline:,} ranks of Megatron-LM; {_FOLDER}"
    if not named:  # the file was moved or renamed
        return Part("rank-part", "warning", message, "", alone=True)
    # Prefer the path as typed, if it contains the folders.
    above = folder_of(folder_of(checkpoint.path))
    if os.path.realpath(above) != os.path.dirname(folder):
        above = os.path.dirname(folder)
    return Part("rank-part", "warning", message, above)


#: Megatron-LM's tables with one row per token, and the layer number in a tensor name.
_VOCABULARY: Final = regex(r"(?:word_embeddings|output_layer|lm_head)\.weight\Z")
_LAYER: Final = regex(r"(?:^|\.)layers\.(\d{1,6})\.")


def _lacks_weights(checkpoint: Checkpoint, own: Mapping[str, object], tensor: int, pipeline: int) -> bool:
    """Return whether a Megatron-LM file has fewer rows or layers than its arguments say. Its path does not matter."""
    from .names.megatron import number

    entries = Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container).lenient().survey.tensors
    layers = {int(match[1]) for entry in entries if (match := _LAYER.search(str(entry.key)))}
    if not layers:
        return False
    rows = [entry.tensor.shape[:1] for entry in entries if _VOCABULARY.search(str(entry.key))]
    vocabulary = (number(own, "padded_vocab_size"),)
    sliced = tensor > 1 and (vocabulary not in rows or not rows)
    return sliced or (pipeline > 1 and len(layers) < number(own, "num_layers"))


def shards_of(checkpoint: Checkpoint) -> ShardingSummary | None:
    """Return a summary of how the tensors are sharded over ranks, or None if they are not."""
    if not has_sharded(checkpoint.graph):
        return None
    survey = checkpoint.survey
    if not checkpoint.added:
        read_mesh_ranks(checkpoint.container, survey.reader)
    return sharding_summary(survey.reader, survey.tensors)


def _spread(checkpoint: Checkpoint, folder: Folder | None) -> Part | None:
    shards = shards_of(checkpoint)
    if shards is None or not shards.partial:
        return None
    number, every = shards.partial, shards.partial == len(checkpoint.survey.tensors)
    share = "1 tensor is a shard" if number == 1 else f"{'all' if every else f'{number:,}'} tensors are shards"
    whole = _whole_of_ranks(checkpoint, folder, shards.expected) if folder is not None else ""
    alone = folder is not None and not whole
    message = f"{share} that {shards.owner} saved, spread over {shards.over}: {_TOGETHER}"
    if alone:
        absent = list(map(str, sorted(shards.members.difference(shards.ranks))))
        others = f"{'rank' if len(absent) == 1 else 'ranks'} {join_limited(absent)}" if absent else "the other ranks"
        message += f"; those of {others} were not found beside it"
    return Part("shards", "warning", message, whole, alone=alone)


def _whole_of_ranks(checkpoint: Checkpoint, folder: Folder, ranks: int) -> str:
    """Return the path of all ranks' files: the folder, or a pattern if files of other saves are in it; "" if the names
    do not prove it. No other file is opened."""
    from .fsdp.meshes import pattern_among
    from .names.numbered import numbered_sets, rank_sets, torch_files

    name = os.path.basename(checkpoint.path)
    names = folder.names()
    own = [files for files in rank_sets(names) if name in files.files.values() and len(files.files) >= files.world]
    own += [files for files in numbered_sets(names) if name in files.files.values() and len(files.files) == ranks]
    if not own or len(own[0].files) < (own[0].world or ranks):
        return ""
    files = [*own[0].files.values()]
    worlds = {every.world for every in rank_sets(names)}
    if {*torch_files(names)} <= {*files} or (own[0].world and worlds == {own[0].world}):
        return folder.path
    return os.path.join(os.path.dirname(checkpoint.path), pattern_among(files, names))


def _named(checkpoint: Checkpoint, folder: Folder) -> Part | None:
    """Recognise a part by the number in its file name and by the files next to it; None for any other file."""
    name = os.path.basename(checkpoint.path)
    if not any(marks(name)) or not checkpoint.state_dicts:
        return None
    parts = named_parts(name, folder.names())
    ranks = _llama_ranks(checkpoint, folder) if parts is None and name.startswith("consolidated.00") else 1
    if ranks > 1:
        absent = [name.replace("00", f"{number:02d}", 1) for number in range(1, ranks)]
        parts = NamedParts({0: name}, range(ranks), SLICES, absent)
    others = [file for file in parts.files.values() if file != name] if parts is not None else []
    names = (f"{entry.key}" for entry in checkpoint.survey.tensors)
    if parts is not None and parts.kind == RANKS and adapter_keys(names):
        return None  # the matrices of a LoRA adapter have the rank in its name
    if parts is not None and others and parts.kind != SLICES and not _SHARD.search(name):
        parts = _by_content(parts, checkpoint, folder, others[0])
    if parts is None:
        return None
    number = next(number for number, file in parts.files.items() if file == name)
    message = f"it is part {number - parts.every[0] + 1:,} of {len(parts.every):,} of a checkpoint"
    message += f"; beside it: {join_limited(others, most=3)}" if others else ""
    missing = parts.missing
    message += f"; not there: {join_limited(missing, most=3)}" if missing else ""
    from . import folder_format

    whole = folder_format(folder) is not None
    message += f"; {'the folder is the checkpoint' if whole else join_advice(parts)}"
    joined = parts.kind == SHARDS and not missing
    level = "note" if joined else "warning"
    paths = tuple(os.path.realpath(folder.join(file)) for file in others) if joined else ()
    place = folder.path if whole else ""
    whole_tensors = parts.kind == SHARDS
    return Part("part", level, message, place, False, paths, tensors_whole=whole_tensors, alone=bool(missing))


def _by_content(parts: NamedParts, checkpoint: Checkpoint, folder: Folder, name: str) -> NamedParts | None:
    """Decide how parts relate by the metadata of another one, ``name``; return None if each part is complete."""
    from . import read_container

    try:
        source = folder.open(name)
        with closing(source), Checkpoint.of(source.name, source, read_container(source)) as other:
            here, there = ({entry.path: entry.tensor for entry in item.survey.tensors} for item in (checkpoint, other))
            if here.keys().isdisjoint(there):
                return parts._replace(kind=SHARDS)
            copies = here.keys() == there.keys() and are_copies(checkpoint, other)
            if here.keys() == there.keys() and (parts.kind == NUMBERED or copies != (parts.kind == SHARDS)):
                return None  # shards have other names of tensors: these are files such as those of epochs
    except CkptoolError:
        pass  # an unreadable file proves nothing
    return parts._replace(kind=SLICES) if parts.kind in (RANKS, NUMBERED) else parts


def are_copies(one: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two files' tensors, in path order, have equal shapes, sizes and recorded checksums."""
    sums = [
        {record.key: (record.crc, record.span.size) for record in item.container.records() if record.key and record.crc}
        for item in (one, other)
    ]
    pairs = zip(*(sorted(item.survey.tensors, key=lambda entry: entry.path) for item in (one, other)))
    for a, b in ((own.tensor, its.tensor) for own, its in pairs):
        own = sums[0].get(a.storage)
        if a.shape != b.shape or own is None or own != sums[1].get(b.storage):
            return False
    return True


def _llama_ranks(checkpoint: Checkpoint, folder: Folder) -> int:
    """Return the number of files in which Meta saved the model; 1 if the shapes in one file do not say. Each file has
    some heads, as rows of ``wq``, which is square unless ``params.json`` says otherwise."""
    shapes = {entry.key: entry.tensor.shape for entry in checkpoint.survey.tensors}
    norm = shapes.get("norm.weight", ())
    rows = shapes.get("layers.0.attention.wq.weight", ())
    if len(norm) != 1 or len(rows) != 2 or not 0 < rows[0] < norm[0]:
        return 1
    size = norm[0]
    with suppress(UnreadableError, ValueError, TypeError, KeyError, ZeroDivisionError):
        values: Any = parsed_object(folder.read("params.json", _LONGEST_JSON)) or {}
        heads, each = int(values["n_heads"]), values.get("head_dim")
        size = heads * int(each or values["dim"] // heads) or size
    return size // rows[0] if size % rows[0] == 0 else 1


#: The next step for empty weights. No edit of the file can help, but DeepSpeed's folder has all slices.
GATHER: Final = as_step(
    "save again on all ranks, with trainer.save_model(), or convert the folder global_stepN of DeepSpeed"
)
_EMPTY: Final = (0,)
Shapes: TypeAlias = dict[str, tuple[int, ...]]
_ADAPTER_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG, _CONFIG = "adapter_config.json", "config.json"
#: Other tensors of a module that have one element per row of its weight.
_BESIDE: Final = ("bias", "running_mean", "running_var", "weight_g", "weight_scale")


def empty_weights(checkpoint: Checkpoint) -> str:
    """Return a message about weights that have no values, or "" if they have values. Tensors of size 0 are legitimate
    as buffers, and as parameters of a module whose tensors all have size 0. They contradict the model if every weight
    is empty, if other tensors of the module have elements, or if most weights are empty."""
    if checkpoint.traits.assembled:
        return ""  # the ranks recorded the shapes of the whole tensors
    survey = checkpoint.survey
    if survey.tensors and not any(entry.tensor.shape == _EMPTY for entry in survey.tensors):
        return ""
    names = _names_beside(checkpoint)
    adapter = _ADAPTER_CONFIG in names or os.path.basename(checkpoint.path) in _ADAPTER_FILES
    if not survey.tensors:
        return "the adapter is empty: it has no tensor" if adapter else ""
    if (part := part_of(checkpoint)) is not None and part.code == "weights-elsewhere":
        return ""  # the slices are in other files of the DeepSpeed folder
    state_dicts: dict[int, Shapes] = {}
    for entry in survey.tensors:
        dtype = BY_NAME.get(entry.tensor.dtype)
        if entry.state_dict >= 0 and dtype is not None and dtype.floating:
            state_dicts.setdefault(entry.state_dict, {})[entry.key] = entry.tensor.shape
    found = (_emptied(shapes, adapter or _CONFIG in names, adapter) for shapes in state_dicts.values())
    return next((message for message in found if message), "")


def _emptied(shapes: Shapes, sure: bool, adapter: bool) -> str:
    """Return the message about one state dict, or "". ``sure``: no weight of this folder may be empty."""
    weights = [name for name in shapes if name.rpartition(".")[2] == "weight" or adapter_keys([name])]
    empty = [name for name in weights if shapes[name] == _EMPTY]
    cause = "it was saved on one rank of DeepSpeed ZeRO-3, without gathering the weights"
    if empty and all(shape == _EMPTY for shape in shapes.values()):
        what = "the adapter is empty: all its tensors have" if adapter else "it holds no weights: every tensor has"
        return f"{what} the shape [0]; {cause}"
    bad = [name for name in empty if sure or adapter_keys([name]) or any(_sizes_beside(name, shapes))]
    if not bad and len(empty) * 2 > len(weights):
        bad = [name for name in empty if not _sizes_beside(name, shapes)]  # nn.LayerNorm(0) has an empty bias
    if not bad:
        return ""
    count = f"{len(bad):,} of {pluralize(len(weights), 'weight')}"
    return f"{count} have the shape [0]: {join_limited(bad, most=3)}; {cause}"


def _sizes_beside(name: str, shapes: Shapes) -> list[int]:
    module = name.rpartition(".")[0]
    return [prod(shapes[key]) for other in _BESIDE if (key := f"{module}.{other}") in shapes]


def _names_beside(checkpoint: Checkpoint) -> Collection[str]:
    if isinstance(checkpoint.source, FolderSource):
        return {os.path.basename(path) for path in checkpoint.source.beside}
    if is_address(checkpoint.path):
        return ()
    folder = open_folder(folder_of(checkpoint.path))
    names = [name for name in (_CONFIG, _ADAPTER_CONFIG) if folder.size(name) is not None]
    if not names:
        return ()
    from .names.hf import weights_of  # only if there is a configuration

    return names if weights_of([os.path.basename(checkpoint.path)]) is not None else ()

"""Read DeepSpeed's per-rank files: the flat tensors of an optimizer file, the shapes in a model file.

Sources: DeepSpeed, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and ``runtime/bf16_optimizer.py``
(``state_dict``), ``runtime/engine.py`` (``_save_checkpoint``). Stage 3 files have ``fp32_flat_groups``, others
``single_partition_of_fp32_groups``. Files of BF16_Optimizer do not record the stage.

``unlike`` compares 16-bit weights with the optimizer's 32-bit weights, rounded.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Final
from zlib import crc32

from ...base.errors import MalformedError, NotACheckpointError
from ...base.records import NamedTuple
from ...base.text import quoted, words
from ...checkpoint.objects import callable_name, list_items, mapping, named_attributes, values_of
from ...checkpoint.tensors import Tensor
from ...pickles.nodes import Call, Graph, Ref
from ..joined.container import RankFile, rows, slice_of
from ..joined.contents import Digests
from ..names.deepspeed import whole_number
from ..pieces.chunks import Rows
from ..pieces.copies import Copy
from .slices import Shapes

#: Struct formats of step dtypes.
_NUMBERS: Final = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}

#: Root entries of a model file that only describe the partitions. They are left out of a joined checkpoint.
OF_PARTS: Final = words("""
    buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params checkpoint_parallel_dimensions
    dp_world_size mp_world_size
""")

#: The places of parameters in a rank's flat tensor: name -> (first element, number of elements).
Addresses = Mapping[str, tuple[int, int]]


class ZeroState(NamedTuple):
    """One rank's optimizer file.

    - ``flats``: the 32-bit parameters, one vector per group.
    - ``moments``: for each group, the optimizer states of the same length, by name.
    - ``in_parts``: each parameter is cut over all ranks, as in stage 3.
    - ``counts``: the number of ranks over which each group is cut.
    - ``addresses``: the places of each group's parameters, {} if the file does not record them.
    - ``save``: facts that all files of one save share.
    - ``checksums``: the recorded CRC-32 of each tensor in the partition, 0 if not recorded.
    """

    name: str
    in_parts: bool
    stage: int
    flats: tuple[Rows, ...]
    moments: tuple[Mapping[str, Rows], ...]
    counts: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...]
    addresses: tuple[Addresses, ...]
    round_robin: bool
    steps: tuple[float, ...]
    version: str
    save: Mapping[str, object]
    checksums: tuple[int, ...]


class ModelState(NamedTuple):
    """A model file: the ``values`` at its root, and the description of the partitions.

    - ``groups``: the shapes of the parameters, in flat tensor order.
    - ``frozen``: the shapes of frozen parameters; ``fragments``: this rank's parts, with their recorded CRC-32 in
      ``checksums``.
    - ``aliases``: names of tied parameters, mapped to the kept names.
    - ``whole``: the buffers, which every file has in full.
    - ``save``: facts that all files of one save share.
    """

    name: str
    values: Mapping[str, Ref]
    groups: tuple[Shapes, ...]
    frozen: Shapes
    fragments: Mapping[str, Rows]
    aliases: Mapping[str, str]
    buffers: Collection[str]
    save: Mapping[str, object]
    checksums: tuple[int, ...]
    whole: Mapping[str, tuple[Tensor, Copy]]

    def number(self, name: str) -> int:
        """Return a number of the run, or 0 if it is missing."""
        value = self.save.get(name)
        return value if isinstance(value, int) else 0


def read_optimizer(file: RankFile) -> ZeroState:
    """Read one rank's optimizer file. Raises MalformedError for any other file, NotACheckpointError for partitions that
    cannot be joined."""
    graph = file.graph
    root = values_of(graph, graph.root)
    own = _values(graph, root, "optimizer_state_dict")
    if "ds_zero_partition_groups" in own:
        what = "its parameters are cut over groups of ranks (ds_zero_partition_groups), which are not joined"
        raise NotACheckpointError(what, kind="deepspeed", next="deepspeed/checkpoint/ds_to_universal.py joins them")
    in_parts = "fp32_flat_groups" in own
    name = "fp32_flat_groups" if in_parts else "single_partition_of_fp32_groups"
    partitions = _list(graph, own.get(name, -1))
    if not partitions:
        raise MalformedError("it has no partitions of parameters in 32 bits", where=file.name)
    flats = tuple(_flat(file, ref, f"{name}[{number}]") for number, ref in enumerate(partitions))
    base = base_optimizer(graph, own)
    states = group_states(graph, base)
    moments: list[dict[str, Rows]] = [{} for _ in flats]
    steps = []
    checksums = [_checksum(file, ref) for ref in partitions]
    for number, flat in enumerate(flats):
        for slot, ref in states.get(number, {}).items():
            tensor = file.reader.tensor(ref)
            if slot == "step":
                steps.append(number_of(file, ref))
            elif tensor is not None and len(tensor.shape) == 1 and _is_moment(tensor.shape[0], flat, in_parts):
                moments[number][slot] = _flat(file, ref, f"{slot} of group {number}")
                checksums.append(_checksum(file, ref))
    counts = own.get("partition_count", -1)
    each = tuple(whole_number(graph, ref) for ref in (_list(graph, counts) or (counts,)) if ref >= 0)
    config = _values(graph, _values(graph, root, "ds_config"), "zero_optimization")
    round_robin = graph.nodes[config["round_robin_gradients"]] if "round_robin_gradients" in config else False
    groups = [values_of(graph, ref) for ref in _list(graph, base.get("param_groups", -1))]
    rates = [graph.nodes[group["lr"]] for group in groups if "lr" in group]
    version = str(graph.nodes[root["ds_version"]]) if "ds_version" in root else ""
    stage = whole_number(graph, own["zero_stage"]) if "zero_stage" in own else None
    save = {
        "step": tuple(steps),
        "learning rate": tuple(rate for rate in rates if type(rate) is float),
        "DeepSpeed": version,
        "ranks": " and ".join(map(str, sorted({*each}))),
        "groups": len(flats),
        "dtypes": tuple(flat.dtype.name for flat in flats),
        "states": tuple(f"{slot} of {part.dtype.name}" for of in moments for slot, part in sorted(of.items())),
        "zero_stage": "none" if stage is None else stage,
        **_configuration(file, root),
    }
    return ZeroState(
        file.name,
        in_parts,
        stage or 0,
        flats,
        tuple(moments),
        each,
        tuple(_integers(graph, ref) for ref in _list(graph, own.get("param_alignment_paddings", -1))),
        tuple(_addresses(graph, ref) for ref in _list(graph, own.get("param_slice_mappings", -1))),
        round_robin is True,
        tuple(steps),
        version,
        save,
        tuple(checksums),
    )


def _configuration(file: RankFile, root: Mapping[str, Ref]) -> dict[str, str]:
    ref = root.get("ds_config", -1)
    if ref < 0 or mapping(file.graph, ref) is None:
        return {}
    digest = Digests(file.reader).digest(ref)
    return {"ds_config": f"CRC-32 {crc32(digest):08x}"} if isinstance(digest, bytes) else {}


def base_optimizer(graph: Graph, own: Mapping[str, Ref]) -> dict[str, Ref]:
    """Return the wrapped optimizer's state in torch.optim's form, or {} if it has another form."""
    inner = own.get("base_optimizer_state", own.get("optimizer_state_dict", -1))
    base = values_of(graph, inner) if inner >= 0 else {}
    return base if {"state", "param_groups"} <= base.keys() else {}


def group_states(graph: Graph, base: Mapping[str, Ref]) -> dict[int, dict[str, Ref]]:
    """Return the states of the flat tensors by group number."""
    items = mapping(graph, base["state"]) or [] if "state" in base else []
    return {number: values_of(graph, ref) for key, ref in items if type(number := graph.nodes[key]) is int}


def read_model(file: RankFile) -> ModelState:
    """Read a model file; raise MalformedError for any other file."""
    graph = file.graph
    values = values_of(graph, graph.root)
    if "module" not in values or mapping(graph, values["module"]) is None or "param_shapes" not in values:
        lacking = "module" if "module" not in values else "param_shapes"
        raise MalformedError(f"it has no {lacking}: it is not a file of a model of ZeRO", where=file.name)
    frozen, module = _values(graph, values, "frozen_param_fragments"), values_of(graph, values["module"])
    groups = parameter_shapes(file, values["param_shapes"])
    frozen_shapes = _shapes(file, values["frozen_param_shapes"]) if "frozen_param_shapes" in values else {}
    aliases = {name: graph.nodes[ref] for name, ref in _values(graph, values, "shared_params").items()}
    buffers = [name for ref in _list(graph, values.get("buffer_names", -1)) if type(name := graph.nodes[ref]) is str]
    facts = ("global_steps", "skipped_steps", "dp_world_size", "ds_version")
    plain = {name: graph.nodes[values[name]] for name in facts if name in values}
    described = crc32(repr((groups, frozen_shapes)).encode())
    whole = {}
    for name in buffers:
        tensor = file.reader.tensor(module[name]) if name in module else None
        if tensor is not None:
            with suppress(MalformedError):
                whole[name] = tensor, slice_of(file, module[name]).copy
    return ModelState(
        file.name,
        values,
        groups,
        frozen_shapes,
        {name: rows(file, ref) for name, ref in frozen.items()},
        {name: kept for name, kept in aliases.items() if type(kept) is str},
        buffers,
        {
            **{name: value for name, value in plain.items() if isinstance(value, int | str)},
            **_configuration(file, values),
            "tensors": len(module),
            "names and shapes": f"CRC-32 {described:08x}",
        },
        tuple(_checksum(file, ref) for ref in frozen.values()),
        whole,
    )


def parameter_shapes(file: RankFile, ref: Ref) -> tuple[Shapes, ...]:
    """Return the parameter shapes of each group; raise MalformedError if they are invalid."""
    groups = [ref] if mapping(file.graph, ref) is not None else _list(file.graph, ref)
    return tuple(_shapes(file, group) for group in groups)


def _is_moment(count: int, flat: Rows, in_parts: bool) -> bool:
    """Return whether a state has one element per element of a flat tensor. With stages 1 and 2, the flat tensor may be
    shorter, because only its padding is stripped."""
    return count == flat.shape[0] or (count > flat.shape[0] and not in_parts)


def _checksum(file: RankFile, ref: Ref) -> int:
    tensor = file.reader.tensor(ref)
    return (file.container.stored(tensor.storage).crc or 0) if tensor is not None and tensor.storage else 0


def _flat(file: RankFile, ref: Ref, where: str) -> Rows:
    try:
        flat = rows(file, ref)
    except MalformedError as error:
        error.what = f"{where}: {error.what}"
        raise
    if len(flat.shape) != 1:
        raise MalformedError(f"{where} is not a vector", where=file.name)
    return flat


def _values(graph: Graph, values: Mapping[str, Ref], name: str) -> dict[str, Ref]:
    return values_of(graph, values[name]) if name in values else {}


def _list(graph: Graph, ref: Ref) -> Sequence[Ref]:
    return list_items(graph.nodes[ref]) if ref >= 0 else ()


def _integers(graph: Graph, ref: Ref) -> tuple[int, ...]:
    values = [graph.nodes[item] for item in _list(graph, ref)]
    return tuple(value for value in values if type(value) is int and value >= 0)


def _shapes(file: RankFile, ref: Ref) -> dict[str, tuple[int, ...]]:
    """Return parameter shapes by name, each a ``torch.Size``; raise MalformedError for anything else."""
    graph = file.graph
    shapes = {}
    for name, value in values_of(graph, ref).items():
        node = graph.nodes[value]
        if isinstance(node, Call) and callable_name(graph, node.func) == "torch.Size":
            value = next(iter(list_items(graph.nodes[node.args])), value)
        shape = _integers(graph, value)
        if len(shape) != len(_list(graph, value)) or prod(shape) >= 1 << 62:
            raise MalformedError(f"the shape of {quoted(name)} is not one", where=file.name)
        shapes[name] = shape
    return shapes


def _addresses(graph: Graph, ref: Ref) -> Addresses:
    """Return the parameter fragments of a flat tensor: ``deepspeed.utils.tensor_fragment.fragment_address``."""
    addresses = {}
    for name, value in values_of(graph, ref).items():
        fields = named_attributes(graph, value)
        start, count = (whole_number(graph, fields[field]) if field in fields else -1 for field in ("start", "numel"))
        addresses[name] = start, count
    return addresses


def number_of(file: RankFile, ref: Ref) -> float:
    """Return a number stored in the pickle or in a tensor, or -1 for anything else."""
    node = file.graph.nodes[ref]
    if type(node) is int or type(node) is float:
        return node
    if file.reader.tensor(ref) is None:
        return -1
    dtype, shape, source, begin = rows(file, ref)
    if dtype.name not in _NUMBERS or prod(shape) != 1:
        return -1
    data = source.read(begin, dtype.itemsize)
    return float(struct.unpack(_NUMBERS[dtype.name], data)[0]) if len(data) == dtype.itemsize else -1


#: Elements that are compared in one place.
SAMPLE: Final = 64
#: One in this many elements may differ: a program may have changed some since the last step.
MOST_UNLIKE: Final = 16
#: Struct formats for the bits of a dtype.
_BITS: Final = {"float32": "I", "bfloat16": "H", "float16": "H"}


def unlike(wide: Rows, at: int, narrow: Rows, there: int, count: int) -> tuple[int, int]:
    """Compare up to ``SAMPLE`` elements from ``at`` and ``there`` on; return (unequal elements, compared elements).
    Elements of ``wide`` are rounded to the dtype of ``narrow``. Returns (0, 0) for other dtypes than 32 and 16 bits."""
    count = min(count, SAMPLE)
    if wide.dtype.name not in _BITS or narrow.dtype.name not in _BITS:
        return 0, 0
    first = _read(wide, at, count)
    second = _read(narrow, there, count)
    if len(first) != count * wide.dtype.itemsize or len(second) != count * narrow.dtype.itemsize:
        return 0, 0
    expected = rounded(first, wide.dtype.name, narrow.dtype.name)
    if expected is None:
        return 0, 0
    own = struct.unpack(f"<{count}{_BITS[narrow.dtype.name]}", second)
    name = narrow.dtype.name
    return sum(one != two and not (_is_nan(one, name) and _is_nan(two, name)) for one, two in zip(expected, own)), count


def _read(rows: Rows, at: int, count: int) -> bytes:
    width = rows.dtype.itemsize
    return rows.source.read(rows.begin + at * width, count * width)


def rounded(data: bytes, dtype: str, target: str) -> tuple[int, ...] | None:
    """Return the bits of elements rounded to another dtype, to nearest, ties to even; None if it is not narrower."""
    count = len(data) // (4 if dtype == "float32" else 2)
    bits: tuple[int, ...] = struct.unpack(f"<{count}{_BITS[dtype]}", data)
    if dtype == target:
        return bits
    if dtype != "float32":
        return None
    if target == "bfloat16":
        return tuple(
            one >> 16 | 0x40 if _is_nan(one, dtype) else (one + 0x7FFF + (one >> 16 & 1)) >> 16 for one in bits
        )
    return tuple(map(_half, struct.unpack(f"<{count}f", data)))


def _half(value: float) -> int:
    try:
        bits: int = struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00
    return bits


def _is_nan(bits: int, dtype: str) -> bool:
    magnitude = bits & (0x7FFFFFFF if dtype == "float32" else 0x7FFF)
    return magnitude > {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[dtype]

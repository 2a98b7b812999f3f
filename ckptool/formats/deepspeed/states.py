"""Read DeepSpeed's per-rank files: the flat tensors of an optimizer file, the shapes in a model file.

Sources: DeepSpeed, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and ``runtime/bf16_optimizer.py``
(``state_dict``), ``runtime/engine.py`` (``_save_checkpoint``). Stage 3 files have ``fp32_flat_groups``, others
``single_partition_of_fp32_groups``. Files of BF16_Optimizer do not record the stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod
from typing import Final
from zlib import crc32

from ...base.errors import MalformedError, NotACheckpointError
from ...base.records import NamedTuple
from ...base.text import quoted, words
from ...checkpoint.objects import callable_name, list_items, mapping, named_attributes, values_of
from ...pickles.nodes import Call, Graph, Ref
from ...values.numeric import ROUNDED, to_numbers
from ..joined import Digests, RankFile, rows
from ..names.deepspeed import items_in, whole_number
from ..pieces import Chunk, Rows

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
    save: Mapping[str, object]

    @property
    def checksums(self) -> tuple[int, ...]:
        """The recorded CRC-32 of each tensor in the partition, 0 if not recorded."""
        return tuple(part.crc for parts in (self.flats, *(of.values() for of in self.moments)) for part in parts)


class ModelState(NamedTuple):
    """A model file: the ``values`` at its root, and the description of the partitions.

    - ``groups``: the shapes of the parameters, in flat tensor order.
    - ``frozen``: the shapes of frozen parameters; ``fragments``: this rank's parts.
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
    whole: Mapping[str, Rows]

    @property
    def checksums(self) -> tuple[int, ...]:
        """The recorded CRC-32 of each frozen part, 0 if not recorded."""
        return tuple(part.crc for part in self.fragments.values())

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
    partitions = items_in(graph, own, name)
    if not partitions:
        raise MalformedError("it has no partitions of parameters in 32 bits", where=file.name)
    flats = tuple(_flat(file, ref, f"{name}[{number}]") for number, ref in enumerate(partitions))
    base = optimizer_in(graph, own)
    states = states_of(graph, base)
    moments: list[dict[str, Rows]] = [{} for _ in flats]
    steps = []
    for number, flat in enumerate(flats):
        for slot, ref in states.get(number, {}).items():
            tensor, size = file.reader.tensor(ref), flat.shape[0]
            count = tensor.numel if tensor is not None and len(tensor.shape) == 1 else -1
            # With stages 1 and 2, the padding of the parameters may be stripped.
            if slot == "step":
                steps.append(number_of(file, ref))
            elif count == size or (count > size and not in_parts):
                moments[number][slot] = _flat(file, ref, f"{slot} of group {number}")
    counts = items_in(graph, own, "partition_count") or [own[name] for name in ("partition_count",) if name in own]
    each = tuple(whole_number(graph, ref) for ref in counts)
    config = _values(graph, _values(graph, root, "ds_config"), "zero_optimization")
    round_robin = graph.nodes[config["round_robin_gradients"]] if "round_robin_gradients" in config else False
    groups = [values_of(graph, ref) for ref in items_in(graph, base, "param_groups")]
    rates = [graph.nodes[group["lr"]] for group in groups if "lr" in group]
    stage = whole_number(graph, own["zero_stage"]) if "zero_stage" in own else None
    save = {
        "step": tuple(steps),
        "learning rate": tuple(rate for rate in rates if type(rate) is float),
        "DeepSpeed": str(graph.nodes[root["ds_version"]]) if "ds_version" in root else "",
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
        tuple(_integers(graph, ref) for ref in items_in(graph, own, "param_alignment_paddings")),
        tuple(_addresses(graph, ref) for ref in items_in(graph, own, "param_slice_mappings")),
        round_robin is True,
        tuple(steps),
        save,
    )


def _configuration(file: RankFile, root: Mapping[str, Ref]) -> dict[str, str]:
    ref = root.get("ds_config", -1)
    if ref < 0 or mapping(file.graph, ref) is None:
        return {}
    digest = Digests(file.reader).digest(ref)
    return {"ds_config": f"CRC-32 {crc32(digest):08x}"} if isinstance(digest, bytes) else {}


def optimizer_in(graph: Graph, own: Mapping[str, Ref]) -> dict[str, Ref]:
    """Return the wrapped optimizer's state in torch.optim's form, or {} if it has another form."""
    inner = own.get("base_optimizer_state", own.get("optimizer_state_dict", -1))
    base = values_of(graph, inner) if inner >= 0 else {}
    return base if {"state", "param_groups"} <= base.keys() else {}


def states_of(graph: Graph, base: Mapping[str, Ref]) -> dict[int, dict[str, Ref]]:
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
    groups = shapes_in(file, values["param_shapes"])
    frozen_shapes = _shapes(file, values["frozen_param_shapes"]) if "frozen_param_shapes" in values else {}
    aliases = {name: graph.nodes[ref] for name, ref in _values(graph, values, "shared_params").items()}
    buffers = [name for ref in items_in(graph, values, "buffer_names") if type(name := graph.nodes[ref]) is str]
    facts = ("global_steps", "skipped_steps", "dp_world_size", "ds_version")
    plain = {name: graph.nodes[values[name]] for name in facts if name in values}
    whole = {}
    for name in buffers:
        if name in module and file.reader.tensor(module[name]) is not None:
            with suppress(MalformedError):
                whole[name] = rows(file, module[name])
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
            "names and shapes": f"CRC-32 {crc32(repr((groups, frozen_shapes)).encode()):08x}",
        },
        whole,
    )


def shapes_in(file: RankFile, ref: Ref) -> tuple[Shapes, ...]:
    """Return the parameter shapes of each group; raise MalformedError if they are invalid."""
    groups = [ref] if mapping(file.graph, ref) is not None else list_items(file.graph.nodes[ref])
    return tuple(_shapes(file, group) for group in groups)


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


def _integers(graph: Graph, ref: Ref) -> tuple[int, ...]:
    values = [graph.nodes[item] for item in list_items(graph.nodes[ref])]
    return tuple(value for value in values if type(value) is int and value >= 0)


def _shapes(file: RankFile, ref: Ref) -> dict[str, tuple[int, ...]]:
    graph = file.graph
    shapes = {}
    for name, value in values_of(graph, ref).items():
        node = graph.nodes[value]
        if isinstance(node, Call) and callable_name(graph, node.func) == "torch.Size":
            value = next(iter(list_items(graph.nodes[node.args])), value)
        shape = _integers(graph, value)
        if len(shape) != len(list_items(graph.nodes[value])) or prod(shape) >= 1 << 62:
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
    tensor = file.reader.tensor(ref)
    if tensor is None or tensor.numel != 1:
        return -1
    place = rows(file, ref)
    (value,) = to_numbers(place.source.read(place.begin, place.size), place.dtype.name)
    return -1 if isinstance(value, complex) else value


#: Elements that are compared in one place.
SAMPLE: Final = 64
#: One in this many elements may differ: a program may have changed some since the last step.
MOST_ODD: Final = 16


def unlike(wide: Rows, at: int, narrow: Rows, there: int, count: int) -> tuple[int, int]:
    """Compare up to ``SAMPLE`` elements from ``at`` and ``there`` on; return (unequal elements, compared elements).
    Elements of ``wide`` are rounded to the dtype of ``narrow``. Returns (0, 0) for other dtypes than 32 and 16 bits."""
    count = min(count, SAMPLE)
    dtype = narrow.dtype.name
    if dtype not in ROUNDED or wide.dtype.name not in (dtype, "float32"):
        return 0, 0
    one, other = (
        to_numbers(part.source.read(part.begin + first * part.dtype.itemsize, count * part.dtype.itemsize), name)
        for part, first, name in ((wide, at, wide.dtype.name), (narrow, there, dtype))
    )
    own = to_numbers(b"".join(ROUNDED[dtype](value) for value in one if not isinstance(value, complex)), dtype)
    return sum(a != b and (a == a or b == b) for a, b in zip(own, other)), count


#: The shapes of a group's parameters by name, in flat vector order.
Shapes = Mapping[str, tuple[int, ...]]


class Vector:
    """One vector made of tensors in several files. ``parts`` has None for a missing file; ``sizes`` has the sizes of
    all parts in elements, by which those of existing parts are replaced."""

    def __init__(self, parts: Sequence[Rows | None], sizes: Sequence[int]) -> None:
        self.parts = parts
        self.sizes = [size if part is None else part.shape[0] for part, size in zip(parts, sizes)]
        self.starts = [0, *accumulate(self.sizes)]
        #: The number of elements.
        self.size = self.starts[-1]

    def pieces(self, begin: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the pieces of a range as (offset in the range, count, part number, offset in the part). Elements beyond
        the end of the vector are in no piece."""
        at, end = begin, min(begin + size, self.size)
        number = bisect_right(self.starts, at) - 1
        while at < end:
            count = min(self.starts[number + 1], end) - at
            if count > 0:
                yield at - begin, count, number, at - self.starts[number]
                at += count
            number += 1


class Slices(NamedTuple):
    """The place of a parameter: from element ``begin`` on in the vector of its ``group``, or in the vectors of all
    ``ranks``. ``group`` is also the number of its flat tensor in each file."""

    shape: tuple[int, ...]
    group: int
    begin: int
    ranks: int = 0

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield where the parameter is in the vectors: (number of the vector, size, offset in the parameter)."""
        size = prod(self.shape)
        if not self.ranks:
            yield self.group, size, 0
            return
        part = -(-size // self.ranks)
        for rank in range(-(-size // part) if part else 0):
            yield rank, min(part, size - rank * part), rank * part

    def chunks(self, vectors: Sequence[Vector]) -> Iterator[Chunk]:
        """Yield the pieces that are in files that exist."""
        for number, size, at in self.stretches():
            for offset, count, part, local in vectors[number].pieces(self.begin, size):
                if (rows := vectors[number].parts[part]) is not None:
                    yield Chunk(((at + offset,), (count,)), rows.source, rows.begin + local * rows.dtype.itemsize)

    def is_whole(self, vectors: Sequence[Vector]) -> bool:
        """Return whether all elements are in files that exist."""
        return prod(self.shape) == sum(chunk.box[1][0] for chunk in self.chunks(vectors))


def slices_of_vectors(
    groups: Sequence[Shapes], paddings: Sequence[Sequence[int]]
) -> tuple[dict[str, Slices], list[int]]:
    """Return each parameter's place with stages 1 and 2 (one vector per group), and the size of each vector.
    ``paddings`` has the elements after each parameter of a group, or [] if there are none."""
    slices: dict[str, Slices] = {}
    used = []
    for group, shapes in enumerate(groups):
        at = 0
        padding = paddings[group] if group < len(paddings) else ()
        for number, (name, shape) in enumerate(shapes.items()):
            slices[name] = Slices(shape, group, at)
            at += prod(shape) + (padding[number] if number < len(padding) else 0)
        used.append(at)
    return slices, used


def slices_of_ranks(groups: Sequence[Shapes], ranks: int, starts: Sequence[int]) -> tuple[dict[str, Slices], int]:
    """Return each parameter's place with stage 3 (one vector per rank), and the size of the vectors. ``starts`` are the
    elements of a rank's vector at which its flat tensors begin."""
    slices: dict[str, Slices] = {}
    at = 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        slices[name] = Slices(shape, max(bisect_right(starts, at) - 1, 0), at, ranks)
        at += -(-prod(shape) // ranks)
    return slices, at

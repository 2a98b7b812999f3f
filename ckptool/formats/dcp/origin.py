"""Find the framework that wrote a DCP folder, and the step, from its values and neighbouring files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from math import prod
from typing import Final

from ...base.errors import CkptoolError
from ...base.records import NamedTuple
from ...checkpoint.container import StorageLocation
from ...checkpoint.objects import values_of
from ...checkpoint.tensors import Tensor, TensorReader
from ...files.folders import Folder
from ...pickles.nodes import Dict, Graph, Ref
from .. import read_container
from ..megatron.args import Arguments, arguments, number
from ..names.megatron import ITERATION, ranks_in_words

#: Files next to the pieces that record the step, and the frameworks that write them.
_BESIDE: Final = {"common.pt": "Megatron-LM", "meta.pt": "Lightning"}
#: Paths of a step value, and the framework that stores it there ("" if several do). Sources: torchtitan,
#: ``components/checkpoint.py`` and ``train.py``.
_PLACES: Final = {
    ("train_state", "step"): "torchtitan",
    ("global_step",): "",
    ("step",): "",
    ("iteration",): "",
}
#: Integer dtypes and their sizes in bytes.
_WHOLE: Final = {"int64": 8, "int32": 4, "int16": 2, "int8": 1}


class Origin(NamedTuple):
    """The framework with its parallel sizes, "" if unknown; the training step, None if unknown."""

    framework: str = ""
    step: int | None = None


def origin_of(
    folder: Folder, names: Collection[str], reader: TensorReader, stored: Callable[[str], StorageLocation]
) -> Origin:
    """Return the origin of a save. ``stored`` locates the bytes of a step that is a tensor."""
    for name, framework in _BESIDE.items():
        beside = _graph_in(folder, name) if name in names else None
        if beside is not None:
            own = values_of(beside, beside.root)
            numbers = [_number(beside, own[key]) for key in ("iteration", "global_step") if key in own]
            return _origin(framework, arguments(beside), max(numbers, default=-1), folder)
    graph = reader.graph
    for path, framework in _PLACES.items():
        ref: Ref | None = graph.root
        for key in path:
            ref = values_of(graph, ref).get(key) if ref is not None else None
        step = -1 if ref is None else max(_number(graph, ref), _element(reader.tensor(ref), stored))
        if step >= 0:
            return Origin(framework, step)
    run = arguments(graph)
    return _origin("Megatron-LM", run, max(_iterations(graph), default=-1), folder) if run else Origin()


def _origin(framework: str, run: Arguments, step: int, folder: Folder) -> Origin:
    """Return the origin, with the ranks of a Megatron-LM run. Without a ``step``, take it from the folder name."""
    sizes = number(run, "tensor_model_parallel_size") or 1, number(run, "pipeline_model_parallel_size") or 1
    parallel = f" ({ranks_in_words(sizes)})" if prod(sizes) > 1 else ""
    name = folder.name
    if step < 0 and run and ITERATION.match(name) and name[-1].isdecimal():
        step = int(name.rpartition("_")[2])
    return Origin(framework + parallel, step if step >= 0 else None)


def _iterations(graph: Graph) -> Iterator[int]:
    for ref, _ in graph.of_type(Dict):
        own = values_of(graph, ref)
        if "args" in own and "iteration" in own:
            yield _number(graph, own["iteration"])


def _graph_in(folder: Folder, name: str) -> Graph | None:
    with suppress(CkptoolError), closing(folder.open(name)) as source:
        return read_container(source).graph
    return None


def _number(graph: Graph, ref: Ref) -> int:
    node = graph.nodes[ref]
    return node if type(node) is int else -1


def _element(tensor: Tensor | None, stored: Callable[[str], StorageLocation]) -> int:
    size = _WHOLE.get(tensor.dtype, 0) if tensor is not None else 0
    if tensor is None or tensor.shape != () or not size:
        return -1
    with suppress(CkptoolError):
        span = stored(tensor.storage).span
        if span is not None and span.size == size:
            return int.from_bytes(span.source.read(span.offset, size), "little", signed=True)
    return -1

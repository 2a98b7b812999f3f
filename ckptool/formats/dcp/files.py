"""The files of a DCP folder: its listings, the data files that can be opened, and the framework that wrote them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from math import prod
from typing import Final

from ...base.errors import CkptoolError, MalformedError, UnreadableError
from ...base.records import NamedTuple
from ...base.text import pluralize
from ...checkpoint.container import StorageLocation
from ...checkpoint.objects import values_of
from ...checkpoint.tensors import Tensor, TensorReader
from ...files.downloads import prefetch
from ...files.folders import Folder
from ...files.sources import Source, Span
from ...pickles.nodes import Dict, Graph, Ref
from .. import read_container
from ..foreign.identification import explain_placeholder
from ..names.dcp import DATA, OF_RANK
from ..names.megatron import ITERATION, Arguments, arguments, number, ranks_in_words
from .items import edges
from .metadata import Item

#: The first bytes of a data file, by which a placeholder is recognised.
_HEAD: Final = 1024


def metadata_names(folder: Folder, names: Sequence[str]) -> list[str]:
    """Return the metadata names: the common file, or one file per rank. Raises MalformedError if there are none."""
    if ".metadata" in names:
        return [".metadata"]
    ranks = sorted((int(match[1]), name) for name in names if (match := OF_RANK.match(name)))
    if ranks:
        return [name for _, name in ranks]
    if any(name.endswith(".metadata.tmp") for name in names):
        what = "the checkpoint is not finished: there is .metadata.tmp, and .metadata is written last"
        raise MalformedError(what, path=folder.path, next="wait until it is saved")
    data = pluralize(sum(name.endswith(DATA) for name in names), "file")
    what = f"{data} of torch.distributed.checkpoint, and no .metadata to say what they hold"
    raise MalformedError(what, path=folder.path, next="get the folder again, with its hidden files")


def open_data(
    folder: Folder, names: Sequence[str], items: Sequence[Item], opened: list[Source], stack: ExitStack
) -> tuple[dict[str, Source], dict[str, CkptoolError]]:
    """Return the open data files, and the errors of the files that cannot be opened, both by name. The ``items`` that
    are objects are read next."""
    files: dict[str, Source] = {}
    closed: dict[str, CkptoolError] = {}
    for name in names:
        try:
            files[name] = folder.open(name)
        except UnreadableError as error:
            closed[name] = error
            continue
        stack.callback(files[name].close)
        opened.append(files[name])
    heads = _heads(files, items)
    prefetch(chain(heads.values(), *(edges(item, files) for item in items if item.offset is None)))
    for name in heads:
        placeholder = explain_placeholder(files[name])
        if placeholder is not None:
            closed[name] = placeholder
            del files[name]
    return files, closed


def _heads(files: Mapping[str, Source], items: Iterable[Item]) -> dict[str, Span]:
    """Return the first bytes of files that may be placeholders; a remote file with room for its items is none."""
    ends: dict[str, int] = {}
    for item in items:
        ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
    return {
        name: Span(file, 0, _HEAD)
        for name, file in files.items()
        if file.size and (file.size < ends.get(name, file.size + 1) or not file.missing([(0, _HEAD)]))
    }


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
    for name, framework in [item for item in _BESIDE.items() if item[0] in names]:
        with suppress(CkptoolError), closing(folder.open(name)) as source:
            beside = read_container(source).graph
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
    run, inner = arguments(graph), (values_of(graph, ref) for ref, _ in graph.of_type(Dict))
    steps = [_number(graph, own["iteration"]) for own in inner if own.keys() >= {"args", "iteration"}] if run else []
    return _origin("Megatron-LM", run, max(steps, default=-1), folder) if run else Origin()


def _origin(framework: str, run: Arguments, step: int, folder: Folder) -> Origin:
    """Return the origin, with the ranks of a Megatron-LM run. Without a ``step``, take it from the folder name."""
    sizes = number(run, "tensor_model_parallel_size") or 1, number(run, "pipeline_model_parallel_size") or 1
    parallel = f" ({ranks_in_words(sizes)})" if prod(sizes) > 1 else ""
    name = folder.name
    if step < 0 and run and ITERATION.match(name) and name[-1].isdecimal():
        step = int(name.rpartition("_")[2])
    return Origin(framework + parallel, step if step >= 0 else None)


def _number(graph: Graph, ref: Ref) -> int:
    node = graph.nodes[ref]
    return node if type(node) is int else -1


def _element(tensor: Tensor | None, stored: Callable[[str], StorageLocation]) -> int:
    size = _WHOLE.get(tensor.dtype, 0) if tensor is not None else 0
    with suppress(CkptoolError):
        span = stored(tensor.storage).span if tensor is not None and tensor.shape == () and size else None
        if span is not None and span.size == size:
            return int.from_bytes(span.source.read(span.offset, size), "little", signed=True)
    return -1

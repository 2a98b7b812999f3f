"""The content of a DCP folder as its ``.metadata`` lists it: tensors, objects, and where their pieces are.

``listing`` reads it. Here are its records, and how those of several ranks or folders become one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from math import prod
from typing import Final, TypeAlias

from ...base.dtypes import Dtype
from ...base.errors import CkptoolError, MalformedError, UnreadableError
from ...base.findings import TRANSFORMED
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, quoted, shown
from ...checkpoint.container import StorageLocation
from ...checkpoint.graph_builder import Builder
from ...checkpoint.objects import values_of
from ...checkpoint.tensors import Tensor, TensorReader
from ...files import compressed
from ...files.downloads import prefetch
from ...files.folders import Folder
from ...files.sources import Source, Span
from ...formats import read_container
from ...pickles.nodes import Dict, Graph, Ref
from ..foreign.identification import explain_placeholder
from ..names.megatron import ITERATION, Arguments, arguments, number, ranks_in_words
from ..names.training import DATA, OF_RANK
from ..pieces import Box, box_text, misfit


class Item(NamedTuple):
    """An archive in a file: ``length`` bytes from byte ``at`` on. ``offset`` is the piece's offset in its tensor, None
    for an object. ``transforms`` names the extensions that changed the bytes, such as compression."""

    name: str
    offset: tuple[int, ...] | None
    file: str
    at: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The place of the item, for messages."""
        return f"{self.file} at byte {self.at:,}"

    @property
    def is_zstd(self) -> bool:
        """Whether it is compressed with zstd, by ``ZStandard`` of torch/distributed/checkpoint/_extension.py."""
        name, _, version = self.transforms[0].partition("/") if len(self.transforms) == 1 else ("", "", "")
        return name == "stream.zstd" and version.partition(".")[0] == "1"


#: The identity of a piece: a name, and the offset in its tensor (None for an object).
ItemKey = tuple[str, "tuple[int, ...] | None"]


#: Items up to this size are read in one go: most have a few hundred bytes besides their tensor.
SMALL: Final = 1 << 16
#: Bytes at both ends of a larger item, with all that opening it reads.
_EDGE: Final = 1 << 13


def edges(item: Item, files: Mapping[str, Source]) -> Iterator[Span]:
    """Yield what opening an item reads of its file: all of a small item, both ends of a large one."""
    file = files.get(item.file)
    if file is not None and (item.length <= SMALL or item.transforms):
        yield Span(file, item.at, item.length)
    elif file is not None:
        yield from (Span(file, at, _EDGE) for at in (item.at, item.at + item.length - _EDGE))


class ValueMetadata(NamedTuple):
    """A tensor of ``shape`` in pieces, or an object with ``dtype`` None."""

    dtype: Dtype | None
    shape: tuple[int, ...] = ()
    chunks: tuple[Box, ...] = ()

    def is_whole(
        self, name: str, usable: Mapping[ItemKey, Item], mentioned: Callable[[], Collection[ItemKey]], note: Note
    ) -> bool:
        """Return whether all pieces exist, judging by sizes; report each missing piece. ``mentioned`` returns the items
        that .metadata locates."""
        if len(self.chunks) == 1:
            ((offset, sizes),) = self.chunks
            if sizes == self.shape and not any(offset) and (name, offset) in usable:
                return True  # one piece holds the whole tensor
        inside: list[Box] = []
        for box in self.chunks:
            if any(at + size > whole for at, size, whole in zip(*box, self.shape)):
                what = f"{name}: the piece {box_text(box)} lies outside of the tensor, {list(self.shape)}"
                note("chunk-bounds", "error", what, name)
            else:
                inside.append(box)
        odd = misfit(self.shape, inside)
        if odd and odd.boxes:
            note("chunk-overlap", "error", f"{name}: the pieces {' and '.join(map(box_text, odd.boxes))} overlap", name)
            return False
        if odd:
            note("chunk-hole", "error", f"{name}: no piece of .metadata has {box_text(odd.place)}", name)
        lost = [box for box in inside if (name, box[0]) not in usable]
        for box in lost:
            if (name, box[0]) not in mentioned() and 0 not in box[1]:
                what = f"{name}: .metadata does not say where the piece {box_text(box)} is"
                note("missing-item", "error", what, name)
        return not odd and len(inside) == len(self.chunks) and all(0 in box[1] for box in lost)


class Metadata(NamedTuple):
    """The content of a ``.metadata`` file.

    - ``end``: the size of the pickle in bytes.
    - ``values``: tensors and objects, in file order; ``paths``: their places in the nested object.
    - ``items``: the content of the data files.
    - ``flaws``: messages about invalid content.
    - ``subclasses``: the classes of other libraries.
    - ``copies``: pairs of items, where two ranks saved the same piece; the first item counts.
    """

    end: int
    values: dict[str, ValueMetadata]
    paths: Mapping[str, tuple[str | int, ...]]
    items: list[Item]
    version: str
    flaws: list[str]
    subclasses: list[str]
    copies: Sequence[tuple[Item, Item]] = ()

    def usable_items(
        self, sizes: Mapping[str, int], note: Note, closed: Mapping[str, CkptoolError]
    ) -> dict[ItemKey, Item]:
        """Return the items that are within their files, in file order; report all others to ``note``. ``sizes`` are the
        file sizes in bytes. ``closed`` has the files that cannot be opened, with the errors."""
        usable: dict[ItemKey, Item] = {}
        missing: dict[str, list[Item]] = {}
        cut: dict[str, list[Item]] = {}
        folders = {folder for name in (*sizes, *closed) for folder, slash, _ in (name.partition("/"),) if slash}
        inner = ((file, *file.partition("/")) for file in {item.file for item in self.items})
        names = ((file, name if slash and folder in folders else file) for file, folder, slash, name in inner)
        outside = {file for file, name in names if name in ("", ".", "..") or {*name} & {*"/\\\0:"}}
        for file in sorted(outside):
            note("outside-path", "error", f"the file {quoted(file)} is outside of the folder: not opened", file)
        pieces = Pieces(self.values)
        for item in self.items:
            if item.name not in self.values:
                what = f"{item.place} holds {pieces.name(item)}, which .metadata does not list"
                note("unlisted-item", "warning", what)
            elif item.file not in sizes:
                missing.setdefault(item.file, []).append(item)
            elif item.at + item.length > sizes[item.file]:
                cut.setdefault(item.file, []).append(item)
            elif item.transforms and not (item.is_zstd and compressed.available()):
                why = "its bytes cannot be read here; torch.distributed.checkpoint loads it with the same extensions"
                why = f"reading it takes a package that is not installed: {compressed.INSTALL}" if item.is_zstd else why
                what = f"{pieces.name(item)} in {item.file} went through {join_limited(list(item.transforms))}: {why}"
                note(TRANSFORMED, "error", what, item.file, item.at)
            else:
                if (item.name, item.offset) in usable:
                    what = f"{pieces.name(item)} is listed twice: torch takes the last, another reader the first"
                    note("item-twice", "error", what, item.file, item.at)
                usable[item.name, item.offset] = item
        for file, items in ((file, items) for file, items in missing.items() if file not in outside):
            state = f"cannot be read: {closed[file].what}" if file in closed else "is missing"
            note("missing-file", "error", f"{file} {state}, and with it {pieces.names(items)}", file)
        for file in closed.keys() - missing.keys():
            what = f"{file} cannot be read: {closed[file].what}; .metadata names nothing in it"
            note("stray-file", "warning", what, file)
        ends: dict[str, int] = {}
        for item in self.items if cut else ():
            ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
        for file, items in cut.items():
            end = items[0].at + items[0].length
            what = f"{file} has {sizes[file]:,} bytes, and {pieces.name(items[0])} ends at {end:,}"
            other = next((name for name in sizes if sizes[name] == ends[file] and ends.get(name) == sizes[file]), "")
            why = f"{file} and {other} may have been swapped" if other else f"it is cut, and {pieces.names(items)} lost"
            note("short-file", "error", f"{what}; {why}", file, items[0].at)
        return _without_overlaps(usable, note)

    def placed(self, folder: str, *, apart: bool) -> Metadata:
        """Return the metadata of a subfolder with paths from its parent; ``apart`` puts its values under the folder's
        name."""
        before, paths = f"{folder}." if apart else "", self.paths
        if apart:
            paths = {before + name: (folder, *self.paths.get(name, (name,))) for name in self.values}
        return self._replace(
            values={before + name: value for name, value in self.values.items()},
            paths=paths,
            items=[item._replace(name=before + item.name, file=f"{folder}/{item.file}") for item in self.items],
        )


def merged(parts: Sequence[Metadata], version: str) -> Metadata:
    """Merge the metadata of several ranks or folders. If several have the same piece, the first one counts."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, ValueMetadata] = {}
    boxes: dict[str, dict[Box, None]] = {}
    items: dict[ItemKey, Item] = {}
    flaws = [flaw for part in parts for flaw in part.flaws]
    copies = [pair for part in parts for pair in part.copies]
    for part in parts:
        for name, value in part.values.items():
            known = values.setdefault(name, value)
            if (known.dtype, known.shape) != (value.dtype, value.shape):
                flaws.append(f"the ranks do not agree on the dtype and shape of {quoted(name)}")
            else:
                boxes.setdefault(name, {}).update(dict.fromkeys(value.chunks))
        for item in part.items:
            first = items.setdefault((item.name, item.offset), item)
            copies += [(first, item)] if first is not item and item.offset is not None else []
    values = {name: value._replace(chunks=tuple(boxes[name])) for name, value in values.items()}
    paths = {name: path for part in reversed(parts) for name, path in part.paths.items()}
    subclasses = [name for part in parts for name in part.subclasses]
    return Metadata(0, values, paths, list(items.values()), version, flaws, subclasses, copies)


#: Adds a problem: code, level, message, and where it is.
Note: TypeAlias = Callable[..., None]
#: Suffixes of DCP's own files.
_OWN: Final = (".distcp", ".metadata", ".tmp")
#: Files that frameworks add to the folder.
_FRAMEWORK_FILES: Final = {
    "common.pt": "the values of a Megatron-LM checkpoint that are not tensors: arguments, iteration",
    "meta.pt": "the rest of a checkpoint of Lightning: loops, callbacks, hyperparameters",
    "metadata.json": "the version of Megatron-LM's format",
}
#: Those that record the step, and the frameworks that write them.
_BESIDE: Final = {"common.pt": "Megatron-LM", "meta.pt": "Lightning"}


def extra_files(names: Iterable[str]) -> dict[str, str]:
    """Return the files that are not DCP's own with their descriptions, "" for an unknown file."""
    return {name: _FRAMEWORK_FILES.get(name, "") for name in names if not name.endswith(_OWN)}


def _without_overlaps(usable: Mapping[ItemKey, Item], note: Note) -> dict[ItemKey, Item]:
    """Leave out items that overlap the one before, so that the size of the files bounds the time to read them all."""
    # Sort twice by an attribute rather than once by a tuple: there may be a million items.
    ordered = sorted(usable, key=lambda key: usable[key].at)
    ordered.sort(key=lambda key: usable[key].file)
    kept: dict[ItemKey, Item] = {}
    before: Item | None = None
    for key in ordered:
        item = usable[key]
        if before is not None and before.file == item.file and before.at + before.length > item.at:
            what = f"{item.file}: {before.name!r} and {item.name!r} overlap at byte {item.at:,}"
            note("item-overlap", "error", what, item.file, item.at)
        else:
            kept[key] = before = item
    return kept


class Pieces:
    """The boxes of each tensor's pieces, found by their offsets."""

    def __init__(self, values: Mapping[str, ValueMetadata]) -> None:
        self._values = values
        self._boxes: dict[str, dict[tuple[int, ...], Box]] = {}

    def box(self, item: Item) -> Box | None:
        """Return the box that .metadata has for an item; None for an object, or if it lists none."""
        value = self._values.get(item.name)
        if value is None or item.offset is None:
            return None
        boxes = self._boxes.get(item.name)
        if boxes is None:
            # Of two boxes at one offset, the first counts.
            boxes = self._boxes[item.name] = {box[0]: box for box in reversed(value.chunks)}
        return boxes.get(item.offset)

    def name(self, item: Item) -> str:
        """Return the name of an item; for one of several pieces, also its box."""
        box, value = self.box(item), self._values.get(item.name)
        return f"{item.name} {box_text(box)}" if box and value and len(value.chunks) > 1 else item.name

    def names(self, items: list[Item]) -> str:
        """Return the names of the items: where lists are shortened, of the first three."""
        return join_limited([self.name(item) for item in items[: shown(3)]], len(items), most=3)


#: The most empty list places that are filled, as a base and per value, so that a large index cannot exhaust memory.
_GAPS: Final = 1000
_GAPS_PER_VALUE: Final = 4

Level = dict["str | int", "Level | Ref"]


class Nested:
    """The object while it is rebuilt from flat names, like ``_EmptyStateDictLoadPlanner``. ``misfits`` are names whose
    place is taken. ``sparse`` are lists with too many empty places to fill, as (places, values)."""

    def __init__(self) -> None:
        self.root: Level = {}
        self.misfits: list[str] = []
        self.sparse: list[tuple[int, int]] = []
        self._gaps = _GAPS

    def put(self, name: str, path: Iterable[str | int], value: Ref) -> None:
        """Set the value at a path."""
        self._gaps += _GAPS_PER_VALUE
        *parents, last = path
        level = self.root
        for step, next_step in zip(parents, [*parents[1:], last]):
            inner = level.setdefault(step, {})
            if not isinstance(inner, dict) or (inner and type(next(iter(inner))) is not type(next_step)):
                self.misfits.append(name)
                return
            level = inner
        if last in level:
            self.misfits.append(name)
        else:
            level[last] = value

    def build(self, builder: Builder, inner: Level | None = None) -> Ref:
        """Build the graph of the object."""
        level = self.root if inner is None else inner
        refs = {step: self.build(builder, value) if isinstance(value, dict) else value for step, value in level.items()}
        by_index = {step: ref for step, ref in refs.items() if isinstance(step, int)}
        if inner is not None and by_index:
            size = max(by_index) + 1
            gaps = size - len(by_index)
            if gaps <= self._gaps:
                self._gaps -= gaps
                return builder.sequence(by_index[n] if n in by_index else builder.constant(None) for n in range(size))
            self.sparse.append((size, len(by_index)))
        return builder.mapping((str(step), ref) for step, ref in refs.items())


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
    """Return the first bytes of files that may be placeholders: not of remote files with room for their items."""
    ends: dict[str, int] = {}
    for item in items:
        ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
    return {
        name: Span(file, 0, _HEAD)
        for name, file in files.items()
        if file.size and (file.size < ends.get(name, file.size + 1) or not file.missing([(0, _HEAD)]))
    }


#: Paths of a step value, and the framework that stores it there ("" if several do). Sources: torchtitan,
#: ``components/checkpoint.py`` and ``train.py``.
_PLACES: Final = {("train_state", "step"): "torchtitan", ("global_step",): "", ("step",): "", ("iteration",): ""}
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

"""The domain record: a checkpoint is a graph, the container it came from, and what a walk finds in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Literal, NamedTuple

from ..base.errors import MalformedError, RefusedError, UnreadableError
from ..base.text import argument
from ..files.sources import ContainedSource, FileSource, FolderSource, Source
from ..pickles.nodes import Graph
from .changes import Change
from .container import Body, Container, Traits
from .objects import class_name, mapping
from .survey import StateDict, Survey, survey
from .tensors import Storage, TensorReader, storage_mention

#: What an edit that computes bytes has to say when they were computed: values that overflowed.
Later = Callable[[], Sequence[Change]]


class Target(NamedTuple):
    """The format of the output: its name, the state dict that goes in where it holds one, what becomes of tensors that
    share memory ("", "keep-first", "clone"), and texts beside the tensors. ``shard_size`` are the most bytes of a shard
    of a folder, 0 for a single file; ``stem`` and ``variant`` are what its files are called, "" for the usual."""

    format: str
    key: str = ""
    tied: Literal["", "keep-first", "clone"] = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    shard_size: int = 0
    stem: str = ""
    variant: str = ""


class Checkpoint:
    """One checkpoint, metadata only. Never changed: an edit gives another one over the same bytes.

    ``path`` as it was opened; ``graph`` the pickled object; ``container`` the file behind it. ``added`` are the
    storages that an edit made, by their keys: they come before those of the container. ``anew`` says that the file
    must be laid out anew, because storages came or went or the container cannot be carried over; ``also`` are the
    other files that bytes come from; ``later`` tell what is known only once the bytes were computed.
    """

    def __init__(
        self,
        path: str,
        source: Source,
        container: Container,
        graph: Graph | None = None,
        changes: tuple[Change, ...] = (),
        added: Mapping[str, Body] | None = None,
        anew: bool = False,
        also: tuple[Source, ...] = (),
        later: tuple[Later, ...] = (),
        root: str = "",
        target: Target | None = None,
    ) -> None:
        self.path = path
        self.source = source
        self.container = container
        self.graph = container.graph if graph is None else graph
        #: What the edits since the file was opened did, in their order.
        self.changes = changes
        self.added: Mapping[str, Body] = added or {}
        self.anew = anew
        self.also = also
        self.later = later
        #: The folder of the records when the file is laid out anew.
        self.root = root or container.root
        #: The format to write it in; None for that of its file.
        self.target = target
        self._survey: Survey | None = None
        self._tolerant = False
        #: What torch makes of the storages that the file describes in two ways; known after the first edit.
        self._first: dict[str, Storage] = {}
        #: The storage whose bytes were inflated or computed last: (where they come from, the bytes).
        self.kept: tuple[object, bytes] | None = None

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r} {self.container.format}{', edited' if self.edited else ''}>"

    @property
    def format(self) -> str:
        """ "torch-zip", "torch-legacy", ..."""
        return self.container.format

    @property
    def traits(self) -> Traits:
        """What there is to know of its format."""
        return self.container.traits

    @property
    def pickled(self) -> bool:
        """Is there a pickle behind it? Where there is none, nothing can be run."""
        return self.traits.pickled

    @property
    def edited(self) -> bool:
        """Does it differ from its file?"""
        return self.anew or self.target is not None or self.graph is not self.container.graph

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files that the output is made of."""
        return tuple(part for source in (self.source, *self.also) for part in _with_files(source))

    @property
    def survey(self) -> Survey:
        """Tensors, state dicts, entries and devices; made at the first use.

        Raises UnreadableError where the pickle means something to torch that is not followed (``unfollowed``); see
        ``tolerating``.
        """
        if self._survey is None:
            # Some containers have looked at the tensors of their graph before.
            reader = getattr(self.container, "reader", None)
            own = reader if self.graph is self.container.graph else None
            try:
                self._survey = survey(self.graph, own, named=self.traits.named)
            except MalformedError as error:
                error.path = self.path
                raise
        if self._survey.unfollowed and not self._tolerant:
            what = next(iter(self._survey.unfollowed.values()))
            step = f"ckptool validate {argument(self.path)} says more"
            raise UnreadableError(f"{what}, which ckptool does not follow", path=self.path, next=step)
        return self._survey

    @property
    def state_dicts(self) -> list[StateDict]:
        """Every state dict found, those of low confidence included."""
        return self.survey.state_dicts

    def changed(
        self,
        graph: Graph,
        changes: Sequence[Change],
        added: Mapping[str, Body] | None = None,
        *,
        anew: bool = False,
        also: Sequence[Source] = (),
        later: Sequence[Later] = (),
        root: str = "",
        target: Target | None = None,
    ) -> Checkpoint:
        """The checkpoint after an edit: another object, and the account of what was done to it.

        Raises RefusedError where a storage is described in two ways, and the edit leaves out the first, which counts.
        """
        first = self._first
        if self.graph is self.container.graph:
            # This raises for what is not followed: nothing is known to be unused there.
            reader = self.survey.reader
            first = {key: reader.storages[key] for key in reader.disagreeing}
        if first:
            _check_first(first, graph, self.path)
        storages = {**self.added, **(added or {})}
        done = (*self.changes, *changes)
        former = self.traits.former
        # A format that nobody writes any more becomes a zip with every edit.
        anew = anew or (self.traits.written == "torch" and graph is not self.graph)
        if (anew or added) and not self.anew and former and target is None:
            done = (*done, Change("container", "", 1, 0, f"{former} format -> zip"))
        sources = (*self.also, *(source for source in also if source not in self.sources))
        anew = self.anew or anew or bool(storages)
        told = (*self.later, *later)
        root = root or self.root
        target = target or self.target
        twin = Checkpoint(
            self.path, self.source, self.container, graph, done, storages, anew, sources, told, root, target
        )
        twin._first = first
        return twin

    def body(self, key: str) -> Body | None:
        """The bytes of a storage, whether an edit made them or the file holds them; None where there are none."""
        if key in self.added:
            return self.added[key]
        stored = self.container.stored(key)
        return None if stored.span is None else Body(stored.span, stored.size, stored.crc, stored.compressed)

    def tolerating(self) -> Checkpoint:
        """The same checkpoint, whose survey says what is not followed where this one's raises."""
        twin = copy(self)
        twin._tolerant = True
        return twin

    def regraphed(self, graph: Graph) -> Checkpoint:
        """The same checkpoint with an equal graph: that of the pickle that will be written. It is tolerating."""
        twin = self.tolerating()
        twin.graph, twin._survey = graph, None
        return twin

    def close(self) -> None:
        """Close the file; what was read stays."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_first(first: Mapping[str, Storage], graph: Graph, path: str) -> None:
    reader = TensorReader(graph)
    left = set(first)
    for ref in graph.reachable():
        used = reader.storage(ref)
        if used is None or used.key not in left:
            continue
        left.discard(used.key)
        was, now = first[used.key], storage_mention(graph, ref)
        if now != (was.cls, was.numel):
            what = f"storage {used.key!r} is described in two ways, and the one that torch takes would be left out"
            raise RefusedError(what, path=path)


def _with_files(source: Source) -> tuple[Source, ...]:
    """A source, and the files behind one that is none itself."""
    if isinstance(source, FolderSource):
        return (source, *source.files)
    return (source, source.file) if isinstance(source, ContainedSource) else (source,)


def layout_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """(kind, container) of the root: bare, wrapped, module, tensor or other, and the type of the root."""
    found, graph = checkpoint.survey, checkpoint.graph
    container = class_name(graph, graph.root)
    if any(state_dict.path == "" for state_dict in found.state_dicts):
        return "bare", container
    if found.tensors and found.tensors[0].path == "" and found.tensors[0].ref == graph.root:
        return "tensor", "Tensor"
    if "" in found.modules:
        return "module", container
    sure = any(item.confidence == "high" for item in found.state_dicts)
    if sure and mapping(graph, graph.root) is not None:
        return "wrapped", container
    return "other", container


def file_mode(source: Source) -> int:
    """The permission bits of the input, of its first file for a folder; 0o644 for what is not a file."""
    if isinstance(source, ContainedSource):
        source = source.file
    if isinstance(source, FolderSource) and source.files:
        source = source.files[0]
    return source.mode if isinstance(source, FileSource) else 0o644

"""The domain record: a checkpoint is a graph, the container it came from, and what a walk finds in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from .changes import Change
from .objects import class_name, mapping
from .pickles.nodes import Graph
from .source import Appending, ContainedSource, FileSource, FolderSource, Piece, Plan, Source, Span
from .survey import ReadAlready, StateDict, Survey, survey

__all__ = [
    "AMBIGUOUS",
    "CUT",
    "DAMAGED",
    "INCOMPLETE",
    "UNCHECKED",
    "UNEDITABLE",
    "Body",
    "Change",
    "Checkpoint",
    "Container",
    "FoundPickle",
    "Later",
    "Problem",
    "StoredBytes",
    "StoredRecord",
    "Target",
    "Traits",
    "file_mode",
    "layout_of",
]

#: Problems on whose account no edit is written: it would carry the damage over under a good name.
DAMAGED = "damaged"
CUT = "cut"
#: Of a file that holds former versions of itself.
EDITED = "edited-in-place"
#: Of a checkpoint in several files something is missing.
INCOMPLETE = "incomplete"
UNEDITABLE = frozenset(
    (DAMAGED, CUT, INCOMPLETE, "missing-file", "short-file", "bad-item", "missing-item", "chunk-hole")
)
#: What would have taken too long to find out.
UNCHECKED = "not-checked"
#: Codes of the problems on whose account nobody knows what torch reads.
_UNCLEAR = ("duplicate-record", "case-twin", "second-archive", "encrypted", "special-flags", "folder-attribute")
AMBIGUOUS = frozenset((*_UNCLEAR, "chunk-overlap", UNCHECKED))


class Problem(NamedTuple):
    """Something about the container that a user should know.

    ``level`` is "note", "warning" or "error"; ``refused`` says that torch.load does not take such a file.
    ``where`` names a record, ``offset`` is in bytes into the file, -1 for none.
    """

    code: str
    level: str
    message: str
    refused: bool = False
    where: str = ""
    offset: int = -1


class StoredBytes(NamedTuple):
    """Where a storage's bytes are: ``span`` (None where they are missing), ``size`` in bytes as stored plain,
    ``compressed`` whether the span must be inflated."""

    span: Span | None
    size: int
    compressed: bool = False


class Body(NamedTuple):
    """The bytes of a storage that an edit made or brought from another file.

    ``piece`` as they are to be stored, ``size`` inflated; ``crc`` the CRC-32 of the inflated bytes where it is
    known without reading them, ``compressed`` whether ``piece`` is a deflate stream.
    """

    piece: Piece
    size: int
    crc: int | None = None
    compressed: bool = False


class StoredRecord(NamedTuple):
    """One stretch of a file with content of its own: a record of a zip, a storage of a legacy file.

    ``span`` are its bytes as stored, ``size`` its bytes inflated; ``crc`` the CRC-32 of the inflated bytes on
    record: 0 for "not computed", None where the format has none. ``key`` is that of the storage, "" for another
    record.
    """

    name: str
    span: Span
    size: int
    crc: int | None
    compressed: bool
    key: str


class FoundPickle(NamedTuple):
    """A pickle somewhere in a file: ``where`` in words; ``graph`` is None where it cannot be followed, and
    ``error`` says why. ``rest`` are bytes behind its STOP."""

    where: str
    graph: Graph | None
    error: str = ""
    rest: int = 0


class Traits(NamedTuple):
    """What there is to know of a format, as data: nobody asks for its name.

    ``pickled``: there is a pickle, that is, torch.load may run something. ``unsummed``: what has no checksums, in
    words, "" where there are some. ``loads``: what torch.load is given: the "file", "each file" of a folder, or what it
    is "converted" to. ``written``: how an edit writes it, by the name of a ``Target``; "same" is the file with another
    pickle. ``former``: what it is called where an edit makes a zip of it. ``in_a_row``: storages stand one behind the
    other after the pickles, in an order of their own. ``sharded``: a folder of weights, which an edit may put into one
    file, by its name.
    """

    pickled: bool = True
    unsummed: str = ""
    loads: Literal["file", "each file", "converted"] = "file"
    written: str = "same"
    former: str = ""
    in_a_row: bool = False
    sharded: bool = False


class Container(Protocol):
    """What a format module makes of a file; the only thing that commands see of a format."""

    @property
    def format(self) -> str:
        """ "torch-zip", "torch-legacy", ..."""
        ...

    @property
    def traits(self) -> Traits:
        """What there is to know of the format."""
        ...

    @property
    def writer(self) -> str:
        """Which torch wrote it, in words."""
        ...

    @property
    def graph(self) -> Graph:
        """The object as it is in the file."""
        ...

    @property
    def pickle(self) -> bytes:
        """The bytes of that object, up to its STOP at least."""
        ...

    @property
    def root(self) -> str:
        """The folder that the records are in, "" where there is none."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that the format keeps beside the tensors: ``__metadata__`` of safetensors."""
        ...

    @property
    def others(self) -> Sequence[Graph]:
        """The other pickles that torch loads with it: four in a legacy file."""
        ...

    @property
    def byteorder(self) -> str:
        """ "little" or "big"."""
        ...

    @property
    def problems(self) -> Sequence[Problem]:
        """What is wrong or odd about the container."""
        ...

    def stored_size(self, key: str) -> int | None:
        """The bytes that are there for the storage ``key``, inflated; None where there are none."""
        ...

    def stored(self, key: str) -> StoredBytes:
        """Where the bytes of the storage ``key`` are."""
        ...

    def records(self) -> Iterable[StoredRecord]:
        """Everything stored, in the order of the file; raises MalformedError where a record cannot be found."""
        ...

    def audit(self, keys: Collection[str]) -> Sequence[Problem]:
        """What a thorough look at the structure finds, beyond ``problems``; ``keys`` are the storages in use."""
        ...

    def pickles(self) -> Iterable[FoundPickle]:
        """Every pickle in the file, the object itself first."""
        ...

    def plan(self, pickle: bytes | None) -> Plan:
        """The output file with another pickle, or with None the file as it is."""
        ...

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        """The version with another pickle, to be appended to the file: ``keys`` are the storages in use, in the order
        of the pickle, ``gone`` those that were; ``edit`` says what was done and ``time`` when, in seconds since 1970.

        Raises RefusedError where the format has no room for that.
        """
        ...


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
        """Tensors, state dicts, entries and devices; made at the first use."""
        if self._survey is None:
            reader = self.container.reader if isinstance(self.container, ReadAlready) else None
            self._survey = survey(self.graph, reader if self.graph is self.container.graph else None)
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
        """The checkpoint after an edit: another object, and the account of what was done to it."""
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
        return Checkpoint(
            self.path, self.source, self.container, graph, done, storages, anew, sources, told, root, target
        )

    def body(self, key: str) -> Body | None:
        """The bytes of a storage, whether an edit made them or the file holds them; None where there are none."""
        if key in self.added:
            return self.added[key]
        stored = self.container.stored(key)
        return None if stored.span is None else Body(stored.span, stored.size, None, stored.compressed)

    def close(self) -> None:
        """Close the file; what was read stays."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

"""``Container``, the interface of the formats, and its records of storages and problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from ..base.errors import CkptoolError, RefusedError, TargetError
from ..base.findings import Effect, Finding
from ..base.records import NamedTuple
from ..base.text import pluralize, words
from ..files.sources import AppendPlan, FolderSource, Piece, Plan, Source, Span
from ..pickles.nodes import Graph, Ref
from .tensors import TensorReader

#: The records about the archive itself, which torch.save writes in addition to the object and the storages.
ARCHIVE_RECORDS: Final = words("version byteorder .format_version .storage_alignment .data/serialization_id")


def is_complete(problems: Iterable[Finding]) -> bool:
    """Return whether all files of a checkpoint are present and intact."""
    return not any(Effect.LOSES_VALUES in problem.effect for problem in problems)


class StorageLocation(NamedTuple):
    """Where the bytes of a storage are.

    ``span`` is None if the bytes are missing. ``size`` is in bytes, uncompressed. ``compressed`` says whether the span
    must be inflated. ``crc`` is the recorded CRC-32 of the uncompressed bytes, as in ``StorageData``.
    """

    span: Span | None
    size: int
    compressed: bool = False
    crc: int | None = None


class StorageData(NamedTuple):
    """The bytes of a storage that an edit made or took from another file.

    ``piece`` holds the bytes as they will be stored: a deflate stream if ``compressed``. ``size`` is the uncompressed
    size. ``crc`` is the CRC-32 of the uncompressed bytes if it is known without reading them; it is 0 if the writer did
    not compute one, and None if the format has none.
    """

    piece: Piece
    size: int
    crc: int | None = None
    compressed: bool = False


class StoredRecord(NamedTuple):
    """A stretch of a file with its own content, such as a record of a zip or a storage of a legacy file.

    ``span`` holds the bytes as stored; ``size`` is their uncompressed size. ``crc`` is the recorded CRC-32 of the
    uncompressed bytes: 0 for "not computed", None if the format has none. ``key`` is the key of the storage, or "" for
    another record. ``part_of`` lists the keys of storages that have a part in this record.
    """

    name: str
    span: Span
    size: int
    crc: int | None
    compressed: bool
    key: str
    part_of: tuple[str, ...] = ()


#: The metadata of each stored record, by name. Two files with the same content have equal manifests.
Manifest: TypeAlias = Mapping[str, tuple[object, ...]]


class FoundPickle(NamedTuple):
    """A pickle found in a file.

    ``where`` describes its place. ``graph`` is None if ckptool cannot follow the pickle; ``error`` gives the reason.
    ``rest`` counts the bytes after its STOP. ``unchecked`` marks a placeholder for pickles that would take too long to
    find. ``program`` describes code that was found instead of a pickle, or configuration from which a loader runs code.
    ``note`` gives the reason why a file with this pickle is never weights-only, although ckptool can follow it.
    """

    where: str
    graph: Graph | None
    error: str = ""
    rest: int = 0
    unchecked: bool = False
    program: str = ""
    note: str = ""


class Traits(NamedTuple):
    """The facts about a format that shared code asks for, as data.

    ``pickled``       there is a pickle, so torch.load may run code;
    ``size_source``   the part of the file that says how large each storage is;
    ``no_checksums``  describes the files without checksums; "" if there are checksums;
    ``loads``         the argument of torch.load: the "file", "each file" of a folder, or the "converted" output;
    ``loader``        the function that loads it as it is; "" if only the program that wrote it does;
    ``suffix``        the suffix by which loaders recognise it; "" if the content decides;
    ``writes_as``     how an edit writes it, by the name of an ``OutputFormat``; "same" is the file with another pickle,
                      and "" one file of torch, because nothing writes the files of many ranks;
    ``legacy_name``   its name in messages if an edit turns it into a zip;
    ``storages_in_sequence``  the storages follow the pickles one after another, in their own order;
    ``sharded``       a folder of weights; an edit may write it as one file, if the user gives a file name;
    ``assembled``     tensors are assembled from pieces in several files; checksums are verified while copying;
    ``blocks``        tensors are in blocks of quantized values, which no other format holds: ``convert`` computes them;
    ``flat_names``    the root maps names to tensors, and the names may be any text.
    """

    pickled: bool = True
    size_source: str = "pickle"
    no_checksums: str = ""
    loads: Literal["file", "each file", "converted"] = "file"
    loader: str = "torch.load"
    suffix: str = ""
    writes_as: str = "same"
    legacy_name: str = ""
    storages_in_sequence: bool = False
    sharded: bool = False
    assembled: bool = False
    blocks: bool = False
    flat_names: bool = False


class RankSave(NamedTuple):
    """A folder that many ranks saved: the number of ranks with a part in it, and the step, or None if unknown.

    ``recorded``: the files say how many there were, so that a missing one is noticed. ``kind``: "rank" or "shard"."""

    ranks: int
    step: int | None = None
    recorded: bool = True
    kind: str = "rank"

    @property
    def unsure(self) -> str:
        """The message for ranks whose number is not recorded."""
        return f"files of {pluralize(self.ranks, self.kind)} are there; nothing records how many there were"


class ShardLayout(NamedTuple):
    """The layout of a folder of shards: the size of its largest shard in bytes, and the parts of its file names."""

    size: int = 0
    stem: str = ""
    variant: str = ""


class Original(NamedTuple):
    """A tensor from which a converter made a tensor of the file, or a part of one.

    ``part`` is its number along the first dimension, -1 for the whole. ``heads`` is the number of heads whose rows were
    interleaved, 0 for none. ``added`` was added to every value.
    """

    name: str
    part: int = -1
    heads: int = 0
    added: float = 0.0


class Container:
    """A file as its format describes it, the only view that commands have of a format.

    Each format overrides the members that it supports.
    """

    #: "torch-zip", "torch-legacy", ...
    format: str = ""
    traits: Traits = Traits()
    #: A description of the torch version that wrote the file.
    writer: str = ""
    #: What the metadata says about the model, such as its architecture; "" if nothing.
    model: str = ""
    #: The folder of the records, or "".
    root: str = ""
    #: "little" or "big".
    byteorder: str = "little"
    #: The object in the file.
    graph: Graph
    #: The reader of that graph, if its tensors were read already.
    reader: TensorReader | None = None
    #: The other pickles that torch loads with the object: four in a legacy file.
    others: Sequence[Graph] = ()
    #: The texts stored with the tensors, such as ``__metadata__`` of safetensors.
    metadata: Mapping[str, str] = MappingProxyType({})
    #: Whether edits can change these texts.
    holds_texts: bool = False
    #: The bytes at the beginning of the file that an edit may replace where they stand; 0 if there is no such header.
    header_size: int = 0
    shard_layout: ShardLayout = ShardLayout()
    #: What the only library that loads the folder does with it; "" if others load it, or none.
    only_loader: str = ""
    #: Facts about the save from the files of many ranks; None for any other checkpoint.
    rank_save: RankSave | None = None
    #: The reason why each missing storage is missing, by key, in an object rescued from a damaged file.
    lost: Mapping[str, str] = MappingProxyType({})

    #: Errors for files of a folder that cannot be read; each is also listed as a problem.
    errors: Sequence[CkptoolError] = ()
    #: Defects and oddities of the container; the code that opens it may add more.
    problems: list[Finding]

    @property
    def keeps_format(self) -> bool:
        """Whether a new layout of the file still has this format."""
        return self.traits.writes_as == "same" and not self.traits.legacy_name

    @property
    def drops_records(self) -> bool:
        """Whether a new layout of the file lacks the records that are no storages."""
        return self.keeps_format or bool(self.traits.legacy_name)

    @property
    def keeps_order(self) -> bool:
        """Whether keys come in the order in which the model was saved, not in an order of the format."""
        traits = self.traits
        return traits.pickled and (not traits.writes_as or traits.loads != "converted")

    @property
    def checks_ids(self) -> bool:
        """Whether the reader checked how the pickle describes each storage."""
        return bool(self.traits.legacy_name or self.traits.sharded)

    @property
    def in_pieces(self) -> bool:
        """Whether tensors are in pieces, so that one file of them is of more use."""
        return self.traits.assembled

    @property
    def in_blocks(self) -> bool:
        """Whether tensors are in blocks of quantized values, which no other format holds."""
        return self.traits.blocks

    def read_with_object(self, other: Graph) -> Collection[Ref]:
        """Return the nodes of another pickle that are also part of the object."""
        return set(other.reachable()) if self.traits.sharded else ()

    def problems_of_edits(self) -> list[Finding]:
        """Return the problems that every edit repeats: errors, and warnings about parts that were joined."""
        levels = ("error",) if self.traits.writes_as and not self.traits.assembled else ("error", "warning")
        return [problem for problem in self.problems if problem.level in levels]

    def misnamed(self, source: Source) -> str:
        """Return the suffix by which loaders recognise the format if the name of a file lacks it, otherwise ""."""
        suffix = self.traits.suffix
        files = source.files if isinstance(source, FolderSource) else (source,)
        return "" if all(file.name.endswith((suffix, ".index.json")) for file in files) else suffix

    def load_rule(self, source: Source, torch: str) -> str:
        """Return why torch.load of a version does not load a file without a pickle; "" if it does."""
        return f"torch.load does not read the format {self.format}"

    @property
    def pickle(self) -> bytes:
        """The pickle of the object, up to its STOP or further; without one, the one that ``torch.save`` would write."""
        from ..pickles.encode import encode  # inspecting needs no encoder

        return encode(self.graph)

    def stored_size(self, key: str) -> int | None:
        """Return the uncompressed size of the storage ``key`` in bytes; None if its bytes are missing."""
        stored = self.stored(key)
        return None if stored.span is None else stored.size

    def is_compressed(self, key: str) -> bool:
        """Return whether the bytes of the storage ``key`` are in the file and compressed."""
        stored = self.stored(key)
        return stored.span is not None and stored.compressed

    def stored(self, key: str) -> StorageLocation:
        """Return where the bytes of the storage ``key`` are."""
        raise NotImplementedError

    def records(self) -> Iterable[StoredRecord]:
        """Yield all stored records in the order of the file; raise MalformedError if a record cannot be found."""
        raise NotImplementedError

    def outer_records(self, touched: Callable[[Span], bool] | None = None) -> Iterable[StoredRecord]:
        """Yield the records whose checksums no storage's ``AssembledSource`` knows.

        ``touched`` returns whether any bytes of a span matter. Other records may be left out: each takes a read.
        """
        return self.records()

    def manifest(self, *, checked: bool = False) -> Manifest:
        """Return the metadata of all stored records; raise MalformedError if a ``checked`` one is not at its place."""
        return {record.name: (record.size, record.crc, record.compressed) for record in self.records()}

    def audit(self, keys: Collection[str]) -> Sequence[Finding]:
        """Return the problems that only a thorough check of the structure finds; ``keys`` are the storages in use."""
        return ()

    def compare_copies(self, storages: Collection[str] | None = None) -> None:
        """Read the copies that several files hold of these storages, or of all, and add a problem for unequal ones.

        Copies that recorded checksums compare are not read.
        """

    def pickles(self, *, quick: bool = False) -> Iterable[FoundPickle]:
        """Yield every pickle in the file, the object itself first; for ``quick`` only those that a reader reaches."""
        return ()

    def texts(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield (file name in the folder or "", texts) for each file that stores texts other than "format"."""
        return [("", self.metadata)] if self.metadata.keys() - {"format"} else []

    def held_texts(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield all texts as ``texts`` does, also those that are part of the object."""
        return self.texts()

    def other_dtypes(self, name: str) -> Mapping[str, str]:
        """Return the dtype of each tensor, by name, in other weights that are a cast of the object's weights."""
        return {}

    def other_weights(self, name: str) -> Graph:
        """Return the object with another version of its weights from the files; raise TargetError if it has none."""
        raise TargetError(f"there are no weights called {name!r} beside these", next="leave `--deepspeed-16bit=` out")

    def originals(self) -> Mapping[str, Sequence[Original]]:
        """Return the tensors that a converter turned into those here, by the names here."""
        return {}

    def in_full(self, key: str = "") -> Container:
        """Return the container with a graph of all values to which ``key`` may lead, if this one summarizes some."""
        return self

    def plan(self, pickle: bytes) -> Plan:
        """Return the output file with another pickle; raise RefusedError if the format is read-only."""
        raise RefusedError(f"files of the format {self.format} are read-only in ckptool")

    def fitted(self, header: bytes) -> bytes:
        """Return a new header, filled up to ``header_size`` bytes if it is shorter and the format allows that."""
        return header

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> AppendPlan:
        """Return the plan that appends a version with another pickle; raise RefusedError if there is no room.

        ``keys`` are the storages in use, in the order of the pickle; ``gone`` are the storages no longer in use.
        ``edit`` describes the edit; ``time`` is in seconds since 1970.
        """
        what = f"only torch zips, safetensors and GGUF are edited in place, and this is of the format {self.format}"
        raise RefusedError(what, next="write a new file with `-o=`")

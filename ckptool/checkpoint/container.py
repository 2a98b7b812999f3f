"""``Container``, the interface of the formats, and the records that it returns of storages and problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from ..base.errors import CkptoolError, RefusedError, TargetError
from ..base.findings import Finding
from ..files.sources import AppendPlan, Piece, Plan, Span
from ..pickles.encode import encode
from ..pickles.nodes import Graph
from .tensors import TensorReader


def is_complete(problems: Iterable[Finding]) -> bool:
    """Return whether all files of a checkpoint are there and whole."""
    return not any(problem.loses_values for problem in problems)


class StorageLocation(NamedTuple):
    """Where a storage's bytes are: ``span`` (None where they are missing), ``size`` in bytes inflated, ``compressed``
    whether the span must be inflated; ``crc`` the CRC-32 of the inflated bytes on record, as in a ``StorageData``."""

    span: Span | None
    size: int
    compressed: bool = False
    crc: int | None = None


class StorageData(NamedTuple):
    """The bytes of a storage that an edit made or brought from another file.

    ``piece`` holds them as they will be stored, ``size`` inflated; ``crc`` the CRC-32 of the inflated bytes where it is
    known without reading them (0 where its writer did not compute one, None where the format has none), ``compressed``
    whether ``piece`` is a deflate stream.
    """

    piece: Piece
    size: int
    crc: int | None = None
    compressed: bool = False


class StoredRecord(NamedTuple):
    """One stretch of a file with content of its own: a record of a zip, a storage of a legacy file.

    ``span`` are its bytes as stored, ``size`` its bytes inflated; ``crc`` the CRC-32 of the inflated bytes on
    record: 0 for "not computed", None where the format has none. ``key`` is that of the storage, "" for another
    record; ``part_of`` those of storages of which the record holds a part.
    """

    name: str
    span: Span
    size: int
    crc: int | None
    compressed: bool
    key: str
    part_of: tuple[str, ...] = ()


#: The metadata of each stored record by name: two files with the same content have equal manifests.
Manifest: TypeAlias = Mapping[str, tuple[object, ...]]


class FoundPickle(NamedTuple):
    """A pickle somewhere in a file: ``where`` in words; ``graph`` is None where it cannot be followed, and
    ``error`` says why. ``rest`` counts the bytes after its STOP. ``unchecked``: a stand-in for pickles that would take
    too long to find.

    ``program`` describes code, or configuration from which a loader runs code, that was found instead of a pickle.
    ``note`` says why a file with it is never weights-only, although it can be followed.
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

    ``pickled``       there is a pickle, so torch.load may run something;
    ``no_checksums``  the files without checksums, in words, "" if there are checksums;
    ``loads``         what torch.load is given: the "file", "each file" of a folder, or what it is "converted" to;
    ``writer_key``    how an edit writes it, by the name of a ``Target``; "same" is the file with another pickle;
    ``legacy_name``   its name in messages if an edit turns it into a zip;
    ``in_a_row``      the storages follow the pickles one after the other, in an order of their own;
    ``sharded``       a folder of weights, which an edit may put into one file, by its name;
    ``joined``        a folder of parts that many ranks wrote, which every edit writes as one file;
    ``pieces``        tensors are put together from pieces of several files, whose checksums are checked while copied;
    ``named``         the root is a mapping of tensors by name, and the names may be any text;
    ``zipped``        a zip of torch.save: its storages are records, in the order that ``.format_version`` promises.
    """

    pickled: bool = True
    no_checksums: str = ""
    loads: Literal["file", "each file", "converted"] = "file"
    writer_key: str = "same"
    legacy_name: str = ""
    in_a_row: bool = False
    sharded: bool = False
    joined: bool = False
    pieces: bool = False
    named: bool = False
    zipped: bool = False


class RankSave(NamedTuple):
    """The save of many ranks that a folder is: how many have a part of it, and the step, None for an unknown one."""

    ranks: int
    step: int | None = None


class ShardLayout(NamedTuple):
    """How a folder of shards is laid out: the bytes of its largest shard, and the parts of its file names."""

    size: int = 0
    stem: str = ""
    variant: str = ""


class Container:
    """A file as its format describes it: all that commands see of a format. Formats override what they have."""

    #: "torch-zip", "torch-legacy", ...
    format: str = ""
    traits: Traits = Traits()
    #: Which torch wrote the file, in words.
    writer: str = ""
    #: The folder of the records, "" for none.
    root: str = ""
    #: "little" or "big".
    byteorder: str = "little"
    #: The object as it is in the file.
    graph: Graph
    #: The tensors of that graph, where they were read before.
    reader: TensorReader | None = None
    #: The name of other weights that are whole whatever the problems are, "" for none: see ``other_weights``.
    whole_weights: str = ""
    #: The other pickles that torch loads with it: four in a legacy file.
    others: Sequence[Graph] = ()
    #: The texts beside the tensors: ``__metadata__`` of safetensors.
    metadata: Mapping[str, str] = MappingProxyType({})
    shard_layout: ShardLayout = ShardLayout()
    #: What the files of many ranks say of their save, None for any other checkpoint.
    rank_save: RankSave | None = None
    #: The reasons why storages are missing, by key, in an object rescued from a damaged file.
    lost: Mapping[str, str] = MappingProxyType({})

    #: Why files of a folder cannot be read; each is a problem as well.
    errors: Sequence[CkptoolError] = ()
    #: Defects and oddities of the container; the code that opens it may add more.
    problems: list[Finding]

    @property
    def pickle(self) -> bytes:
        """The pickle of the object, up to its STOP at least; without one, what ``torch.save`` would write."""
        return encode(self.graph)

    def stored_size(self, key: str) -> int | None:
        """Return the size in bytes of the storage ``key``, inflated; None if its bytes are missing."""
        stored = self.stored(key)
        return None if stored.span is None else stored.size

    def stored(self, key: str) -> StorageLocation:
        """Return where the bytes of the storage ``key`` are."""
        raise NotImplementedError

    def records(self) -> Iterable[StoredRecord]:
        """Yield everything stored, in the order of the file; raise MalformedError where a record cannot be found."""
        raise NotImplementedError

    def outer_records(self) -> Iterable[StoredRecord]:
        """Yield the records, but for those of which a storage's ``AssembledSource`` knows the checksums."""
        return self.records()

    def manifest(self, *, checked: bool = False) -> Manifest:
        """Return what is stored beside the object. With ``checked`` each record is read at its place.

        Raises MalformedError if one is not there.
        """
        return {record.name: (record.size, record.crc, record.compressed) for record in self.records()}

    def audit(self, keys: Collection[str]) -> Sequence[Finding]:
        """Return the problems that only a thorough check of the structure finds; ``keys`` are the storages in use."""
        return ()

    def compare_copies(self, storages: Collection[str] | None = None) -> None:
        """Compare the copies that several files have of these storages, or of all, where recorded checksums do not
        tell; add a problem for those that are not equal. Each copy is read once."""

    def pickles(self, *, quick: bool = False) -> Iterable[FoundPickle]:
        """Yield every pickle in the file, the object itself first.

        ``quick``: those that a reader of the format comes to, not those that nothing refers to.
        """
        return ()

    def texts(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield the texts beside the tensors of each file: (its name in the folder or "", texts).

        A file with "format" alone, which every file of safetensors has, is left out.
        """
        return [("", self.metadata)] if self.metadata.keys() - {"format"} else []

    def other_dtypes(self, name: str) -> Mapping[str, str]:
        """Return the dtypes, by the names of tensors, that other weights have which are those of the object, cast."""
        return {}

    def other_weights(self, name: str) -> Graph:
        """Return the object with another version of its weights that is in the files; raise TargetError for none."""
        raise TargetError(f"there are no weights called {name!r} beside these", next="leave --weights out")

    def plan(self, pickle: bytes | None) -> Plan:
        """Return the output file with another pickle, or with None the file as it is.

        Not of a folder, whose writers plan each of its files. Raises RefusedError if the format is read-only.
        """
        raise RefusedError(f"files of the format {self.format} are read-only in ckptool")

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> AppendPlan:
        """Return the version with another pickle, to be appended to the file: ``keys`` are the storages in use, in the
        order of the pickle, ``gone`` those that were; ``edit`` says what was done and ``time`` when, in seconds since
        1970.

        Raises RefusedError where the format has no room for that.
        """
        what = f"files of the format {self.format} are not edited in place"
        raise RefusedError(what, next="write a new file with -o")

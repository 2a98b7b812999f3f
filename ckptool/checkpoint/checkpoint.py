"""``Checkpoint``: a graph, the container it was read from, and the survey of the graph."""

from __future__ import annotations

import os
from abc import ABCMeta
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from ..base import lazy
from ..base.errors import CkptoolError, RefusedError, UnreadableError, adding_path
from ..base.findings import COPIES, Finding
from ..base.records import NamedTuple, new_tuple
from ..base.steps import ONE_SAVE, AnyStep, NextStep, as_step, command, salvage_step
from ..base.text import join_limited, pluralize
from ..files.sources import FolderSource, MemberSource, Source, Span
from ..pickles.nodes import Graph
from .container import Container, StorageData, Traits
from .objects import class_name, mapping
from .survey import StateDict, Survey, survey
from .tensors import Storage, TensorReader, storage_mention

#: Edits whose description is followed by the number of keys.
KEY_EDITS = ("strip-prefix", "strip-wrappers", "add-prefix", "rename")


class Change(NamedTuple):
    """One change that an edit made at one path.

    ``edit`` is the name of the edit ("strip-prefix", "add-prefix", "remap"). ``number`` counts the changed things,
    ``kept`` the unchanged ones of the same sort. ``what`` is the description; ``notes`` are remarks.

    >>> [change.words for change in ckptool.strip_module("training.pth").changes]
    ["state_dict: prefix 'module.' removed from 14 keys"]
    """

    edit: str
    path: str
    number: int
    kept: int
    what: str
    notes: tuple[AnyStep, ...] = ()

    @property
    def words(self) -> str:
        """The change and its remarks as text."""
        return "; ".join([self.head, *(str(as_step(note)) for note in self.notes)])

    @property
    def in_shell(self) -> Change:
        """The change with its remarks as text that spells settings as options."""
        return self._replace(notes=tuple(as_step(note).advice for note in self.notes))

    @property
    def head(self) -> str:
        """The path and the description; for edits of keys, also the number of keys."""
        where = f"{self.path}: " if self.path else ""
        if self.edit not in KEY_EDITS or not self.number:
            return f"{where}{self.what}"
        others = f", {pluralize(self.kept, 'other key')} unchanged" if self.kept else ""
        return f"{where}{self.what} {pluralize(self.number, 'key')}{others}"


#: Changes known only after writing, such as overflow counts.
DeferredChanges: TypeAlias = Callable[[], Sequence[Change]]


#: Cached attributes, computed on first use; not copied by ``replace``.
_CACHED: Final = ("_contents", "_survey")
#: How to write tensors that share memory: refuse them, keep the first name and record the others, or copy each.
Tied: TypeAlias = Literal["", "keep-first", "clone"]


class Target(NamedTuple):
    """The format of the output.

    ``key`` is the path of the state dict to write, for formats that hold one; "" for the whole checkpoint. ``tied``
    says how to write tensors that share memory. ``metadata`` holds texts that are stored with the tensors.
    ``shard_size`` is in bytes, 0 for a single file. ``stem`` and ``variant`` are parts of file names; "" if usual.
    """

    format: str
    key: str = ""
    tied: Tied = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    shard_size: int = 0
    stem: str = ""
    variant: str = ""


class ReadCache:
    """Results of reading that later reads use.

    ``last`` holds the storage that was inflated or computed last, and its bytes. ``checksums`` is None unless a caller
    asks for them; then it maps each span that was read completely to its CRC-32, also for later edits. ``flaws`` are
    the findings of ``safety.storages``, with the reader and the number of problems for which they are true.
    """

    def __init__(self, checksums: dict[Span, int] | None = None) -> None:
        self.last: tuple[object, bytes] = None, b""
        self.checksums = checksums
        self.flaws: tuple[object, Sequence[Finding]] = None, ()

    def __reduce__(self) -> tuple[object, ...]:
        return ReadCache, ()  # another process starts with an empty cache


#: What users call, apart from the methods of a mapping. Other attributes are for ckptool itself.
PUBLIC: Final = ("changes", "close", "edited", "format", "inspect", "path", "save", "state_dicts", "survey")


class _PublicNames(ABCMeta):
    """A class that lists only its public names in ``dir`` and completion."""

    def __dir__(cls) -> list[str]:
        return [*dir(Mapping), *PUBLIC]


class Checkpoint(Mapping[Any, Any], metaclass=_PublicNames):
    """One checkpoint, metadata only. An edit returns another Checkpoint over the same bytes.

    It is a read-only mapping of its root: the entries of a dict, the elements of a list by their indices, or the
    attributes of an object. Values are plain Python values; tensors are ``TensorValue``, read on demand. Nested
    mappings and lists are also read-only; ``ckptool.get`` returns ordinary dicts and lists.

    ``path`` is the path as it was opened, ``graph`` the pickled object, ``container`` the file behind it. ``changes``
    lists the changes by edits since it was opened, in order. ``added`` maps keys to storages that an edit made; they
    take precedence over the container's. ``needs_relayout`` says that the file must get a new layout, because storages
    were added or removed, or because the container cannot be carried over. ``others`` are the checkpoints from which an
    edit took bytes. ``deferred_changes`` are functions that return changes known only after the bytes were computed.
    ``root`` is the folder of the records in a new layout. ``target`` is the format to write, or None to keep the format
    of the file. ``companions`` maps names to other files of the folder that an edit changed. ``texts`` replace the
    texts stored with the tensors, if not None. ``by_name`` says that an edit removed entries that the user named
    without a pattern: only then may an output have no tensors.

    >>> checkpoint = ckptool.open("training.pth")
    >>> checkpoint
    <Checkpoint 'training.pth' torch-zip: 38 tensors; 'epoch', 'best_mIoU', 'state_dict' and 'optimizer'>
    >>> checkpoint["epoch"], checkpoint["state_dict"]["module.head.bias"].shape
    (41, (5,))
    >>> ckptool.strip_module(checkpoint)["state_dict"]["head.bias"].dtype
    'float32'
    >>> checkpoint.close()
    """

    changes: tuple[Change, ...] = ()
    added: Mapping[str, StorageData] = MappingProxyType({})
    needs_relayout: bool = False
    others: tuple[Checkpoint, ...] = ()
    deferred_changes: tuple[DeferredChanges, ...] = ()
    root: str = ""
    target: Target | None = None
    is_lenient: bool = False
    companions: Mapping[str, bytes] = MappingProxyType({})
    texts: Mapping[str, str] | None = None
    #: Storages that the file describes in two ways, with the description that torch uses. Filled by the first edit.
    first_descriptions: Mapping[str, Storage] = MappingProxyType({})
    by_name: bool = False

    # Not a dataclass: importing the module and creating the class would take a tenth of a short run.
    def __init__(self, path: str, source: Source, container: Container, graph: Graph, **others: Any) -> None:
        self.path: Final = path
        self.source: Final = source
        self.container: Final = container
        self.graph: Final = graph
        self.cache = ReadCache()
        self.__dict__.update(others)

    @classmethod
    def of(cls, path: str, source: Source, container: Container) -> Checkpoint:
        """Return the unedited checkpoint in a file."""
        return cls(path, source, container, container.graph, root=container.root)

    def __repr__(self) -> str:
        words = f"<Checkpoint {self.path!r} {self.format}{', edited' if self.edited else ''}"
        try:
            keys = join_limited([repr(key) for key, _ in zip(self, range(6))], len(self), 6)
            return f"{words}: {pluralize(len(self.survey.tensors), 'tensor')}{'; ' if keys else ''}{keys}>"
        except CkptoolError:
            return words + ">"  # the checkpoint uses constructs that ckptool does not follow

    def _repr_html_(self) -> str:
        html: str = lazy.module("reports.html").summary_html(self)
        return html

    # A higher room reads the contents when they are first needed. The view gets its own Checkpoint: a reference cycle
    # through this one would keep its file open.
    @cached_property
    def _contents(self) -> Mapping[Any, Any]:
        contents: Mapping[Any, Any] = lazy.module("reports.entries").contents(self.replace())
        return contents

    def __getitem__(self, key: Hashable) -> Any:
        return self._contents[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: object) -> bool:
        return key in self._contents

    def __bool__(self) -> bool:
        return True  # an empty checkpoint is also a checkpoint

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def _ipython_key_completions_(self) -> list[Any]:
        return list(self)

    def inspect(self, **how: Any) -> Mapping[str, Any]:
        """Return the report of ``ckptool.inspect``, which takes the same arguments.

        >>> ckptool.open("training.pth").inspect()["tensors"]
        38
        """
        report: Mapping[str, Any] = lazy.module("reports.inspection").inspect(self, **how)
        return report

    def save(self, path: str | os.PathLike[str], **how: Any) -> Any:
        """Write the checkpoint as ``ckptool.save`` does, which takes the same arguments.

        >>> ckptool.remap("training.pth", "cpu").save("on_cpu.pth").path
        'on_cpu.pth'
        """
        return lazy.module("saving").save(self, path, **how)

    @property
    def format(self) -> str:
        """The name of the format, such as "torch-zip" or "torch-legacy"."""
        return self.container.format

    @property
    def traits(self) -> Traits:
        """The facts about the format."""
        return self.container.traits

    @property
    def pickled(self) -> bool:
        """Whether the checkpoint was read from a pickle; without one, loading cannot run code."""
        return self.traits.pickled

    @property
    def edited(self) -> bool:
        """Whether the checkpoint differs from its file."""
        changed = self.target is not None or self.texts is not None
        return changed or self.needs_relayout or self.graph is not self.container.graph

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts stored with the tensors, such as ``__metadata__`` of safetensors."""
        return self.container.metadata if self.texts is None else self.texts

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files from which the output takes bytes."""
        return tuple(dict.fromkeys(part for each in self.inputs for part in _with_files(each.source)))

    @property
    def inputs(self) -> tuple[Checkpoint, ...]:
        """This checkpoint, and all others from which the output takes bytes."""
        return (self, *(each for other in self.others for each in other.inputs))

    @cached_property
    def _survey(self) -> Survey:
        own = self.container.reader if self.graph is self.container.graph else None
        with adding_path(self.path):
            return survey(self.graph, own, named=self.traits.flat_names)

    @property
    def survey(self) -> Survey:
        """Tensors, state dicts, entries and devices; computed on first use.

        Raises UnreadableError if the pickle does something with torch objects that ckptool does not follow (see the
        module ``unsupported``). ``lenient`` returns a checkpoint that does not raise.
        """
        if self._survey.unsupported and not self.is_lenient:
            text = next(iter(self._survey.unsupported.values()))
            step = command("validate", self.path)
            raise UnreadableError(f"{text}, which ckptool does not follow", path=self.path, next=step)
        return self._survey

    def forget_survey(self) -> None:
        """Free the memory of the survey; the next use computes it again."""
        self.__dict__.pop("_survey", None)

    @property
    def state_dicts(self) -> list[StateDict]:
        """All state dicts, including the ones of low confidence."""
        return self.survey.state_dicts

    def changed(
        self,
        graph: Graph,
        changes: Sequence[Change],
        added: Mapping[str, StorageData] | None = None,
        *,
        needs_relayout: bool = False,
        others: Sequence[Checkpoint] = (),
        deferred_changes: Sequence[DeferredChanges] = (),
        root: str = "",
        target: Target | None = None,
        by_name: bool = False,
    ) -> Checkpoint:
        """Return the checkpoint after an edit; raise RefusedError if it removes the first description of a storage."""
        first = self.first_descriptions
        if self.graph is self.container.graph:
            # This raises if the pickle has constructs that ckptool does not follow. In such a pickle, any storage may
            # be in use.
            reader = self.survey.reader
            first = {key: reader.storages[key] for key in reader.disagreeing}
        if first:
            _check_first(first, graph, self.path)
        former = self.traits.legacy_name
        # Every edit converts a format that is no longer written to a zip.
        needs_relayout = needs_relayout or (self.traits.writes_as in ("torch", "") and graph is not self.graph)
        if (needs_relayout or added) and not self.needs_relayout and former and target is None:
            changes = (*changes, Change("container", "", 1, 0, f"{former} format -> zip"))
        return self.replace(
            graph=graph,
            changes=(*self.changes, *changes),
            added={**self.added, **(added or {})},
            needs_relayout=self.needs_relayout or needs_relayout or bool(self.added or added),
            others=(*self.others, *others),
            deferred_changes=(*self.deferred_changes, *deferred_changes),
            root=root or self.root,
            target=target or self.target,
            is_lenient=False,
            first_descriptions=first,
            cache=ReadCache(self.cache.checksums),
            by_name=self.by_name or by_name,
        )

    def with_texts(self, new: Mapping[str, str | None], changes: Sequence[Change]) -> Checkpoint:
        """Return the checkpoint with new texts beside the tensors; None removes a text."""
        texts = {name: text for name, text in {**self.metadata, **new}.items() if text is not None}
        edited: dict[str, Any] = {"texts": texts} if texts != self.metadata else {}
        if self.target is not None:
            texts = {name: text for name, text in {**self.target.metadata, **new}.items() if text is not None}
            edited["target"] = self.target._replace(metadata=texts)
        return self.replace(changes=(*self.changes, *changes), **edited)

    def replace(self, **changes: Any) -> Checkpoint:
        """Return a copy with other fields; it keeps the survey if the graph is the same."""
        other = Checkpoint(**{name: value for name, value in self.__dict__.items() if name not in _CACHED} | changes)
        if other.graph is self.graph and "_survey" in self.__dict__:
            other.__dict__["_survey"] = self.__dict__["_survey"]
        return other

    def body(self, key: str) -> StorageData | None:
        """Return the bytes of a storage, from an edit or from the file; None if they are missing."""
        if key in self.added:
            return self.added[key]
        span, size, compressed, crc = self.container.stored(key)
        return None if span is None else new_tuple(StorageData, (span, size, crc, compressed))

    def stored_size(self, key: str) -> int | None:
        """Return the uncompressed size of a storage in bytes; None if its bytes are missing."""
        return self.added[key].size if key in self.added else self.container.stored_size(key)

    def lenient(self) -> Checkpoint:
        """Return a copy whose survey lists constructs that ckptool does not follow, instead of raising."""
        return self.replace(is_lenient=True)

    def in_full(self, key: str = "") -> Checkpoint:
        """Return the unedited checkpoint with the values of the file that its graph only summarizes, if ``key`` may
        lead to them."""
        container = self.container if self.edited else self.container.in_full(key)
        return self if container is self.container else self.replace(container=container, graph=container.graph)

    def close(self) -> None:
        """Close the file. Metadata that was read stays available."""
        self.source.close()

    def __dir__(self) -> list[str]:
        return dir(Checkpoint)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_first(first: Mapping[str, Storage], graph: Graph, path: str) -> None:
    reader = TensorReader(graph)
    used = [(storage.key, ref) for ref in graph.reachable() if (storage := reader.storage(ref)) is not None]
    # In reverse, the first description of each storage is the one that stays.
    for key, ref in {key: ref for key, ref in reversed(used) if key in first}.items():
        if storage_mention(graph, ref) != (first[key].cls, first[key].numel):
            message = f"storage {key!r} is described in two ways, and the one that torch takes would be left out"
            raise RefusedError(message, path=path)


def _with_files(source: Source) -> tuple[Source, ...]:
    """Return a source and, unless it is a file itself, the files that it reads from."""
    if isinstance(source, FolderSource):
        return (source, *source.files)
    return (source, source.file) if isinstance(source, MemberSource) else (source,)


def wanted_storages(checkpoint: Checkpoint) -> set[str]:
    """Return the keys of the storages whose tensors the output holds; the output may be a single state dict."""
    survey, key = checkpoint.survey, checkpoint.target.key if checkpoint.target is not None else ""
    entries = survey.tensors_in([key]) if key else survey.tensors
    return {part.storage for entry in entries for part in survey.reader.parts(entry.tensor)}


def damage_of(checkpoint: Checkpoint) -> list[Finding]:
    """Return the problems that prevent any output: damage to storages that the edits have kept."""
    damage = [problem for problem in checkpoint.container.problems if problem.blocks_edits]
    partial = any(problem.storages is not None for problem in damage)
    used = wanted_storages(checkpoint) if partial else set[str]()
    return [problem for problem in damage if problem.storages is None or not used.isdisjoint(problem.storages)]


def rescue_step(checkpoint: Checkpoint) -> NextStep:
    """Return the next step for a damaged checkpoint: ``salvage`` for a file in which any tensor has its bytes."""
    if isinstance(checkpoint.source, FolderSource):
        unequal = {COPIES} == {item.code for item in checkpoint.container.problems if item.blocks_edits}
        return as_step(ONE_SAVE if unequal else "get the files again that are missing or damaged")
    tensors = (entry.tensor for entry in checkpoint.survey.tensors)
    whole = any(not tensor.storage or checkpoint.stored_size(tensor.storage) is not None for tensor in tensors)
    # Salvage does not read programs.
    if whole and checkpoint.traits.writes_as != "program":
        return salvage_step(checkpoint.path)
    return as_step("get another copy of the file")


def away(checkpoint: Checkpoint) -> bool:
    """Return whether any storage is on a device that some machines lack, such as a GPU."""
    storages = checkpoint.survey.reader.storages.values()
    return any(storage.location not in ("cpu", "meta", "") for storage in storages)


def layout_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the kind of the root (bare, wrapped, module, tensor or other) and its type."""
    survey, graph = checkpoint.survey, checkpoint.graph
    container = class_name(graph, graph.root)
    if any(state_dict.path == "" for state_dict in survey.state_dicts):
        return "bare", container
    if survey.reader.tensor(graph.root) is not None:
        return "tensor", "Tensor"
    if "" in survey.modules:
        return "module", container
    sure = any(item.confidence == "high" for item in survey.state_dicts)
    return "wrapped" if sure and mapping(graph, graph.root) is not None else "other", container


def file_mode(source: Source) -> int:
    """Return the permission bits of the input: for a folder, of its first file; 0o644 for an empty folder."""
    if isinstance(source, MemberSource):
        source = source.file
    if isinstance(source, FolderSource) and source.files:
        source = source.files[0]
    file = source.local_file()
    return file.mode if file is not None else 0o644

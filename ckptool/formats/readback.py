"""Read back a staged output with ckptool's own readers, and check that its metadata keep the promise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Final

from ..base.errors import CkptoolError, ReadBackError, of_file
from ..base.text import quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Container, Manifest
from ..checkpoint.objects import mapping
from ..checkpoint.tensors import TensorReader
from ..files.folders import open_folder
from ..files.sources import Source
from ..files.zips.reader import read_archive
from ..pickles.compare import CompareIds, Refs, difference
from ..pickles.decode import decode
from ..pickles.nodes import Graph
from . import FOLDERS, read_container, zip_kinds
from .losses import Facts, Promise, tensor_facts

#: The parts of a storage's persistent id: the word "storage", class, key, location, and number of elements.
_ID: Final = 5


def check_file(promise: Promise, staged: Source) -> None:
    """Raise ReadBackError if a staged file does not hold what was promised."""
    with _reporting(promise):
        if promise.format == "torch-zip" and promise.known is not None:
            container = zip_kinds.read(staged, promise.known)
        else:
            container = read_container(staged)
        _check(promise, staged, container)


def check_folder(promise: Promise, path: str) -> None:
    """Raise ReadBackError if a staged folder does not hold what was promised."""
    # ``read_folder`` would treat a folder that cannot be listed as no checkpoint; here it means a failing disk.
    folder, names = open_folder(path), frozenset(os.listdir(path))
    known = next((known for known in FOLDERS if known.sniff(folder, names)), None)
    with _reporting(promise):
        if known is None:
            raise ReadBackError("it is not a checkpoint", promised=promise.format, read="a folder of other files")
        opened = known.read(folder)
        with closing(opened[0]):
            _check(promise, *opened)


@contextmanager
def _reporting(promise: Promise) -> Iterator[None]:
    """Turn an error of reading the output into ReadBackError, unless a server failed."""
    try:
        yield
    except ReadBackError:
        raise
    except CkptoolError as error:
        if isinstance(error.__cause__, OSError):
            # A failing disk is no bug in ckptool: the writer reports it like its other I/O errors.
            raise error.__cause__ from None
        what = of_file(error).what
        raise ReadBackError(f"it does not read: {what}", promised=promise.format, read=what) from error


def _check(promise: Promise, source: Source, container: Container) -> None:
    for error in container.errors:
        if isinstance(error.__cause__, OSError):
            raise error
    _alike("the format", promise.format, container.format)
    for problem in container.problems:
        if problem.level in ("error", "warning") and problem.code not in promise.odd:
            what = f"something is wrong with it: {problem.message}"
            raise ReadBackError(what, promised="no flaw", read=problem.code)
    if promise.byteorder:
        _alike("the byte order", promise.byteorder, container.byteorder)
    if promise.texts is not None:
        _alike("the texts beside the tensors", dict(promise.texts), dict(container.metadata))
    if promise.manifest is not None:
        _check_manifest(promise, promise.manifest, container.manifest(checked=promise.checked))
    if promise.beside is not None:
        names = {name.removeprefix(f"{container.root}/") for name in container.manifest(checked=True)}
        beside = sorted(name for name in names if not name.startswith("data/"))
        _alike("the records beside the storages", sorted(promise.beside), beside)
    if promise.graph is not None:
        _check_object(promise.graph, container, promise.storages)
    if promise.pickles:
        archive = read_archive(source)
        for name, graph in promise.pickles.items():
            record = archive.by_name.get(name)
            data = archive.read(record, record.size) if record else b""
            _equal(name, difference(graph, decode(data, where=name).graph))
    if promise.leaves:
        _check_leaves(promise.leaves, Checkpoint.of(source.name, source, container))
    if promise.tensors is not None:
        container.manifest(checked=True)
        _check_tensors(promise.tensors, Checkpoint.of(source.name, source, container))


def _check_manifest(promise: Promise, promised: Manifest, read: Manifest) -> None:
    expected = {**promised, **{name: read[name] for name in promise.replaced if name in read}}
    for name in {**expected, **read} if expected != read else ():
        if name in read or name.lower() not in promise.dropped:
            _alike(quoted(name), expected.get(name), read.get(name))


def _check_object(graph: Graph, container: Container, storages: Mapping[str, tuple[int, int | None]] | None) -> None:
    if storages is None:
        _equal("the object", difference(graph, container.graph))
        return
    keys: dict[str, str] = {}
    _equal("the object", difference(graph, container.graph, compare_ids=_renamed(graph, container.graph, keys)))
    records = {record.key: record for record in container.records()}
    for key, (size, crc) in storages.items():
        if not size and key not in keys:
            continue  # each mention of an empty storage makes a separate storage
        record = records.get(keys.get(key, ""))
        name = f"storage {quoted(key)}"
        _alike(f"the size of {name}", size, record.size if record else None)
        if crc and record and record.crc:
            _alike(f"the checksum of {name}", f"{crc:08x}", f"{record.crc:08x}")


def _renamed(graph: Graph, other: Graph, keys: dict[str, str]) -> CompareIds:
    """Return a comparison of persistent ids that maps storage keys one to one and records the mapping in ``keys``."""
    ours, theirs = graph.nodes, other.nodes
    back: dict[str, str] = {}

    def compare(one: Refs, two: Refs) -> tuple[Refs, Refs]:
        if len(one) < _ID or len(two) < _ID:
            return one, two
        key, twin = str(ours[one[2]]), str(theirs[two[2]])
        if ours[one[4]] and (keys.setdefault(key, twin) != twin or back.setdefault(twin, key) != key):
            raise ValueError(f"storage {quoted(key)} is shared differently")
        if len(one) == len(two) == _ID:
            return (one[0], one[1], one[3], one[4]), (two[0], two[1], two[3], two[4])
        # Legacy files have a sixth part: a view of the storage, or None.
        views = [[ref for ref in pid[_ID:] if nodes[ref] is not None] for pid, nodes in ((one, ours), (two, theirs))]
        return (*one[:2], *one[3:_ID], *views[0]), (*two[:2], *two[3:_ID], *views[1])

    return compare


def _check_leaves(promised: Mapping[str, Graph], read: Checkpoint) -> None:
    from .dcp.writer import object_items

    leaves = object_items(read)
    _alike("the objects in it", sorted(promised), sorted(leaves))
    for name, graph in promised.items():
        # Each item has its own storages; sharing between items is a loss the user allowed.
        compare_ids = _renamed(graph, leaves[name], {})
        _equal(quoted(name), difference(graph, leaves[name], texts_by_value=True, compare_ids=compare_ids))


def _check_tensors(promised: Facts, read: Checkpoint) -> None:
    graph, reader = read.graph, TensorReader(read.graph)
    items = [(str(graph.nodes[key]), value) for key, value in mapping(graph, graph.root) or ()]
    if read.pickled:
        facts = tensor_facts(items, reader, read.container.stored_size)
    else:
        tensors = ((name, reader.tensor(ref)) for name, ref in items)
        facts = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors if tensor}
    for name in {**promised, **facts} if promised != facts else ():
        _alike(f"tensor {quoted(name)}", promised.get(name), facts.get(name))


def _alike(what: str, promised: object, read: object) -> None:
    if promised != read:
        raise ReadBackError(f"{what}: {read!r}, not {promised!r}", promised=f"{what}: {promised!r}", read=repr(read))


def _equal(what: str, difference: str) -> None:
    if difference:
        raise ReadBackError(f"{what} differs: {difference}", promised=f"{what} as edited", read=difference)

"""Reading back what was staged: does it hold what the output promises? By our own readers, metadata only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ..base.errors import CkptoolError, ReadBackError
from ..base.text import quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Container, Manifest
from ..checkpoint.objects import mapping
from ..checkpoint.tensors import TensorReader
from ..files.sources import Source
from ..files.zips.reader import read_archive
from ..pickles.compare import CompareIds, Refs, difference
from ..pickles.decode import decode
from ..pickles.nodes import Graph
from . import read_container, read_folder, zip_kinds
from .promises import Facts, Promise, tensor_facts

#: References in the persistent id of a storage: the word, its class, its key, its location, its elements.
_ID: Final = 5


# -- what is read ---------------------------------------------------------------------------------------------------


def check_file(promise: Promise, staged: Source) -> None:
    """Raise ReadBackError where a staged file does not hold what is promised."""
    _read(promise, lambda: (staged, _container(promise, staged)), close=False)


def _container(promise: Promise, staged: Source) -> Container:
    if promise.format == "torch-zip" and promise.known is not None:
        return zip_kinds.read(staged, promise.known)
    return read_container(staged)


def check_folder(promise: Promise, path: str) -> None:
    """The same for a staged folder."""

    def opened() -> tuple[Source, Container]:
        found = read_folder(path)
        if found is None:
            raise ReadBackError("it is no checkpoint", promised=promise.format, read="a folder of other files")
        return found

    _read(promise, opened, close=True)


def _read(promise: Promise, opened: Callable[[], tuple[Source, Container]], *, close: bool) -> None:
    try:
        source, container = opened()
        try:
            _check(promise, source, container)
        finally:
            if close:
                source.close()
    except ReadBackError:
        raise
    except CkptoolError as error:
        if isinstance(error.__cause__, OSError):
            # A disk that fails is no bug in ckptool: the writer reports it as for its other steps.
            raise error.__cause__ from None
        raise ReadBackError(f"it does not read: {error.what}", promised=promise.format, read=error.what) from error


def _check(promise: Promise, source: Source, container: Container) -> None:
    _alike("the format", promise.format, container.format)
    worse = [one for one in container.problems if one.level in ("error", "warning") and one.code not in promise.odd]
    if worse:
        raise ReadBackError(f"something is wrong with it: {worse[0].message}", promised="no flaw", read=worse[0].code)
    if promise.byteorder:
        _alike("the byte order", promise.byteorder, container.byteorder)
    if promise.texts is not None:
        _alike("the texts beside the tensors", dict(promise.texts), dict(container.metadata))
    if promise.manifest is not None:
        _check_manifest(promise, container.manifest(checked=promise.checked))
    if promise.beside is not None:
        names = {name.removeprefix(f"{container.root}/") for name in container.manifest(checked=True)}
        there = sorted(name for name in names if not name.startswith("data/"))
        _alike("the records beside the storages", sorted(promise.beside), there)
    if promise.graph is not None:
        _check_object(promise.graph, container, promise.storages)
    if promise.pickles:
        archive = read_archive(source)
        for name, graph in promise.pickles.items():
            record = archive.by_name.get(name)
            data = archive.read(record, record.size) if record else b""
            _equal(name, difference(graph, decode(data, where=name).graph))
    if promise.tensors is not None:
        _check_tensors(promise, source, container)


def _check_manifest(promise: Promise, there: Manifest) -> None:
    assert promise.manifest is not None
    wanted = dict(promise.manifest)
    for name in promise.replaced:
        if name in there:
            wanted[name] = there[name]
    if wanted == there:
        return
    for name, facts in wanted.items():
        if there.get(name) != facts and (name in there or name.lower() not in promise.dropped):
            _alike(quoted(name), facts, there.get(name))
    for name, facts in there.items():
        if name not in wanted:
            _alike(quoted(name), None, facts)


def _check_object(graph: Graph, container: Container, storages: Mapping[str, tuple[int, int | None]] | None) -> None:
    if storages is None:
        _equal("the object", difference(graph, container.graph))
        return
    keys: dict[str, str] = {}
    _equal("the object", difference(graph, container.graph, compare_ids=_renamed(graph, container.graph, keys)))
    records = {record.key: record for record in container.records()}
    for key, (size, crc) in storages.items():
        if not size and key not in keys:
            continue  # of empty ones each mention stands for itself
        record = records.get(keys.get(key, ""))
        name = f"storage {quoted(key)}"
        _alike(f"the size of {name}", size, record.size if record else None)
        if crc and record and record.crc:
            _alike(f"the checksum of {name}", f"{crc:08x}", f"{record.crc:08x}")


def _renamed(graph: Graph, other: Graph, keys: dict[str, str]) -> CompareIds:
    """Compares persistent ids but for the keys of storages, of which each has one other; fills ``keys``."""
    ours, theirs = graph.nodes, other.nodes
    back: dict[str, str] = {}

    def outside(one: Refs, two: Refs) -> tuple[Refs, Refs]:
        if len(one) < _ID or len(two) < _ID:
            return one, two
        key, twin = str(ours[one[2]]), str(theirs[two[2]])
        if ours[one[4]] and (keys.setdefault(key, twin) != twin or back.setdefault(twin, key) != key):
            raise ValueError(f"storage {quoted(key)} is shared otherwise")
        # The sixth is a view of a storage, or nothing, in legacy files.
        views = [[ref for ref in pid[_ID:] if nodes[ref] is not None] for pid, nodes in ((one, ours), (two, theirs))]
        return (*one[:2], *one[3:_ID], *views[0]), (*two[:2], *two[3:_ID], *views[1])

    return outside


def _check_tensors(promise: Promise, source: Source, container: Container) -> None:
    assert promise.tensors is not None
    read = Checkpoint.of(source.name, source, container)
    if promise.leaves is not None:
        from .dcp.leaves import object_items, tensor_items

        container.manifest(checked=True)
        _check_facts(promise.tensors, tensor_items(read))
        found = object_items(read)
        _alike("the objects in it", sorted(promise.leaves), sorted(found))
        keys: dict[str, str] = {}
        for name, graph in promise.leaves.items():
            outside = _renamed(graph, found[name], keys)
            _equal(quoted(name), difference(graph, found[name], texts_by_value=True, compare_ids=outside))
        return
    container.manifest(checked=True)
    graph, reader = container.graph, TensorReader(container.graph)
    items = [(str(graph.nodes[key]), value) for key, value in mapping(graph, graph.root) or ()]
    if container.traits.pickled:
        _check_facts(promise.tensors, tensor_facts(items, reader, container.stored_size))
    else:
        tensors = ((name, reader.tensor(ref)) for name, ref in items)
        _check_facts(promise.tensors, {name: (one.dtype, one.shape) for name, one in tensors if one})


def _check_facts(promised: Facts, found: Facts) -> None:
    if promised != found:
        for name in {**promised, **found}:
            _alike(f"tensor {quoted(name)}", promised.get(name), found.get(name))


def _alike(what: str, promised: object, read: object) -> None:
    if promised != read:
        raise ReadBackError(f"{what}: {read!r}, not {promised!r}", promised=f"{what}: {promised!r}", read=repr(read))


def _equal(what: str, difference: str) -> None:
    if difference:
        raise ReadBackError(f"{what} is another one: {difference}", promised=f"{what} as edited", read=difference)

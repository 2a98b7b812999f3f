"""What an output promises, as data, and whether what was staged holds it: read by our own readers, metadata only.

A promise is made of the checkpoint, never of the plan: what plans and writes is what it is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from .checkpoint import Checkpoint, Target
from .container import Container, Manifest
from .edits.prune import used_storages
from .edits.views import without_views
from .errors import CkptoolError, ReadBackError
from .formats import read_container, read_folder, zip_archives
from .human import shown
from .objects import mapping
from .outputs import dcp, programs, safetensors
from .pickles import Outside, Refs, decode, difference, respelled
from .pickles.nodes import Graph, Ref
from .planning import state_dict_of, target_of
from .programs import program_of
from .source import Source
from .tensors import TensorReader
from .zips import read_archive

__all__ = ["Promise", "check_file", "check_folder", "promise_in_place", "promise_of"]

#: What is compared of a tensor, or of an object that stands for itself.
_Facts: TypeAlias = Mapping[str, tuple[object, ...]]
#: The records that torch.save writes beside the object and the storages.
_OWN: Final = frozenset(("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"))
#: References in the persistent id of a storage: the word, its class, its key, its location, its elements.
_ID: Final = 5
#: What an edit in place may take out: where storages no longer stand as torch computes it, it must look them up.
_CONTRACT: Final = "/.format_version"


class Promise(NamedTuple):
    """What a reader must find in the output.

    ``format`` is that of the file. ``graph`` is the object; with ``storages`` these may have other keys, one for each,
    and hold so many bytes with that checksum (None where nothing is on record), and ``beside`` are all other records
    in its folder. ``manifest`` is what is stored beside the object, but for the names in ``replaced``, and those in
    ``dropped`` (in lower case) may be gone. ``pickles`` are those of records by their names. ``tensors`` are facts by
    name, ``leaves`` the objects that are items of their own, ``texts`` the texts beside the tensors. ``odd`` are the
    codes of problems that the input has, too; not ``checked``, its places are as odd as those of the input. ``known``
    gives the graph of a pickle that is the input's but for texts.
    """

    format: str
    graph: Graph | None = None
    beside: frozenset[str] | None = None
    storages: Mapping[str, tuple[int, int | None]] | None = None
    manifest: Manifest | None = None
    replaced: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    pickles: Mapping[str, Graph] = MappingProxyType({})
    tensors: _Facts | None = None
    leaves: Mapping[str, Graph] | None = None
    texts: Mapping[str, str] | None = None
    byteorder: str = ""
    odd: frozenset[str] = frozenset()
    checked: bool = True
    known: Callable[[bytes], Graph | None] | None = None


# -- what is promised -----------------------------------------------------------------------------------------------


def promise_of(checkpoint: Checkpoint, output: str) -> Promise | None:
    """What the output of a checkpoint under that name must hold; None where it is the input, byte for byte."""
    target = target_of(checkpoint, output)
    if target is None:
        return None
    return _PROMISES[target.format](checkpoint, target)._replace(odd=_odd(checkpoint.container))


def promise_in_place(checkpoint: Checkpoint) -> Promise:
    """What the file must hold after an edit in place."""
    if program_of(checkpoint) is not None:
        return _program(checkpoint, None)._replace(odd=_odd(checkpoint.container))
    container = checkpoint.container
    gone = TensorReader(container.graph).storages.keys() - used_storages(checkpoint.graph, checkpoint.path).keys()
    dropped = {f"{container.root}/data/{key}".lower() for key in gone} | {f"{container.root}{_CONTRACT}".lower()}
    return _same(checkpoint, None)._replace(dropped=frozenset(dropped), odd=_odd(container))


def _odd(container: Container) -> frozenset[str]:
    return frozenset(problem.code for problem in container.problems)


def _same(checkpoint: Checkpoint, target: Target | None) -> Promise:
    """The input with another object."""
    container = checkpoint.container
    return Promise(
        container.format,
        checkpoint.graph,
        manifest=container.manifest(),
        byteorder=container.byteorder,
        known=lambda data: respelled(container.graph, container.pickle, data),
    )


def _torch(checkpoint: Checkpoint, target: Target) -> Promise:
    if target.shard_size:
        found = state_dict_of(checkpoint, target)
        assert found is not None
        reader = checkpoint.survey.reader
        items = [(str(checkpoint.graph.nodes[key]), value) for key, value in found.items if reader.tensor(value)]
        return Promise("hf-torch", tensors=_facts(items, reader, lambda key: _size(checkpoint, key)))
    graph = without_views(checkpoint.graph)
    order = checkpoint.container.byteorder
    return Promise("torch-zip", graph, _OWN, _storages(checkpoint, graph), byteorder=order)


def _legacy(checkpoint: Checkpoint, target: Target) -> Promise:
    if not checkpoint.anew:
        return _same(checkpoint, target)
    storages = {key: (size, None) for key, (size, _) in _storages(checkpoint, checkpoint.graph).items()}
    return Promise("torch-legacy", checkpoint.graph, None, storages)


def _safetensors(checkpoint: Checkpoint, target: Target) -> Promise:
    found = state_dict_of(checkpoint, target)
    assert found is not None
    chosen = safetensors.chosen_tensors(checkpoint, found, target.tied)
    if target.shard_size:
        return Promise(
            "hf-safetensors", tensors={one.name: (one.tensor.dtype, one.tensor.shape) for one in chosen.tensors}
        )
    manifest = {one.name: safetensors.listed(one.tensor) for one in chosen.tensors}
    texts = {**target.metadata, **chosen.names}
    return Promise("safetensors", manifest=manifest, texts=texts)


def _dcp(checkpoint: Checkpoint, target: Target) -> Promise:
    return Promise("dcp", tensors=_plain_leaves(checkpoint), leaves=_objects(checkpoint))


def _program(checkpoint: Checkpoint, target: Target | None) -> Promise:
    program = program_of(checkpoint)
    assert program is not None
    pickles = programs.edited_pickles(checkpoint, program)
    own = _same(checkpoint, target)
    return own._replace(graph=None, pickles=pickles, replaced=frozenset(pickles))


#: What each format promises, by the name that a target has for it.
_PROMISES: Final[Mapping[str, Callable[[Checkpoint, Target], Promise]]] = {
    "same": _same,
    "program": _program,
    "torch": _torch,
    "legacy": _legacy,
    "safetensors": _safetensors,
    "dcp": _dcp,
}


def _storages(checkpoint: Checkpoint, graph: Graph) -> dict[str, tuple[int, int | None]]:
    """The bytes of every storage that an object uses, and their checksum where one is on record."""
    crcs = {record.key: record.crc for record in checkpoint.container.records() if record.key}
    found: dict[str, tuple[int, int | None]] = {}
    for key in used_storages(graph, checkpoint.path):
        body = checkpoint.body(key)
        if body is not None:
            found[key] = body.size, (body.crc if key in checkpoint.added else crcs.get(key)) or None
    return found


def _size(checkpoint: Checkpoint, key: str) -> int | None:
    body = checkpoint.body(key)
    return None if body is None else body.size


def _facts(items: Iterable[tuple[str, Ref]], reader: TensorReader, size: Callable[[str], int | None]) -> _Facts:
    """All that makes tensors what they are, but for their values: which of them share memory, too."""
    numbers: dict[str, int] = {}
    found: dict[str, tuple[object, ...]] = {}
    for name, ref in sorted(items):
        tensor = reader.tensor(ref)
        facts: list[object] = []
        for part in reader.parts(tensor) if tensor else ():
            known = reader.storages.get(part.storage)
            held = known is not None and known.nbytes > 0
            facts += part._replace(storage="", parts=())
            facts += (numbers.setdefault(part.storage, len(numbers)), size(part.storage)) if held else (-1, 0)
        found[name] = tuple(facts)
    return found


def _plain_leaves(checkpoint: Checkpoint) -> _Facts:
    return {
        leaf.name: (leaf.tensor.dtype, leaf.tensor.shape)
        for leaf in dcp.leaves(checkpoint)
        if leaf.plain and leaf.tensor is not None
    }


def _objects(checkpoint: Checkpoint) -> dict[str, Graph]:
    graph = without_views(checkpoint.graph)
    return {leaf.name: Graph(graph.nodes, leaf.ref, graph.style) for leaf in dcp.leaves(checkpoint) if not leaf.plain}


# -- what is read ---------------------------------------------------------------------------------------------------


def check_file(promise: Promise, staged: Source) -> None:
    """Raise ReadBackError where a staged file does not hold what is promised."""
    _read(promise, lambda: (staged, _container(promise, staged)), close=False)


def _container(promise: Promise, staged: Source) -> Container:
    if promise.format == "torch-zip" and promise.known is not None:
        return zip_archives.read(staged, promise.known)
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
            # A disk that fails is no bug: the writer gives it the words of its other steps.
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
            _alike(shown(name), facts, there.get(name))
    for name, facts in there.items():
        if name not in wanted:
            _alike(shown(name), None, facts)


def _check_object(graph: Graph, container: Container, storages: Mapping[str, tuple[int, int | None]] | None) -> None:
    if storages is None:
        _equal("the object", difference(graph, container.graph))
        return
    keys: dict[str, str] = {}
    _equal("the object", difference(graph, container.graph, outside=_renamed(graph, container.graph, keys)))
    records = {record.key: record for record in container.records()}
    for key, (size, crc) in storages.items():
        if not size and key not in keys:
            continue  # of empty ones each mention stands for itself
        record = records.get(keys.get(key, ""))
        name = f"storage {shown(key)}"
        _alike(f"the size of {name}", size, record.size if record else None)
        if crc and record and record.crc:
            _alike(f"the checksum of {name}", f"{crc:08x}", f"{record.crc:08x}")


def _renamed(graph: Graph, other: Graph, keys: dict[str, str]) -> Outside:
    """Compares persistent ids but for the keys of storages, of which each has one other; fills ``keys``."""
    ours, theirs = graph.nodes, other.nodes
    back: dict[str, str] = {}

    def outside(one: Refs, two: Refs) -> tuple[Refs, Refs]:
        if len(one) < _ID or len(two) < _ID:
            return one, two
        key, twin = str(ours[one[2]]), str(theirs[two[2]])
        if ours[one[4]] and (keys.setdefault(key, twin) != twin or back.setdefault(twin, key) != key):
            raise ValueError(f"storage {shown(key)} is shared otherwise")
        # The sixth is a view of a storage, or nothing, in legacy files.
        views = [[ref for ref in pid[_ID:] if nodes[ref] is not None] for pid, nodes in ((one, ours), (two, theirs))]
        return (*one[:2], *one[3:_ID], *views[0]), (*two[:2], *two[3:_ID], *views[1])

    return outside


def _check_tensors(promise: Promise, source: Source, container: Container) -> None:
    assert promise.tensors is not None
    read = Checkpoint(source.name, source, container)
    if promise.leaves is not None:
        container.manifest(checked=True)
        _check_facts(promise.tensors, _plain_leaves(read))
        found = _objects(read)
        _alike("the objects in it", sorted(promise.leaves), sorted(found))
        keys: dict[str, str] = {}
        for name, graph in promise.leaves.items():
            outside = _renamed(graph, found[name], keys)
            _equal(shown(name), difference(graph, found[name], texts_by_value=True, outside=outside))
        return
    container.manifest(checked=True)
    graph, reader = container.graph, TensorReader(container.graph)
    items = [(str(graph.nodes[key]), value) for key, value in mapping(graph, graph.root) or ()]
    if container.traits.pickled:
        _check_facts(promise.tensors, _facts(items, reader, container.stored_size))
    else:
        tensors = ((name, reader.tensor(ref)) for name, ref in items)
        _check_facts(promise.tensors, {name: (one.dtype, one.shape) for name, one in tensors if one})


def _check_facts(promised: _Facts, found: _Facts) -> None:
    if promised != found:
        for name in {**promised, **found}:
            _alike(f"tensor {shown(name)}", promised.get(name), found.get(name))


def _alike(what: str, promised: object, read: object) -> None:
    if promised != read:
        raise ReadBackError(f"{what}: {read!r}, not {promised!r}", promised=f"{what}: {promised!r}", read=repr(read))


def _equal(what: str, difference: str) -> None:
    if difference:
        raise ReadBackError(f"{what} is another one: {difference}", promised=f"{what} as edited", read=difference)

"""From an edited checkpoint to the plan of its file: the same file with another pickle, or a file laid out anew."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from .checkpoint import AMBIGUOUS, CUT, UNEDITABLE, Checkpoint
from .edits.prune import used_storages
from .edits.views import without_views
from .errors import MalformedError, PickleError, RefusedError
from .human import salvage_step
from .pickles import decode, difference, encode
from .pickles.nodes import Graph, Node, Persistent, Ref
from .source import Appending, Computed, Plan
from .tensors import TensorReader
from .zips import Content, Sum, fresh, summed

__all__ = ["InPlace", "in_place_of", "plan_of"]

#: The folder of the records where the file does not say one; torch.save uses it for what has no name.
_ROOT: Final = "archive"
#: Decimal digits in ``.data/serialization_id``.
_ID_DIGITS: Final = 40


class Verified(NamedTuple):
    """The pickle of an edited graph; ``exact`` whether the unedited one comes out byte for byte."""

    data: bytes
    exact: bool


def plan_of(checkpoint: Checkpoint) -> tuple[Plan, bool]:
    """The output file of a checkpoint, and whether its pickle is proven byte-exact (see ``verified_pickle``).

    Raises MalformedError for a damaged file, RefusedError where something would be lost.
    """
    if not checkpoint.edited and not checkpoint.changes:
        return checkpoint.container.plan(None), True
    _refuse_damage(checkpoint)
    if checkpoint.anew:
        return _anew(checkpoint), _codec_is_exact(checkpoint)
    if not checkpoint.edited:
        return checkpoint.container.plan(None), True
    data, exact = verified_pickle(checkpoint)
    return checkpoint.container.plan(data), exact


class InPlace(NamedTuple):
    """What an edit in place appends, None where nothing changed; ``exact`` as in ``plan_of``.

    ``unused_bytes`` are those of the storages that the edit left out: they stay in the file.
    """

    appending: Appending | None
    exact: bool = True
    unused_bytes: int = 0


def in_place_of(checkpoint: Checkpoint, edit: str, time: int) -> InPlace:
    """The edited checkpoint as a new version behind its own file.

    ``edit`` says what was done and ``time`` when, in seconds since 1970. Raises RefusedError where that takes new bytes
    of tensors, or the format has no room for it.
    """
    if not checkpoint.edited:
        return InPlace(None)
    _refuse_damage(checkpoint)
    if checkpoint.added or checkpoint.also:
        what = "the edit makes new bytes of tensors, which only a new file holds"
        raise RefusedError(what, path=checkpoint.path, next="write it with -o")
    used, before = used_storages(checkpoint.graph), TensorReader(checkpoint.container.graph).storages
    gone = before.keys() - used.keys()
    data, exact = verified_pickle(checkpoint)
    appending = checkpoint.container.append(data, list(used), gone, edit, time)
    return InPlace(appending, exact, sum(before[key].nbytes for key in gone))


def _refuse_damage(checkpoint: Checkpoint) -> None:
    # An edit that changed nothing has looked at what may not be what torch reads, too.
    damage = [problem for problem in checkpoint.container.problems if problem.code in UNEDITABLE]
    if damage:
        step = "get a whole copy of the file"
        if damage[0].code == CUT:
            step += f", or {salvage_step(checkpoint.path)}"
        raise MalformedError(damage[0].message, path=checkpoint.path, next=step)
    ambiguous = [problem for problem in checkpoint.container.problems if problem.code in AMBIGUOUS]
    if ambiguous:
        raise RefusedError(f"the archive is ambiguous: {ambiguous[0].message}", path=checkpoint.path)


def verified_pickle(checkpoint: Checkpoint) -> Verified:
    """Encode an edited checkpoint, after proving on its own file that the codec loses nothing.

    The unedited graph must encode to the very bytes in the file; a foreign pickle that does not must
    at least decode to an equal graph again. Raises RefusedError when not even that holds.
    """
    exact = _codec_is_exact(checkpoint)
    data = encode(checkpoint.graph)
    if not exact:
        _prove(checkpoint.graph, data, "edited", checkpoint.path)
    return Verified(data, exact)


def _codec_is_exact(checkpoint: Checkpoint) -> bool:
    """Does the unedited graph encode to the very bytes in the file? If not, it is proven to be equal at least."""
    container = checkpoint.container
    again = encode(container.graph)
    original = container.pickle
    if again == original[: len(again)] and len(again) <= len(original):
        return True
    _prove(container.graph, again, "unedited", checkpoint.path)
    return False


def _prove(graph: Graph, data: bytes, name: str, path: str) -> None:
    """Raise RefusedError unless the bytes decode to the graph that they were made of."""
    try:
        found = difference(graph, decode(data).graph)
    except PickleError as error:
        found = str(error)
    if found:
        what = f"the {name} pickle cannot be written again without a loss: {found}"
        raise RefusedError(what, path=path, next="please report this file")


# -- laid out anew --------------------------------------------------------------------------------------


def _anew(checkpoint: Checkpoint) -> Plan:
    """A zip as torch writes it, with the storages that the graph uses, numbered as it meets them.

    That is the layout contract of ``.format_version`` (torch/serialization.py, ``_load._get_offset``).
    """
    graph, keys = _renumbered(without_views(checkpoint.graph))
    data = encode(graph)
    _prove(graph, data, "new", checkpoint.path)
    root = checkpoint.root
    if root in ("", ".", "..") or "\\" in root or not root.isprintable():
        root = _ROOT  # a name that readers disagree about, or that is no text, is not handed on
    contents = list(_contents(checkpoint, root, data, keys))
    name = f"{root}/.data/serialization_id"
    kept = _kept_identity(checkpoint) if graph is checkpoint.container.graph else b""
    if kept:
        return fresh([*contents, Content(name, kept, zlib.crc32(kept), len(kept))])
    identity = Computed(_ID_DIGITS, lambda: (_identity(contents),))
    return fresh([*contents, summed(name, identity)])


def _kept_identity(checkpoint: Checkpoint) -> bytes:
    """The id in the file, for an output that holds the same; b"" where it has none."""
    for record in checkpoint.container.records():
        if record.name.endswith("/.data/serialization_id") and not record.compressed and record.size == _ID_DIGITS:
            return record.span.source.read(record.span.offset, record.size)
    return b""


def _contents(checkpoint: Checkpoint, root: str, data: bytes, keys: list[str]) -> Iterator[Content]:
    container = checkpoint.container
    yield _record(root, "data.pkl", data)
    yield _record(root, ".format_version", b"1")
    yield _record(root, ".storage_alignment", b"64")
    yield _record(root, "byteorder", container.byteorder.encode())
    crcs = {record.key: record.crc for record in container.records() if record.key}
    for number, key in enumerate(keys):
        name = f"{root}/data/{number}"
        body = checkpoint.body(key)
        if body is None:
            what = f"the bytes of storage {key!r} are not in the file"
            raise RefusedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))
        crc = body.crc if key in checkpoint.added else crcs.get(key)
        if crc is None and body.size:
            yield summed(name, body.piece)
        else:
            yield Content(name, body.piece, crc or 0, body.size, body.compressed)
    yield _record(root, "version", b"3\n")


def _record(root: str, name: str, data: bytes) -> Content:
    return Content(f"{root}/{name}", data, zlib.crc32(data), len(data))


def _identity(contents: list[Content]) -> bytes:
    """40 decimal digits that the names and checksums decide, as torch's own do; nobody reads them back."""
    from hashlib import sha256  # OpenSSL takes milliseconds to load

    digest = sha256()
    for content in contents:
        crc = content.crc.value if isinstance(content.crc, Sum) else content.crc
        digest.update(f"{content.name}:{crc:08x}:{content.size};".encode())
    return b"%0*d" % (_ID_DIGITS, int.from_bytes(digest.digest(), "big") % 10**_ID_DIGITS)


def _renumbered(graph: Graph) -> tuple[Graph, list[str]]:
    """The graph with its storages called 0, 1, ... in the order of their first mention, and their old keys."""
    reader = TensorReader(graph)
    numbers: dict[str, int] = {}
    changes: dict[Ref, Node] = {}
    added: list[Node] = []
    names: dict[int, Ref] = {}
    for ref in graph.reachable():
        storage = reader.storage(ref)
        if storage is None:
            continue
        node = graph.nodes[ref]
        assert isinstance(node, Persistent)
        pid = graph.nodes[node.pid]
        assert type(pid) is tuple
        if storage.location == "meta" and not storage.nbytes:
            continue
        number = numbers.setdefault(storage.key, len(numbers))
        if graph.nodes[pid[2]] != str(number):
            if number not in names:
                names[number] = len(graph.nodes) + len(added)
                added.append(str(number))
            changes[node.pid] = (*pid[:2], names[number], *pid[3:])
    return (graph.edited(changes, added) if changes else graph), list(numbers)

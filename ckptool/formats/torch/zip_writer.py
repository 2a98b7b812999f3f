"""Write zips in torch.save's layout, with only the content that the graph uses."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ...base.errors import RefusedError
from ...base.steps import salvage_step
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.container import ARCHIVE_RECORDS, StorageData
from ...checkpoint.graph_editor import storage_mentions, used_storages, without_views
from ...checkpoint.tensors import Storage
from ...files.sources import Computed, Plan, size_of
from ...files.zips.reader import MAX_NAME
from ...files.zips.writer import RecordContent, checksummed, plan_archive, stored_content
from ...pickles.encode import encode
from ...pickles.nodes import Graph, Node, Persistent, Ref
from ..losses import Fit, Promise, refuse_texts, storage_facts
from ..repickled import is_exact

#: The folder of records for an input without one: torch.save's name for an output without a file name.
_ROOT: Final = "archive"
#: The most bytes of a record name after the folder.
_RECORD: Final = 64
#: Decimal digits in ``.data/serialization_id``.
_ID_DIGITS: Final = 40


def fit(checkpoint: Checkpoint, target: Target) -> Fit:
    """Return that the file holds every object; a program's other entries are not part of it."""
    refuse_texts(checkpoint, target)
    return Fit("a state dict", target, relayout=True)


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """Return the archive, and whether its pickle is proven byte-exact."""
    return archive_plan(checkpoint), is_exact(checkpoint)


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the object, its storages under other keys, and torch's own records."""
    graph = without_views(checkpoint.graph)
    order = checkpoint.container.byteorder
    return Promise("torch-zip", graph, ARCHIVE_RECORDS, storage_facts(checkpoint, graph), byteorder=order)


def archive_plan(checkpoint: Checkpoint) -> Plan:
    """Return a zip as torch writes it, with the storages that the graph uses, numbered in order of mention. This is the
    layout contract of ``.format_version`` (torch/serialization.py, ``_load._get_offset``)."""
    used_storages(checkpoint.graph, checkpoint.path)  # raises for a possible storage of an unknown kind
    graph, storages = renumbered(without_views(checkpoint.graph))
    data = encode(graph)
    root = checkpoint.root
    odd = root in ("", ".", "..") or "\\" in root or not root.isprintable()
    if odd or len(root.encode()) > MAX_NAME - _RECORD:
        root = _ROOT  # readers disagree about such a name, it is not printable, or it is too long for torch
    contents = list(
        archive_contents(root, data, checkpoint.container.byteorder, storage_contents(checkpoint, root, storages))
    )
    name = f"{root}/.data/serialization_id"
    kept = _kept_identity(checkpoint) if graph is checkpoint.container.graph else b""
    if kept:
        return plan_archive([*contents, RecordContent(name, kept, zlib.crc32(kept), len(kept))])
    identity = Computed(_ID_DIGITS, _identity, tuple(contents), late=True)
    return plan_archive([*contents, checksummed(name, identity)])


def _kept_identity(checkpoint: Checkpoint) -> bytes:
    """Return the file's own id for an output with the same content, or b"" if it has none."""
    for record in checkpoint.container.outer_records():
        if record.name.endswith("/.data/serialization_id") and not record.compressed and record.size == _ID_DIGITS:
            return record.span.source.read(record.span.offset, record.size)
    return b""


def archive_contents(
    root: str, data: bytes, byteorder: str, storages: Iterable[RecordContent]
) -> Iterator[RecordContent]:
    """Yield the records that torch.save writes, except ``.data/serialization_id``; ``data`` is the pickle."""
    yield record_content(root, "data.pkl", data)
    yield record_content(root, ".format_version", b"1")
    yield record_content(root, ".storage_alignment", b"64")
    yield record_content(root, "byteorder", byteorder.encode())
    yield from storages
    yield record_content(root, "version", b"3\n")


def storage_contents(
    checkpoint: Checkpoint, root: str, storages: Sequence[Storage], where: str = ""
) -> Iterator[RecordContent]:
    """Yield the records of storages, numbered in order; ``where`` names their owner in errors. Raises RefusedError if
    bytes are missing, or their number differs from the pickle."""
    # A legacy file counts the elements of each storage: if a count differs, an empty storage may not be empty.
    unclear = any(problem.code == "storage-size" for problem in checkpoint.container.problems)
    for number, storage in enumerate(storages):
        body = checkpoint.body(storage.key)
        if body is None and not storage.nbytes and not unclear and checkpoint.traits.storages_in_sequence:
            body = StorageData(b"", 0, 0)  # a zip also has a record for an empty storage
        if body is None:
            raise _incomplete(checkpoint, f"the bytes of {where or f'storage {storage.key!r}'} are not all in the file")
        size = body.size if body.compressed else size_of(body.piece)
        expected = storage.nbytes if storage.dtype.name != "unknown" else body.size
        if not size == body.size == expected:
            expected = expected if expected != size else body.size
            what = f"{where or f'storage {storage.key!r}'} has {size:,} bytes where {expected:,} are expected"
            raise _incomplete(checkpoint, what)
        yield stored_content(f"{root}/data/{number}", body.piece, body.size, body.crc, body.compressed)


def _incomplete(checkpoint: Checkpoint, what: str) -> RefusedError:
    return RefusedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))


def record_content(root: str, name: str, data: bytes) -> RecordContent:
    """Return a record of these bytes."""
    return RecordContent(f"{root}/{name}", data, zlib.crc32(data), len(data))


def _identity(*contents: RecordContent) -> tuple[bytes]:
    """Return 40 decimal digits derived from names and checksums, as torch does; nothing reads them back."""
    from hashlib import sha256  # loading OpenSSL takes milliseconds

    digest = sha256()
    for content in contents:
        digest.update(f"{content.name}:{int(content.crc):08x}:{content.size};".encode())
    return (b"%0*d" % (_ID_DIGITS, int.from_bytes(digest.digest(), "big") % 10**_ID_DIGITS),)


def renumbered(graph: Graph) -> tuple[Graph, list[Storage]]:
    """Return the graph with its storages renamed to 0, 1, ... in order of first mention, and the storages."""
    numbers: dict[str, int] = {}
    storages: list[Storage] = []
    changes: dict[Ref, Node] = {}
    added: list[Node] = []
    names: dict[int, Ref] = {}
    for ref, storage in storage_mentions(graph):
        if storage is None:
            continue
        node = graph.nodes[ref]
        assert isinstance(node, Persistent)
        pid = graph.nodes[node.pid]
        assert type(pid) is tuple
        number = numbers.setdefault(storage.key, len(numbers))
        if number == len(storages):
            storages.append(storage)
        if graph.nodes[pid[2]] != str(number):
            if number not in names:
                names[number] = len(graph.nodes) + len(added)
                added.append(str(number))
            changes[node.pid] = (*pid[:2], names[number], *pid[3:])
    return (graph.edited(changes, added) if changes else graph), storages

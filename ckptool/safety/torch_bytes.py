"""Check whether bytes in a pickle are a torch file that runs nothing: ``pickle.dump`` writes each storage this way.

``torch.storage._load_from_bytes`` passes them to ``torch.load(weights_only=False)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final, TypeAlias

from ..base.errors import CkptoolError
from ..checkpoint.objects import mapped_name
from ..files.sources import BytesSource
from ..files.zips.audit import audit
from ..files.zips.reader import read_archive
from ..pickles.decode import decode
from ..pickles.nodes import Extension, Global, Graph
from .torch_lists import NEWEST, allowed

#: A function that returns the suspicious calls in a pickle.
Calls: TypeAlias = Callable[[Graph], Sequence[str]]
#: The number of pickles in the legacy format: magic number, protocol version, system, object, storage keys.
_LEGACY: Final = 5
#: The first pickle that ``torch.save`` writes (``MAGIC_NUMBER`` in torch/serialization.py).
_MAGIC: Final = 0x1950A86A20F9469CFC6C
#: Maximum depth of bytes within bytes; torch itself writes one level.
_MAX_DEPTH: Final = 4
#: Maximum bytes of a pickle that are decoded; a storage needs a few hundred.
_MAX_PICKLE: Final = 1 << 20

_depth: ContextVar[int] = ContextVar("_depth", default=0)


def is_clean(data: bytes, calls: Calls) -> bool:
    """Return whether bytes are a whole torch file whose pickles name only globals on torch's list.

    ``calls`` returns the suspicious calls in a pickle. Return False for bytes that cannot be followed to the end, and
    for anything unusual; then ``_load_from_bytes`` counts as an acting call.
    """
    if _depth.get() >= _MAX_DEPTH:
        return False
    token = _depth.set(_depth.get() + 1)
    try:
        return _is_clean_archive(data, calls) if data[:4] == b"PK\x03\x04" else _is_clean_legacy(data, calls)
    except CkptoolError:
        return False
    finally:
        _depth.reset(token)


def _is_clean_legacy(data: bytes, calls: Calls) -> bool:
    at = 0
    head = data if len(data) <= _MAX_PICKLE else data[:_MAX_PICKLE]
    for number in range(_LEGACY):
        graph, at, _ = decode(head, at)
        if (number == 0 and graph.nodes[graph.root] != _MAGIC) or not _is_clean_pickle(graph, calls):
            return False
    return True


def _is_clean_archive(data: bytes, calls: Calls) -> bool:
    archive = read_archive(BytesSource(data, "bytes"))
    audited = audit(archive)
    if archive.oddities or audited.oddities or audited.hidden:
        return False
    pickles = [record for record in archive.records if record.name.lower().endswith(".pkl")]
    if len(pickles) != 1 or pickles[0].name != f"{archive.prefix}data.pkl":
        return False  # TorchScript has constants.pkl, and code
    return _is_clean_pickle(decode(archive.read(pickles[0], _MAX_PICKLE)).graph, calls)


def _is_clean_pickle(graph: Graph, calls: Calls) -> bool:
    names = {mapped_name(node) for _, node in graph.of_type(Global)}
    listed = allowed(NEWEST) | {"torch.storage._load_from_bytes"}
    return names <= listed and not any(graph.of_type(Extension)) and not calls(graph)

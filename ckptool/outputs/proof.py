"""Proving, on the very file, that a pickle can be written again without a loss (law 2)."""

from __future__ import annotations

from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..errors import PickleError, RefusedError
from ..pickles import decode, difference, encode
from ..pickles.nodes import Graph, Persistent
from ..tensors import ID_PARTS, TensorReader

__all__ = ["Verified", "check_ids", "codec_is_exact", "prove", "verified_pickle"]


class Verified(NamedTuple):
    """The pickle of an edited graph; ``exact`` whether the unedited one comes out byte for byte."""

    data: bytes
    exact: bool


def verified_pickle(checkpoint: Checkpoint) -> Verified:
    """Encode an edited checkpoint, after proving on its own file that the codec loses nothing.

    The unedited graph must encode to the very bytes in the file; a foreign pickle that does not must
    at least decode to an equal graph again. Raises RefusedError when not even that holds.
    """
    exact = codec_is_exact(checkpoint)
    data = encode(checkpoint.graph)
    if not exact:
        prove(checkpoint.graph, data, "edited", checkpoint.path)
    return Verified(data, exact)


def codec_is_exact(checkpoint: Checkpoint) -> bool:
    """Does the unedited graph encode to the very bytes in the file? If not, it is proven to be equal at least."""
    container = checkpoint.container
    again = encode(container.graph)
    original = container.pickle
    if again == original[: len(again)] and len(again) <= len(original):
        return True
    prove(container.graph, again, "unedited", checkpoint.path)
    check_ids(checkpoint)
    return False


def check_ids(checkpoint: Checkpoint) -> None:
    """Raise RefusedError for a persistent id that torch refuses in a zip, also one that is thrown away.

    Written again, the file would load: without it, or as something that ckptool made up.
    """
    if checkpoint.traits.former or checkpoint.traits.sharded:
        return  # their readers look at the ids themselves
    nodes, reader = checkpoint.graph.nodes, TensorReader(checkpoint.graph)
    for ref, node in enumerate(nodes):
        if type(node) is Persistent:
            pid = nodes[node.pid]
            count = len(pid) if type(pid) is tuple else 0
            if count != ID_PARTS or reader.storage(ref) is None:
                what = "a storage is described in a way that torch cannot read"
                if count > ID_PARTS:
                    what = f"a storage is described by {count} values, of which torch takes {ID_PARTS}"
                raise RefusedError(what, path=checkpoint.path)


def prove(graph: Graph, data: bytes, name: str, path: str) -> None:
    """Raise RefusedError unless the bytes decode to the graph that they were made of."""
    try:
        found = difference(graph, decode(data).graph)
    except PickleError as error:
        found = str(error)
    if found:
        what = f"the {name} pickle cannot be written again without a loss: {found}"
        raise RefusedError(what, path=path, next="please report this file")

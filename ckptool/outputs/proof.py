"""Proving, on the very file, that a pickle can be written again without a loss (law 2)."""

from __future__ import annotations

from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..errors import PickleError, RefusedError
from ..pickles import decode, difference, encode, respelled
from ..pickles.nodes import Graph

__all__ = ["Verified", "codec_is_exact", "prove", "verified_pickle"]


class Verified(NamedTuple):
    """The pickle of an edited graph; ``exact`` whether the unedited one comes out byte for byte."""

    data: bytes
    exact: bool


def verified_pickle(checkpoint: Checkpoint) -> Verified:
    """Encode an edited checkpoint, after proving on its own file that the codec loses nothing.

    The edited pickle must be the one in the file but for texts, or else the unedited graph must encode to the very
    bytes in the file; a foreign pickle that does not must at least decode to an equal graph again. Raises RefusedError
    when not even that holds.
    """
    data = encode(checkpoint.graph)
    container = checkpoint.container
    # Most edits change names or devices only: then every other byte of the pickle is the file's own.
    if respelled(container.graph, container.pickle, data) is not None:
        return Verified(data, True)
    exact = codec_is_exact(checkpoint)
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
    return False


def prove(graph: Graph, data: bytes, name: str, path: str) -> None:
    """Raise RefusedError unless the bytes decode to the graph that they were made of."""
    try:
        found = difference(graph, decode(data).graph)
    except PickleError as error:
        found = str(error)
    if found:
        what = f"the {name} pickle cannot be written again without a loss: {found}"
        raise RefusedError(what, path=path, next="please report this file")

"""Write the input with another pickle, after proving on this very file that the codec loses nothing (law 2)."""

from __future__ import annotations

from ..base.errors import PickleError, RefusedError
from ..checkpoint.checkpoint import Checkpoint, Target
from ..checkpoint.programs import program_of
from ..files.sources import Plan
from ..pickles.compare import difference, redecoded, respelled
from ..pickles.decode import decode
from ..pickles.encode import encode
from ..pickles.nodes import Graph
from .losses import Promise


def verified_pickle(checkpoint: Checkpoint) -> tuple[bytes, bool]:
    """Encode an edited checkpoint, after proving on its own file that the codec loses nothing. Return the pickle, and
    whether the unedited graph encodes to the file's own bytes.

    Either the edited pickle differs from the file's pickle in strings only, or the unedited graph must encode to the
    file's own bytes. If a foreign pickle does not, it must at least decode to an equal graph again. Raises RefusedError
    if even that fails.
    """
    container = checkpoint.container
    data = respelled(container.graph, container.pickle, checkpoint.graph) or encode(checkpoint.graph)
    # Most edits change only names or devices: then every other byte of the pickle is the file's own.
    if redecoded(container.graph, container.pickle, data) is not None:
        return data, True
    exact = codec_is_exact(checkpoint)
    if not exact:
        prove(checkpoint.graph, data, "edited", checkpoint.path)
    return data, exact


def codec_is_exact(checkpoint: Checkpoint) -> bool:
    """Return whether the unedited graph encodes to the file's own bytes; if not, prove that it decodes to an equal
    graph."""
    container = checkpoint.container
    again = encode(container.graph)
    if container.pickle.startswith(again):
        return True
    prove(container.graph, again, "unedited", checkpoint.path)
    return False


def prove(graph: Graph, data: bytes, name: str, path: str) -> None:
    """Raise RefusedError unless the bytes decode to the encoded graph."""
    try:
        flaw = difference(graph, decode(data).graph)
    except PickleError as error:
        flaw = str(error)
    if flaw:
        what = f"the {name} pickle cannot be written again without a loss: {flaw}"
        raise RefusedError(what, path=path, next="please report this file")


def is_exact(checkpoint: Checkpoint) -> bool:
    """Return ``codec_is_exact``, but True for a program: its state dict is new, with no pickle to compare."""
    return program_of(checkpoint) is not None or codec_is_exact(checkpoint)


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """Return the input with another pickle, and whether the unedited pickle is reproduced byte for byte."""
    data, exact = verified_pickle(checkpoint)
    return checkpoint.container.plan(data), exact


def promise(checkpoint: Checkpoint, target: Target | None = None) -> Promise:
    """Promise the input with another object."""
    container = checkpoint.container
    promise = Promise(container.format, checkpoint.graph, manifest=container.manifest(), byteorder=container.byteorder)
    return promise._replace(known=lambda data: redecoded(container.graph, container.pickle, data))

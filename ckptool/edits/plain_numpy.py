"""NumPy's scalars as numbers and its arrays as tensors, for those who only look."""

from __future__ import annotations

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import callable_name
from ..checkpoint.tensors import TensorReader
from ..pickles.nodes import Call
from ..values.elements import added_storages
from .sanitize.case import Case, Plain
from .sanitize.numpy_values import ARRAYS, BUFFERS, SCALARS, array, numpy_scalar


def with_plain_numpy(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with NumPy's values made plain in their places: every reference stays the same.

    What has no plain form (arrays of structures) stays as it is. The checkpoint is to be read, not to be saved: what
    was done is not among its changes.
    """
    # The bytes of the pickle are searched in no time, its nodes are not.
    if not any(word in checkpoint.container.pickle for word in (b"multiarray", b"_frombuffer")):
        return checkpoint
    graph = checkpoint.graph
    rewrite = GraphEditor(graph)
    storages: dict[str, bytes] = {}
    for ref, node in enumerate(graph.nodes):
        if type(node) is not Call or callable_name(graph, node.func) not in (*SCALARS, *ARRAYS, *BUFFERS):
            continue
        case = Case(rewrite, ref, node, storages)
        verdict = numpy_scalar(case) or array(case)
        if isinstance(verdict, Plain):
            rewrite.changed[ref] = verdict.node
    if not rewrite.changed or checkpoint.survey.reader.storages.keys() & storages.keys():
        return checkpoint
    done = rewrite.done()
    return checkpoint.changed(done, (), added_storages(checkpoint, storages, TensorReader(done).storages))

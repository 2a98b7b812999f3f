"""The graph of a pickle, or the error of the decoder."""

from __future__ import annotations

import pytest

from ckptool.base.errors import PickleError
from ckptool.pickles.compare import difference
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Graph, Node


def graph_of(data: bytes) -> Graph:
    """The graph of a pickle for which the laws hold."""
    graph = decode(data).graph
    assert difference(graph, decode(encode(graph)).graph) == ""
    return graph


def root_of(data: bytes) -> Node:
    graph = graph_of(data)
    return graph.nodes[graph.root]


def refusal(data: bytes) -> PickleError:
    with pytest.raises(PickleError) as caught:
        decode(data)
    return caught.value

"""The arguments of a run of Megatron-LM, which it saves with a model: an ``argparse.Namespace``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ...checkpoint.objects import callable_name, named_attributes
from ...pickles.nodes import CONSTANTS, Call, Graph

_CLASS: Final = "argparse.Namespace"
#: An argument that every run has, and hardly any other program.
_MARK: Final = "num_attention_heads"

#: Numbers, texts, bools and None by their names.
Arguments: TypeAlias = Mapping[str, object]


def arguments(graph: Graph) -> Arguments:
    """Return the arguments of the run that are numbers, strings or None; {} where there are none in a pickle."""
    for ref, node in graph.of_type(Call):
        if callable_name(graph, node.func) != _CLASS:
            continue
        values = {name: graph.nodes[value] for name, value in named_attributes(graph, ref).items()}
        if _MARK in values:
            return {name: value for name, value in values.items() if isinstance(value, (*CONSTANTS, str))}
    return {}


def number(values: Arguments, name: str) -> int:
    """Return an argument that is a whole number, 0 for none."""
    value = values.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else 0

"""The arguments of a Megatron-LM run, which it saves with a model as an ``argparse.Namespace``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ...checkpoint.objects import callable_name, named_attributes
from ...pickles.nodes import CONSTANTS, Call, Global, Graph

_NAME: Final = "Namespace"
_CLASS: Final = f"argparse.{_NAME}"
#: An argument of every run, which hardly any other program has.
_MARK: Final = "num_attention_heads"

#: Numbers, strings, bools and None by argument name.
Arguments: TypeAlias = Mapping[str, object]


def arguments(graph: Graph) -> Arguments:
    """Return the run's arguments that are numbers, strings, bools or None; {} if the pickle has none."""
    if not any(node.name == _NAME for _, node in graph.of_type(Global)):
        return {}
    for ref, node in graph.of_type(Call):
        if callable_name(graph, node.func) != _CLASS:
            continue
        values = {name: graph.nodes[value] for name, value in named_attributes(graph, ref).items()}
        if _MARK in values:
            return {name: value for name, value in values.items() if isinstance(value, (*CONSTANTS, str))}
    return {}


def number(values: Arguments, name: str) -> int:
    """Return an argument that is a positive whole number, or 0."""
    value = values.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else 0

"""Tables of names: the tensors in transformers that each Megatron-LM tensor becomes, for each family of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from ...base import lazy
from ...base.errors import TargetError
from ...base.text import join_limited

#: How the rows of a tensor are cut into other tensors:
#: ``vocabulary``  without the rows that pad the vocabulary;
#: ``heads``       queries, keys and values, which are interleaved by groups of heads;
#: ``halves``      the gate projection and the up projection.
Cut: TypeAlias = Literal["", "vocabulary", "heads", "halves"]


class Rule(NamedTuple):
    """A tensor's name, and the names of the tensors that its rows are cut into; {} stands for the layer."""

    source: str
    names: tuple[str, ...]
    cut: Cut = ""


#: The module with the table, by the name of the family.
FAMILIES: Final[Mapping[str, str]] = {
    "hf:llama": "llama",
    "hf:mistral": "llama",
    "hf:qwen2": "qwen2",
    "hf:qwen3": "qwen3",
}

#: Tensors that a model may lack: with tied embeddings the head is the embedding.
OPTIONAL: Final = frozenset(("lm_head.weight",))

#: The help line of the option.
HELP: Final = f"Give a model of Megatron-LM the names of transformers: {', '.join(FAMILIES)}."


def table(family: str) -> tuple[Rule, ...]:
    """Return the table of a family; raise TargetError for an unknown family."""
    if family not in FAMILIES:
        raise TargetError(f"{family!r} is not a family of names", next=f"one of {join_limited(list(FAMILIES))}")
    rules: tuple[Rule, ...] = lazy.module(f"edits.families.{FAMILIES[family]}").RULES
    return rules

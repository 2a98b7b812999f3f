"""Tables of names: what becomes of each tensor of Megatron-LM in a family of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from ...base import lazy
from ...base.errors import TargetError
from ...base.text import join_limited

#: How the rows of a tensor are cut into those of others:
#: ``vocabulary``  without the rows that pad the vocabulary;
#: ``heads``       the queries, keys and values of each group of heads, which are together;
#: ``halves``      the gate and what it is for.
Cut: TypeAlias = Literal["", "vocabulary", "heads", "halves"]


class Rule(NamedTuple):
    """What becomes of a tensor: its name, and the names of those that its rows are cut into; {} is for the layer."""

    source: str
    names: tuple[str, ...]
    cut: Cut = ""


#: The modules with the tables by the names of families.
FAMILIES: Final[Mapping[str, str]] = {
    "hf:llama": "llama",
    "hf:mistral": "llama",
    "hf:qwen2": "qwen2",
    "hf:qwen3": "qwen3",
}

#: What a model may lack: with tied embeddings the head is the embedding.
OPTIONAL: Final = frozenset(("lm_head.weight",))

#: The line of help of the option.
HELP: Final = f"Give a model of Megatron-LM the names of transformers: {', '.join(FAMILIES)}."


def table(family: str) -> tuple[Rule, ...]:
    """Return the table of a family; raise TargetError for an unknown one."""
    if family not in FAMILIES:
        raise TargetError(f"{family!r} is not a family of names", next=f"one of {join_limited(list(FAMILIES))}")
    rules: tuple[Rule, ...] = lazy.module(f"edits.families.{FAMILIES[family]}").RULES
    return rules

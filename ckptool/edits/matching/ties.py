"""Tensors that a model has under two names and the file under one, such as the token embedding and the output layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ...base.records import NamedTuple
from ...base.text import join_limited
from .fused import Side
from .names import Cause, agrees

#: The token embedding, which many language models also use as the output layer.
EMBEDDINGS: Final = (
    "shared.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "embed_in.weight", "token_embedding.weight", "backbone.embeddings.weight", "emb.weight",
)  # fmt: skip
#: Output layers, and the embeddings of an encoder and a decoder that share one.
HEADS: Final = (
    "lm_head.weight", "embed_out.weight", "output.weight", "lm_head.decoder.weight", "predictions.decoder.weight",
    "vocab_projector.weight", "output_projection.weight", "proj_out.weight", *EMBEDDINGS[:2],
)  # fmt: skip
#: Names that may be tied, with the names that may have their values.
_TIES: Final = (
    (HEADS, EMBEDDINGS),
    (("predictions.decoder.bias", "lm_head.decoder.bias"), ("predictions.bias", "lm_head.bias")),
)


class Tie(NamedTuple):
    """A name that the file lacks, and our name for its values; ``sure`` if the target shows that both are one."""

    name: str
    source: str
    sure: bool


def find_ties(own: Side, target: Side, tied: Mapping[str, str], missing: Iterable[str]) -> list[Tie]:
    """Return the missing names whose values the file has; ``tied`` maps second names in the target to the first."""
    groups: dict[str, list[str]] = {}
    for second, first in tied.items():
        groups.setdefault(first, [first]).append(second)
    ties = []
    for name in missing:
        partners = [other for other in groups.get(tied.get(name, name), ()) if other != name]
        tie = next(_possible_ties(name, partners, own, target), None)
        if tie is not None:
            ties.append(tie)
    return ties


def _possible_ties(name: str, partners: Iterable[str], own: Side, target: Side) -> Iterator[Tie]:
    """Yield the ties of a name: with its ``partners`` in the target, then those that names and shapes suggest."""
    yield from (Tie(name, other, True) for other in partners if _fits(other, name, own, target))
    for heads, sources in _TIES:
        if _ends(name, heads):
            theirs = [other for other in target.specs if _ends(other, sources)]
            for source in own.specs:
                if not _ends(source, sources) or not _fits(source, name, own, target):
                    continue
                if source in target.specs or not theirs:
                    equal = _are_equal(target, name, source)
                    if equal is not False:
                        yield Tie(name, source, bool(equal))
                elif _are_equal(target, name, theirs[0]):  # under other names, only values show a tie
                    yield Tie(name, source, True)


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _fits(source: str, name: str, own: Side, target: Side) -> bool:
    """Return whether our tensor has the shape that a name needs, and is whole."""
    spec = own.specs.get(source)
    return spec is not None and spec.shape is not None and not spec.part and agrees(spec.shape, target.shape(name))


def _are_equal(target: Side, name: str, other: str) -> bool | None:
    """Return whether the target has the same values under both names; None if it does not say."""
    if target.values is None or other not in target.specs:
        return None
    samples = [target.values.sample(each) for each in (name, other)]
    if samples[0] is None or samples[1] is None:
        return None
    equal = samples[0].equals(samples[1])
    return None if equal and not samples[0].is_telling else equal


def tied_causes(ties: Sequence[Tie], own: Side) -> list[Cause]:
    """Return the reason for the missing names, with what helps; empty without any."""
    if not ties:
        return []
    names = join_limited([tie.name for tie in ties])
    sources = join_limited(list(dict.fromkeys(own.label(tie.source) for tie in ties)))
    are, them, each = ("is", "it", "it") if len(ties) == 1 else ("are", "them", "each")
    ties_them = "the model ties" if all(tie.sure for tie in ties) else "the model probably ties"
    message = (
        f"{names} {are} missing, because {ties_them} {them} to {sources}, which the file has: transformers ties {them}"
        f" itself when it loads, and load_state_dict needs {each} as a copy"
    )
    return [Cause("tied", message, tuple(tie.name for tie in ties))]

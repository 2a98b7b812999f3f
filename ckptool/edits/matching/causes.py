"""Why keys of one model do not load into another form of it: adapters, fused projections, tied weights, other sizes.

``causes.toml`` has the messages, and the rules for sizes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from ...base import toml
from ...base.lazy import regex
from ...base.prefixes import adapter_keys
from ...base.records import NamedTuple
from ...base.steps import AnyStep
from ...base.text import join_limited, pluralize, quoted, shape_text
from ...checkpoint.checkpoint import Checkpoint
from ...files.archives import read_bytes
from .pairing import Comparison, Shape, Spec, agrees, family_of, numbers_in
from .state_dict_errors import Mismatch
from .targets import MatchTarget

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
#: Names that do not say which projections they hold.
_UNNAMED: Final = {"c_attn": "qkv", "in_proj": "qkv", "w_pack": "qkv"}
#: Parameters named after the projection and the kind in one segment, as in ``in_proj_weight``.
_JOINED: Final = regex(r"(.+)_(weight|bias)\Z")
#: The most tensors that one may hold, such as q, k, v and a gate, and the most kinds that a message names.
_MOST: Final = 4


class Side(NamedTuple):
    """The tensors of one side by their names for the comparison; ``names`` maps these to the names in the file."""

    specs: Mapping[str, Spec]
    names: Mapping[str, str]

    def shape(self, name: str) -> Shape:
        return self.specs[name].shape

    def label(self, name: str) -> str:
        """Return the name in the file."""
        return self.names.get(name, name)


def causes_of(own: Side, target: Side, rest: Comparison) -> list[Cause]:
    """Return the reasons for the differences that are left."""
    sizes = [
        Mismatch(key, have, want)
        for key in (item["key"] for item in rest.sizes)
        if not own.specs[key].part and (have := own.shape(key)) is not None and (want := target.shape(key)) is not None
    ]
    adapters = _adapter_causes(own, target.specs, rest)
    return [
        *adapters,
        *(size_causes(sizes, len(own.specs)) if sizes else []),
        *(_fused_causes(own, target, rest) if not adapters else []),
    ]


def with_own_step(
    checkpoint: Checkpoint, target: MatchTarget, causes: Sequence[Cause], now: Comparison | None
) -> tuple[list[Cause], AnyStep]:
    """Return the causes, and the command that has its own edit for them; ``now`` is None if the place differs."""
    kinds = [cause.kind for cause in causes]
    if "adapter" in kinds and target.kind == "checkpoint":
        from ..lora import merge_verdict  # only for adapters

        step, verdict = merge_verdict(target.source, checkpoint)
        changed = (cause._replace(message=verdict) if cause.kind == "adapter" else cause for cause in causes)
        return [*(changed if verdict else causes)], step
    if kinds == ["vocabulary"] and now is not None and not (now.missing or now.unexpected):
        from ..resize import resize_step  # only for vocabularies

        return [*causes], resize_step(checkpoint, {item["key"]: target.shapes[item["key"]] for item in now.sizes})
    return [*causes], ""


# -- adapters


def _adapter_causes(own: Side, wanted: Mapping[str, Spec], rest: Comparison) -> list[Cause]:
    ours, theirs = adapter_keys(rest.unexpected), adapter_keys(rest.missing)
    if ours and not adapter_keys(wanted):
        others = len(own.specs) - len(ours)
        kind = "adapter" if others * 2 <= len(wanted) and others <= len(ours) else "model_with_adapter"
        such = f"{pluralize(len(ours), 'key')} such as {quoted(own.label(ours[0]))}"
        return [Cause("adapter", text_of(kind, keys=such), (), tuple(ours))]
    if not theirs or adapter_keys(own.specs):
        return []
    kind = "adapter_as_target" if len(theirs) == len(wanted) else "base_of_adapter"
    message = text_of(kind, keys=f"{pluralize(len(theirs), 'key')} such as {quoted(theirs[0])}")
    return [Cause("adapter", message, tuple(theirs))]


# -- fused projections


def _fused_causes(own: Side, target: Side, rest: Comparison) -> list[Cause]:
    """Return what is in one tensor in the file and in several in the model, and the other way round."""
    causes = []
    for kind, wholes, parts, whole_names, part_names in (
        ("fused", own, target, rest.unexpected, rest.missing),
        ("split", target, own, rest.missing, rest.unexpected),
    ):
        if fusions := dict(_fusions(wholes, parts, whole_names, part_names)):
            joined = tuple(fusions)
            single = tuple(part for several in fusions.values() for part in several)
            message = _fused(kind, fusions, wholes, parts)
            causes.append(Cause(kind, message, *((single, joined) if kind == "fused" else (joined, single))))
    return causes


def _fusions(
    wholes: Side, parts: Side, whole_names: Iterable[str], part_names: Iterable[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield tensors with the neighbours that they probably hold: as of q, k and v, the first letters are in qkv."""
    groups: dict[tuple[object, str], list[str]] = {}
    for name in part_names:
        module, _, end = _place(name)
        for place in (module, numbers_in(module)):
            groups.setdefault((place, end), []).append(name)
    for whole in whole_names:
        module, projection, end = _place(whole)
        letters = _UNNAMED.get(projection.lower(), projection.lower())
        for place in (module, numbers_in(module)):
            group = groups.get((place, end), [])[:64]  # tensors of one layer
            first = {name: _place(name)[1].lower().removeprefix("to_")[:1] for name in group}
            found = [name for name in group if first[name] and first[name] in letters]
            together = bool(found) and group[group.index(found[0]) :][: len(found)] == found
            shapes = [wholes.shape(whole), *(parts.shape(name) for name in found)]
            sizes = [math.prod(shape) for shape in shapes if shape is not None]
            if together and 2 <= len(found) <= _MOST and (None in shapes or sizes[0] == sum(sizes[1:])):
                yield whole, found
                break


def _place(name: str) -> tuple[str, str, str]:
    """Return a name as the module around a projection, the projection, and its parameter."""
    module, _, last = name.rpartition(".")
    if match := _JOINED.match(last):
        return module, match[1], match[2]
    module, _, projection = module.rpartition(".")
    return module, projection, last


def _fused(kind: str, fusions: Mapping[str, Sequence[str]], wholes: Side, parts: Side) -> str:
    examples: dict[str, str] = {}
    for whole in sorted(fusions, key=lambda whole: -len(wholes.shape(whole) or ())):
        examples.setdefault(".".join(_place(family_of(whole))[:2]), whole)  # a matrix shows more than a bias
    words = []
    for whole in [*examples.values()][:_MOST]:
        labels = [_place(parts.label(name))[1] + _size(parts.shape(name)) for name in fusions[whole]]
        words.append(f"{wholes.label(whole)}{_size(wholes.shape(whole))} is {join_limited(labels)}")
    one, several = ("the file", "the model") if kind == "fused" else ("the model", "the file")
    holds = "holds" if len(fusions) == 1 else "hold"
    text = f"{pluralize(len(fusions), 'tensor')} of {one} {holds} what {several} has in several: {'; '.join(words)}"
    number = len(next(iter(fusions.values())))
    return text + text_of("unknown_order", call=f"state[key].chunk({number})" if kind == "fused" else "torch.cat")


def _size(shape: Shape) -> str:
    return "" if shape is None else f" ({shape_text(shape)})"


# -- tied weights


def find_ties(own: Side, target: MatchTarget, missing: Iterable[str]) -> dict[str, str]:
    """Map the missing names whose values the file has to our names."""
    groups: dict[str, list[str]] = {}
    for second, first in target.tied.items():
        groups.setdefault(first, [first]).append(second)
    ties = {}
    for name in missing:
        partners = groups.get(target.tied.get(name, name), ())
        if source := next(_sources(name, partners, own, target), ""):
            ties[name] = source
    return ties


def _sources(name: str, partners: Iterable[str], own: Side, target: MatchTarget) -> Iterator[str]:
    """Yield the names that a name may be tied to: its ``partners``, then what names and shapes suggest."""
    shape = target.tensors[name].shape

    def fits(source: str) -> bool:
        spec = own.specs.get(source)
        return spec is not None and spec.shape is not None and not spec.part and agrees(spec.shape, shape)

    yield from (other for other in partners if other != name and fits(other))
    for heads, sources in _TIES:
        if not _ends(name, heads):
            continue
        theirs = [other for other in target.tensors if _ends(other, sources)]
        for source in (each for each in own.specs if _ends(each, sources) and fits(each)):
            # Under other names, only values show a tie.
            equal = _are_equal(target, name, source if source in target.tensors or not theirs else theirs[0])
            if equal or (equal is None and (source in target.tensors or not theirs)):
                yield source


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _are_equal(target: MatchTarget, name: str, other: str) -> bool | None:
    """Return whether the target has the same values under both names; None if it does not say."""
    samples = [target.values.sample(each) if target.values is not None else None for each in (name, other)]
    if samples[0] is None or samples[1] is None:
        return None
    equal = samples[0].equals(samples[1])
    return None if equal and not samples[0].is_telling else equal


def tied_causes(ties: Mapping[str, str], own: Side) -> list[Cause]:
    """Return the reason for the missing names, with what helps; empty without any."""
    sources = join_limited(list(dict.fromkeys(map(own.label, ties.values()))))
    return [Cause("tied", text_of("tied", names=join_limited([*ties]), sources=sources), tuple(ties))] if ties else []


#: Tensors of adapters, which are not cut for processes.
_ADAPTERS: Final = regex(r"lora_|\.adapter|lokr|hada_|prompt_encoder")
#: A module within one of several equal blocks: ``layers.0.attention.wq``.
_IN_BLOCK: Final = regex(r"\.\d+\.[A-Za-z_]\w*\.[A-Za-z_]\w*\Z")


class Cause(NamedTuple):
    """A reason why keys do not load, with what helps, as a clause for a message.

    ``keys`` are the keys of the model that it explains, and ``unused`` the keys of the file that have no place there.
    ``replaceable`` says that a copy without the keys loses nothing, because they are computed or trained again.
    """

    kind: str
    message: str
    keys: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    replaceable: bool = False


class _Rule(NamedTuple):
    """A row of ``causes.toml``, which explains the fields."""

    kind: str
    form: str
    message: str
    names: re.Pattern[str]
    others: re.Pattern[str]
    of_model: bool
    replaceable: bool

    def fits(self, item: Mismatch) -> bool:
        form, shapes = _FORMS.get(self.form), (item.saved, item.wanted)
        if form is None or not form(*(reversed(shapes) if self.of_model else shapes)):
            return False
        return bool(self.names.search(item.key)) and not self.others.search(item.key)

    def cause(self, items: Sequence[Mismatch], number: int = 0) -> Cause:
        keys = tuple(item.key for item in items)
        first = items[0]
        have, want = next((pair for pair in zip(first.saved, first.wanted) if pair[0] != pair[1]), (0, 0))
        modules = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
        facts: dict[str, Any] = {
            "key": first.key,
            "saved": shape_text(first.saved),
            "wanted": shape_text(first.wanted),
            "shape": first.wanted,
            "have": have,
            "want": want,
            "names": join_limited(keys, most=4),
            "ends": join_limited(list(dict.fromkeys(key.rpartition(".")[2] for key in keys))),
            "modules": join_limited([repr(module) if module else "the tensor" for module in modules]),
            "has": "has" if len(modules) == 1 else "have",
            "layers": join_limited(list(dict.fromkeys(module.rpartition(".")[2] for module in modules)), most=4),
            "count": pluralize(len(keys), "tensor"),
            "number": number,
        }
        return Cause(self.kind, self.message.format(**facts), keys, replaceable=self.replaceable)


@cache
def _table() -> dict[str, Any]:
    path = os.path.join(os.path.dirname(__file__), "causes.toml")
    return toml.parsed(read_bytes(path, 1 << 20), path, "the table of causes")


@cache
def _rules() -> list[_Rule]:
    return [
        _Rule(
            row["kind"],
            row["form"],
            row["message"],
            re.compile(row.get("names", "")),
            re.compile(row.get("not", r"(?!)")),
            row.get("of_model", False),
            row.get("replaceable", False),
        )
        for row in _table()["sizes"]
    ]


def text_of(kind: str, **facts: str) -> str:
    """Return one of the other messages in ``causes.toml``."""
    return str(_table()["messages"][kind]).format(**facts)


def size_causes(mismatches: Sequence[Mismatch], keys: int) -> list[Cause]:
    """Return the reasons for the tensors of other sizes, each tensor under one of them.

    ``keys`` is the number of keys in the file. The last resort is a model that was built with other sizes.
    """
    rules = {rule.form: rule for rule in _rules()}
    if ratio := _parts(mismatches):
        return [rules["cut" if ratio > 1 else "cut-model"].cause(mismatches, round(max(ratio, 1 / ratio)))]
    groups: dict[_Rule, list[Mismatch]] = {}
    rest: list[Mismatch] = []
    for item in mismatches:
        rule = next((rule for rule in _rules() if rule.fits(item)), None)
        groups.setdefault(rule, []).append(item) if rule else rest.append(item)
    if rest and len(rest) * 2 > len(mismatches) and not _is_head(rest, keys):
        groups, rest = {}, list(mismatches)  # the model is another one, which other kinds would only obscure
    if rest:
        groups[rules["head" if _is_head(rest, keys) else "other"]] = rest
    return [rule.cause(groups[rule]) for rule in _rules() if rule in groups]


def sizes_text(mismatches: Sequence[Mismatch]) -> str:
    """Return the sizes of the first tensor on both sides, and how many others differ."""
    first, count = mismatches[0], len(mismatches)
    more = f", and {count - 1:,} more {'differ' if count > 2 else 'differs'}" if count > 1 else ""
    return f"{first.key!r} is {shape_text(first.saved)} in the file and {shape_text(first.wanted)} in the model{more}"


def _is_head(items: Sequence[Mismatch], keys: int) -> bool:
    modules = {item.key.rpartition(".")[0] for item in items}
    few = len(modules) <= 3 and len(items) * 4 <= max(keys, 8)  # as of a classifier
    layer = all(_other_rows(item.saved, item.wanted) and item.key.endswith(("weight", "bias")) for item in items)
    return few and layer and not any(map(_IN_BLOCK.search, modules))


def _parts(mismatches: Sequence[Mismatch]) -> float:
    """Return 2 if the file has halves of all tensors, 0.5 if the model wants halves, by rows and by columns; or 0."""
    ratios, axes = set[float](), set[int]()
    for key, saved, wanted in mismatches:
        differing = [axis for axis, pair in enumerate(zip(saved, wanted)) if pair[0] != pair[1]]
        if len(saved) != len(wanted) or len(differing) != 1 or not saved[differing[0]] or _ADAPTERS.search(key):
            return 0
        ratios.add(wanted[differing[0]] / saved[differing[0]])
        axes.update(differing)
    ratio, processes = ratios.pop(), (2, 4, 8, 16, 32, 64)
    return ratio if not ratios and axes == {0, 1} and (ratio in processes or 1 / ratio in processes) else 0


_Sizes = tuple[int, ...]


def _other_rows(saved: _Sizes, wanted: _Sizes) -> bool:
    return bool(saved) and len(saved) == len(wanted) and saved[1:] == wanted[1:]


def _other_columns(saved: _Sizes, wanted: _Sizes) -> bool:
    return len(saved) == len(wanted) and saved[:1] + saved[2:] == wanted[:1] + wanted[2:]


#: How one shape differs from another. ``size_causes`` itself finds the forms of whole checkpoints.
_FORMS: Final[Mapping[str, Callable[[_Sizes, _Sizes], bool]]] = {
    "any": lambda saved, wanted: True,
    "empty": lambda saved, wanted: saved == (0,) != wanted,
    # 4-bit weights of bitsandbytes: two elements in each byte.
    "packed": lambda saved, wanted: (
        len(saved) == 2 and saved[1] == 1 < len(wanted) and math.prod(saved) * 2 == math.prod(wanted)
    ),
    "table": lambda saved, wanted: len(saved) == len(wanted) and any(a == b > 1 for a, b in zip(saved, wanted)),
    "squeezed": lambda saved, wanted: (
        len(saved) != len(wanted) and [size for size in saved if size != 1] == [size for size in wanted if size != 1]
    ),
    "flat": lambda saved, wanted: len(saved) == 1 < len(wanted) and saved != (0,),
    "columns": _other_columns,
    "channels": lambda saved, wanted: len(saved) >= 3 and _other_columns(saved, wanted),
    "rows": _other_rows,
    "transposed": lambda saved, wanted: len(saved) == 2 and saved == wanted[::-1],
}

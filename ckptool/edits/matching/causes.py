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
from .pairing import Comparison, Shape, Spec, agrees, family_of, is_new_weight_norm, numbers_in
from .state_dict_errors import Mismatch
from .targets import MatchTarget
from .values import Values

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
#: The two matrices of LoRA, after the name of the module that they change: the rows of the first are the rank.
_LORA: Final = regex(r"(?:\.processor)?[._]lora[_.](?:embedding_)?(?:(?P<first>A|a|down)|B|b|up)\b")
#: Names that do not say which projections they hold.
_UNNAMED: Final = {"c_attn": "qkv", "in_proj": "qkv", "w_pack": "qkv"}
#: Parameters named after the projection and the kind in one segment, as in ``in_proj_weight``.
_JOINED: Final = regex(r"(.+)_(weight|bias)\Z")
#: The most tensors that one may hold, such as q, k, v and a gate, and the most kinds that a message names.
_MOST: Final = 4


class Side(NamedTuple):
    """The tensors of one side by their names for the comparison; ``names`` maps these to the names in ``values``."""

    specs: Mapping[str, Spec]
    values: Values | None
    names: Mapping[str, str]

    def shape(self, name: str) -> Shape:
        return self.specs[name].shape

    def label(self, name: str) -> str:
        """Return the name in the file."""
        return self.names.get(name, name)


def causes_of(own: Side, target: Side, rest: Comparison) -> list[Cause]:
    """Return the reasons for the differences that are left."""
    sizes = [
        Mismatch(item.key, have, want)
        for item in rest.sizes
        if not own.specs[item.key].part
        and (have := own.shape(item.key)) is not None
        and (want := target.shape(item.key)) is not None
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
    """Return the causes, and the command that has its own edit for them: adapters are merged, vocabularies resized.

    ``now`` compares the state dict as it is, None if it has to be moved first. The step is "" for other causes.
    """
    kinds = [cause.kind for cause in causes]
    if "adapter" in kinds and target.kind == "checkpoint":
        from ..lora import merge_verdict  # only for adapters

        step, verdict = merge_verdict(target.source, checkpoint)
        changed = (cause._replace(message=verdict) if cause.kind == "adapter" else cause for cause in causes)
        return [*(changed if verdict else causes)], step
    if kinds == ["vocabulary"] and now is not None and not (now.missing or now.unexpected):
        from ..resize import resize_step  # only for vocabularies

        return [*causes], resize_step(checkpoint, {item.key: target.shapes[item.key] for item in now.sizes})
    return [*causes], ""


def weight_norm_causes(pairs: Iterable[tuple[str, str]]) -> list[Cause]:
    """Return the reason why tensors of weight_norm get their old names; ``pairs`` are old and new names of tensors."""
    renamed = tuple(new for name, new in pairs if is_new_weight_norm(name) and not is_new_weight_norm(new))
    return [Cause("weight_norm", text_of("weight_norm"), renamed)] if renamed else []


# -- adapters


def _adapter_causes(own: Side, wanted: Mapping[str, Spec], rest: Comparison) -> list[Cause]:
    ours, theirs = adapter_keys(rest.unexpected), adapter_keys(rest.missing)
    if ours and not adapter_keys(wanted):
        others = len(own.specs) - len(ours)
        kind = "adapter" if others * 2 <= len(wanted) and others <= len(ours) else "model_with_adapter"
        return [Cause("adapter", _with_lora(kind, own, ours), (), tuple(ours))]
    if not theirs or adapter_keys(own.specs):
        return []
    kind = "adapter_as_target" if len(theirs) == len(wanted) else "base_of_adapter"
    message = text_of(kind, keys=f"{pluralize(len(theirs), 'key')} such as {quoted(theirs[0])}")
    return [Cause("adapter", message, tuple(theirs))]


def _with_lora(kind: str, own: Side, keys: Sequence[str]) -> str:
    """Return a message that names the ranks and the modules of LoRA, or a key of another adapter."""
    matches = {key: match for key in keys if (match := _LORA.search(key))}
    shapes = [own.shape(key) for key, match in matches.items() if match["first"]]
    ranks = sorted({shape[0] for shape in shapes if shape})
    modules = list(dict.fromkeys(key[: match.start()].rpartition(".")[2] for key, match in matches.items()))
    such = f"{pluralize(len(keys), 'key')} such as {quoted(own.label(keys[0]))}"
    rank = f" of rank {join_limited([f'{number:,}' for number in ranks])}" if ranks else ""
    what = f"LoRA{rank} on {join_limited(modules)}" if modules else such
    config = f"r={ranks[0] if len(ranks) == 1 else '...'}, lora_alpha=..., target_modules={modules or '...'}, ..."
    return text_of(kind, what=what, keys=such, config=config)


# -- fused projections


class _Fusion(NamedTuple):
    """A tensor of one side that holds several of the other side, one after the other along ``axis``."""

    whole: str
    parts: tuple[str, ...]
    axis: int


def _fused_causes(own: Side, target: Side, rest: Comparison) -> list[Cause]:
    """Return what is in one tensor in the file and in several in the model, and the other way round."""
    causes = []
    for kind, wholes, parts, whole_names, part_names in (
        ("fused", own, target, rest.unexpected, rest.missing),
        ("split", target, own, rest.missing, rest.unexpected),
    ):
        fusions = list(_fusions(wholes, parts, whole_names, part_names))
        if fusions:
            joined = tuple(fusion.whole for fusion in fusions)
            single = tuple(part for fusion in fusions for part in fusion.parts)
            message = _fused(kind, fusions, wholes, parts)
            causes.append(Cause(kind, message, *((single, joined) if kind == "fused" else (joined, single))))
    return causes


def _fusions(wholes: Side, parts: Side, whole_names: Iterable[str], part_names: Iterable[str]) -> Iterator[_Fusion]:
    """Yield which tensors hold several neighbours in one module of the other side, by their names and shapes.

    The module has the same name, or else the same layer number. Where the shapes of the parts are not known, their
    first letters must be in the name of the whole, as those of q, k and v are in ``qkv``.
    """
    modules: dict[tuple[str, str], list[str]] = {}
    layers: dict[tuple[tuple[str, ...], str], list[list[str]]] = {}
    for name in part_names:
        module, _, end = _place(name)
        if (module, end) not in modules:
            layers.setdefault((numbers_in(module), end), []).append(modules.setdefault((module, end), []))
        modules[module, end].append(name)
    used: set[str] = set()
    for whole in whole_names:
        module, projection, end = _place(whole)
        same = modules.get((module, end))
        near = [same] if same else layers.get((numbers_in(module), end), [])[: _MOST**2]
        found = [
            _Fusion(whole, names, axis)
            for group in near
            for count in range(2, _MOST + 1)
            for names in zip(*(group[at:] for at in range(count)))
            if (axis := _axis(wholes.shape(whole), [parts.shape(name) for name in names])) is not None
            and used.isdisjoint(names)
        ]
        named = [fusion for fusion in found if _names_parts(projection, fusion.parts)]
        unknown = None in (wholes.shape(whole), *(parts.shape(name) for fusion in found for name in fusion.parts))
        chosen = named if unknown or len(found) > 1 else found
        if len(chosen) == 1 or (unknown and chosen):
            used.update(chosen[-1].parts)
            yield chosen[-1]


def _place(name: str) -> tuple[str, str, str]:
    """Return a name as the module around a projection, the projection, and its parameter."""
    module, _, last = name.rpartition(".")
    match = _JOINED.match(last)
    if match:
        return module, match[1], match[2]
    module, _, projection = module.rpartition(".")
    return module, projection, last


def _names_parts(projection: str, parts: Iterable[str]) -> bool:
    words = (_place(name)[1].lower().removeprefix("to_") for name in parts)
    letters = _UNNAMED.get(projection.lower(), projection.lower())
    return all(word[:1] in letters for word in words)


def _axis(whole: Shape, parts: Sequence[Shape]) -> int | None:
    """Return the axis along which the parts make up the whole, 0 if a shape is not known; None if none does."""
    known = [shape for shape in parts if shape is not None]
    if whole is None or len(known) < len(parts):
        return 0
    for axis in range(min(len(whole), 2)):
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in known if len(shape) == len(whole)}
        same = others == {(*whole[:axis], *whole[axis + 1 :])} and all(len(shape) == len(whole) for shape in known)
        if same and sum(shape[axis] for shape in known) == whole[axis]:
            return axis
    return None


def _fused(kind: str, fusions: Sequence[_Fusion], wholes: Side, parts: Side) -> str:
    examples: dict[str, _Fusion] = {}
    for fusion in sorted(fusions, key=lambda fusion: -len(wholes.shape(fusion.whole) or ())):
        examples.setdefault(".".join(_place(family_of(fusion.whole))[:2]), fusion)  # a matrix shows more than a bias
    shown = list(examples.values())[:_MOST]
    words = []
    for fusion in shown:
        labels = [_place(parts.label(name))[1] + _size(parts.shape(name)) for name in fusion.parts]
        whole = wholes.label(fusion.whole) + _size(wholes.shape(fusion.whole))
        words.append(f"{whole} is {join_limited(labels)}")
    one, several = ("the file", "the model") if kind == "fused" else ("the model", "the file")
    holds = "holds" if len(fusions) == 1 else "hold"
    text = f"{pluralize(len(fusions), 'tensor')} of {one} {holds} what {several} has in several: {'; '.join(words)}"
    first = shown[0]
    along = f", dim={first.axis}" if first.axis else ""
    call = f"state[key].chunk({len(first.parts)}{along})" if kind == "fused" else f"torch.cat((...){along})"
    return text + text_of("unknown_order", call=call)


def _size(shape: Shape) -> str:
    return "" if shape is None else f" ({shape_text(shape)})"


# -- tied weights


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
    found = (next(_possible_ties(name, groups.get(tied.get(name, name), ()), own, target), None) for name in missing)
    return [tie for tie in found if tie is not None]


def _possible_ties(name: str, partners: Iterable[str], own: Side, target: Side) -> Iterator[Tie]:
    """Yield the ties of a name: with its ``partners`` in the target, then those that names and shapes suggest."""

    def fits(source: str) -> bool:
        spec = own.specs.get(source)
        return spec is not None and spec.shape is not None and not spec.part and agrees(spec.shape, target.shape(name))

    yield from (Tie(name, other, True) for other in partners if other != name and fits(other))
    for heads, sources in _TIES:
        if not _ends(name, heads):
            continue
        theirs = [other for other in target.specs if _ends(other, sources)]
        for source in (each for each in own.specs if _ends(each, sources) and fits(each)):
            # Under other names, only values show a tie.
            equal = _are_equal(target, name, source if source in target.specs or not theirs else theirs[0])
            if equal or (equal is None and (source in target.specs or not theirs)):
                yield Tie(name, source, bool(equal))


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


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
    probably = "" if all(tie.sure for tie in ties) else "probably "
    message = text_of("tied", names=names, sources=sources, probably=probably)
    return [Cause("tied", message, tuple(tie.name for tie in ties))]


#: Numbers of processes that models are cut for.
_PARTS: Final = (2, 4, 8, 16, 32, 64)
#: Tensors of adapters, which are not cut for processes.
_ADAPTERS: Final = regex(r"lora_|\.adapter|lokr|hada_|prompt_encoder")
#: A module within one of several equal blocks: ``layers.0.attention.wq``.
_IN_BLOCK: Final = regex(r"\.\d+\.[A-Za-z_]\w*\.[A-Za-z_]\w*\Z")
#: A classifier has at most so many modules, and one in so many keys.
_HEADS: Final = 3
_SHARE: Final = 4


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
    tokens = {_rows(item) for item in groups.get(rules["matrix"], ())}
    others = [item for item in rest if _rows(item) in tokens]
    if others:  # the bias of the head, and the head itself
        groups[rules["matrix"]] += others
        rest = [item for item in rest if item not in others]
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
    few = len(modules) <= _HEADS and len(items) * _SHARE <= max(keys, 8)
    layer = all(_other_rows(item.saved, item.wanted) and item.key.endswith(("weight", "bias")) for item in items)
    return few and layer and not any(map(_IN_BLOCK.search, modules))


def _rows(item: Mismatch) -> tuple[int, int]:
    """Return the number of rows on both sides, if nothing else differs: the first size, or the last of one row."""
    if len(item.saved) != len(item.wanted) or not item.saved:
        return 0, 0
    differing = [pair for pair in zip(item.saved, item.wanted) if pair[0] != pair[1]]
    one_row = item.saved[:-1] == item.wanted[:-1] and set(item.saved[:-1]) <= {1}
    return differing[0] if len(differing) == 1 and (one_row or item.saved[0] != item.wanted[0]) else (0, 0)


def _parts(mismatches: Sequence[Mismatch]) -> float:
    """Return by what number all tensors are cut, some by rows and some by columns: 2 if the file has halves, 0.5 if the
    model wants halves; 0 for anything else. Tensor parallelism cuts this way; another width changes rows and columns.
    """
    ratios, axes = set[float](), set[int]()
    for key, saved, wanted in mismatches:
        differing = [axis for axis, pair in enumerate(zip(saved, wanted)) if pair[0] != pair[1]]
        if len(saved) != len(wanted) or len(differing) != 1 or not saved[differing[0]] or _ADAPTERS.search(key):
            return 0
        ratios.add(wanted[differing[0]] / saved[differing[0]])
        axes.update(differing)
    ratio = ratios.pop()
    return ratio if not ratios and axes == {0, 1} and (ratio in _PARTS or 1 / ratio in _PARTS) else 0


_Sizes = tuple[int, ...]


def _other_rows(saved: _Sizes, wanted: _Sizes) -> bool:
    return bool(saved) and len(saved) == len(wanted) and saved[1:] == wanted[1:]


def _other_columns(saved: _Sizes, wanted: _Sizes) -> bool:
    return len(saved) == len(wanted) and saved[:1] + saved[2:] == wanted[:1] + wanted[2:]


def _is_packed(saved: _Sizes, wanted: _Sizes) -> bool:
    """Return whether a tensor has the form of 4-bit weights of bitsandbytes: two elements in each byte."""
    column = len(saved) == 2 and saved[1] == 1
    return column and len(wanted) > 1 and math.prod(saved) * 2 == math.prod(wanted)


#: How one shape differs from another. ``size_causes`` itself finds the forms of whole checkpoints.
_FORMS: Final[Mapping[str, Callable[[_Sizes, _Sizes], bool]]] = {
    "any": lambda saved, wanted: True,
    "empty": lambda saved, wanted: saved == (0,) != wanted,
    "packed": _is_packed,
    "table": lambda saved, wanted: len(saved) == len(wanted) and any(a == b > 1 for a, b in zip(saved, wanted)),
    "squeezed": lambda saved, wanted: (
        len(saved) != len(wanted) and [size for size in saved if size != 1] == [size for size in wanted if size != 1]
    ),
    "flat": lambda saved, wanted: len(saved) == 1 < len(wanted) and saved != (0,),
    "columns": _other_columns,
    "channels": lambda saved, wanted: len(saved) >= 3 and _other_columns(saved, wanted),
    "rows": _other_rows,
    "matrix": lambda saved, wanted: len(saved) == 2 and _other_rows(saved, wanted),
    "transposed": lambda saved, wanted: len(saved) == 2 and saved == wanted[::-1],
}

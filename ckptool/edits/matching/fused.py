"""Recognise projections that one side holds in one tensor and the other in several: qkv, in_proj, c_attn, gate_up.

Names and shapes show which tensors belong together, but not the order of rows: query, key and value may follow each
other, or alternate head by head. One line of values from both sides shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Final

from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, shape_text
from .names import Cause, Comparison, Shape, Spec, family_of, numbers_in
from .values import Values

#: Words in the names of projections, with the letters that stand for them here.
_LETTERS: Final = {
    "query": "q", "key": "k", "value": "v", "queries": "q", "keys": "k", "values": "v", "gate": "g", "up": "u",
    "gateup": "gu",
}  # fmt: skip
#: Letters of projections that are written without a space: ``wqkv``, ``kproj``.
_SHORT: Final = regex(r"w?(q|k|v|g|u|x|qkv|qk|kv|gu|ug)(?:proj|lin|linear|net)?\Z")
#: Words that do not say which projection it is.
_FILLERS: Final = frozenset(
    ("proj", "projection", "linear", "lin", "layer", "to", "attn", "attention", "self", "w", "wi", "net", "fc", "dense",
     "fused", "merged", "packed", "joint", "h", "in", "and", "ff", "mlp", "c")
)  # fmt: skip
#: Names that do not say which projections they hold, with the letters of these.
_UNNAMED: Final = {
    "c_attn": ("qkv", "kv"),
    "in_proj": ("qkv",),
    "in_projection": ("qkv",),
    "proj_in": ("gu",),
    "c_fc": ("gu",),
    "w_pack": ("qkv",),
    "dense_h_to_4h": ("gu",),
    "linear_fc1": ("gu",),
    "fc1": ("gu", "gx"),
    "wi": ("01",),
}
#: Letters that mean the same: gate and up are w1 and w3 of Meta.
_SAME: Final = {"gu": ("13",), "13": ("gu",)}
_WORD: Final = regex(r"[a-z]+|\d")
#: Parameters named after the projection and the kind in one segment, as in ``in_proj_weight``.
_JOINED: Final = regex(r"(.+)_(weight|bias)\Z")
#: The most modules in which the parts of one tensor are sought.
_NEAR: Final = 32
#: The most tensors that one may hold, and the most kinds that a message names.
_MOST: Final = 4


class Fusion(NamedTuple):
    """A tensor of one side that holds several tensors of the other side.

    They follow each other along ``axis`` of the whole, which is ``part_axis`` of each part.
    """

    whole: str
    parts: tuple[str, ...]
    axis: int = 0
    part_axis: int = 0


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

    def line(self, name: str, axis: int) -> list[bytes]:
        """Return the elements of a tensor along an axis; an empty list if they are not known."""
        lines = self.values.lines(self.label(name)) if self.values is not None else []
        return lines[axis] if axis < len(lines) else []

    def piece(self, name: str, at: Sequence[int], begin: int, count: int) -> list[bytes]:
        """Return elements along the last axis of a tensor, see ``Values.piece``; an empty list if not known."""
        return [] if self.values is None else self.values.piece(self.label(name), at, begin, count)


def fused_causes(own: Side, target: Side, rest: Comparison) -> list[Cause]:
    """Return what is in one tensor in the file and in several in the model, and the other way round."""
    causes = []
    for kind, wholes, parts, whole_names, part_names in (
        ("fused", own, target, rest.unexpected, rest.missing),
        ("split", target, own, rest.missing, rest.unexpected),
    ):
        fusions = find_fusions(
            {name: wholes.specs[name].shape for name in whole_names},
            {name: parts.specs[name].shape for name in part_names},
        )
        if fusions:
            joined = tuple(fusion.whole for fusion in fusions)
            single = tuple(part for fusion in fusions for part in fusion.parts)
            message = _message(kind, fusions, wholes, parts)
            causes.append(Cause(kind, message, *((single, joined) if kind == "fused" else (joined, single))))
    return causes


def find_fusions(wholes: Mapping[str, Shape], parts: Mapping[str, Shape]) -> list[Fusion]:
    """Return which tensors in ``wholes`` hold several in ``parts``, by names and shapes; a shape may be unknown."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    modules: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name in parts:
        module, projection, end = _place(name)
        groups.setdefault((module, end), {}).setdefault(_letters(projection) or projection, name)
        places = modules.setdefault((numbers_in(module), end), [])
        if module not in places:
            places.append(module)
    fusions = []
    used: set[str] = set()
    for whole, shape in wholes.items():
        module, projection, end = _place(whole)
        near = [module] if (module, end) in groups else modules.get((numbers_in(module), end), [])[:_NEAR]
        found = [
            fusion
            for place in near
            for fusion in _in_group(whole, shape, projection, groups[place, end], parts, named=place != module)
            if used.isdisjoint(fusion.parts)
        ]
        if found and (len(found) == 1 or near == [module]):
            fusions.append(found[0])
            used.update(found[0].parts)
    return fusions


def _in_group(
    whole: str, shape: Shape, projection: str, group: Mapping[str, str], parts: Mapping[str, Shape], *, named: bool
) -> Iterator[Fusion]:
    """Yield the ways in which a tensor may hold tensors of one module: by their names, then by shapes alone.

    With ``named`` only names count.
    """
    letters = _letters(projection)
    choices = [
        tuple(group[role] for role in roles) for text in _choices(projection, letters) for roles in _cut(text, group)
    ]
    everything = tuple(group.values())
    shapes = [shape, *(parts[name] for name in everything)]
    if not named and not letters and "." in whole and None not in shapes and 2 <= len(everything) <= _MOST:
        choices.append(everything)
    for names in choices:
        axes = _axes(shape, [parts[name] for name in names])
        if axes is not None and len(names) > 1:
            yield Fusion(whole, names, *axes)


def _choices(projection: str, letters: str) -> Sequence[str]:
    if len(letters) > 1:
        return (letters, *_SAME.get(letters, ()))
    return _UNNAMED.get(projection.lower(), ())


def _cut(text: str, group: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the ways to divide letters over the tensors of a group: "qkv" over q, k, v or over q, kv."""
    if not text:
        yield ()
    for size in range(1, len(text) + 1):
        if text[:size] in group:
            yield from ((text[:size], *rest) for rest in _cut(text[size:], group))


def _place(name: str) -> tuple[str, str, str]:
    """Return a name as the module around a projection, the projection, and its parameter."""
    module, _, last = name.rpartition(".")
    match = _JOINED.match(last)
    if match:
        return module, match[1], match[2]
    module, _, projection = module.rpartition(".")
    return module, projection, last


def _letters(projection: str) -> str:
    """Return the letters of the projections in a name: "qkv" for ``query_key_value``; "" if it does not say them."""
    letters = ""
    for word in _WORD.findall(projection.lower().removeprefix("fc1_")):
        short = _SHORT.match(word)
        if word.isdigit() or word in _LETTERS:
            letters += _LETTERS.get(word, word)
        elif short:
            letters += short[1]
        elif word not in _FILLERS:
            return ""
    return letters if len(letters) <= _MOST else ""


def _axes(whole: Shape, parts: Sequence[Shape]) -> tuple[int, int] | None:
    """Return the axes along which the parts make up the whole: of the whole, and of each part; None if none does."""
    known = [shape for shape in parts if shape is not None]
    if whole is None or len(known) < len(parts):
        return 0, 0
    for turned in (False, True):
        size = whole[::-1] if turned else whole
        for axis in range(min(len(size), 2)):
            others = {(*shape[:axis], *shape[axis + 1 :]) for shape in known if len(shape) == len(size)}
            same = others == {(*size[:axis], *size[axis + 1 :])} and all(len(shape) == len(size) for shape in known)
            if same and sum(shape[axis] for shape in known) == size[axis]:
                return len(size) - 1 - axis if turned else axis, axis
        if len(whole) != 2:
            break
    return None


def in_order(fusion: Fusion, wholes: Side, parts: Side) -> Fusion | None:
    """Return a fusion with its parts in the order in which one line of values shows them in the whole; None if it shows
    no order, or turned parts.
    """
    whole = wholes.line(fusion.whole, fusion.axis)
    lines = {name: parts.line(name, fusion.part_axis) for name in fusion.parts}
    if len(set(whole)) < _MOST or not all(lines.values()):
        return None
    orders = permutations(fusion.parts)
    found = next((names for names in orders if [each for name in names for each in lines[name]] == whole), None)
    return None if found is None else fusion._replace(parts=found)


# -- messages


def _message(kind: str, fusions: Sequence[Fusion], wholes: Side, parts: Side) -> str:
    """Say what is fused, one example of each kind, and what is known of the order of rows."""
    examples: dict[str, Fusion] = {}
    for fusion in fusions:
        family = ".".join(_place(family_of(fusion.whole))[:2])
        known = examples.setdefault(family, fusion)
        if len(wholes.shape(fusion.whole) or ()) > len(wholes.shape(known.whole) or ()):
            examples[family] = fusion  # a matrix shows more than a bias
    shown = [in_order(fusion, wholes, parts) or fusion for fusion in list(examples.values())[:_MOST]]
    orders = [_order(kind, fusion, wholes, parts) for fusion in shown]
    words = "; ".join(_words(fusion, wholes, parts) + order for fusion, order in zip(shown, orders))
    one, several = ("the file", "the model") if kind == "fused" else ("the model", "the file")
    holds = "holds" if len(fusions) == 1 else "hold"
    text = f"{pluralize(len(fusions), 'tensor')} of {one} {holds} what {several} has in several: {words}"
    if all(orders):
        return text
    along = f", dim={shown[0].axis}" if shown[0].axis else ""
    call = f"state[key].chunk({len(shown[0].parts)}{along})" if kind == "fused" else f"torch.cat((...){along})"
    return (
        f"{text}; the names can be paired by shape, but the order of rows is not known: the parts may follow each"
        f" other, as {call} takes them, or alternate head by head"
    )


def _words(fusion: Fusion, wholes: Side, parts: Side) -> str:
    """Describe one fusion: the tensor, and the projections that it holds."""
    labels = [_place(parts.label(name))[1] + _size(parts.shape(name)) for name in fusion.parts]
    turned = ", transposed" if fusion.axis != fusion.part_axis else ""
    return f"{wholes.label(fusion.whole)}{_size(wholes.shape(fusion.whole))} is {join_limited(labels)}{turned}"


def _size(shape: Shape) -> str:
    return "" if shape is None else f" ({shape_text(shape)})"


def _order(kind: str, fusion: Fusion, wholes: Side, parts: Side) -> str:
    """Say in which order the rows stand, from one line of values; "" if values are not known or differ."""
    whole = wholes.line(fusion.whole, fusion.axis)
    axes = [fusion.part_axis]
    if all(len(shape) == 2 and shape[0] == shape[1] for shape in (parts.shape(name) or () for name in fusion.parts)):
        axes.append(1 - fusion.part_axis)  # squares may be transposed
    for axis in axes if len(set(whole)) >= _MOST else ():
        lines = [parts.line(name, axis) for name in fusion.parts]
        joined = [element for line in lines for element in line]
        if not all(lines) or sorted(joined) != sorted(whole):
            continue
        turned = ", each transposed" if axis != fusion.part_axis else ""
        if joined == whole:
            along = f", dim={fusion.axis}" if fusion.axis else ""
            sizes = [len(line) for line in lines]
            call = f"state[key].split({sizes}{along})" if kind == "fused" else f"torch.cat((...){along})"
            return f" in this order{turned}, as the values show: {call}"
        step = whole.index(lines[1][0])
        regular = 0 < step < len(lines[0]) and whole[:step] == lines[0][:step]
        how = f"that alternate every {step:,} rows" if regular else "in another order"
        return f" with rows {how}{turned}, as the values show"
    return ""

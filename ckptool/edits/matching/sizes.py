"""Name the reasons why tensors have other sizes in a checkpoint than in a model, and what helps (``causes.toml``)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from ...base import toml
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, shape_text
from ...files.archives import read_bytes
from .state_dict_errors import Mismatch

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
    """Return whether the tensors may be the last layer of a classifier."""
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

"""An entry as text for people: a tensor with its numbers, a dict or object as a tree, a scalar as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from ..base.errors import MalformedError
from ..base.limits import LIMITS
from ..base.text import counted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.paths import bounded, joined
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Ref
from ..values.interpretation import interpret, numbers_in
from ..values.numeric import Number
from ..values.python_values import ContainerValue, ScalarValue, python_value
from ..values.tensor_text import tensor_lines, tensor_summary

#: Characters of a text or of bytes within a tree, and of a list on one line.
_LONG: Final = 500
_INLINE: Final = 100
_DEPTH: Final = 200


def entry_lines(checkpoint: Checkpoint, ref: Ref, path: str) -> Iterator[str]:
    """The lines that show what ``ref`` stands for; none of them is escaped. Raises MalformedError for missing bytes."""
    found = python_value(checkpoint, ref)
    if isinstance(found, Tensor):
        yield from tensor_lines(checkpoint, ref)
    elif isinstance(found, ScalarValue):
        # As it is: a text without quotes, line by line.
        yield from found.value.split("\n") if isinstance(found.value, str) else [_leaf(found, 1 << 20)]
    else:
        yield from _tree(checkpoint, ref, found, path)


def _tree(checkpoint: Checkpoint, ref: Ref, found: ContainerValue, path: str) -> Iterator[str]:
    opened = {ref: path}
    told_of: dict[Ref, str] = {}
    if not found.members:
        yield _empty(found)
        return
    if found.kind == "object":
        yield f"{found.cls}, {counted(len(found.members), 'attribute')}"
    work: list[Iterator[tuple[str, Ref, str]]] = [_members(found, path)]
    while work:
        step = next(work[-1], None)
        if step is None:
            work.pop()
            continue
        name, child, where = step
        indent = "  " * (len(work) - 1)
        inner = python_value(checkpoint, child)
        if not isinstance(inner, ContainerValue):
            told = told_of.get(child, "")
            if not told and isinstance(inner, Tensor):
                # Its number is read once, though it may stand at a million places.
                told = told_of[child] = _tensor(checkpoint, child, inner)
            elif isinstance(inner, ScalarValue):
                told = _leaf(inner, _LONG)
            yield f"{indent}{name}: {told}"
            continue
        flat = _inline(checkpoint, inner)
        if flat:
            yield f"{indent}{name}: {flat}"
        elif child in opened:
            yield f"{indent}{name}: the same {inner.cls} as {opened[child] or 'the root'}"
        elif len(work) >= _DEPTH:
            yield f"{indent}{name}: {inner.cls}, deeper than is shown"
        else:
            opened[child] = where
            noun = "attribute" if inner.kind == "object" else "element" if inner.kind == "sequence" else "entry"
            yield f"{indent}{name}: {inner.cls}, {counted(len(inner.members), noun)}"
            work.append(_members(inner, where))


def _members(found: ContainerValue, path: str) -> Iterator[tuple[str, Ref, str]]:
    for name, step, ref, _ in found.members:
        yield name, ref, bounded(joined(path, step), ref)


def _inline(checkpoint: Checkpoint, found: ContainerValue) -> str:
    """What fits on the line of its name: nothing, or a short list of scalars."""
    if not found.members:
        return _empty(found)
    if found.kind != "sequence" or len(found.members) > _INLINE // 2:
        return ""
    leaves = [python_value(checkpoint, member.ref) for member in found.members]
    texts = [_leaf(leaf, _INLINE) for leaf in leaves if isinstance(leaf, ScalarValue)]
    left, right = {"tuple": ("(", ")"), "set": ("{", "}")}.get(found.cls, ("[", "]"))
    text = left + ", ".join(texts) + right
    return text if len(texts) == len(leaves) and len(text) <= _INLINE else ""


def _empty(found: ContainerValue) -> str:
    if found.kind == "object":
        return f"{found.cls}, no attributes"
    return f"an empty {found.cls}"


def _leaf(leaf: ScalarValue, most: int) -> str:
    value = leaf.value
    if isinstance(value, str) and leaf.kind == "str":
        return _cut(json.dumps(value, ensure_ascii=False), most, f"{len(value):,} characters")
    if isinstance(value, bytes):
        return _cut(repr(value[:most]), most, f"{len(value):,} bytes")
    if isinstance(value, int) and value.bit_length() > LIMITS.int_digits * 3:
        return f"an integer of {value.bit_length():,} bits"
    return str(value)


def _cut(text: str, most: int, size: str) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({size})"


def _tensor(checkpoint: Checkpoint, ref: Ref, tensor: Tensor) -> str:
    """A tensor on the line of its name; one number with its value."""
    if tensor.numel != 1 or tensor.kind != "dense":
        return tensor_summary(tensor)
    how = interpret(checkpoint, ref)
    if isinstance(how, str):
        return f"{tensor_summary(tensor)} ({how})"
    try:
        (value,) = next(numbers_in(checkpoint, how))
    except MalformedError:
        return f"{tensor_summary(tensor)} (its bytes are missing)"
    return f"{tensor_summary(tensor)} = {_number(value)}"


def _number(value: Number) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)

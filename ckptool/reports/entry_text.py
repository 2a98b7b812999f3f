"""The value at a path as text: a tensor with its numbers, a dict or object as a tree, a scalar unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from ..base.errors import MalformedError
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.paths import bounded, joined
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Ref
from ..values.interpretation import interpret, numbers_in
from ..values.python_values import ContainerValue, ScalarValue, python_value
from ..values.tensor_text import tensor_lines, tensor_summary
from .json_values import huge_text, is_huge

#: Maximum characters of a string or bytes in a tree, and of a list on one line.
_MAX_STRING: Final = 500
_MAX_INLINE: Final = 100
_MAX_DEPTH: Final = 200


def entry_lines(checkpoint: Checkpoint, ref: Ref, path: str) -> Iterator[str]:
    """Yield the lines that show the value at ``ref``, unescaped. Raise MalformedError if bytes are missing."""
    shown = python_value(checkpoint, ref)
    if isinstance(shown, Tensor):
        yield from tensor_lines(checkpoint, ref)
    elif isinstance(shown, ScalarValue):
        # A string is shown without quotes, with its own line breaks.
        yield from shown.value.split("\n") if isinstance(shown.value, str) else [_leaf(shown, 1 << 20)]
    else:
        yield from _tree(checkpoint, ref, shown, path)


def _tree(checkpoint: Checkpoint, ref: Ref, container: ContainerValue, path: str) -> Iterator[str]:
    opened = {ref: path}
    texts: dict[Ref, str] = {}
    if not container.members:
        yield _empty(container)
        return
    if container.kind == "object":
        yield f"{container.cls}, {pluralize(len(container.members), 'attribute')}"
    work: list[Iterator[tuple[str, Ref, str]]] = [_members(container, path)]
    while work:
        step = next(work[-1], None)
        if step is None:
            work.pop()
            continue
        name, child, where = step
        indent = "  " * (len(work) - 1)
        inner = python_value(checkpoint, child)
        if not isinstance(inner, ContainerValue):
            text = texts.get(child, "")
            if not text and isinstance(inner, Tensor):
                # Read the number once, because the tensor may be at a million places.
                text = texts[child] = _tensor(checkpoint, child, inner)
            elif isinstance(inner, ScalarValue):
                text = _leaf(inner, _MAX_STRING)
            yield f"{indent}{name}: {text}"
            continue
        inline = _inline(checkpoint, inner)
        if inline:
            yield f"{indent}{name}: {inline}"
        elif child in opened:
            yield f"{indent}{name}: the same {inner.cls} as {opened[child] or 'the root'}"
        elif len(work) >= _MAX_DEPTH:
            yield f"{indent}{name}: {inner.cls}, deeper than is shown"
        else:
            opened[child] = where
            noun = "attribute" if inner.kind == "object" else "element" if inner.kind == "sequence" else "entry"
            yield f"{indent}{name}: {inner.cls}, {pluralize(len(inner.members), noun)}"
            work.append(_members(inner, where))


def _members(container: ContainerValue, path: str) -> Iterator[tuple[str, Ref, str]]:
    for name, step, ref, _ in container.members:
        yield name, ref, bounded(joined(path, step), ref)


def _inline(checkpoint: Checkpoint, container: ContainerValue) -> str:
    """Return an empty container or a short list of scalars as one line; "" for other containers."""
    if not container.members:
        return _empty(container)
    if container.kind != "sequence" or len(container.members) > _MAX_INLINE // 2:
        return ""
    leaves = [python_value(checkpoint, member.ref) for member in container.members]
    texts = [_leaf(leaf, _MAX_INLINE) for leaf in leaves if isinstance(leaf, ScalarValue)]
    left, right = {"tuple": ("(", ")"), "set": ("{", "}")}.get(container.cls, ("[", "]"))
    text = left + ", ".join(texts) + right
    return text if len(texts) == len(leaves) and len(text) <= _MAX_INLINE else ""


def _empty(container: ContainerValue) -> str:
    if container.kind == "object":
        return f"{container.cls}, no attributes"
    return f"an empty {container.cls}"


def _leaf(leaf: ScalarValue, limit: int) -> str:
    value = leaf.value
    if isinstance(value, str) and leaf.kind == "str":
        return _cut(json.dumps(value, ensure_ascii=False), limit, f"{len(value):,} characters")
    if isinstance(value, bytes):
        return _cut(repr(value[:limit]), limit, f"{len(value):,} bytes")
    return huge_text(value) if isinstance(value, int) and is_huge(value) else str(value)


def _cut(text: str, limit: int, size: str) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({size})"


def _tensor(checkpoint: Checkpoint, ref: Ref, tensor: Tensor) -> str:
    """Return a tensor as one line, with its value if it is a single number."""
    if tensor.numel != 1 or tensor.kind != "dense":
        return tensor_summary(tensor)
    how = interpret(checkpoint, ref)
    if isinstance(how, str):
        return f"{tensor_summary(tensor)} ({how})"
    try:
        (value,) = next(numbers_in(how))
    except MalformedError:
        return f"{tensor_summary(tensor)} (its bytes are missing)"
    return f"{tensor_summary(tensor)} = {f'{value:.7g}' if isinstance(value, float) else value}"

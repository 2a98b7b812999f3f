"""Rebuild the nested object from flat names, like ``_EmptyStateDictLoadPlanner``.

Source: ``set_element`` in torch/distributed/checkpoint/_traverse.py: strings lead into dicts, numbers into lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...checkpoint.graph_builder import Builder
from ...pickles.nodes import Ref

#: The most empty list places that are filled, as a base and per value, so that a large index cannot exhaust memory.
_GAPS: Final = 1000
_GAPS_PER_VALUE: Final = 4

Level = dict["str | int", "Level | Ref"]


class Nested:
    """The object while it grows.

    ``misfits`` are names whose place is taken by another value. ``sparse`` are lists with too many empty places to
    fill, as (places, values).
    """

    def __init__(self) -> None:
        self.root: Level = {}
        self.misfits: list[str] = []
        self.sparse: list[tuple[int, int]] = []
        self._gaps = _GAPS

    def put(self, name: str, path: Iterable[str | int], value: Ref) -> None:
        """Set the value at a path."""
        self._gaps += _GAPS_PER_VALUE
        *parents, last = path
        level = self.root
        for step, next_step in zip(parents, [*parents[1:], last]):
            inner = level.setdefault(step, {})
            if not isinstance(inner, dict) or (inner and type(next(iter(inner))) is not type(next_step)):
                self.misfits.append(name)
                return
            level = inner
        if last in level:
            self.misfits.append(name)
        else:
            level[last] = value

    def build(self, builder: Builder) -> Ref:
        """Build the graph of the object."""
        return self._build_level(builder, self.root, top=True)

    def _build_level(self, builder: Builder, level: Level, top: bool = False) -> Ref:
        refs = {
            step: self._build_level(builder, value) if isinstance(value, dict) else value
            for step, value in level.items()
        }
        by_index = {step: ref for step, ref in refs.items() if isinstance(step, int)}
        if not top and by_index:
            size = max(by_index) + 1
            gaps = size - len(by_index)
            if gaps <= self._gaps:
                self._gaps -= gaps
                return builder.sequence(by_index[n] if n in by_index else builder.constant(None) for n in range(size))
            self.sparse.append((size, len(by_index)))
        return builder.mapping((str(step), ref) for step, ref in refs.items())

"""From flat names to the nested object that they were taken from, as ``_EmptyStateDictLoadPlanner`` rebuilds it.

Source: ``set_element`` in torch/distributed/checkpoint/_traverse.py: texts lead into dicts, numbers into lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...checkpoint.graph_builder import Builder
from ...pickles.nodes import Ref

#: Places of lists that may be empty, in all and for each value there is: no file fills memory with a large number.
_GAPS: Final = 1000
_GAPS_EACH: Final = 4

Level = dict["str | int", "Level | Ref"]


class Nested:
    """The object as it grows. ``misfits`` are names for which there is no room: another value is in their way.
    ``sparse`` are lists with more empty places than are followed, as (places, values)."""

    def __init__(self) -> None:
        self.root: Level = {}
        self.misfits: list[str] = []
        self.sparse: list[tuple[int, int]] = []
        self._gaps = _GAPS

    def put(self, name: str, path: Iterable[str | int], value: Ref) -> None:
        """Set the value at a path."""
        self._gaps += _GAPS_EACH
        *way, last = path
        level = self.root
        kinds = [*map(type, way[1:]), type(last)]
        for step, kind in zip(way, kinds):
            inner = level.setdefault(step, {})
            if not isinstance(inner, dict) or (inner and type(next(iter(inner))) is not kind):
                self.misfits.append(name)
                return
            level = inner
        if last in level:
            self.misfits.append(name)
        else:
            level[last] = value

    def built(self, builder: Builder) -> Ref:
        """The graph of it."""
        return self._level(builder, self.root, top=True)

    def _level(self, builder: Builder, level: Level, top: bool = False) -> Ref:
        refs = {
            step: self._level(builder, value) if isinstance(value, dict) else value for step, value in level.items()
        }
        if top or not any(isinstance(step, int) for step in refs):
            return builder.mapping((str(step), ref) for step, ref in refs.items())
        by_number = {step: ref for step, ref in refs.items() if isinstance(step, int)}
        most = max(by_number)
        self._gaps -= most + 1 - len(by_number)
        if self._gaps < 0:
            self._gaps += most + 1 - len(by_number)
            self.sparse.append((most + 1, len(by_number)))
            return builder.mapping((str(step), ref) for step, ref in refs.items())
        return builder.sequence(by_number[n] if n in by_number else builder.constant(None) for n in range(most + 1))

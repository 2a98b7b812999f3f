"""Where the blocks of a tensor lie: steps along its factors, and boxes in the grid of its dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .axes import Leaf, Tag, sizes, tagged


def all_tags(leaf: Leaf) -> list[Tag | None]:
    """Return the tag of each factor; None for the number 1."""
    tags = tagged(leaf.factors)
    return [None if (each.symbol, each.number) == ("", 1) else next(tags) for each in leaf.factors]


def steps_of(leaf: Leaf, stride: Sequence[int], known: Mapping[str, int]) -> tuple[int, dict[Tag, int]]:
    """Return where a block of a tensor begins, and the distance between neighbours along each factor, in elements."""
    begin, steps, tags = 0, dict[Tag, int](), iter(all_tags(leaf))
    for dimension, section, step in zip(leaf.axes, leaf.sections, stride):
        inner = sizes(dimension.inner, known)
        widths = [sizes(each, known) for each in dimension.sections]
        begin += sum(widths[:section]) * inner * step
        parts = (
            (dimension.outer, step * inner * sum(widths)),
            (dimension.sections[section], step * inner),
            (dimension.inner, step),
        )
        for factors, unit in parts:
            for at, _ in enumerate(factors):
                tag = next(tags)
                if tag is not None:
                    steps[tag] = unit * sizes(factors[at + 1 :], known)
    return begin, steps


def grid_of(leaf: Leaf, known: Mapping[str, int]) -> Iterator[tuple[tuple[Any, ...], int, bool]]:
    """Yield the axes of the grid: factors, the offset of the block, and whether these are the sections."""
    for dimension, section in zip(leaf.axes, leaf.sections):
        yield from (((each,), 0, False) for each in dimension.outer)
        yield dimension.sections[section], sum(sizes(each, known) for each in dimension.sections[:section]), True
        yield from (((each,), 0, False) for each in dimension.inner)


def merged(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a view with as few dimensions as possible: neighbours that are one run become one."""
    merged: list[tuple[int, int]] = []
    for size, step in zip(shape, stride):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = merged[-1][0] * size, step
        else:
            merged.append((size, step))
    return tuple(size for size, _ in merged), tuple(step for _, step in merged)

"""Options whose order on the command line counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

_ORDER = "ckptool.order"


class Ordered(click.Command):
    """A command that remembers in which order its options were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = order
        return super().parse_args(ctx, args)


def steps_of(ctx: click.Context, names: Iterable[str]) -> list[tuple[str, str | bool]]:
    """The options with these names (without dashes) and their texts, in the order of the command line."""
    wanted = set(names)
    taken: dict[str, int] = {}
    steps: list[tuple[str, str | bool]] = []
    for param in ctx.meta[_ORDER]:
        name = next((option.lstrip("-") for option in param.opts if option.startswith("--")), "")
        if name not in wanted or param.name is None:
            continue
        value: Any = ctx.params[param.name]
        if isinstance(value, tuple):
            number = taken[name] = taken.get(name, -1) + 1
            value = value[number]
        steps.append((name, value))
    return steps

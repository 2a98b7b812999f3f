"""The help of commands in parts, for the pages of the site."""

from __future__ import annotations

import re
from inspect import cleandoc
from itertools import groupby
from typing import NamedTuple

import click


class Part(NamedTuple):
    """A paragraph, or literal lines, whose line breaks are kept."""

    text: str
    literal: bool


def parts(text: str) -> list[Part]:
    """Return the paragraphs of a help text. Indented lines become literal parts, without their common indent."""
    found = []
    for block in re.split(r"\n\s*\n", cleandoc(text.replace("\b", ""))):
        for literal, lines in groupby(block.splitlines(), key=lambda line: line.startswith("  ")):
            own = list(lines)
            found.append(Part(cleandoc("\n".join(["", *own])) if literal else " ".join(own), literal))
    return found


def epilog(command: click.Command) -> tuple[list[str], list[Part]]:
    """Return the example lines of a command, and the other parts of its epilog."""
    rest = parts(command.epilog or "")
    headings = [number for number, part in enumerate(rest) if part.text == "Examples:"]
    examples = [line for number in headings for line in rest[number + 1].text.splitlines()]
    return examples, [part for number, part in enumerate(rest) if not {number, number - 1} & {*headings}]


def options(ctx: click.Context) -> list[tuple[str, str]]:
    """Return (names, help) for each option of a command, as ``--help`` prints them."""
    given = (param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option))
    return [record for param in given if (record := param.get_help_record(ctx)) is not None]

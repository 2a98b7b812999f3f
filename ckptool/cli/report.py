"""The report command: write an HTML page about a checkpoint, or about what changed between two."""

from __future__ import annotations

import os

import click

import ckptool

from ..base.globs import Globs
from .help import GroupedCommand
from .options import (
    AnyPath,
    InputPath,
    choosing_keys,
    force_option,
    ignore_option,
    no_values_option,
    other_key_option,
    quiet_option,
)
from .progress import progress_bar
from .render import clean, emit


@click.command(cls=GroupedCommand)
@click.argument("a", metavar="A", type=InputPath())
@click.argument("b", metavar="[B]", type=InputPath(), required=False)
@click.option("-o", "--output", type=AnyPath(), metavar="OUT", required=True, help="The page to write.")
@ignore_option
@choosing_keys
@other_key_option
@no_values_option
@force_option
@quiet_option
def report(
    a: str,
    b: str | None,
    output: str,
    ignore: list[str],
    key: str | None,
    other_key: str | None,
    only: Globs,
    no_values: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Write a page that a browser opens: what a checkpoint is, what to do, its bytes and numbers, and what B changed.

    Of values it shows what stats prints, which needs torch; without torch, or with --no-values, the page has none.
    With B it shows what diff prints, and tensors that have another name in B. --key and --include choose the tensors.
    """
    read = sum(os.path.getsize(path) for path in (a, b) if path is not None and os.path.isfile(path))
    with progress_bar(read, "reading", not (quiet or no_values)) as progress:
        written = ckptool.report(
            a,
            b,
            output=output,
            force=force,
            no_values=no_values,
            key=key,
            other_key=other_key,
            ignore=ignore,
            include=only.include,
            exclude=only.exclude,
            progress=progress,
        )
    if not quiet:
        emit(clean(f"{a if b is None else f'{a} and {b}'} -> {written.path}"))

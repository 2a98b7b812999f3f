"""The options that commands share, each spelled once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ..base.globs import Globs

Command = TypeVar("Command", bound=Callable[..., Any])

ALL_FORMATS = ("table", "json", "jsonl", "csv", "markdown", "plain")
#: Kinds of tensors that a dtype and a shape describe.
PLAIN_KINDS = ("dense", "quantized", "meta")
REPORT_FORMATS = ("table", "json", "jsonl")

#: Of several inputs, the code that counts: the first of these that occurred.
_GRAVITY = (70, 5, 3, 4, 2, 1, 0)


def worst(codes: Iterable[int]) -> int:
    """The exit code for several inputs."""
    found = set(codes)
    return next((code for code in _GRAVITY if code in found), 0)


def paths(command: Command) -> Command:
    """One input or more. They are opened by ckptool, which says more about them than click would."""
    return click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path())(command)


def one_path(command: Command) -> Command:
    """One input, because what follows it on the command line says what to do with it."""
    return click.argument("path", metavar="PATH", type=click.Path())(command)


def key_option(command: Command) -> Command:
    text = "One state dict, by its path as inspect prints it ('.' for the root). Default: all that are found."
    return click.option("--key", metavar="PATH", help=text, multiple=True, callback=_only_one)(command)


def _only_one(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    if len(values) > 1:
        raise click.BadParameter("it names one state dict, and was given twice")
    return values[0] if values else None


def choosing(command: Command) -> Command:
    """Which keys or tensors an edit is about: ``only``, made of two options."""

    @wraps(command)
    def with_choice(*args: Any, include: tuple[str, ...], exclude: tuple[str, ...], **how: Any) -> Any:
        return command(*args, only=Globs(include, exclude), **how)

    exclude = click.option("--exclude", multiple=True, metavar="GLOB", help="Leave matching keys alone; repeatable.")
    include = click.option("--include", multiple=True, metavar="GLOB", help="Only matching keys; repeatable.")
    return cast(Command, include(exclude(with_choice)))


def format_option(formats: tuple[str, ...] = REPORT_FORMATS) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        return click.option(
            "--format", "style", type=click.Choice(formats), default="table", show_default=True, help="Output format."
        )(command)

    return decorate


def in_place(command: Command) -> Command:
    """What commands that change metadata alone take beside ``writing``."""
    text = "Append the edit to the file itself: no time, no space, and ckptool undo takes it back."
    return click.option("--in-place", is_flag=True, help=text)(command)


def writing(command: Command) -> Command:
    """What every command that writes takes."""
    for option in reversed(
        (
            click.option(
                "-o",
                "--output",
                type=click.Path(),
                metavar="OUT",
                help="The file to write; {hash8} in its name becomes its SHA-256.",
            ),
            click.option(
                "--out-dir",
                type=click.Path(),
                metavar="DIR",
                help="The folder to write the outputs of several inputs to.",
            ),
            click.option("--force", is_flag=True, help="Replace an existing output."),
            click.option(
                "--follow-links", is_flag=True, help="Also write the targets of links that lead out of a folder."
            ),
            click.option("--dry-run", is_flag=True, help="Only show what would change, and the size of the output."),
            format_option(),
            click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
            click.option("--no-progress", is_flag=True, help="Show no progress bar."),
        )
    ):
        command = option(command)
    return command

"""Typing errors: what a mistyped command or option may mean, and which command has it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final

import click

from ..base.lazy import table
from ..base.steps import command
from ..base.text import join_limited
from ..files.archives import exists

#: The most commands to name that have an option.
_NAMED: Final = 4


def explained(group: click.Group, words: Sequence[str], error: click.UsageError) -> click.UsageError:
    """Return an error that also says what was meant, or the same error if that is unknown. ``words`` were typed."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        meant = _option(group, error.option_name, error.ctx.command)
    elif error.ctx is not None and error.ctx.command is group:
        meant = _command(group, [word for word in words if word[:1] != "-" and word != "help"])
    else:
        meant = ""
    return click.UsageError(f"{error.message} {meant}", error.ctx) if meant else error


def _synonyms() -> dict[str, Any]:
    """Return the words of other tools for commands and options; of several options, the first that fits is meant."""
    return table("cli/synonyms")


def _command(group: click.Group, words: Sequence[str]) -> str:
    """Say which command the first word means, or that it is a file; return "" if nothing is similar."""
    names = group.list_commands(click.Context(group))
    if not words or words[0] in names:
        return ""
    typed = words[0].lower().replace("_", "-")
    near = [name for name, others in _synonyms()["commands"].items() if typed in others.split() and name in names]
    if near := near or get_close_matches(typed, [*names, "help", "version"], 1):
        return f"Did you mean {near[0]!r}?"
    return f"Did you mean: {command('inspect', *words)}" if exists(words[0]) else ""


def _option(group: click.Group, typed: str, own: click.Command) -> str:
    """Say which option of a command is meant, or else which other commands have the option; return "" for none."""
    have = _options(own)
    spelled = typed.lower().replace("_", "-") if typed[:2] == "--" else typed
    known = [meant for others, meant in _synonyms()["options"].items() if spelled in others.split()]
    near = [name for name in (spelled, *" ".join(known).split()) if name in have]
    near = near or get_close_matches(spelled, [name for name in have if name[:2] == "--"], 1)
    meant = f"Did you mean {near[0]!r}?" if near else ""
    ctx = click.Context(group)
    every = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    others = [name for name, each in every if each is not None and typed in _options(each)]
    return f"It is an option of {join_limited(others, most=_NAMED)}. {meant}".rstrip() if others else meant


def _options(command: click.Command) -> list[str]:
    """Return every name of every option of a command."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return ["-h", "--help", *(name for param in options for name in (*param.opts, *param.secondary_opts))]

"""Help: the options of a command under headings, rare ones only with ``--help-all``; and what a typing error means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import click

from ..base.lazy import table
from ..base.steps import command
from ..base.text import join_limited

#: Headings with the options that stand under them. Any other option stands under "Options", after the command's own
#: headings and before the shared ones.
Headings: TypeAlias = Sequence[tuple[str, Collection[str]]]


@cache
def _table() -> dict[str, Any]:
    """Return the headings of all commands ("shared") and of ``edit``, and what only ``--help-all`` describes."""
    return table("cli/headings")


def headings(name: str) -> Headings:
    """Return the headings under this name in the table of options."""
    return [(title, options.split()) for title, options in _table()[name].items()]


def variable(name: str) -> str:
    """Return the name of the function of a command: ``strip_module``, ``lora_merge``."""
    return name.replace("-", "_").replace(" ", "_")


def _show_help(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        from .render import emit  # start-up imports this module, and rendering takes longer

        command = ctx.command
        emit(command.full_help(ctx) if param is HELP_ALL and isinstance(command, GroupedCommand) else ctx.get_help())
        ctx.exit()


def eager(*names: str, callback: Callable[[click.Context, click.Parameter, bool], Any], help: str) -> click.Option:
    """Return a flag that acts when it is read. click's own ones look for translations, which takes longer than that."""
    return click.Option([*names], is_flag=True, is_eager=True, expose_value=False, callback=callback, help=help)


HELP: Final = eager("-h", "--help", callback=_show_help, help="Show this message and exit.")
#: An option of every command.
HELP_ALL: Final = eager("--help-all", callback=_show_help, help="Show this message with every option, and exit.")


class Helpful(click.Command):
    """A command with the option ``HELP``."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option that shows the help."""
        return HELP


class GroupedCommand(Helpful):
    """A command whose help has its options under headings; ``headings`` are its own ones."""

    headings: Headings = ()
    _epilog: str | None

    @property
    def epilog(self) -> str | None:
        """The examples and other last parts of the help, from ``epilogs.json`` if the command was given none."""
        if self._epilog is None and (lines := table("cli/epilogs").get(self.name or "")):
            self._epilog = "\n\n".join(f"\b\n{part}" for part in "\n".join(lines).split("\n\n"))
        return self._epilog

    @epilog.setter
    def epilog(self, text: str | None) -> None:
        self._epilog = text

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and list the names of the rarely used ones."""
        rare, purposes, here = (_table()[name] for name in ("rare", "purposes", "rare_here"))
        own, more = (listed.get(self.name, "").split() for listed in (purposes, here))
        self._write_options(ctx, formatter, {*rare.split()}.difference(own).union(more))

    def full_help(self, ctx: click.Context) -> str:
        """Return the help with every option."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self._write_options(ctx, formatter, frozenset())
        self.format_epilog(ctx, formatter)
        return formatter.getvalue().rstrip("\n")

    def sections(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the visible options by their headings, in the order of the help."""
        titles = {name: title for title, names in (*self.headings, *headings("shared")) for name in names}
        own, shared = ([title for title, _ in headings] for headings in (self.headings, headings("shared")))
        found: dict[str, list[click.Option]] = {title: [] for title in (*own, "Options", *shared)}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and not param.hidden:
                found[titles.get(param.opts[-1], "Options")].append(param)
        return {title: options for title, options in found.items() if options}

    def _write_options(self, ctx: click.Context, formatter: click.HelpFormatter, rare: Collection[str]) -> None:
        left = []
        for title, options in self.sections(ctx).items():
            left += [option.opts[-1] for option in options if option.opts[-1] in rare]
            shown = [option.get_help_record(ctx) for option in options if option.opts[-1] not in rare]
            if records := [record for record in shown if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)
        if "--endpoint-url" in left:
            formatter.write("\nA path may be an address, too: s3://, gs://, az://, https:// or hf://.\n")
        if left:
            from textwrap import wrap  # start-up imports this module

            with formatter.section("Rarely used, see --help-all"):
                width = formatter.width - formatter.current_indent
                for line in wrap(", ".join(left), width, break_on_hyphens=False):
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


# -- typing errors: what a mistyped command or option may mean, and which command has it

#: The most commands to name that have an option.
_NAMED: Final = 4


def explained(group: click.Group, words: Sequence[str], error: click.UsageError) -> click.UsageError:
    """Return an error that also says what was meant, or the same error if that is unknown. ``words`` were typed."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        meant = _option(group, error.option_name, error.ctx.command)
    elif error.ctx is not None and isinstance(error.ctx.command, click.Group):
        typed = [word for word in words if word[:1] != "-" and word != "help"]
        meant = _command(error.ctx.command, typed if error.ctx.command is group else typed[1:])
    else:
        meant = ""
    return click.UsageError(f"{error.message} {meant}", error.ctx) if meant else error


def _close(typed: str, names: Sequence[str]) -> list[str]:
    from difflib import get_close_matches  # only errors need it

    return get_close_matches(typed, names, 1)


def _command(group: click.Group, words: Sequence[str]) -> str:
    """Say which command the first word means, or that it is a file; return "" if nothing is similar."""
    from ..files.archives import exists  # only errors need it

    names = group.list_commands(click.Context(group))
    if not words or words[0] in names:
        return ""
    typed = words[0].lower().replace("_", "-")
    near = [
        name for name, others in table("cli/synonyms")["commands"].items() if typed in others.split() and name in names
    ]
    if near := near or _close(typed, [*names, "help", "version"]):
        return f"Did you mean {near[0]!r}?"
    return f"Did you mean: {command('inspect', *words)}" if exists(words[0]) else ""


def _option(group: click.Group, typed: str, own: click.Command) -> str:
    """Say which option of a command is meant, or else which other commands have the option; return "" for none."""
    have = _options(own)
    spelled = typed.lower().replace("_", "-") if typed[:2] == "--" else typed
    known = [meant for others, meant in table("cli/synonyms")["options"].items() if spelled in others.split()]
    near = [name for name in (spelled, *" ".join(known).split()) if name in have]
    near = near or _close(spelled, [name for name in have if name[:2] == "--"])
    meant = f"Did you mean {near[0]!r}?" if near else ""
    ctx = click.Context(group)
    every = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    others = [name for name, each in every if each is not None and typed in _options(each)]
    return f"It is an option of {join_limited(others, most=_NAMED)}. {meant}".rstrip() if others else meant


def _options(command: click.Command) -> list[str]:
    options = (param for param in command.params if isinstance(param, click.Option))
    return ["-h", "--help", *(name for param in options for name in (*param.opts, *param.secondary_opts))]

"""The commands rename, slim, cast and edit. ``edit`` applies several edits in one pass, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypedDict, TypeVar

import click

import ckptool

from ..base.globs import Globs
from ..checkpoint.checkpoint import Checkpoint
from ..edits.pipeline import FILES, MODIFIERS, STEPS, files_of
from .edit_report import EditReport, change_lines
from .editing import Job, WithFields, edit_all
from .options import (
    KEY,
    InputPath,
    Writing,
    choosing,
    device,
    exclude_option,
    in_place_option,
    include_option,
    paths,
    writing,
    writing_in_place,
    writing_steps,
)
from .render import clean
from .terminal import arrow

Command = TypeVar("Command", bound=Callable[..., Any])

_ORDER = "ckptool.order"


class Ordered(click.Command):
    """A click command that records the order of its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = order
        return super().parse_args(ctx, args)


def steps_of(ctx: click.Context, names: Iterable[str]) -> list[tuple[str, str | bool]]:
    """Return the options with these names (without dashes) and their values, in the order of the command line."""
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


class RenamedKey(TypedDict):
    """A tensor with its ``old`` and ``new`` key."""

    old: str
    new: str


class RenameReport(EditReport):
    """``ckptool.rename/1``: ``renamed`` lists the tensors whose keys changed."""

    renamed: list[RenamedKey]


RENAME_EPILOG = """\b
Examples:
  ckptool rename model.pth --glob 'backbone.*=encoder.*' -o renamed.pth
  ckptool rename model.pth --regex 's/^layers\\.(\\d+)/blocks.\\1/' -o renamed.pth
  ckptool rename model.pth --table names.json -o renamed.pth
  ckptool rename model.pth --like other.pth --by-order -o renamed.pth
"""

#: The most renamed tensors shown by name.
_SHOWN: Final = 5
#: Options of rename, with the edit steps that they stand for.
_RENAMES = {"glob": "rename", "regex": "rename-regex", "table": "rename-table", "like": "like", "by-order": "by-order"}


@click.command(cls=Ordered, epilog=RENAME_EPILOG)
@paths
@click.option(
    "--glob",
    multiple=True,
    metavar="OLD=NEW",
    help="By pattern (*, ?, [45], [a-c], [!x], {a,b}); each wildcard of NEW takes what that of OLD matched.",
)
@click.option("--regex", multiple=True, metavar="s/OLD/NEW/", help="By regular expression, as in sed; flags g and i.")
@click.option(
    "--table",
    type=InputPath(),
    multiple=True,
    metavar="FILE",
    help="By table: a JSON object, or two columns, old and new.",
)
@click.option("--like", type=InputPath(), metavar="OTHER", help="By the names of another checkpoint.")
@click.option("--by-order", is_flag=True, help="With --like: pair the names in order; shapes must agree.")
@choosing
@writing_in_place
@click.pass_context
def rename(ctx: click.Context, /, paths: tuple[str, ...], only: Globs, how: Writing, **_: Any) -> int:
    """Rename keys of state dicts. Renames apply one after the other, in the order given.

    _metadata follows, and so do parameter names in optimizers. A rename that matches nothing is refused, and so are
    two keys that would become one.
    """
    given = steps_of(ctx, _RENAMES)
    if not any(name != "by-order" for name, _ in given):
        raise click.UsageError("Say how to rename: --glob, --regex, --table or --like.")
    first = [step for step in _scope(how.key, only) + given if step[0] in ("key", "include", "exclude", "by-order")]
    steps = [*first, *((_RENAMES[name], value) for name, value in given if name != "by-order")]

    edit = partial(_renamed, steps=steps)
    job = Job("rename", edit, lines=_rename_lines, inputs=files_of(steps), of_keys=True, keyed=True, only=only)
    return edit_all(job, paths, how)


def _renamed(checkpoint: Checkpoint, steps: Sequence[tuple[str, str | bool]]) -> WithFields:
    edited = ckptool.edit(checkpoint, steps)
    pairs = zip(checkpoint.survey.tensors, edited.survey.tensors)
    return WithFields(
        edited, {"renamed": [{"old": old.key, "new": new.key} for old, new in pairs if old.key != new.key]}
    )


def _rename_lines(report: RenameReport) -> list[str]:
    renamed = report["renamed"]
    names = [f"    {arrow(clean(pair['old']), clean(pair['new']))}" for pair in renamed[:_SHOWN]]
    more = len(renamed) - _SHOWN
    return [*change_lines(report, of_keys=True), *names, *([f"    and {more:,} more"] if more > 0 else [])]


def _scope(key: str | None, only: Globs) -> list[tuple[str, str | bool]]:
    steps: list[tuple[str, str | bool]] = [("key", key)] if key is not None else []
    return steps + [("include", glob) for glob in only.include] + [("exclude", glob) for glob in only.exclude]


SLIM_EPILOG = """\b
Examples:
  ckptool slim training.pth --for inference -o model.pth
  ckptool slim model.pth --dedupe -o small.pth
"""


@click.command(epilog=SLIM_EPILOG)
@paths
@click.option("--for", "purpose", type=click.Choice(["inference"]), help="Drop optimizer, scheduler and EMA entries.")
@click.option("--dedupe", is_flag=True, help="Merge storages with the same bytes into one: tied tensors.")
@choosing
@writing
def slim(paths: tuple[str, ...], purpose: Any, dedupe: bool, only: Globs, how: Writing) -> int:
    """Drop bytes that no tensor uses: a slice of a large storage gets a storage of its own size.

    Tensors that overlap still share a storage. No value changes.
    """

    edit = partial(ckptool.slim, dedupe=dedupe, purpose=purpose, **only.patterns)
    return edit_all(Job("slim", edit, only=only), paths, how)


CAST_EPILOG = """\b
Examples:
  ckptool cast model.pth --dtype bfloat16 -o model.bf16.pth
  ckptool cast model.pth --dtype float16 --exclude '*norm*' --no-overflow -o model.fp16.pth
  ckptool cast model.pth --dtype float32 --include 'head.*' -o model.new.pth
"""


@click.command(epilog=CAST_EPILOG)
@paths
@click.option("--dtype", required=True, metavar="DTYPE", help="float32, bfloat16, float16, float8_e4m3fn ...")
@click.option("--no-overflow", is_flag=True, help="Refuse finite values that would become infinite or NaN.")
@click.option("--optimizer", is_flag=True, help="Also convert optimizer state.")
@choosing
@writing
def cast(paths: tuple[str, ...], dtype: str, no_overflow: bool, optimizer: bool, only: Globs, how: Writing) -> int:
    """Convert floating-point tensors to another dtype, exactly like torch's own .to(dtype).

    Optimizer state stays as it is: in a narrower dtype its small numbers would become 0. With --include, exactly the
    matching tensors are converted, whatever their dtype. Tensors that share a storage still share it. Values are
    computed with torch while the output is written: the file is never in memory. Finite values that become infinite
    are counted and reported. NaN stays NaN; its bits in bfloat16 differ between the CPUs that torch runs on: here they
    are 0xffff, as on x86.
    """
    scope: dict[str, Any] = {"key": how.key, **only.patterns}
    edit = partial(ckptool.cast, dtype=dtype, no_overflow=no_overflow, optimizer=optimizer, **scope)
    return edit_all(Job("cast", edit, keyed=True, only=only), paths, how)


EDIT_EPILOG = """\b
Examples:
  ckptool edit in.pth -o out.pth --extract state_dict --strip-module --cast bfloat16 --to cpu
  ckptool edit in.pth -o out.pth --rename 'a.*=b.*' --drop 'head.*' --set epoch=0
  ckptool edit in.pth -o out.pth --exclude '*norm*' --cast float16
  ckptool edit dcp/ -o out/ --extract model --cast bfloat16 --to-format safetensors --max-shard-size 5GB
"""


def _steps(command: Command) -> Command:
    """Add one option per step and modifier, in the order of the tables."""
    for name, (metavar, text) in reversed(list(MODIFIERS.items())):
        values: dict[str, Any] = {"metavar": metavar} if metavar else {"is_flag": True}
        command = click.option(f"--{name}", help=text, **values)(command)
    command = include_option(exclude_option(command))
    command = click.option("--key", multiple=True, metavar="PATH", help=KEY)(command)
    for name, step in reversed(list(STEPS.items())):
        values = {"multiple": True, "metavar": step.metavar} if step.metavar else {"is_flag": True}
        values |= {"callback": device} if step.metavar == "DEVICE" else {}
        values |= {"type": InputPath()} if step.metavar in FILES else {}
        command = click.option(f"--{name}", help=step.help, **values)(command)
    return command


@click.command(cls=Ordered, epilog=EDIT_EPILOG)
@paths
@_steps
@in_place_option
@writing_steps
@click.pass_context
def edit(ctx: click.Context, /, paths: tuple[str, ...], how: Writing, **_: Any) -> int:
    """Apply several edits in one pass over the file, in the order given.

    --key, --include and --exclude apply to the edits after them, until given again; --key '*' is all. The file is
    written once, at the end, in the format that its name or --to-format says; the last --key is then the state dict to
    write where the format holds one.
    """
    steps = steps_of(ctx, [*STEPS, *MODIFIERS, "key", "include", "exclude"])
    if not any(name in STEPS for name, _ in steps):
        raise click.UsageError("No edit is given: name one, such as --strip-module.")
    # A modifier may stand before or after its edit, so all modifiers are moved to the front.
    steps.sort(key=lambda step: step[0] not in MODIFIERS)
    last = steps[-1][0]
    if last in ("include", "exclude"):
        raise click.UsageError(f"--{last} applies to later edits, and none follows: give it before them.")
    keys = [value for name, value in steps if name == "key"]
    key = str(keys[-1]) if keys and keys[-1] != "*" else None
    only = Globs([str(value) for name, value in steps if name == "include"])
    job = Job("edit", partial(ckptool.edit, steps=steps), inputs=files_of(steps), keyed=last != "key", only=only)
    return edit_all(job, paths, how._replace(key=key))

"""The commands plan, run and commit: many processes, on any machines, make one output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import click

from .. import __version__
from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.nearest import nearest
from ..base.records import TypedDict
from ..base.steps import argument, command
from ..base.text import human_bytes, pluralize
from ..tasks import Committer, SheetWriter, abort, is_committed, read_sheet, run_tasks
from .help import GroupedCommand
from .options import AnyPath, Workers, engine_options, format_option, quiet_options
from .progress import progress_bar
from .render import clean, emit, emit_json, say, tell_step

_SHARE: Final = regex(r"(\d{1,9})/(\d{1,9})")

PLAN_EPILOG: Final = """\b
Examples:
  ckptool plan --tasks tasks.jsonl convert checkpoint/ -o model.safetensors
  ckptool run tasks.jsonl --task 1/2 &
  ckptool run tasks.jsonl --task 2/2 & wait
  ckptool commit tasks.jsonl

\b
The output does not exist before the commit, and is then what the command alone would
have written. Tasks may be carried out in any order, at the same time, and again.
"""

RUN_EPILOG: Final = """\b
Examples:
  ckptool run tasks.jsonl
  ckptool run tasks.jsonl --task $SLURM_ARRAY_TASK_ID/100

\b
What is done is noted in tasks.jsonl.journal: run it again after a failure, and only
what is left is carried out.
"""

COMMIT_EPILOG: Final = """\b
Examples:
  ckptool commit tasks.jsonl
  ckptool commit tasks.jsonl --abort
"""


class RunReport(TypedDict):
    """``ckptool.run/1``: ``tasks`` counts the tasks of the share.

    ``done`` counts those finished in this run, ``before`` those finished earlier, and ``bytes`` what this run wrote.
    """

    schema: str
    path: str
    tasks: int
    done: int
    before: int
    bytes: int


@click.command(
    cls=GroupedCommand,
    epilog=PLAN_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--tasks",
    "sheet",
    type=AnyPath(),
    metavar="TASKS",
    required=True,
    help="The file of tasks to make, in JSON lines.",
)
@click.option(
    "--task-size",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Bytes per task, such as 4GiB or 500MB.",
)
@click.argument("words", nargs=-1, required=True, metavar="COMMAND...", type=click.UNPROCESSED)
@click.pass_context
def plan(ctx: click.Context, sheet: str, task_size: str, words: tuple[str, ...]) -> int:
    """Plan a command that writes as tasks that any process can carry out.

    COMMAND is one of ckptool with its arguments and options, such as convert, cast, remap, edit or sanitize. The
    options of plan stand before it. Nothing is written but the file of tasks, and staged files full of holes beside the
    outputs.
    """
    size = _size(task_size)
    writer: SheetWriter | None = None
    with _invoked(ctx, words) as sub:
        writer = SheetWriter(sheet, words, __version__, size)
        try:
            sub.params["saver"] = writer.save
            code = int(sub.command.invoke(sub) or 0)
            planned = writer.close()
        except BaseException:
            writer.discard()
            raise
        if code > 1:
            writer.discard()
            return code
    as_json = sub.params.get("as_json") or sub.params.get("style") in ("json", "jsonl")
    if not (as_json or sub.params.get("quiet")):
        emit(f"planned: {pluralize(planned.tasks, 'task')} in {clean(sheet)}, {human_bytes(planned.bytes)} to write")
        tell_step(command("run", sheet))
        tell_step(command("commit", sheet))
    return code


def _size(text: str) -> int:
    from ..base.text import parse_bytes

    size = parse_bytes(text)
    if not size:
        raise click.BadParameter("a task has at least one byte", param_hint="--task-size")
    return size


@contextmanager
def _invoked(ctx: click.Context, words: Sequence[str]) -> Iterator[click.Context]:
    """Parse the planned command, which must write new outputs. Yield its context."""
    root, name = ctx.find_root(), words[0]
    assert isinstance(root.command, click.Group)
    sub_command = root.command.get_command(ctx, name)
    if sub_command is None or not any(param.name == "to_format" for param in sub_command.params):
        near = [] if sub_command is not None else nearest(name, root.command.list_commands(ctx), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ": options of plan, then a command, then its own"
        _refuse(f"{name!r} is not a command that writes checkpoints{hint}")
    with sub_command.make_context(name, list(words[1:]), parent=root) as sub:
        for option in ("in_place", "dry_run"):
            if sub.params.get(option) or getattr(sub.params.get("how"), option, False):
                _refuse(f"--{option.replace('_', '-')} does not go with plan: it plans a new output")
        yield sub


def _refuse(what: str) -> NoReturn:
    raise click.UsageError(what if what.endswith("?") else f"{what}.")


class _Share(click.ParamType[tuple[int, int]]):
    """The type of an option that takes a share of the tasks, as I/N."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = _SHARE.fullmatch(value) if isinstance(value, str) else None
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is not I/N with I from 1 to N, such as 3/100", param, ctx)
        return int(match[1]), int(match[2])


@click.command(cls=GroupedCommand, epilog=RUN_EPILOG)
@click.argument("sheet", metavar="TASKS", type=AnyPath())
@click.option("--task", "share", type=_Share(), metavar="I/N", help="Carry out the I-th of N shares.  [default: all]")
@engine_options
@format_option()
@quiet_options
def run(sheet: str, share: tuple[int, int] | None, working: Workers, style: str, quiet: bool, no_progress: bool) -> int:
    """Carry out tasks of a plan that are not done yet.

    Any number of processes may do so, on machines that see the files under the same paths.
    """
    whole = read_sheet(sheet, __version__)
    try:
        with progress_bar(whole.bytes, os.path.basename(sheet), not (quiet or no_progress)) as update:
            if working.alone:
                ran = run_tasks(whole, share or (1, 1), on_done=update)
            else:
                from ..files.engine import open_engine

                with open_engine(working.engine, working.jobs or 0) as engine:
                    ran = run_tasks(whole, share or (1, 1), engine, update)
    except KeyboardInterrupt:
        if not quiet:
            say(f"{sheet}: interrupted; what is done is kept, and not done again")
            tell_step(command("run", sheet, task=share and f"{share[0]}/{share[1]}"))
        raise
    report: RunReport = {
        "schema": "ckptool.run/1",
        "path": sheet,
        "tasks": ran.tasks,
        "done": ran.now,
        "before": ran.before,
        "bytes": ran.bytes,
    }
    if style != "table":
        emit_json([report], style, False)
    elif not quiet:
        if not ran.tasks:
            emit(f"{clean(sheet)}: nothing in this share ({pluralize(whole.tasks, 'task')} in all)")
        elif ran.now:
            before = f", {ran.before:,} before" if ran.before else ""
            emit(
                f"{clean(sheet)}: {ran.now:,} of {pluralize(ran.tasks, 'task')} done{before}, {human_bytes(ran.bytes)}"
            )
        else:
            emit(f"{clean(sheet)}: nothing left to do, {pluralize(ran.tasks, 'task')} done before")
        if (share is None or share[1] == 1) and not is_committed(whole):
            tell_step(command("commit", sheet))
    return 0


@click.command(cls=GroupedCommand, epilog=COMMIT_EPILOG)
@click.argument("sheet", metavar="TASKS", type=AnyPath())
@click.option("--abort", "aborting", is_flag=True, help="Remove the task file and the staged outputs.")
@quiet_options
@click.pass_context
def commit(ctx: click.Context, sheet: str, aborting: bool, quiet: bool, no_progress: bool) -> int:
    """Put the planned outputs in place, once all tasks are done.

    Each is read back before, and appears as a whole or not at all. What is printed is what the command that was planned
    prints, in its --format.
    """
    if aborting:
        removed = abort(sheet)
        if not quiet:
            emit(f"{clean(sheet)}: {pluralize(removed, 'staged output')} removed")
        return 0
    whole = read_sheet(sheet, __version__)
    if is_committed(whole):
        if not quiet:
            emit(f"{clean(sheet)}: {pluralize(len(whole.outputs), 'output')} committed before")
        return 0
    committer = Committer(whole)
    folder = whole.head["folder"]
    try:
        os.chdir(folder)
    except OSError as error:
        what = f"it was planned in {folder}: {error.strerror or error}"
        raise RefusedError(what, path=sheet, next=f"cd there, then {command('commit', argument(sheet))}") from error
    with _invoked(ctx, whole.head["command"]) as sub:
        sub.params["saver"] = committer.save
        given = {"quiet": quiet, "no_progress": no_progress}
        sub.params.update({name: True for name, wanted in given.items() if wanted and name in sub.params})
        code = int(sub.command.invoke(sub) or 0)
    if code < 2:
        committer.close()
    return code

"""Options that several commands share, each defined once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from ..base.addresses import conceal, is_remote
from ..base.engines import LOCAL, SPECS, engine_address
from ..base.errors import EngineError, lost_a_slash, without_secrets
from ..base.globs import Globs
from ..base.records import NamedTuple
from ..base.steps import command
from ..base.text import BREVITY

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..checkpoint.checkpoint import Checkpoint
    from ..edits.convert import Conversion

Command = TypeVar("Command", bound=Callable[..., Any])

ALL_FORMATS = ("table", "json", "jsonl", "markdown")
#: Tensor kinds that a dtype and a shape describe completely.
PLAIN_KINDS = ("dense", "quantized", "meta")
REPORT_FORMATS = ("table", "json", "jsonl")

#: Exit codes, the gravest first. The gravest code of several inputs is the exit code of the command.
_GRAVITY = (70, 5, 3, 4, 2, 1, 0)


class AnyPath(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A path that need not exist: ckptool opens it, and its errors say more. An address comes without its secrets.

    It is like ``click.Path()``, which looks for a translation of its name and takes 0.3 ms per option.
    """

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail as ``click.Path()`` does."""
        if os.path.exists(value) and not os.access(value, os.R_OK):
            click.Path().convert(value, param, ctx)
        return without_secrets(value) if lost_a_slash(value) else conceal(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Let the shell complete paths."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class InputPath(AnyPath):
    """An input path: a file, a folder, or an address within an archive, ``outer.zip!policy.pth``."""

    #: Whether the path is read.
    reads = True


def _slice(ctx: click.Context, param: click.Parameter, text: str) -> slice:
    """Return ``I/N``, every Nth input from the Ith on, as a Python slice."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 0 < int(first) <= int(step)):
        raise click.BadParameter(f"{text!r} is not I/N with I from 1 to N, such as 2/8.")
    return slice(int(first) - 1, None, int(step))


#: All inputs.
EVERY: Final = slice(0, None, 1)


def list_options(command: Command) -> Command:
    """Add PATH, --files-from and --slice."""
    lists = "Read paths from a file, or - for standard input: one per line, or NUL-separated; globs are not expanded."
    part = "Take every Nth input, from the Ith: for arrays of jobs."
    option: Any = click.option("--slice", "chosen", metavar="I/N", default="1/1", callback=_slice, help=part)(command)
    option = click.option("--files-from", type=AnyPath(), metavar="FILE", is_eager=True, help=lists)(option)
    argument = click.argument("paths", nargs=-1, metavar="PATH...", type=InputPath(), callback=_named)
    return cast(Command, argument(option))


def _named(ctx: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    if not paths and not ctx.params.get("files_from") and not ctx.resilient_parsing:
        raise click.MissingParameter(ctx=ctx, param=param)
    return paths


def worst(codes: Iterable[int]) -> int:
    """Return the gravest of the exit codes of several inputs, or 0 without inputs."""
    occurred = set(codes)
    return next((code for code in _GRAVITY if code in occurred), 0)


def paths(command: Command, *, local: bool = False) -> Command:
    """Add ``list_options``; the command gets all ``paths``. A quoted glob names the files that it matches.

    A ``local`` command refuses addresses later, without listing them.
    """

    @wraps(command)
    def with_files(*args: Any, paths: tuple[str, ...], files_from: str | None, chosen: slice, **how: Any) -> Any:
        if any(set("*?[") & {*path} for path in paths) and not (local and any(map(is_remote, paths))):
            from ..formats.checkpoint_search import expanded  # only for patterns

            paths = expanded(paths)
        if files_from is not None:
            from ..files.lists import listed_paths

            paths += tuple(map(conceal, listed_paths(files_from)))
        inputs = paths[chosen]
        return command(*args, paths=inputs, **how) if inputs else 0

    return list_options(cast(Command, with_files))


def one_path(command: Command) -> Command:
    """Add an argument for a single input path; the arguments after it are not paths."""
    return click.argument("path", metavar="PATH", type=InputPath())(command)


def completed(kind: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Return the function that completes a value in a shell: "keys", "state_dicts", or fixed "words" by the metavar."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from . import completion  # only a shell asks

        return completion.values(kind, ctx, param, incomplete)

    return complete


KEY = "One state dict, by its path ('.' is the root)."


def _one_key(name: str, text: str) -> Callable[[Command], Command]:
    complete = completed("state_dicts")
    return click.option(name, metavar="KEY", help=text, multiple=True, callback=_only_one, shell_complete=complete)


def _only_one(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    if len(values) > 1:
        raise click.BadParameter("it names one state dict, and was given twice")
    return values[0] if values else None


def _words(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [word.strip() for text in values for word in text.split(",") if word.strip()]


def repeatable(*names: str, metavar: str, help: str, **how: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds an option which may be given several times."""
    return click.option(*names, multiple=True, metavar=metavar, help=f"{help}; repeatable.", **how)


def flag(*names: str, help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds a flag."""
    return click.option(*names, is_flag=True, help=help)


key_option = _one_key("--key", KEY)
other_key_option = _one_key("--other-key", "The state dict of the second file.")
ignore_option = repeatable(
    "--ignore",
    metavar="WORDS",
    help="Words that diff --help explains, with commas",
    callback=_words,
    shell_complete=completed("words"),
)
include_option = repeatable("--include", metavar="GLOB", help="Only keys that match a glob or re:REGEX")
exclude_option = repeatable("--exclude", metavar="GLOB", help="No keys that match a glob or re:REGEX")
dequantized_option = flag("--dequantized", help="Take the plain values of quantized weights.")
no_values_option = flag("--no-values", help="Do not read tensor values.")
strict_option = flag("--strict", help="Fail on warnings and on data that is left out.")
quiet_option = flag("-q", "--quiet", help="Print errors only.")
force_option = flag("--force", help="Replace an existing output.")
dry_run_option = flag("--dry-run", help="Show what would be done; write nothing.")
reclaim_option = flag("--reclaim", help="With --in-place: free the dropped bytes on the disk; undo is then impossible.")
in_place_option = flag(
    "--in-place", help="Edit the file itself, reversible with ckptool undo; --force: also by a rewrite."
)
model_option = click.option(
    "--model",
    metavar="MODULE:CALLABLE",
    help="Use the model that this callable makes on the meta device, not a file. This runs your code.",
)


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, in the order of the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def choosing(command: Command) -> Command:
    """Add --include and --exclude; the command gets them as ``only``."""

    @wraps(command)
    def with_globs(*args: Any, include: tuple[str, ...], exclude: tuple[str, ...], **how: Any) -> Any:
        return command(*args, only=Globs(include, exclude), **how)

    return cast(Command, include_option(exclude_option(with_globs)))


def unmatched_lines(checkpoint: Checkpoint, only: Globs, key: str | None, everything: bool) -> list[str]:
    """Return the lines that say that ``only`` selects no tensor, with the command that lists what is there."""
    from ..checkpoint.selection import candidates  # only this remark needs these
    from ..reports.keys import near_pattern

    near = near_pattern(only, candidates(checkpoint, key, everything)) or "; what is there"
    step = command("keys", checkpoint.path, all=everything, key=key)
    return [f"ckptool: {checkpoint.path}: no key matches{near}", f"  -> {step}"]


def choosing_keys(command: Command) -> Command:
    """Add --key, --include and --exclude; the command gets ``key`` and ``only``."""
    return key_option(choosing(command))


def listing(command: Command) -> Command:
    """Add --all, --include and --exclude; the command gets ``everything`` and ``only``."""
    text = "List every tensor in the file by its path, including optimizer state."
    option = click.option("--all", "everything", is_flag=True, help=text)
    return option(choosing(command))


def sort_option(orders: Sequence[str], default: str = "file") -> Callable[[Command], Command]:
    help = "Order of the rows: as in the file, by name, or by a number, largest first."
    return click.option("--sort", type=click.Choice(orders), default=default, show_default=True, help=help)


def format_option(formats: tuple[str, ...] = REPORT_FORMATS, default: str = "table") -> Callable[[Command], Command]:
    """Return a decorator that adds --format, and --json as its short form; the command gets ``style``."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_format(*args: Any, as_json: bool, style: str, **how: Any) -> Any:
            if as_json or style != "table":
                BREVITY.set(BREVITY.get()._replace(lists=False))  # a report for programs has every name
            return command(*args, style="json" if as_json else style, **how)

        text = "Format of the report."
        style = click.option(
            "--format", "style", type=click.Choice(formats), default=default, show_default=True, help=text
        )
        short = click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
        return cast(Command, style(short(with_format)))

    return decorate


class Workers:
    """Who does the work of a command: ``--jobs`` and ``--engine``.

    ``error`` is set if the engine was lost before all work was done. The command then reports the finished part.
    """

    def __init__(self, jobs: int | None = None, engine: str = LOCAL) -> None:
        if engine_address(engine) and jobs is not None:
            raise click.UsageError("--jobs starts workers on this machine: a scheduler has its own.")
        self.jobs = jobs
        self.engine = engine
        self.error: EngineError | None = None

    @property
    def alone(self) -> bool:
        """Whether this process reads the files itself, one after the other."""
        return self.engine == LOCAL and self.jobs in (None, 1)

    def open(self) -> AbstractContextManager[Executor]:
        """Open the engine that does the work."""
        from ..files.engine import open_engine

        return open_engine(self.engine, self.jobs or 0)


def work_options(command: Command) -> Command:
    """Add --jobs and --engine to a command."""
    # Measured with inspect on 2 cores and 1,000 checkpoints. With 5 tensors each: 0.49 s with one process, 0.38 s with
    # two. With 60 tensors each: 2.2 s and 1.2 s. The default is still one process: most calls have few files, and a
    # tool should not take every core of a shared machine unasked.
    text = "Number of worker processes; 0: one per core.  [default: 1; with dask one per core]"
    kinds = f"Where the work runs: {SPECS}."
    option = click.option("--engine", metavar="ENGINE", default=LOCAL, show_default=True, help=kinds)(command)
    return click.option("--jobs", type=click.IntRange(min=0), metavar="N", help=text)(option)


def engine_options(command: Command) -> Command:
    """Add --jobs and --engine; the command gets them as ``working``."""

    @wraps(command)
    def with_workers(*args: Any, jobs: int | None, engine: str, **options: Any) -> Any:
        return command(*args, working=Workers(jobs, engine), **options)

    return cast(Command, work_options(with_workers))


class Writing(NamedTuple):
    """The options of every command that writes: the output, its format, and how to report."""

    conversion: Conversion
    key: str | None = None
    output: str | None = None
    out_dir: str | None = None
    force: bool = False
    follow_links: bool = False
    dry_run: bool = False
    style: str = "table"
    quiet: bool = False
    in_place: bool = False
    reclaim: bool = False
    update_config: bool = False
    working: Workers = Workers()


def as_writing(command: Command) -> Command:
    """Collect the fields of ``Writing`` and the options of ``converting`` in one ``Writing``, passed as ``how``."""

    @wraps(command)
    def with_writing(*args: Any, **options: Any) -> Any:
        conversion = _conversion(**{name: options.pop(name) for name in _CONVERTING})
        working = Workers(**{name: options.pop(name) for name in ("jobs", "engine") if name in options})
        given = {name: options.pop(name) for name in Writing._fields if name in options}
        how = Writing(conversion, working=working, **given)
        return command(*args, how=how, **options)

    return cast(Command, with_writing)


#: The parameters that ``converting`` adds.
_CONVERTING = ("to_format", "allow_loss", "strict", "tied", "max_shard_size", "texts")


def converting(command: Command) -> Command:
    """Add the options that choose the output format, and the losses that it may cause."""
    # Only commands that write need these.
    from ..formats.losses import KINDS
    from ..formats.outputs import TARGETS

    formats, kinds = click.Choice(TARGETS), click.Choice((*KINDS, "all"))
    tied, tied_text = click.Choice(("keep-first", "clone")), "Tensors that share memory: keep-first or clone."
    loss, shards = "Accept this loss, see convert --help", "Write a folder of shards: 5GB, 200MB."
    text = f"{', '.join(TARGETS)}; by default as -o says."
    options = together(
        click.option("--to-format", type=formats, metavar="FORMAT", help=text),
        strict_option,
        repeatable("--allow-loss", type=kinds, metavar="KIND", help=loss),
        click.option("--tied", type=tied, metavar="WORD", help=tied_text),
        click.option("--max-shard-size", metavar="SIZE", help=shards),
        repeatable("--metadata", "texts", metavar="NAME=VALUE", help="Add to the header of safetensors"),
    )
    return options(command)


def _conversion(
    to_format: str | None,
    allow_loss: tuple[str, ...],
    strict: bool,
    tied: Any,
    max_shard_size: str | None,
    texts: tuple[str, ...],
) -> Conversion:
    from ..edits.convert import Conversion

    wrong = next((text for text in texts if "=" not in text), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not NAME=VALUE", param_hint="--metadata")
    size = 0
    if max_shard_size is not None:
        from ..formats.hf.writer import parse_size

        size = parse_size(max_shard_size)
    metadata = {name: value for name, _, value in (text.partition("=") for text in texts)}
    return Conversion(to_format or "", tied or "", allow_loss, metadata, size, strict=strict)


#: The options of every command that writes, except --key, which ``edit`` allows several times.
writing_steps = together(
    click.option("-o", "--output", type=AnyPath(), metavar="OUT", help="The file to write."),
    click.option("--out-dir", type=AnyPath(), metavar="DIR", help="The folder for the outputs of several inputs."),
    converting,
    force_option,
    flag("--update-config", help="Also update the config.json of a folder where the edit makes it wrong."),
    flag("--follow-links", help="Also copy files that links point to outside of the folder."),
    dry_run_option,
    work_options,
    format_option(),
    quiet_option,
    as_writing,
)
#: The options of every command that writes; the command gets them as ``how``.
writing = together(key_option, writing_steps)
#: The same for commands that change only metadata.
writing_in_place = together(in_place_option, writing)

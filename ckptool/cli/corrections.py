"""Typing errors: the whole command line that was meant, for one that was refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

import click

from ..base.steps import suggested_output
from ..base.suffixes import CHECKPOINTS
from ..files.archives import exists
from .next_steps import retyped
from .options import NoOutput

#: What other tools call these commands.
_COMMANDS: Final = {
    "inspect": "show info describe summary print open view head file stat tree",
    "keys": "ls list dir names params shapes",
    "get": "cat read value entry dump",
    "validate": "check verify test lint audit safe",
    "diff": "compare cmp difference",
    "hash": "checksum digest fingerprint sha256 md5",
    "strip-module": "strip unprefix strip-prefix remove-prefix remove-module",
    "add-module": "add prefix add-prefix",
    "rename": "mv ren map-keys",
    "remap": "map device devices to move cpu map-location",
    "extract": "unwrap pick",
    "wrap": "nest",
    "drop": "rm remove delete del exclude prune",
    "keep": "select filter include only",
    "set": "update put",
    "slim": "shrink trim compact strip-optimizer",
    "cast": "dtype half quantize bf16 fp16",
    "merge": "join combine concat graft",
    "average": "mean avg soup swa",
    "convert": "export save save-as copy cp reshard shard",
    "sanitize": "fix clean harden",
    "redact": "anonymize anonymise scrub publish",
    "salvage": "repair recover rescue",
    "repack": "rewrite align zip",
    "undo": "revert rollback restore",
    "history": "log versions edits",
}
#: What other tools, and other commands of this one, call options: the first that the command has is meant.
_OPTIONS: Final = (
    ("--to --target --to-type -t", ("--to-format", "--to")),
    ("--device --map-location --location -d", ("--to", "--map-location", "--device")),
    ("--dtype --cast --to-dtype --precision", ("--dtype", "--cast")),
    ("-o --output --out --out-file --outfile --output-file --dest --save", ("--output", "--npy")),
    ("--output-dir --outdir --output-folder", ("--out-dir",)),
    ("-f -y --yes --overwrite --replace", ("--force",)),
    ("-n --dry --preview", ("--dry-run",)),
    ("-i --inplace", ("--in-place",)),
    ("-k --state-dict --statedict", ("--key",)),
    ("--pattern --filter --only --match", ("--include", "--glob")),
    ("--skip --except --without --omit", ("--exclude",)),
    ("-j --workers --num-workers --threads --processes", ("--jobs",)),
    ("-s --silent", ("--quiet",)),
    ("--shard-size --shards", ("--max-shard-size",)),
)
#: Names for outputs that commands need.
_NEEDED: Final = {"--tasks": "tasks.jsonl", "--output": "report.html"}
_HELP: Final = ("-h", "--help")
#: Errors in one line that are corrected, one after the other.
_ERRORS: Final = 6


def correction(group: click.Group, typed: Sequence[str], error: click.UsageError) -> str:
    """Return the command line that was meant; "" if it is unclear, or would be refused as well."""
    words = [*typed[1:2], "--help"] if typed[:1] == ("help",) else list(typed)
    for _ in range(_ERRORS):
        meant = _corrected(group, words, error) if words else None
        if not meant:
            return ""
        words, refusal = meant, _refusal(group, meant)
        if refusal is None:
            return retyped(words)
        if isinstance(refusal, click.MissingParameter):
            return retyped([words[0], "--help"])
        error = refusal
    return ""


def _refusal(group: click.Group, words: Sequence[str]) -> click.UsageError | None:
    """Return the error of a command line that is parsed but not run, None if it has none."""
    try:
        outer = click.Context(group, **group.context_settings)  # click keeps the names of the help option
        if words[0] in _names(group):
            return None
        command = group.get_command(outer, words[0])
        if command is None:
            return click.UsageError(f"No such command {words[0]!r}.", outer)
        if any(word in _HELP for word in words):
            return None
        with command.make_context(words[0], list(words[1:]), parent=outer) as ctx:
            outputs = {"output", "out_dir", "in_place"} & ctx.params.keys()
            writes = {"output", "out_dir"} <= outputs and not ctx.params["dry_run"] and words[0] != "redact"
            return NoOutput("", ctx) if writes and not any(ctx.params[name] for name in outputs) else None
    except click.UsageError as error:
        return error


def _corrected(group: click.Group, words: list[str], error: click.UsageError) -> list[str] | None:
    """Return the words with one error less, None if it is not known what was meant."""
    if isinstance(error, click.NoSuchOption):
        return _option(group, words, error)
    if isinstance(error, click.BadOptionUsage):
        return _value(group, words, error)
    if isinstance(error, NoOutput):
        return _output(words, error.ctx)
    if isinstance(error, click.MissingParameter) and error.ctx is not None and error.param is not None:
        return _missing(words, error.ctx, error.param)
    if isinstance(error, click.BadParameter):
        return _choice(words, error)
    if error.ctx is not None and error.ctx.command is not group:
        return _left_over(words, error.ctx)
    return _command(group, words)


def _command(group: click.Group, words: list[str]) -> list[str] | None:
    names = group.list_commands(click.Context(group))
    typed = words[0].lower().replace("_", "-")
    near = [name for name, others in _COMMANDS.items() if typed in others.split()] or get_close_matches(typed, names, 1)
    if near and words[0] not in names:
        return [near[0], *words[1:]]
    return ["inspect", *words] if exists(words[0]) else None


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """Return the options of a command by all of their names."""
    return {name: param for param in command.params for name in (*param.opts, *param.secondary_opts) if name[:1] == "-"}


def _missing(words: list[str], ctx: click.Context, param: click.Parameter) -> list[str] | None:
    """Give a command an option that it needs, with a name; plan gets back those of its own that stand too late."""
    value = _NEEDED.get(param.opts[-1])
    if value is None or ctx.command.name != words[0]:
        return None
    if ctx.allow_interspersed_args:
        return [*words, param.opts[0], value]
    own, rest = [], words[1:]
    for name, other in _names(ctx.command).items():
        if name in rest[:-1] and isinstance(other, click.Option) and not other.is_flag:
            place = rest.index(name)
            own += rest[place : place + 2]
            del rest[place : place + 2]
    return [words[0], *(own if param.opts[0] in own else [*own, param.opts[0], value]), *rest]


def _option(group: click.Group, words: list[str], error: click.NoSuchOption) -> list[str] | None:
    """Correct an option that the command does not have."""
    if error.ctx is None:
        return None
    wrong = error.option_name
    place = next((n for n, word in enumerate(words) if word.partition("=")[0] == wrong), None)
    if place is None:
        return None
    if place == 0 and len(words) > 1 and error.ctx.parent is None:
        return [*words[1:], words[0]]  # it was typed before the command
    have = [*_names(error.ctx.command), *_HELP]
    known = _known(wrong, have)
    edit = group.get_command(error.ctx, "edit") if words[0] == "convert" and not known else None
    if edit is not None and (known := _known(wrong, [*_names(edit)])):
        words = ["edit", *words[1:]]  # which converts, too
    long = [name for name in have if name.startswith("--")]
    near = known or get_close_matches(wrong.lower().replace("_", "-"), long, 1)
    if not near:
        return None
    _, equals, value = words[place].partition("=")
    return [*words[:place], near[0] + equals + value, *words[place + 1 :]]


def _known(wrong: str, have: Sequence[str]) -> list[str]:
    """Return the options that other tools call so, or other commands."""
    same = [wrong] if wrong in have else []
    return same + [name for others, meant in _OPTIONS if wrong in others.split() for name in meant if name in have]


def _value(group: click.Group, words: list[str], error: click.BadOptionUsage) -> list[str] | None:
    """Give -o at the end the name that it lacks."""
    if words[-1] not in ("-o", "--output") or error.option_name != words[-1]:
        return None
    refusal = _refusal(group, words[:-1])
    return _output(words[:-1], refusal.ctx) if isinstance(refusal, NoOutput) else None


def _choice(words: list[str], error: click.BadParameter) -> list[str] | None:
    """Correct a value that is a choice of another option, or nearly one of this."""
    param, ctx = error.param, error.ctx
    if ctx is None or not isinstance(param, click.Option):
        return None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in param.opts:
            continue
        rest = words[place + 1 :] if equals else words[place + 2 :]
        value = value if equals else words[place + 1] if place + 1 < len(words) else ""
        if not isinstance(param.type, click.Choice):
            # A format behind an option of remap: the file is to be converted, and not moved.
            from ..base.suffixes import TARGETS

            return ["convert", *words[1:place], "--to-format", value, *rest] if value in TARGETS else None
        for other in ctx.command.params:
            if isinstance(other.type, click.Choice) and value in other.type.choices and other is not param:
                return [*words[:place], other.opts[-1], value, *rest]
        near = get_close_matches(value.lower(), param.type.choices, 1)
        if near:
            return [*words[:place], name, near[0], *rest]
    return None


def _left_over(words: list[str], ctx: click.Context) -> list[str] | None:
    """Take the one argument too many for the name of the output."""
    if "--output" not in _names(ctx.command) or {"-o", "--output"} & {*words}:
        return None
    _, extra, _ = ctx.command.make_parser(ctx).parse_args(args=list(words[1:]))
    return _moved(words, extra[0]) if len(extra) == 1 else None


def _moved(words: list[str], name: str) -> list[str]:
    """Return the words with the last that is this name as the output."""
    place = len(words) - 1 - words[::-1].index(name)
    option = "--out-dir" if name.endswith("/") or os.path.isdir(name) else "-o"
    return [*words[:place], *words[place + 1 :], option, name]


def _output(words: list[str], ctx: click.Context | None) -> list[str] | None:
    """Name the output: by the last argument if that is no input, otherwise after the input."""
    if ctx is None:
        return None
    arguments = [param for param in ctx.command.params if isinstance(param, click.Argument)]
    last = ctx.params[arguments[-1].name or ""]
    several: tuple[str, ...] = ctx.params.get("paths") or ()
    if ctx.params.get("output") and len(several) > 1:
        return _in_folder(words, ctx)
    if isinstance(last, tuple) and len(last) > 1:
        name = last[-1]
        named = not os.path.lexists(name) if last is several else name.lower().endswith((*CHECKPOINTS, ".dcp", "/"))
        if (named and not set("*?[!") & set(name)) or (last is several and os.path.isdir(name)):
            return _moved(words, name)
    if (len(several) > 1 or ctx.params.get("out_dir")) and ctx.command.name != "average":
        return _in_folder(words, ctx)
    path = several[0] if several else ctx.params.get("path") or ""
    return [*words, "-o", suggested_output(path, *_suffix(ctx))] if path else None


def _in_folder(words: list[str], ctx: click.Context) -> list[str]:
    """Name a folder for several outputs, and for ``convert`` their format, which no suffix names."""
    output = ctx.params.get("output") or ""
    if output and (whole := _whole_of(paths := [word for word in words if word in ctx.params["paths"]])):
        return [whole if word == paths[0] else word for word in words if word not in paths[1:]]
    folder = ctx.params.get("out_dir") or os.path.splitext(output)[0] or "edited"
    words = _without(words, "-o", "--output") if output else words
    if not ctx.params.get("out_dir"):
        words = [*words, "--out-dir", folder]
    if ctx.command.name != "convert" or ctx.params.get("to_format"):
        return words
    from ..edits.outputs import suffix_format

    return [*words, "--to-format", suffix_format(output) or _target(ctx)]


def _whole_of(paths: Sequence[str]) -> str:
    """Return the folder that is the checkpoint of which each of these files is a part, "" if there is none."""
    from ..base.errors import CkptoolError
    from ..formats.opening import open_checkpoint
    from ..formats.parts import part_of

    folders = set()
    for path in paths:
        try:
            with open_checkpoint(path) as checkpoint:
                part = part_of(checkpoint)
        except CkptoolError:
            return ""
        folders.add(part.folder if part is not None else "")
    return folders.pop() if len(folders) == 1 else ""


def _without(words: list[str], *names: str) -> list[str]:
    """Return the words without the option of these names and its value."""
    for place, word in enumerate(words):
        if word in names:
            return [*words[:place], *words[place + 2 :]]
        if word.partition("=")[0] in names:
            return [*words[:place], *words[place + 1 :]]
    return words


def _target(ctx: click.Context) -> str:
    """Return the format that ``convert`` is probably meant to write: safetensors, or torch from safetensors."""
    from ..base.suffixes import TARGETS

    return "torch" if str(ctx.params["paths"][0]).endswith(TARGETS["safetensors"]) else "safetensors"


def _suffix(ctx: click.Context) -> tuple[str, str]:
    """Return the word and the extension of a suggested output."""
    if ctx.command.name != "convert":
        return "new", ""
    from ..base.suffixes import TARGETS

    path = str(ctx.params["paths"][0])
    suffixes = TARGETS[ctx.params.get("to_format") or _target(ctx)] or (".pth",)
    extension = ".pth" if ".pth" in suffixes else suffixes[0]
    return ("new" if path.endswith(extension) else ""), extension

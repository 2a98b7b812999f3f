"""Typing errors: suggest the whole corrected command line for one that click refused."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial
from io import StringIO
from typing import Final

import click

from ..base.dtypes import dtype_named
from ..base.errors import CkptoolError, UnreadableError
from ..base.globs import is_pattern
from ..base.map_location import from_python, is_device, is_device_map
from ..base.steps import is_remote, suggested_output
from ..base.suffixes import CHECKPOINTS, SAFETENSORS
from ..files.archives import exists, file_of
from .options import Mendable, NoOutput
from .render import Typed, retyped, say_error, swapped_words, without
from .synonyms import COMMANDS, DEVICES, KEYS, OPTIONS, PARTIAL, PARTS, VALUES

#: Arguments that are keys or patterns.
_OF_NAMES: Final = frozenset(("GLOB...", "KEY...", "[KEY]", "KEY", "[NAME]"))
#: File names suggested for options that a command requires.
_NEEDED: Final = {"--output": "report.html"}
_HELP: Final = ("-h", "--help")
#: Commands that also answer for files that are no checkpoints.
_ANY_FILE: Final = ("validate", "scan", "explain")
#: Commands that make one output of several inputs.
_OF_SEVERAL: Final = ("average", "merge-lora")
#: The most errors corrected in one command line, one after the other.
_ERRORS: Final = 6
#: How similar an option must be to one that was typed, from 0 to 1.
_SIMILAR: Final = 0.7
#: How many rehearsals are within each other: what a rehearsed command suggests is rehearsed, too.
_depth: Final = ContextVar("depth", default=0)
#: The largest file, in bytes, for which a correction of salvage is rehearsed: it reads every byte.
_REHEARSED: Final = 64 << 20


def correction(group: click.Group, typed: Sequence[str], error: click.UsageError) -> str:
    """Return the line with the corrected command, or "" if the intention is unclear or click refuses it too.

    If the file cannot have the corrected command done, return what that command would say instead.
    """
    words = [*typed[1:2], "--help"] if typed[:1] == ("help",) else list(typed)
    for _ in range(_ERRORS):
        meant = _corrected(group, words, error) if words else None
        if not meant:
            return _form(words, error)
        words, refusal = meant, _refusal(group, meant)
        if refusal is None:
            said = rehearsed(group, words)
            return "" if said is None else said or f"  -> {retyped(words)}"
        if isinstance(refusal, click.MissingParameter):
            return f"  -> {retyped([words[0], '--help'])}"
        error = refusal
    return ""


def _form(words: Sequence[str], error: click.UsageError) -> str:
    """Return a line with the form of the command if one of its arguments is missing, otherwise ""."""
    if not isinstance(error, click.MissingParameter) or not isinstance(error.param, click.Argument) or not words[1:]:
        return ""
    return f"  the form is: {retyped(words)} {error.param.make_metavar(error.ctx)}" if error.ctx else ""


def rehearsed(group: click.Group, words: Sequence[str]) -> str | None:
    """Carry out a command without writing. Return its error message if it is refused, otherwise "".

    Commands that only read open their inputs. Return None if click refuses the command line.
    """
    command = group.get_command(click.Context(group), words[0])
    if command is None or any(word in _HELP for word in words):
        return ""
    end = words.index("--") if "--" in words else len(words)
    dry = [word for word in ("--dry-run", "--quiet") if word not in words]
    writes = "--dry-run" in _names(command)
    typed = Typed.of(words, partial(rehearsed, group))
    line = [*words[:end], *(dry if writes else ()), *words[end:]]
    if _depth.get() > _ERRORS:
        return ""
    if isinstance(refusal := _refusal(group, words), NoOutput) and (meant := _output([*words], refusal.ctx)):
        return rehearsed(group, meant) or f"  -> {retyped(meant)}"
    said, token = StringIO(), _depth.set(_depth.get() + 1)
    try:
        with redirect_stderr(said), redirect_stdout(StringIO()), group.make_context("ckptool", line, obj=typed) as ctx:
            if writes:
                return said.getvalue().rstrip("\n") if _may_rehearse(words) and group.invoke(ctx) else ""
            with command.make_context(words[0], list(words[1:]), parent=ctx) as inner:
                if words[0] != "get":
                    _open_inputs(inner)
                else:
                    inner.params.update(output=None, force=False)
                    command.invoke(inner)
    except CkptoolError as error:
        with redirect_stderr(said):
            say_error(error, typed)
    except click.ClickException:
        return None
    finally:
        _depth.reset(token)
    return said.getvalue().rstrip("\n")


def _may_rehearse(words: Sequence[str]) -> bool:
    return words[0] != "salvage" or all(os.path.getsize(word) <= _REHEARSED for word in words if os.path.isfile(word))


def _open_inputs(ctx: click.Context) -> None:
    """Open the checkpoints that a command reads; raise CkptoolError if one is another kind of file."""
    from ..formats.checkpoint_search import find_checkpoints
    from ..formats.opening import open_checkpoint

    if ctx.command.name in _ANY_FILE:
        return
    for path in (*(ctx.params.get("paths") or ()), *filter(None, [ctx.params.get("path")])):
        if os.path.isfile(file_of(path)):
            open_checkpoint(path).close()
        elif isinstance(first := next(find_checkpoints([path]), None), UnreadableError):
            raise first


def _refusal(group: click.Group, words: Sequence[str]) -> click.UsageError | None:
    """Parse a command line without running it. Return its error, or None if it is valid."""
    try:
        outer = click.Context(group, **group.context_settings)  # the settings name the help options
        if words[0] in (*_names(group), *_HELP):
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
    """Return the words with this one error corrected, or None if the intention is unclear."""
    if stray := _stray(words, error.ctx):
        return stray
    if isinstance(error, NoOutput) and (swapped := swapped_words(words)):
        return swapped
    if isinstance(error, click.NoSuchOption):
        return _option(group, words, error)
    if isinstance(error, click.BadOptionUsage):
        return _value(group, words, error)
    if isinstance(error, NoOutput):
        return _output(words, error.ctx)
    if isinstance(error, Mendable):
        for word in error.less:
            if word in words:
                words.remove(word)  # once: an option may have the same value
        return [*words, *error.more]
    if isinstance(error, click.MissingParameter) and error.ctx is not None and error.param is not None:
        return _missing(words, error.ctx, error.param)
    if isinstance(error, click.BadParameter):
        return _choice(words, error)
    if error.ctx is not None and error.ctx.command is not group:
        return _left_over(words, error.ctx)
    return _command(group, words)


def _stray(words: list[str], ctx: click.Context | None) -> list[str] | None:
    """Return the words with those given to options that were typed like file names, or None without any.

    ``remap model.pth cpu`` means ``--to cpu``, and ``rename model.pth old new`` means ``--rename old=new``.
    """
    if ctx is None or ctx.command.name != words[0]:
        return None
    try:
        opts, _, _ = ctx.command.make_parser(ctx).parse_args(args=list(words[1:]))
    except click.UsageError:
        return None
    paths = opts.get("paths")
    stray = [word for word in paths[1:] if not exists(word) and not is_pattern(word)] if type(paths) is tuple else []
    have = _names(ctx.command)
    chosen = {word: option for word in stray if (option := _option_for(word, have))}
    if len(stray) == 2 and "--map" in have and all(map(is_device, stray)):
        return [*(word for word in words if word not in stray), "--map", "=".join(stray)]
    if not chosen and len(stray) == 2 and "--rename" in have:
        rest = [word for word in words if word not in stray]
        return [*rest, "--rename", "=".join(stray)]
    if not chosen:
        return None
    return [part for word in words for part in ((chosen[word], word) if word in chosen else (word,))]


def _option_for(word: str, have: Collection[str]) -> str:
    """Return the only option among these for which a word can be the value, or ""."""
    from ..edits.keys import is_sed
    from ..formats.outputs import TARGETS

    devices = is_device_map(word)
    kinds = {
        "--to": is_device(word) or bool(from_python(word)),
        "--map": devices,
        "--rename-regex": is_sed(word),
        "--rename": "=" in word and not devices and "--set" not in have,
        "--to-dtype": dtype_named(word) is not None,
        "--to-format": word in TARGETS,
        "--for": word == "inference",
        "--redact": word in ("all", "paths", "users", "sources", "args"),
    }
    options = [option for option, fits in kinds.items() if fits and option in have]
    return options[0] if len(options) == 1 else ""


def _command(group: click.Group, words: list[str]) -> list[str] | None:
    names = group.list_commands(click.Context(group))
    typed = words[0].lower().replace("_", "-")
    part = re.sub("^(remove|drop|delete)-", "strip-", typed)
    if part in PARTS and words[1:]:
        wanted = PARTS[part].split()
        found = [entry for entry in _entries(words) if entry in wanted] or wanted[:1]
        return ["drop", words[1], *found, *words[2:]]
    known = [name for name, others in COMMANDS.items() if typed in others.split()]
    near = known or get_close_matches(typed, [*names, "help", "version"], 1)
    if near == ["help"]:
        return [*words[1:2], "--help"]
    if near == ["version"]:
        return ["--version"]
    if near and words[0] not in names:
        return [near[0], *words[1:]]
    return ["inspect", *words] if exists(words[0]) else None


def _entries(words: Sequence[str]) -> list[str]:
    """Return the keys of the entries in the first file among the words; [] without a file that can be read."""
    from ..formats.opening import open_checkpoint

    path = next((word for word in words[1:] if exists(word)), "")
    try:
        with open_checkpoint(path) as checkpoint:
            return [entry.key for entry in checkpoint.survey.entries]
    except CkptoolError:
        return []


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """Map every option name of a command to its option."""
    return {name: param for param in command.params for name in (*param.opts, *param.secondary_opts) if name[:1] == "-"}


def _missing(words: list[str], ctx: click.Context, param: click.Parameter) -> list[str] | None:
    """Add a required option with a suggested file name, or return None if there is no suggestion."""
    if isinstance(param, click.Argument) and param.metavar in _OF_NAMES:
        # extract --key NAME: the name is an argument.
        place = next((n for n, word in enumerate(words[:-1]) if word in ("--key", "--include")), None)
        return None if place is None else _with_value(words, place, words[place + 1])
    value = _NEEDED.get(param.opts[-1])
    if value is None or ctx.command.name != words[0]:
        return None
    return [*words, param.opts[0], value]


def _option(group: click.Group, words: list[str], error: click.NoSuchOption) -> list[str] | None:
    """Replace an option that the command does not have. Return None if no similar option exists."""
    if error.ctx is None:
        return None
    wrong = error.option_name
    place = next((n for n, word in enumerate(words) if word.partition("=")[0] == wrong), None)
    if place is None:
        return None
    if wrong in ("--in-place", "--inplace", "-i") and not {"--in-place"} & {*_names(error.ctx.command)}:
        return [*words[:place], *words[place + 1 :]]  # NoOutput adds an output
    if place == 0 and len(words) > 1 and error.ctx.parent is None:
        return [*words[1:], words[0]]  # the option was typed before the command
    command, value = error.ctx.command, _value_at(words, place)
    have = [*_names(command), *_HELP]
    edit = group.get_command(error.ctx, "edit")
    assert edit is not None
    for each in (command, edit):
        options = _names(each)
        plain = [] if _known(wrong, [*options]) else _plain_option(wrong, options, "--load" in words)
        replaced = [*words[:place], *plain, *words[place + 1 :]] if plain else []
        if replaced and (meant := replaced if each is command else _as_edit(replaced, edit, error.ctx)):
            return meant
    known = _known(wrong, have)
    if not known and value and (argued := _argument(words, place, value, error.ctx)):
        return argued
    names = _known(wrong, [*_names(edit)])
    device = is_device(value) and "--to" in names and {*known} <= {"--to-format", "--to-dtype"}
    if names and (device or not known):
        typed = [*words[:place], names[0] + words[place].removeprefix(wrong), *words[place + 1 :]]
        return _as_edit(typed, edit, error.ctx)
    long = [name for name in have if name.startswith("--")]
    near = known or get_close_matches(wrong.lower().replace("_", "-"), long, 1, _SIMILAR)
    if not near:
        return None
    option = _option_for(value, known) or near[0]
    if wrong in PARTIAL and option == "--include" and value and not is_pattern(value):
        return _with_value(words, place, option, f"*{value}*")
    taking = _names(command).get(option)
    takes = isinstance(taking, click.Option) and not taking.is_flag and not taking.count
    if takes and (not value or value[:1] == "-") and not known:
        return None  # it would take the next option for its value
    _, equals, after = words[place].partition("=")
    return [*words[:place], option + equals + after, *words[place + 1 :]]


def _value_at(words: Sequence[str], place: int) -> str:
    """Return the value after the option at ``place``, or ""."""
    _, equals, value = words[place].partition("=")
    return value if equals else "".join(words[place + 1 : place + 2])


def _with_value(words: Sequence[str], place: int, *new: str) -> list[str]:
    """Return the words with others in place of an option and its value."""
    return [*words[:place], *new, *words[place + (1 if "=" in words[place] else 2) :]]


def _plain_option(wrong: str, have: Collection[str], loads: bool) -> list[str]:
    """Return the option and the value that ``--cpu``, ``--no-cuda`` or ``--bf16`` stands for, or []."""
    name = wrong.lstrip("-").lower()
    value, options = DEVICES.get(name, name), ["--to", "--device", "--map-location"]
    if loads:
        options.remove("--device")  # of validate: the device that storages should be on
    if not is_device(value):
        dtype = dtype_named(name)
        if dtype is None or "float" not in dtype.name:
            return []
        value, options = dtype.name, ["--to-dtype", "--dtype"]
    return next(([option, value] for option in options if option in have), [])


def _argument(words: list[str], place: int, value: str, ctx: click.Context) -> list[str] | None:
    """Return the words with the option at ``place`` as an argument, or None if the command takes no such argument.

    ``drop model.pth --keys optimizer`` means ``drop model.pth optimizer``, and ``set model.pth --epoch 0`` means
    ``set model.pth epoch=0``.
    """
    wrong, names = words[place].partition("=")[0], {param.metavar for param in ctx.command.params}
    if wrong in KEYS and _OF_NAMES & names and words[0] != "keys":
        return _with_value(words, place, value)
    name = next((name for name in _entries(words) if name.replace("_", "-") == wrong[2:].replace("_", "-")), "")
    return _with_value(words, place, f"{name}={value}") if name and "KEY=VALUE..." in names else None


def _as_edit(words: list[str], edit: click.Command, ctx: click.Context) -> list[str] | None:
    """Return the words as a command line of ``edit``, which also has the options that the command does not have.

    ``set model.pth epoch=0 --drop optimizer`` becomes ``edit model.pth --set epoch=0 --drop optimizer``. Return None if
    ``edit`` does not do what the command does.
    """
    from ..edits.table import EDITS

    kind = EDITS.get(words[0])
    if words[0] == "convert":
        return ["edit", *words[1:]]
    if kind is None or any(each.rest for each in kind.parameters):
        return None
    have, options = _names(ctx.command), _names(edit)
    own, others, left = list[str](), list[str](), words[1:]
    while left:
        word, *left = left
        name, equals, _ = word.partition("=")
        meant = _known(name, [*options]) if name.startswith("-") and name not in have else []
        if not meant:
            own.append(word)
            continue
        param = options[meant[0]]
        alone = equals or (isinstance(param, click.Option) and param.is_flag)
        others += [meant[0] + word.removeprefix(name), *([] if alone else left[:1])]
        left = left if alone else left[1:]
    try:
        given, _, _ = ctx.command.make_parser(ctx).parse_args(args=[*own])
    except click.UsageError:
        return None
    step = next((f"--{each.step}" for each in kind.parameters if each.argument and each.step), "")
    arguments = [param.name or "" for param in ctx.command.params if isinstance(param, click.Argument)][1:]
    # An argument that is missing has neither a text nor a tuple.
    values = [given[name] if type(given[name]) is tuple else (given[name],) for name in arguments]
    texts = [text for value in values for text in value]
    own = [part for word in own for part in ((step, word) if word in texts else (word,))]
    ways = {f"--{each.step}" for each in kind.parameters if each.step}
    own += [f"--{kind.name}"] if kind.flag and not ways & {word.partition("=")[0] for word in own} else []
    return ["edit", *own, *others]


def _known(wrong: str, have: Sequence[str]) -> list[str]:
    """Return the options of this command that other tools or commands call ``wrong``."""
    wrong = wrong.lower().replace("_", "-") if wrong[:2] == "--" else wrong
    same = [wrong] if wrong in have else []
    return same + [name for others, meant in OPTIONS if wrong in others.split() for name in meant if name in have]


def _value(group: click.Group, words: list[str], error: click.BadOptionUsage) -> list[str] | None:
    """Add the file name missing after a final -o. Return None for any other missing value."""
    if words[-1] not in ("-o", "--output") or error.option_name != words[-1]:
        return None
    refusal = _refusal(group, words[:-1])
    return _output(words[:-1], refusal.ctx) if isinstance(refusal, NoOutput) else None


def _choice(words: list[str], error: click.BadParameter) -> list[str] | None:
    """Correct the value of an option: pass it to the option that accepts it, or take the nearest choice.

    Return None if neither exists.
    """
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
            from ..formats.outputs import TARGETS

            if meant := from_python(value) or (value if is_device_map(value) else ""):
                pairs = "=" in meant and "--map" in _names(ctx.command)
                rest += ["--load"] if words[0] == "validate" and "--load" not in words else []
                return [*words[:place], "--map" if pairs else "--to" if name == "--map" else name, meant, *rest]
            # A format given to an option of remap, such as --to, means that the file should be converted.
            return ["convert", *words[1:place], "--to-format", value, *rest] if value in TARGETS else None
        for other in ctx.command.params:
            if isinstance(other.type, click.Choice) and value in other.type.choices and other is not param:
                return [*words[:place], other.opts[-1], value, *rest]
        asked = "size" if value.isdigit() else value.lower()
        same = [other for spelled, meant in VALUES if asked in spelled.split() for other in meant]
        near = [other for other in same if other in param.type.choices]
        if near := near or get_close_matches(value.lower(), param.type.choices, 1):
            return [*words[:place], name, near[0], *rest]
    return None


def _left_over(words: list[str], ctx: click.Context) -> list[str] | None:
    """Use a single surplus argument as the output name. Return None if an output is given or not possible."""
    if "--output" not in _names(ctx.command) or {"-o", "--output"} & {*words}:
        return None
    given, extra, _ = ctx.command.make_parser(ctx).parse_args(args=list(words[1:]))
    if words[0] == "merge" and extra and all(map(exists, extra)):
        return _merged(words, [given["path"], given["other"], *extra])
    return _moved(words, extra[0]) if len(extra) == 1 else None


def _merged(words: list[str], paths: Sequence[str]) -> list[str]:
    """Return the command that joins several files: convert for the rank files of one save, otherwise edit --merge."""
    from ..formats.checkpoint_search import as_one

    others = [word for word in words[1:] if word not in paths]
    whole = as_one(paths)
    if len(whole) == 1:
        return ["convert", *whole, *others]
    return ["edit", paths[0], *(part for path in paths[1:] for part in ("--merge", path)), *others]


def _moved(words: list[str], name: str) -> list[str]:
    """Turn the last word equal to ``name`` into the output: after --out-dir for a folder, otherwise after -o."""
    place = len(words) - 1 - words[::-1].index(name)
    option = "--out-dir" if name.endswith("/") or os.path.isdir(name) else "-o"
    return [*words[:place], *words[place + 1 :], option, name]


def _output(words: list[str], ctx: click.Context | None) -> list[str] | None:
    """Add the missing output: the last argument if it cannot be an input, otherwise a name made from the input's."""
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
        made_of_folders = last is several and ctx.command.name not in _OF_SEVERAL
        if (named and not set("*?[!") & set(name)) or (made_of_folders and os.path.isdir(name)):
            return _moved(words, name)
    if (len(several) > 1 or ctx.params.get("out_dir")) and ctx.command.name not in _OF_SEVERAL:
        return _in_folder(words, ctx)
    path = several[0] if several else ctx.params.get("path") or ""
    return [*words, "-o", suggested_output(path, *_suffix(ctx))] if path else None


def _in_folder(words: list[str], ctx: click.Context) -> list[str] | None:
    """Name a folder for several outputs; None if they were meant for an address, where no folder can be written.

    ``convert`` also gets a format, because no suffix names it. If all inputs are parts of one checkpoint, name that
    folder as the only input instead.
    """
    output = ctx.params.get("output") or ""
    if output and (whole := _whole_of(paths := [word for word in words if word in ctx.params["paths"]])):
        return [whole if word == paths[0] else word for word in words if word not in paths[1:]]
    if is_remote(output):
        return None
    folder = ctx.params.get("out_dir") or os.path.splitext(output)[0] or "edited"
    words = without(words, "-o", "--output") if output else words
    if not ctx.params.get("out_dir"):
        words = [*words, "--out-dir", folder]
    if ctx.command.name != "convert" or ctx.params.get("to_format"):
        return words
    from ..formats.outputs import named_format

    named = named_format(output)
    return [*words, "--to-format", named.name if named is not None else _target(ctx)]


def _whole_of(paths: Sequence[str]) -> str:
    """Return the folder of the checkpoint that contains all these files as parts, or "" if no single one does."""
    from ..formats.opening import open_checkpoint
    from ..formats.rank_part import part_of

    folders = set()
    for path in paths:
        try:
            with open_checkpoint(path) as checkpoint:
                part = part_of(checkpoint)
        except CkptoolError:
            return ""
        folders.add(part.folder if part is not None else "")
    return folders.pop() if len(folders) == 1 else ""


def _target(ctx: click.Context) -> str:
    """Return the format that ``convert`` probably should write: torch for a safetensors file, otherwise safetensors."""
    return "torch" if str(ctx.params["paths"][0]).endswith(SAFETENSORS) else "safetensors"


def _suffix(ctx: click.Context) -> tuple[str, str]:
    """Return the word and the file extension for ``suggested_output``; each may be ""."""
    if ctx.command.name != "convert" and not ctx.params.get("to_format"):
        return "new", ""
    from ..formats.outputs import OUTPUTS

    path = str(ctx.params["paths"][0])
    extension = OUTPUTS[ctx.params.get("to_format") or _target(ctx)].extension
    return ("new" if path.endswith(extension) else ""), extension

"""The commands that edit: one for each edit of the table, ``edit`` for several in one pass, convert and redact."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import cleandoc
from typing import Any, Final, Literal, TypeAlias

import click

from ..base.errors import TargetError
from ..base.globs import MATCH_ALL, Globs
from ..base.records import TypedDict
from ..base.steps import Step
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..edits.convert import output_format
from ..edits.pipeline import Call, applied, calls
from ..edits.table import CONFIG, EDITS, MODIFIERS, STEPS, Edit, Parameter, function
from ..files.archives import exists
from ..formats.opening import open_checkpoint
from ..formats.outputs import named_format
from .edit_report import change_lines, rename_lines, sanitize_lines
from .editing import EditRequest, WithFields, edit_all, make_folder
from .help import GroupedCommand, headings, variable
from .options import (
    KEY,
    Command,
    InputPath,
    Workers,
    Writing,
    choosing,
    completed,
    exclude_option,
    in_place_option,
    include_option,
    model_option,
    one_path,
    other_key_option,
    paths,
    reclaim_option,
    writing,
    writing_in_place,
    writing_steps,
)
from .render import clean, say_model, step_lines
from .runner import Answer, FileCommand, reported, run_each

#: An option without its dashes, and its value.
Typed: TypeAlias = "tuple[str, Any]"
#: A function that makes fields of a report from the checkpoint before and after the edit.
Fields: TypeAlias = Callable[[Checkpoint, Checkpoint], Mapping[str, Any]]


class Ordered(GroupedCommand):
    """A click command that gets its options as ``typed``: (name without dashes, value), in the order typed.

    ``bare`` is the parameter whose values may also stand after the paths, without its option; None for none.
    """

    bare: Parameter | None = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        several = {name: iter(value) for name, value in ctx.params.items() if isinstance(value, tuple)}
        ctx.params["typed"] = [
            (param.opts[-1].lstrip("-"), next(several[name]) if name in several else ctx.params[name])
            for param in order
            if (name := param.name) in ctx.params and param.opts[-1].startswith("--")
        ]
        if self.bare is not None and not ctx.resilient_parsing:
            self._take_bare(ctx, self.bare)
        return rest

    def _take_bare(self, ctx: click.Context, bare: Parameter) -> None:
        """Take the last words that are no files as values of the parameter ``bare``."""
        option = next(param for param in self.params if f"--{bare.spelled}" in param.opts)
        words, name = list(ctx.params["paths"]), str(option.name)
        several = isinstance(ctx.params[name], tuple)
        given: list[str] = []
        while len(words) > 1 and not exists(words[-1]) and _fits(bare, words[-1]):
            if not several and (given or ctx.params[name] is not None):
                break
            given.insert(0, words.pop())
        ctx.params["paths"] = tuple(words)
        if given:
            ctx.params[name] = (*ctx.params[name], *given) if several else given[0]
        ctx.params["typed"] += [(bare.spelled, value) for value in given]


def _fits(parameter: Parameter, text: str) -> bool:
    try:
        parameter.parsed(text)
    except TargetError:
        return False
    return True


def __getattr__(name: str) -> click.Command:
    """Return the command of an edit: ``strip_module`` is ``ckptool strip-module``."""
    kind = next((each for each in EDITS.values() if variable(each.name) == name), None)
    if kind is None or not kind.summary:
        raise AttributeError(name)
    return _command(kind)


@cache
def _command(kind: Edit) -> click.Command:
    command: Callable[..., int] = partial(_run, kind)
    command = (writing_in_place if kind.in_place else writing)(command)
    if kind.frees:
        command = reclaim_option(command)
    if "include" in kind.scope:
        command = choosing(command)
    bare = next((each for each in kind.parameters if each.bare), None)
    required = len(_ways(kind)) == 1 and not bare
    for parameter in reversed(kind.parameters):
        if parameter.kind == "other_key":
            command = other_key_option(command)
        elif not parameter.rest:
            command = _added(parameter, parameter.spelled, parameter.help, kind.in_order, required)(command)
    one = any(parameter.argument for parameter in kind.parameters)
    command = (one_path if one else paths)(command)
    made = click.command(kind.name, Ordered, help=cleandoc(kind.summary), epilog=_epilog(kind.examples))(command)
    if bare:
        take_bare(made, bare)
    return made


def take_bare(command: Ordered, parameter: Parameter) -> None:
    """Let the values of a parameter stand after the paths of a command."""
    command.bare = parameter
    argument = next(each for each in command.params if each.name == "paths")
    argument.metavar = f"{argument.metavar} [{parameter.metavar}]"


def _ways(kind: Edit) -> list[Parameter]:
    """Return the options that choose what an edit does; its command needs at least one. Return [] without any."""
    if kind.flag or any(each.argument or each.rest for each in kind.parameters):
        return []
    return [each for each in kind.parameters if each.step]


def _epilog(examples: str) -> str:
    first, *rest = cleandoc(examples).split("\n\n")
    shown = "".join(f"\n  {line}" for line in first.splitlines())
    return "\n\n".join([f"\b\nExamples:{shown}", *(f"\b\n{text}" for text in rest)])


def _added(
    parameter: Parameter, name: str, help: str, multiple: bool = False, required: bool = False
) -> Callable[[Command], Command]:
    given: dict[str, Any] = {"metavar": parameter.metavar}
    if parameter.kind == "file":
        given["type"] = InputPath()
    if parameter.kind == "keys":
        given["shell_complete"] = completed("keys")
    if parameter.metavar in ("DEVICE", "DTYPE", "FAMILY"):
        given["shell_complete"] = completed("words")
    if parameter.argument:
        return click.argument(
            _variable(parameter),
            nargs=-1 if parameter.metavar.endswith("...") else 1,
            required=not parameter.metavar.startswith("["),
            **given,
        )
    if parameter.choices:
        given |= {"type": click.Choice(parameter.choices), "metavar": None}
    if not parameter.metavar:
        given = {"is_flag": True}
    elif multiple or parameter.many:
        given["multiple"] = True
    elif parameter.default:
        given |= {"default": parameter.default, "show_default": True}
    required = required and bool(parameter.step)
    return click.option(f"--{name}", _variable(parameter), help=help, required=required, **given)


def step_option(name: str, multiple: bool = True) -> Callable[[Command], Command]:
    """Return a decorator that adds the option ``--name`` of ``edit`` to another command."""
    kind, parameter = STEPS[name]
    variable = name.replace("-", "_")
    step = (parameter or Parameter(variable))._replace(name=variable, argument=False)
    metavar = step.metavar.removesuffix("...").removesuffix(",")
    step = step._replace(metavar=metavar.strip("[]") if metavar.startswith("[") else metavar)
    return _added(step, name, step.help or kind.title, multiple=multiple)


def _variable(parameter: Parameter) -> str:
    """Return the name under which click passes the value of a parameter; an option of ``Writing`` may have its own."""
    name = parameter.name or parameter.step
    return f"edit_{name}" if name in Writing._fields else name


def _run(kind: Edit, how: Writing, typed: Sequence[Typed], only: Globs = MATCH_ALL, **given: Any) -> int:
    inputs: tuple[str, ...] = given["paths"] if "paths" in given else (given["path"],)
    values: dict[Parameter, Any] = {}
    for each in kind.parameters:
        value = inputs[1:] if each.rest else given[_variable(each)]
        if each.rest or (value not in (None, (), False) and value != (each.default or None)):
            values[each] = value
        inputs = inputs[:1] if each.rest else inputs
    scope: dict[str, Any] = {"key": how.key, "allow_loss": how.conversion.allow_loss, **only.patterns}
    _check(kind, values)
    if kind.in_order:
        ways = {each.spelled for each in kind.parameters if each.step}
        steps = [(each.spelled, value) for each, value in values.items() if not each.step]
        steps += [("key", how.key)] if how.key is not None else []
        steps += [("include", glob) for glob in only.include] + [("exclude", glob) for glob in only.exclude]
        edits = calls([*steps, *((name, value) for name, value in typed if name in ways)])
    else:
        arguments = {name: scope[name] for name in kind.scope}
        for each, value in values.items():
            arguments |= each.parsed(value)
        edits = [Call(kind.name, arguments)]
    # The patterns of merge choose keys of the other checkpoint.
    own = MATCH_ALL if kind.name == "merge" else only
    request = partial(_request, kind.name, of_keys=kind.of_keys, keyed="key" in kind.scope, only=own)
    folders = _folders(kind, inputs[0], edits[0], how)
    if len(folders) < 2:
        return edit_all(request(edits), inputs, how)
    code = 0
    for folder in folders:
        one = edits[0]._replace(arguments={**edits[0].arguments, "model": folder})
        output = how.output and os.path.join(how.output, folder)
        code = max(code, edit_all(request([one]), inputs, how._replace(output=output)))
    return code


def _folders(kind: Edit, path: str, edit: Call, how: Writing) -> list[str]:
    """Return the names of the folders that an output consists of; create the one around them."""
    if not kind.splits or (how.output is None and not how.dry_run):
        return []
    with open_checkpoint(path) as checkpoint:
        found: list[str] = function(kind.splits)(checkpoint, **edit.arguments)
    if len(found) > 1 and how.output is not None and not how.dry_run:
        make_folder(how.output)
    return found


def _check(kind: Edit, values: Mapping[Parameter, Any]) -> None:
    ways = _ways(kind)
    if ways and not any(each in values for each in ways):
        *first, last = (f"--{each.spelled}" for each in ways)
        if not first:
            raise click.UsageError(f"Missing option {last!r}.")
        raise click.UsageError(f"Say how to {kind.name}: {', '.join(first)} or {last}.")
    for each in values:
        if {*each.excludes} & {other.name for other in values}:
            spelled = {other.name: other.spelled for other in kind.parameters}
            others = " and ".join(f"--{spelled[name]}" for name in each.excludes)
            raise click.UsageError(f"--{each.spelled} cannot be used with {others}.")


def _request(
    name: str, edits: Sequence[Call], *, of_keys: bool = False, keyed: bool = False, only: Globs = MATCH_ALL
) -> EditRequest:
    fields, lines = _REPORTS.get(name, (None, change_lines))
    edit, inputs = partial(_edited, edits=edits, fields=fields), tuple(path for call in edits for path in call.files)
    return EditRequest(name, edit, lines=lines, inputs=inputs, of_keys=of_keys, keyed=keyed, only=only)


def _edited(checkpoint: Checkpoint, edits: Sequence[Call], fields: Fields | None) -> WithFields:
    edited = applied(checkpoint, edits)
    return edited, fields(checkpoint, edited) if fields else {}


def _renamed(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    pairs = zip(before.survey.tensors, after.survey.tensors)
    return {"renamed": [{"old": old.key, "new": new.key} for old, new in pairs if old.key != new.key]}


def _pickled(before: Checkpoint, _after: Checkpoint) -> dict[str, Any]:
    return {"pickled": before.pickled}


#: The commands that add fields to the report: the functions that make these fields, and the lines for people.
_REPORTS: Final[Mapping[str, tuple[Fields, Callable[[Any], list[str]]]]] = {
    "rename": (_renamed, rename_lines),
    "sanitize": (_pickled, sanitize_lines),
}


#: The options of ``edit`` that apply an edit, and those that modify these, in the order of the table.
_APPLY: Final = [name for name in STEPS if any(f"--{name}" in names for _, names in headings("edit"))]
_MODIFY: Final = list(
    dict.fromkeys(each.spelled for name in _APPLY for each in STEPS[name][0].parameters if each.spelled in MODIFIERS)
)


def _steps(command: Command) -> Command:
    for name in reversed(_MODIFY):
        command = _added(MODIFIERS[name]._replace(default=""), name, MODIFIERS[name].help)(command)
    command = include_option(exclude_option(command))
    command = click.option("--key", multiple=True, metavar="KEY", help=KEY)(command)
    for name in reversed(_APPLY):
        command = step_option(name)(command)
    return command


@click.command(cls=Ordered)
@paths
@_steps
@reclaim_option
@in_place_option
@writing_steps
def edit(paths: tuple[str, ...], typed: Sequence[Typed], how: Writing, **_: Any) -> int:
    """Apply several edits in one pass over the file, in the order given.

    --key, --include and --exclude apply to the edits after them, until given again; --key '*' is all. The file is
    written once, at the end, in the format of -o or --to-format. If that format holds one state dict, the last --key
    names it.
    """
    names = {*_APPLY, *_MODIFY, "key", "include", "exclude"}
    # A modifier may stand before or after its edit, so all modifiers are moved to the front.
    steps = sorted((step for step in typed if step[0] in names), key=lambda step: step[0] not in MODIFIERS)
    if not any(name in STEPS for name, _ in steps):
        raise click.UsageError("No edit is given: name one, such as --strip-module.")
    last = steps[-1][0]
    if last in ("include", "exclude"):
        raise click.UsageError(f"--{last} applies to later edits, and none follows: give it before them.")
    keys = [value for name, value in steps if name == "key"]
    key = str(keys[-1]) if keys and keys[-1] != "*" else None
    only = Globs([str(value) for name, value in steps if name == "include"])
    return edit_all(_request("edit", calls(steps), keyed=last != "key", only=only), paths, how._replace(key=key))


edit.headings = headings("edit")


@click.command(cls=GroupedCommand)
@paths
@click.option(
    "--deepspeed-16bit",
    flag_value="module",
    type=click.Choice(("module",)),
    help="Take the 16-bit weights of a DeepSpeed folder.",
)
@step_option("unflatten", multiple=False)
@model_option
@step_option("use-ema", multiple=False)
@step_option("to-names", multiple=False)
@step_option("recipe", multiple=False)
@click.option("--config", metavar=CONFIG.metavar, type=InputPath(), help="Numbers of the model, as config.json.")
@writing
def convert(
    paths: tuple[str, ...],
    deepspeed_16bit: str | None,
    unflatten: str | None,
    model: str | None,
    use_ema: bool,
    to_names: str | None,
    recipe: str | None,
    config: str | None,
    how: Writing,
) -> int:
    """Write the same checkpoint in another format: torch, safetensors, dcp, or legacy (torch 1.5 and earlier).

    Nothing is written if tensors would be lost. DeepSpeed folders are converted with the fp32 masters of the optimizer
    unless --deepspeed-16bit is given. Every other command that writes takes --to-format, too.
    """
    if to_names is not None and to_names.startswith("lora:"):
        return _run(EDITS["lora convert"], how, (), paths=paths, layout=to_names, config=config)
    if unflatten is not None and model is not None:
        raise click.UsageError("--unflatten and --model exclude each other.")
    if model is not None:
        say_model(model)
    if not how.conversion.format:
        if how.output is None:
            raise click.UsageError("Name the format: with --to-format, or by the suffix of -o.")
        # Shards hold weights alone, so they are safetensors; any other output needs a suffix that names its format.
        named = named_format(how.output) is not None or not how.conversion.shard_size
        target = output_format(how.output) if named else "safetensors"
        how = how._replace(conversion=how.conversion._replace(format=target))
    how = how._replace(conversion=how.conversion._replace(deepspeed_16bit=bool(deepspeed_16bit), alone=True))
    edits = []
    if unflatten is not None or model is not None:
        edits.append(Call("unflatten", {"other": unflatten, "model": model}))
    if use_ema:
        edits.append(Call("use-ema", {"key": how.key}))
    if to_names is not None:
        allowed = {"allow_loss": how.conversion.allow_loss}
        edits.append(Call("to-names", {"family": to_names, "key": how.key, "config": config, **allowed}))
    if recipe is not None:
        edits.append(Call("recipe", {"recipe": recipe, "key": how.key, "config": config}))
    if config is not None and recipe is None and to_names is None:
        raise click.UsageError("--config goes with --to-names or --recipe.")
    return edit_all(_request("convert", edits), paths, how)


class PrivateReport(TypedDict):
    """A private item: ``new`` is the text that would replace it, or None if the whole entry would be removed."""

    kind: Literal["paths", "users", "sources", "args"]
    path: str
    what: str
    new: str | None


class PrivateReports(TypedDict):
    """``ckptool.redact/1`` when redact only lists private items; ``left`` says where something may stay."""

    schema: Literal["ckptool.redact/1"]
    path: str
    found: list[PrivateReport]
    left: list[str]


@click.command(cls=Ordered)
@paths
@step_option("redact")
@choosing
@writing_in_place
def redact(paths: tuple[str, ...], redact: tuple[str, ...], only: Globs, how: Writing, typed: object) -> int:
    """Find what a published file should not reveal, and remove what --redact names.

    Without --redact it only lists. --include and --exclude select by path. Read the list: no program can recognise
    everything that is private.
    """
    from ..edits.redact import KINDS, parse_kinds

    if not redact:
        if how.output is not None or how.out_dir is not None or how.in_place:
            raise click.UsageError(f"Say what to remove: --redact all, or some of {', '.join(KINDS)}.")
        style = "quiet" if how.quiet else how.style
        return run_each(FileCommand("redact", style, partial(_list, only=only, style=style)), paths, Workers())
    named = {kind for words in redact for kind in parse_kinds(words)}
    kinds = [kind for kind in KINDS if kind in named]
    return edit_all(_request("redact", [Call("redact", {"kinds": kinds, **only.patterns})]), paths, how)


take_bare(redact, EDITS["redact"].parameters[0])


def _list(path: str, *, only: Globs, style: str) -> Answer:
    from ..edits.redact import private_and_left

    with open_checkpoint(path) as checkpoint:
        items, left = private_and_left(checkpoint, only=only)
    found: list[PrivateReport] = [
        {"kind": item.kind, "path": item.path, "what": item.what, "new": item.new} for item in items
    ]
    report: PrivateReports = {"schema": "ckptool.redact/1", "path": path, "found": found, "left": left}
    return reported(report, style, _list_lines)


def _list_lines(report: PrivateReports) -> list[str]:
    from ..edits.redact import KINDS
    from ..reports.edit_steps import edit_step

    path, items, left = report["path"], report["found"], [f"  left: {clean(text)}" for text in report["left"]]
    kinds = [kind for kind in KINDS if any(item["kind"] == kind for item in items)]
    if not kinds:
        return [f"{clean(path)}: nothing private is recognised{' that redact changes' if left else ''}", *left]
    step = step_lines(edit_step("redact", path, word="redacted", steps=[Step("redact", ",".join(kinds))]).line)
    head = f"{clean(path)}: {pluralize(len(items), 'private item')}"
    return [head, *(f"  {clean(_line(item))}" for item in items), *left, *step]


def _line(item: PrivateReport) -> str:
    new = "the entry is removed" if item["new"] is None else repr(item["new"])
    where = f"{item['path']}: " if item["path"] else ""
    return f"{item['kind']}  {where}{item['what']} -> {new}"

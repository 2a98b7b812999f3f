"""The commands that write: strip-module, add-module, remap."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import click

from .. import api
from ..checkpoint import Checkpoint, file_mode
from ..errors import CkptoolError, OutputError
from ..human import counted, human_bytes
from ..planning import plan_of
from ..source import Plan
from ..write import check_output, write_plan
from .options import key_option, paths, worst, writing
from .render import clean, emit, emit_json, failure, say, say_error, say_problems

__all__ = ["add_module", "remap", "strip_module"]

#: Below this an output takes no noticeable time, and a progress bar would only flicker.
_PROGRESS_FROM = 200_000_000

STRIP_EPILOG = """\b
Examples:
  ckptool strip-module model.pth -o plain.pth
  ckptool strip-module model.pth -o plain.pth --wrappers
  ckptool strip-module model.pth -o plain.pth --prefix model. --key state_dict
  ckptool strip-module *.pth --out-dir plain/ --dry-run
"""


@click.command("strip-module", epilog=STRIP_EPILOG)
@paths
@click.option("--prefix", default="module.", show_default=True, metavar="TEXT", help="The prefix: whole segments.")
@click.option("--repeat", default="1", metavar="N|all", show_default=True, help="How often it is taken off.")
@click.option(
    "--wrappers",
    is_flag=True,
    help="Take out the names of all known wrappers wherever they stand: _orig_mod, _fsdp_wrapped_module, ...; module"
    " in front of names and next to another wrapper.",
)
@key_option
@writing
def strip_module(paths: tuple[str, ...], prefix: str, repeat: str, wrappers: bool, key: str | None, **how: Any) -> int:
    """Take the prefix 'module.' off the keys of every state dict in the file.

    Keys that do not have it stay. Everything else in the file stays as it is, byte for byte.
    """
    if repeat != "all" and not (repeat.isdigit() and int(repeat)):
        raise click.BadParameter("a number from 1 on, or 'all'", param_hint="--repeat")
    if wrappers and (prefix, repeat) != ("module.", "1"):
        raise click.UsageError("--wrappers takes out all known wrappers: --prefix and --repeat do not go with it.")
    times: int | Literal["all"] = "all" if repeat == "all" else int(repeat)

    def edit(checkpoint: Checkpoint) -> Checkpoint:
        if wrappers:
            return api.strip_wrappers(checkpoint, key=key)
        return api.strip_prefix(checkpoint, prefix, key=key, repeat=times)

    return _edit_all("strip-module", paths, edit, **how)


ADD_EPILOG = """\b
Examples:
  ckptool add-module model.pth -o parallel.pth
  ckptool add-module model.pth -o lightning.pth --prefix model. --key state_dict
"""


@click.command("add-module", epilog=ADD_EPILOG)
@paths
@click.option("--prefix", default="module.", show_default=True, metavar="TEXT", help="The prefix: whole segments.")
@key_option
@writing
def add_module(paths: tuple[str, ...], prefix: str, key: str | None, **how: Any) -> int:
    """Put the prefix 'module.' before every key of every state dict in the file.

    So that a model wrapped in DataParallel or DistributedDataParallel loads it.
    """
    return _edit_all("add-module", paths, lambda checkpoint: api.add_prefix(checkpoint, prefix, key=key), **how)


REMAP_EPILOG = """\b
Examples:
  ckptool remap model.pth --to cpu -o model.cpu.pth
  ckptool remap model.pth --map cuda:1=cuda:0 -o model.gpu0.pth
  ckptool remap model.pth --map 'cuda:*=cpu' -o model.cpu.pth
  CUDA_VISIBLE_DEVICES=1,3 saved with physical numbers:
  ckptool remap model.pth --visible 1,3 -o model.logical.pth
"""


@click.command("remap", epilog=REMAP_EPILOG)
@paths
@click.option("--to", metavar="DEVICE", default="", help="Where everything goes that is not on cpu or meta.")
@click.option("--map", "pairs", multiple=True, metavar="FROM=TO", help="One device to another; repeatable; cuda:*=cpu.")
@click.option("--visible", metavar="N,N", help="Physical GPU numbers to logical ones, as CUDA_VISIBLE_DEVICES does.")
@click.option("--all", "include_cpu", is_flag=True, help="With --to: also what is on cpu and meta.")
@click.option("--strings", is_flag=True, help="Change plain strings that name a device, too.")
@writing
def remap(
    paths: tuple[str, ...],
    to: str,
    pairs: tuple[str, ...],
    visible: str | None,
    include_cpu: bool,
    strings: bool,
    **how: Any,
) -> int:
    """Retarget devices: the tags of the storages and torch.device objects. No GPU is needed.

    Tensors on cpu stay there, unless --all or --map says otherwise: optimizer steps and random states belong
    there.
    """
    devices = api.DeviceMap(to, _pairs(pairs), _numbers(visible), include_cpu)
    devices.check()
    return _edit_all("remap", paths, lambda checkpoint: api.remap_devices(checkpoint, devices, strings=strings), **how)


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        for part in text.split(","):
            origin, equals, target = (piece.strip() for piece in part.partition("="))
            if not (origin and equals and target):
                raise click.BadParameter(f"{part!r} is not FROM=TO, such as cuda:1=cuda:0", param_hint="--map")
            if found.get(origin, target) != target:
                raise click.BadParameter(f"{origin} is mapped twice", param_hint="--map")
            found[origin] = target
    return found


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise click.BadParameter("numbers of GPUs, such as 1,3", param_hint="--visible")
    return tuple(map(int, parts))


# -- what all of them do ------------------------------------------------------------------------------


def _edit_all(
    command: str,
    paths: tuple[str, ...],
    edit: Callable[[Checkpoint], Checkpoint],
    *,
    output: str | None,
    out_dir: str | None,
    force: bool,
    dry_run: bool,
    style: str,
    quiet: bool,
    no_progress: bool,
) -> int:
    """Edit every input; each output is written, or each failure said, before the worst code is returned."""
    targets = _targets(paths, output, out_dir, dry_run)
    reports = []
    codes = []
    for path, target in zip(paths, targets):
        bar = not (quiet or no_progress) and sys.stderr.isatty()
        try:
            report = _edit_one(command, path, target, edit, force=force, dry_run=dry_run, bar=bar)
        except CkptoolError as error:
            say_error(error)
            codes.append(error.exit_code)
            reports.append(failure(command, path, error))
            continue
        codes.append(0)
        reports.append(report)
        if style == "table" and not quiet:
            emit(_account(report))
    if style != "table" and not quiet:
        emit_json(reports, style, len(paths) > 1)
    if len(paths) > 1 and not quiet and any(codes):
        say(f"{codes.count(0):,} of {len(paths):,} done, {len(paths) - codes.count(0):,} not")
    return worst(codes)


def _targets(paths: tuple[str, ...], output: str | None, out_dir: str | None, dry_run: bool) -> list[str | None]:
    if output is not None and out_dir is not None:
        raise click.UsageError("-o and --out-dir exclude each other.")
    if out_dir is not None:
        names = [os.path.basename(os.path.normpath(path)) for path in paths]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise click.UsageError(f"Two inputs are called {clean(twice)!r}: their outputs would be one file.")
        if not dry_run:
            try:
                os.makedirs(out_dir, exist_ok=True)
            except OSError as error:
                what = "it is a file, not a folder" if os.path.isfile(out_dir) else error.strerror or str(error)
                raise OutputError(what, path=out_dir) from error
        return [os.path.join(out_dir, name) for name in names]
    if output is not None:
        if output == "-":
            raise click.UsageError("ckptool does not write to stdout: name a file.")
        if len(paths) > 1:
            raise click.UsageError("Several inputs need --out-dir DIR instead of -o.")
        return [output]
    if not dry_run:
        raise click.UsageError("Missing option '-o' / '--output': say where to write, or try --dry-run.")
    return [None] * len(paths)


def _edit_one(
    command: str,
    path: str,
    target: str | None,
    edit: Callable[[Checkpoint], Checkpoint],
    *,
    force: bool,
    dry_run: bool,
    bar: bool,
) -> dict[str, Any]:
    with api.open(path) as checkpoint:
        if target is not None and (not dry_run or os.path.isdir(os.path.dirname(target) or os.curdir)):
            check_output(target, checkpoint.source, force=force)
        say_problems(checkpoint)
        edited = edit(checkpoint)
        plan, exact = plan_of(edited)
        if target is not None and not dry_run:
            _write(edited, plan, target, force=force, bar=bar)
        done = {change.path for change in edited.changes}
        low = [item.path for item in checkpoint.state_dicts if item.confidence == "low" and item.path not in done]
        return {
            "schema": f"ckptool.{command}/1",
            "path": path,
            "output": target,
            "bytes": checkpoint.source.size,
            "output_bytes": plan.size,
            "dry_run": dry_run,
            "changed": edited.edited,
            "exact": exact,
            "changes": [change._asdict() for change in edited.changes],
            "modules": [path for path in edited.survey.modules[:1] if not edited.state_dicts],
            "left_alone": low if command != "remap" else [],
        }


def _write(edited: Checkpoint, plan: Plan, target: str, *, force: bool, bar: bool) -> None:
    source, mode = edited.source, file_mode(edited.source)
    if not bar or plan.size < _PROGRESS_FROM:
        write_plan(plan, target, source, force=force, mode=mode)
        return
    label = clean(os.path.basename(target))
    with click.progressbar(length=plan.size, label=label, file=sys.stderr) as progress:
        write_plan(plan, target, source, force=force, mode=mode, progress=progress.update)


def _account(report: dict[str, Any]) -> str:
    """What was done, for people."""
    sizes = f"{human_bytes(report['bytes'])} -> {human_bytes(report['output_bytes'])}"
    if report["dry_run"]:
        lines = [
            f"{clean(report['path'])}: nothing is written, the output would be {human_bytes(report['output_bytes'])}"
        ]
    else:
        lines = [f"{clean(report['path'])} -> {clean(report['output'])}: {sizes}"]
    changes = report["changes"]
    for change in changes:
        lines.append("  " + clean(_change_words(change)))
    if not changes:
        lines.append(
            "  there is no state dict in it" if "module" in report["schema"] else "  there is no storage in it"
        )
    if not report["changed"]:
        lines.append("  nothing to do: the output is the input, byte for byte")
        lines += [
            f"  note: it holds a pickled module at {clean(path or 'the root')}: its names are attributes, not keys"
            for path in report["modules"]
        ]
    elif not report["exact"]:
        lines.append("  note: a foreign pickle, written anew; it is equal as an object, not byte for byte")
    for path in report["left_alone"]:
        lines.append(f"  note: {clean(repr(path))} may be a state dict; it stays unless --key names it")
    return "\n".join(lines)


def _change_words(change: dict[str, Any]) -> str:
    where = f"{change['path']}: " if change["path"] else ""
    if change["edit"].startswith("remap"):
        words = change["what"]
    elif change["edit"] == "device-string":
        words = f"{where}{change['what']}"
    elif change["number"]:
        words = f"{where}{change['what']} {counted(change['number'], 'key')}"
        if change["kept"]:
            words += f", {counted(change['kept'], 'other key')} as before"
    else:
        words = f"{where}{change['what']}"
    return "; ".join([words, *change["notes"]])

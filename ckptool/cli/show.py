"""``inspect`` and ``keys``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import click

from .. import api
from ..errors import CkptoolError
from ..human import counted, human_bytes
from ..listing import listed_entries, listing
from ..locations import parse_map_location
from ..names import Globs
from ..survey import Survey, TensorEntry
from ..tensors import Tensor
from .options import ALL_FORMATS, PLAIN_KINDS, format_option, key_option, paths, worst
from .render import (
    clean,
    cleaned,
    emit,
    emit_json,
    emit_lines,
    emit_table,
    failure,
    say,
    say_error,
    say_problems,
    table,
)

__all__ = ["inspect", "keys"]

INSPECT_EPILOG = """\b
Examples:
  ckptool inspect model.pth
  ckptool inspect model.pth --tree --depth 2
  ckptool inspect model.pth --map-location cuda:1=cuda:0
  ckptool inspect *.pth --format jsonl
"""


@click.command(epilog=INSPECT_EPILOG)
@paths
@click.option("--tree", is_flag=True, help="Show the tree of objects, too.")
@click.option("--depth", type=click.IntRange(min=1), default=3, show_default=True, help="Levels of the tree.")
@click.option(
    "--map-location", metavar="SPEC", help="Say where each tag would land: cpu, cuda:0, or cuda:1=cuda:0,cuda:2=cpu."
)
@click.option("--load", is_flag=True, help="Really load it with torch.load(weights_only=True).")
@format_option()
@click.pass_context
def inspect(
    ctx: click.Context, paths: tuple[str, ...], tree: bool, depth: int, map_location: str | None, load: bool, style: str
) -> int:
    """Say what a checkpoint is, what is in it, and what to do about it.

    Reads the metadata only: nothing in the file is run, torch is not imported (but with --load).
    """
    from ..report import inspection
    from .summary import summary

    location = parse_map_location(map_location)
    reports: list[dict[str, Any]] = []
    codes = []
    for path in paths:
        try:
            with api.open(path) as checkpoint:
                report = inspection(checkpoint, location)
                if tree:
                    from ..tree import tree_of

                    report["tree"] = [line._asdict() for line in tree_of(checkpoint, depth)]
            if load:
                from ..loading import load_report

                report["load"] = load_report(path, location)
                codes.append(0 if report["load"]["ok"] else 1)
        except CkptoolError as error:
            say_error(error)
            codes.append(error.exit_code)
            reports.append(failure("inspect", path, error))
            continue
        codes.append(0)
        reports.append(report)
        if style == "table":
            emit(("\n" if any("error" not in item for item in reports[:-1]) else "") + summary(report))
    if style != "table":
        emit_json(reports, style, len(paths) > 1)
    return worst(codes)


KEYS_EPILOG = """\b
Examples:
  ckptool keys model.pth
  ckptool keys model.pth --names --include '*.weight'
  ckptool keys model.pth --all --sort bytes
  ckptool keys model.pth --format json
"""


@click.command(epilog=KEYS_EPILOG)
@paths
@click.option("--names", is_flag=True, help="Only the names, one a line.")
@click.option("--all", "everything", is_flag=True, help="Every tensor in the file, by its path: optimizer state, too.")
@click.option("--include", multiple=True, metavar="GLOB", help="Only keys that match; repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not the keys that match; repeatable.")
@click.option(
    "--sort", type=click.Choice(("file", "name", "bytes")), default="file", show_default=True, help="Order of the keys."
)
@key_option
@format_option(ALL_FORMATS)
def keys(
    paths: tuple[str, ...],
    names: bool,
    everything: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    sort: str,
    key: str | None,
    style: str,
) -> int:
    """List the keys of the state dicts: name, dtype, shape, device, bytes."""
    globs = Globs(include, exclude)
    several = len(paths) > 1
    reports: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    codes = []
    for number, path in enumerate(paths):
        try:
            with api.open(path) as checkpoint:
                survey = checkpoint.survey
                entries = listed_entries(checkpoint, key, everything, globs, sort)
                if style in ("json", "jsonl"):
                    reports.append(listing(checkpoint, entries))
                say_problems(checkpoint)
        except CkptoolError as error:
            say_error(error)
            codes.append(error.exit_code)
            reports.append(failure("keys", path, error))
            continue
        codes.append(0)
        if globs and not entries:
            say(f"{path}: no key matches")
        if style in ("json", "jsonl"):
            continue
        if names:
            emit_lines(_labels(entries))
        elif style == "table":
            if several:
                emit(("\n" if number else "") + clean(path))
            _emit_sections(survey, entries, everything)
        else:
            rows += [((path,) if several else ()) + _cells(survey, entry) for entry in entries]
    if style in ("json", "jsonl"):
        emit_json(reports, style, several)
    elif style != "table" and not names:
        headers = (("file",) if several else ()) + ("state_dict", "key", "path", "dtype", "shape", "device", "bytes")
        emit(table(headers, rows, style, right=(len(headers) - 1,)))
    return worst(codes)


def _labels(entries: Sequence[TensorEntry]) -> Sequence[str]:
    """The keys where one state dict is listed, else the paths; "." for a tensor that is the whole file."""
    places = {entry.state_dict for entry in entries}
    if len(places) == 1 and -1 not in places:
        return cleaned([entry.key or "." for entry in entries])
    return cleaned([entry.path or "." for entry in entries])


def _cells(survey: Survey, entry: TensorEntry) -> tuple[str, ...]:
    """A line for machines: always the same columns."""
    tensor = entry.tensor
    where = survey.state_dicts[entry.state_dict].path if entry.state_dict >= 0 else ""
    return where, entry.key, entry.path, tensor.dtype, _shape(tensor.shape), tensor.location, str(tensor.own_bytes)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _emit_sections(survey: Survey, listed: Sequence[TensorEntry], everything: bool) -> None:
    """A table for each state dict, one for what is outside, and what is not listed."""
    groups: dict[int, list[TensorEntry]] = {}
    for entry in listed:
        groups.setdefault(entry.state_dict, []).append(entry)
    rest = len(survey.tensors) - len(listed)
    # Many tensors have few dtypes, shapes and sizes: each is spelled once.
    shape, size = cache(_shape), cache("{:,}".format)
    for number, (place, entries) in enumerate(groups.items()):
        tensors = [entry.tensor for entry in entries]
        columns = (
            [entry.path or "." for entry in entries] if place < 0 else [entry.key or "." for entry in entries],
            [_dtype(tensor) for tensor in tensors],
            [shape(tensor.shape) for tensor in tensors],
            [tensor.location for tensor in tensors],
            [size(tensor.own_bytes) for tensor in tensors],
        )
        emit_table(("path" if place < 0 else "key", "dtype", "shape", "device", "bytes"), columns, right=(4,))
        base = survey.state_dicts[place].path if place >= 0 else None
        where = f" in {base!r}" if base else "" if base is not None or len(groups) == 1 else " outside of them"
        total = human_bytes(sum(tensor.own_bytes for tensor in tensors))
        last = number == len(groups) - 1
        more = f"; {rest:,} more in the file: --all" if last and rest and not everything else ""
        emit(f"\n{counted(len(entries), 'tensor')}{clean(where)}, {total}" + (more if last else "\n"))
    if not groups:
        emit("no tensors" + (f"; {rest:,} more in the file: --all" if rest and not everything else ""))


def _dtype(tensor: Tensor) -> str:
    return tensor.dtype if tensor.kind in PLAIN_KINDS else f"{tensor.dtype} ({tensor.kind})"

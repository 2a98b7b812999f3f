"""``inspect`` and ``keys``."""

from __future__ import annotations

from typing import Any

import click

from .. import api
from ..errors import CkptoolError
from ..human import counted, human_bytes
from ..locations import parse_map_location
from ..names import Globs
from ..report import key_listing
from .options import ALL_FORMATS, format_option, key_option, paths, worst
from .render import clean, emit, emit_json, say_error, table

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
    for number, path in enumerate(paths):
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
            reports.append(_failure("inspect", path, error))
            continue
        codes.append(0)
        reports.append(report)
        if style == "table":
            if number:
                emit("")
            emit(summary(report))
    if style != "table":
        emit_json(reports, style, len(paths) > 1)
    return worst(codes)


def _failure(command: str, path: str, error: CkptoolError) -> dict[str, Any]:
    """The report on an input that cannot be read, so that JSON has an object for each input."""
    found: dict[str, Any] = {"schema": f"ckptool.{command}/1", "path": path, "error": error.what, "next": error.next}
    kind = getattr(error, "kind", None)
    return found | ({"format": kind} if kind else {})


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
    reports: list[dict[str, Any]] = []
    codes = []
    for number, path in enumerate(paths):
        try:
            with api.open(path) as checkpoint:
                report = key_listing(checkpoint, key=key, everything=everything, globs=globs, sort=sort)
                several = key is None and len(checkpoint.state_dicts) > 1
                by_path = everything or several or not checkpoint.state_dicts
        except CkptoolError as error:
            say_error(error)
            codes.append(error.exit_code)
            reports.append(_failure("keys", path, error))
            continue
        codes.append(0)
        reports.append(report)
        if style in ("json", "jsonl"):
            continue
        label = "path" if by_path else "key"
        if names:
            for entry in report["tensors"]:
                emit(clean(entry[label]))
            continue
        if len(paths) > 1 and style == "table":
            emit(("\n" if number else "") + clean(path))
        _print_keys(report, label, style)
    if style in ("json", "jsonl"):
        emit_json(reports, style, len(paths) > 1)
    return worst(codes)


def _print_keys(report: dict[str, Any], label: str, style: str) -> None:
    tensors = report["tensors"]
    if not tensors and style == "table":
        emit("no tensors")
        return
    machine = style in ("csv", "plain")
    rows = []
    for entry in tensors:
        shape = "x".join(map(str, entry["shape"])) or ("" if machine else "scalar")
        size = str(entry["bytes"]) if machine else f"{entry['bytes']:,}"
        rows.append((entry[label], entry["dtype"], shape, entry["location"], size))
    emit(table((label, "dtype", "shape", "device", "bytes"), rows, style, right=(4,)))
    if style == "table":
        total = sum(entry["bytes"] for entry in tensors)
        emit(f"\n{counted(len(tensors), 'tensor')}, {human_bytes(total)}")

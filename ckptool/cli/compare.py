"""The commands that compare: diff prints the differences between two checkpoints, report writes a page about them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import click

import ckptool

from ..base.addresses import is_remote
from ..base.errors import UnreadableError
from ..base.globs import Globs
from ..base.text import cut, join_limited, pluralize, shape_text, shown
from ..reports.comparing.values import SORTS, role
from .help import GroupedCommand
from .options import (
    REPORT_FORMATS,
    AnyPath,
    InputPath,
    choosing_keys,
    dequantized_option,
    force_option,
    format_option,
    ignore_option,
    no_values_option,
    other_key_option,
    quiet_option,
    sort_option,
)
from .render import clean, emit, emit_report, say_problems, table, unreadable
from .terminal import judged, painted, progress_bar, work_size, wrapped

if TYPE_CHECKING:
    from ..reports.comparing.diff import DiffReport
    from ..reports.comparing.values import Figures, ValueDifference

#: Rows shown per section without --verbose; the rest are only counted.
_SHOWN = 20
#: From this many tensors with the same change on, they share one line.
_ALIKE = 4


@click.command(cls=GroupedCommand)
@click.argument("a", metavar="A", type=InputPath())
@click.argument("b", metavar="B", type=InputPath())
@click.option("--rtol", type=click.FloatRange(min=0), metavar="NUMBER", help="Allowed relative difference.")
@click.option("--atol", type=click.FloatRange(min=0), metavar="NUMBER", help="Allowed absolute difference.")
@ignore_option
@choosing_keys
@other_key_option
@no_values_option
@dequantized_option
@sort_option(SORTS, "max")
@format_option(REPORT_FORMATS)
@quiet_option
def diff(
    a: str,
    b: str,
    rtol: float | None,
    atol: float | None,
    ignore: list[str],
    key: str | None,
    other_key: str | None,
    only: Globs,
    no_values: bool,
    dequantized: bool,
    sort: str,
    style: str,
    quiet: bool,
) -> int:
    """Show what differs between two checkpoints: keys, shapes, dtypes, devices, strides, values, entries.

    Values are compared bit for bit, across containers, byte orders and strides; if torch is installed, also how far
    they are apart, and --sort orders these. With --rtol or --atol they may differ by atol + rtol * |b|, like
    torch.allclose, except that NaN equals NaN. With --key one state dict is compared, with that of --other-key
    (default: the same path). Exit 0: the same; 1: they differ; 3: one cannot be read.
    """
    from ..reports.comparing.diff import diff_report

    words = [*ignore, "values"] if no_values else ignore
    try:
        with ckptool.open(a) as left, ckptool.open(b) as right:
            for checkpoint in (left, right):
                say_problems(checkpoint)
            if dequantized:
                from ..edits.dequantize import plain_of  # few models are quantized

                left, right = plain_of(left), plain_of(right)
            size = sum(each.source.size for each in (left, right) if is_remote(each.path)) or work_size(a)

            with progress_bar(size, "comparing", not quiet) as progress:
                report = diff_report(
                    left,
                    right,
                    rtol=rtol,
                    atol=atol,
                    ignore=words,
                    count=not quiet,
                    key=key,
                    other_key=other_key,
                    only=only,
                    sort=sort,
                    progress=progress,
                )
    except UnreadableError as error:
        return unreadable("diff", a, error, style, quiet)
    emit_report(report, lambda: [*_verdict(report), *_measured(report, sort)], style, quiet)
    return 0 if report["same"] else 1


@click.command(cls=GroupedCommand)
@click.argument("a", metavar="A", type=InputPath())
@click.argument("b", metavar="[B]", type=InputPath(), required=False)
@click.option("-o", "--output", type=AnyPath(), metavar="OUT", required=True, help="The page to write.")
@ignore_option
@choosing_keys
@other_key_option
@no_values_option
@force_option
@quiet_option
def report(
    a: str,
    b: str | None,
    output: str,
    ignore: list[str],
    key: str | None,
    other_key: str | None,
    only: Globs,
    no_values: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Write a page that a browser opens: what a checkpoint is, what to do, its bytes and numbers, and what B changed.

    Of values it shows what stats prints, which needs torch; without torch, or with --no-values, the page has none.
    With B it shows what diff prints, and tensors that have another name in B. --key and --include choose the tensors.
    """
    read = sum(os.path.getsize(path) for path in (a, b) if path is not None and os.path.isfile(path))
    with progress_bar(read, "reading", not (quiet or no_values)) as progress:
        written = ckptool.report(
            a,
            b,
            output=output,
            force=force,
            no_values=no_values,
            key=key,
            other_key=other_key,
            ignore=ignore,
            include=only.include,
            exclude=only.exclude,
            progress=progress,
        )
    if not quiet:
        emit(clean(f"{a if b is None else f'{a} and {b}'} -> {written.path}"))


def _verdict(report: DiffReport) -> list[str]:
    """Return the verdict and the sections that need no distances between values."""
    from ..reports.comparing.diff import all_equal

    verdict = report["verdict"]
    text, sums = f"{verdict}: {report['stat']}", report["tensors"]
    if report["same"]:
        close = f", {sums['within_tolerance']:,} of them not bit for bit" if sums["within_tolerance"] else ""
        text = f"{verdict}: {pluralize(sums['in_both'], 'tensor')}{close}"
    if all_equal(report):
        verdict, _, rest = report["stat"].partition(", ")
        text = f"{verdict}; {rest}"
    drawn = wrapped(clean(text), 2)
    lines = [judged(verdict, "the same" if report["same"] else verdict) + drawn.removeprefix(verdict)]
    if report["key"] is not None:
        lines.append(clean(f"compared: the state dict at {report['key']} of A with that at {report['other_key']} of B"))
    if report["include"] or report["exclude"]:
        lines.append(clean(f"compared: {Globs(report['include'], report['exclude']).words}"))
    if report["hint"]:
        lines.append(f"the names agree with {report['hint']}")
    for side, colour, items in (("A", "bad", report["only_in_a"]), ("B", "good", report["only_in_b"])):
        rows = [f"  {painted(_name(item), colour)}  {clean(_content(item))}" for item in items]
        lines += _listed(f"only in {side}", rows)
    lines += _listed("container", [f"  {clean(item['what'])}: {_change(item)}" for item in report["container"]])
    lines += _listed("program", [f"  {clean(item['what'])}: {_change(item)}" for item in report["program"]])
    lines += _listed("changed", list(_changes(report["changed"])))
    rows = [f"  {_name(item)}: {_arrow(_entry(item['a']), _entry(item['b']))}" for item in report["entries"]]
    return lines + _listed("entries", rows)


def _measured(report: DiffReport, sort: str) -> list[str]:
    """Return the sections that begin with the distances between values."""
    near, order = report["rtol"] is not None, "" if sort in ("file", "name") else ", worst first"
    values = sorted(report["values"], key=lambda item: role(item["path"])) if order else report["values"]
    if order and len({role(item["path"]) for item in values}) > 1:
        order += ", weights before training state"
    lines = _values(f"values{order}", values, near)
    lines += _values(f"values within the tolerance{order}", report["within_tolerance"], near)
    lines += _distances(report)
    rows = [
        clean(f"  {label(item['path'])}  shares memory with {label(item['with'])} in {item['only_in'].upper()} only")
        for item in report["sharing"]
    ]
    lines += _listed("sharing", rows)
    rows = [
        f"  {_name(item)}: from key {item['place']:,} on, " + clean(f"{label(item['a'])} in A, {label(item['b'])} in B")
        for item in report["order"]
    ]
    return lines + _listed("order of keys", rows)


def _name(item: Mapping[str, Any]) -> str:
    return clean(label(item["path"]))


def _changes(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line per changed property; many tensors with the same change share a line."""
    alike: dict[str, list[str]] = {}
    for item in items:
        alike.setdefault(f"{clean(item['what'].removeprefix('.'))}: {_change(item)}", []).append(_name(item))
    for words, names in alike.items():
        if len(names) < _ALIKE:
            yield from (f"  {name}  {words}" for name in names)
        else:
            yield f"  {words} in {pluralize(len(names), 'tensor')}: {join_limited(names, most=3)}"


def _listed(title: str, rows: Sequence[str]) -> list[str]:
    """Return a section: its title and its first rows, which must be clean; [] without rows."""
    return ["", f"{title}:", *rows[: shown(_SHOWN)], *_more(len(rows))] if rows else []


def _more(count: int) -> list[str]:
    left = count - shown(_SHOWN)
    return [f"  ... and {left:,} more: -v or --format json for all"] if left > 0 else []


def label(path: str) -> str:
    """Return a path as people read it: only the name for a key of the root, "." for the root itself."""
    if path.startswith('["') and path.endswith('"]') and "\\" not in path and path.count('"') == 2:
        return path[2:-2]
    return path or "."


def _content(item: Mapping[str, Any]) -> str:
    if "shape" in item:
        return f"{item['dtype']} {shape_text(item['shape'])}, {item['device']}"
    if item["tensors"]:
        return f"{item['type']}, {pluralize(item['tensors'], 'tensor')}"
    return _entry(item)


def _change(item: Mapping[str, Any]) -> str:
    if item["what"] == "shape":
        return _arrow(shape_text(item["a"]), shape_text(item["b"]))
    if item["what"] in ("layout", "dtype", "stride", "device", "class", "format", "byte order"):
        return _arrow(str(item["a"]), str(item["b"]))
    return _arrow(_short(item["a"]), _short(item["b"]))


def _arrow(old: str, new: str) -> str:
    return f"{clean(old)} -> {clean(new)}"


def _entry(leaf: Mapping[str, Any]) -> str:
    """Return a value with its type; basic types such as int and str are left unnamed."""
    if leaf.get("value") is None:
        return str(leaf["type"])
    if leaf["type"] in ("int", "float", "str", "bool", "bytes"):
        return _short(leaf["value"])
    return cut(f"{leaf['type']} {leaf['value']}")


def _short(value: object) -> str:
    return cut(repr(value))


def _values(title: str, items: Sequence[ValueDifference], near: bool) -> list[str]:
    """Return a table of the tensors whose values differ. ``near``: a tolerance was given."""
    if not items:
        return []
    measured = near or any(not item["reason"] for item in items)
    headers = ["tensor", "dtype", "shape", "first at", "too far" if near else "elements that differ"]
    headers += _FIGURES if measured else []
    rows = [[*_row(item), *(_figures(item) if measured else ())] for item in items[: shown(_SHOWN)]]
    # A narrow terminal loses columns in this order: first index, mean, dtype, shape, cosine, count.
    spare = (3, 6, 1, 2, 8, 4) if measured else (3, 1, 2)
    drawn = table(headers, rows, right=range(4, len(headers)), spare=spare, indent=2).split("\n")
    return ["", f"{title}:", *(f"  {line}" for line in drawn), *_more(len(items))]


#: The columns that ``_figures`` fills.
_FIGURES: Final = ("max |a-b|", "mean |a-b|", "relative L2", "cosine")


def _row(item: ValueDifference) -> list[str]:
    first = f"[{', '.join(map(str, item['first']))}]" if item["first"] else ""
    name = label(item["path"]) + (f" ({item['part'].removeprefix('.')})" if item["part"] else "")
    dtype = item["dtype"] if item["dtype"] == item["other_dtype"] else f"{item['dtype']} -> {item['other_dtype']}"
    counted = f"{item['differing']:,} of {prod(item['shape']):,}" if item["differing"] is not None else ""
    lost = f" ({item['nonfinite']:,} NaN or Inf)" if item["nonfinite"] else ""
    return [cut(name), dtype, shape_text(item["shape"]), first, counted + lost]


def _figures(item: Figures) -> list[str]:
    """Return the figures as texts, "" for None; a cosine close to 1 as "1 - x", unless x is only a rounding error."""
    numbers = ["" if value is None else f"{value:.3g}" for value in (item["max_abs"], item["mean_abs"], item["rel_l2"])]
    cosine = item["cosine"]
    if cosine is None:
        return [*numbers, ""]
    return [*numbers, f"1 - {1 - cosine:.2g}" if 1e-12 < 1 - cosine < 5e-5 else f"{cosine:.6g}"]


def _distances(report: DiffReport) -> list[str]:
    """Return the distance between all values, or the reason why they were not measured."""
    if report["not_measured"]:
        return ["", clean(report["not_measured"])]
    total = report["total"]
    if total is None:
        return []
    figures = [f"{name} {text}" for name, text in zip(_FIGURES, _figures(total)) if text]
    of = f"{pluralize(total['tensors'], 'tensor')} that {'differs' if total['tensors'] == 1 else 'differ'}"
    of += f", without {pluralize(report['counters'], 'counter')}" if report["counters"] else ""
    return ["", f"in total, of {of}: {', '.join(figures) or 'no finite numbers'}"]

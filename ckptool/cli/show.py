"""The commands that show checkpoints: inspect and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import click

import ckptool

from ..base.errors import CkptoolError, UnreadableError
from ..base.globs import Globs
from ..base.map_location import MapLocation, parse_map_location
from ..base.steps import command
from ..base.text import cut, human_bytes, pluralize
from ..formats.checkpoint_search import as_one, names_one_file
from ..reports.keys import keys_report, select_entries, unmatched
from .jobs import answers, checkpoints_of, engine_options
from .key_tables import Section, cells, drawn, labels, sections
from .options import ALL_FORMATS, format_option, key_option, listing, paths, progress_option, sort_option, worst
from .render import clean, emit, failure, flush, problem_lines, say, say_error, step_lines, table, tell
from .streams import BarUpdate, Reports, Rows, progress_bar, reading_bar, report_text
from .terminal import on_terminal, watched
from .working import Working

#: The most errors printed one by one below an overview.
_EACH: Final = 5

INSPECT_EPILOG = """\b
Examples:
  ckptool inspect model.pth
  ckptool inspect model.pth --tree --depth 2
  ckptool inspect model.pth --map-location cuda:1=cuda:0
  ckptool inspect runs/
  ckptool inspect runs/ --format jsonl --jobs 4
"""


class _Answer(NamedTuple):
    """The answer for a file: exit code, text for stdout, overview row, bytes, lines for stderr, error, rows."""

    code: int
    text: str = ""
    row: tuple[str, ...] = ()
    size: int = 0
    remarks: tuple[str, ...] = ()
    error: CkptoolError | None = None
    rows: tuple[tuple[str, ...], ...] = ()


@contextmanager
def _files(paths: Sequence[str], bar: bool) -> Iterator[tuple[Iterator[str | UnreadableError], BarUpdate]]:
    """Yield the checkpoints for the paths, with errors in place of unreadable ones, and the function of a progress bar.

    The function is called with 1 per file; it is None without a bar.
    """
    items = iter(checkpoints_of(paths))
    if not (bar and watched()) or names_one_file(paths):
        yield items, None
        return
    files = list(items)
    with progress_bar(len(files), "reading", unit="files") as progress:
        yield iter(files), progress


@click.command(epilog=INSPECT_EPILOG)
@paths
@click.option("--tree", is_flag=True, help="Also show the tree of objects.")
@click.option("--depth", type=click.IntRange(min=1), default=3, show_default=True, help="Levels of the tree.")
@click.option(
    "--map-location", metavar="SPEC", help="Show where each tag would go: cpu, cuda:0, or cuda:1=cuda:0,cuda:2=cpu."
)
@click.option("--load", is_flag=True, help="Load it for real with torch.load(weights_only=True). Needs torch.")
@engine_options
@format_option()
@click.option("-v", "--verbose", is_flag=True, help="Show everything about every file, even for folders and globs.")
@click.option("--overview", is_flag=True, help="Print one line per file, even for files given by name.")
@progress_option
def inspect(
    paths: tuple[str, ...],
    tree: bool,
    depth: int,
    map_location: str | None,
    load: bool,
    working: Working,
    style: str,
    verbose: bool,
    overview: bool,
    no_progress: bool,
) -> int:
    """Show what a checkpoint contains and what to do about it.

    Takes files, folders (searched for checkpoints by content) and globs; several files from a folder become a table
    with one line each. Reads only the metadata: nothing in the file is run, and torch is imported for --load only.
    JSON is an object for one named file, otherwise a list.
    """
    if overview and (verbose or tree or load):
        raise click.UsageError("--overview prints one line per file: not with --verbose, --tree or --load.")
    location, paths = parse_map_location(map_location), as_one(paths)
    bar = not no_progress and (style == "json" or not on_terminal())
    with _files(paths, bar) as (files, progress):
        if style == "table" and not (overview or verbose or tree or load):
            first = list(islice(files, 2))
            files = chain(first, files)
            overview = len(first) > 1 and not all(names_one_file([path]) for path in paths)
        alone = not no_progress and working.alone
        work = partial(_inspected, location=location, depth=depth if tree else 0, load=load, bar=alone, style=style)
        with closing(answers(work, files, working, partial(_not_read, "inspect", style))) as every:
            results = _counted(every, progress)
            if style != "table":
                return _json(results, Reports(style, not names_one_file(paths)))
            return _overview(results) if overview else _summaries(results)


def _counted(results: Iterator[_Answer], progress: BarUpdate) -> Iterator[_Answer]:
    """Yield the answers. Move the progress bar after each."""
    for answer in results:
        yield answer
        if progress:
            progress(1)


def _inspected(path: str, *, location: MapLocation, depth: int, load: bool, bar: bool, style: str) -> _Answer:
    from ..reports.inspection import inspection
    from ..reports.summary import overview_row
    from .summary import summary

    code = 0
    try:
        with ckptool.open(path) as checkpoint:
            report = inspection(checkpoint, location)
            if depth:
                from ..reports.entries import tree_of

                report["tree"] = tree_of(checkpoint, depth)
        if load:
            from ..reports.loads import load_report

            with reading_bar(report["bytes"], "loading", bar):
                report["load"] = load_report(path, location)
            code = 0 if report["load"]["ok"] else 1
    except CkptoolError as error:
        return _not_read("inspect", style, path, error)
    if style != "table":
        return _Answer(code, report_text(report, style))
    return _Answer(code, summary(report), overview_row(report), report["bytes"])


def _not_read(command: str, style: str, path: str, error: CkptoolError) -> _Answer:
    text = report_text(failure(command, path, error), style) if style in ("json", "jsonl") else ""
    row = (path, "", getattr(error, "kind", ""), "", "", "", "", f"error: {cut(error.what, 60)}")
    return _Answer(error.exit_code, text, row, error=error)


def _json(results: Iterator[_Answer], reports: Reports) -> int:
    codes = set()
    kept: list[_Answer] = []
    for item in results:
        reports.add(item.text)
        codes.add(item.code)
        if reports.style == "json":
            kept += [item._replace(text="")] if item.error or item.remarks else []  # printed after the list
        else:
            _say(item)
    reports.close()
    for item in kept:
        _say(item)
    return worst(codes)


def _say(item: _Answer) -> None:
    if item.error is not None:
        say_error(item.error)
    for line in item.remarks:
        tell(line)


def _summaries(results: Iterator[_Answer]) -> int:
    """Write the whole summary of each file. Return the exit code."""
    codes = set()
    separator = ""
    for item in results:
        _say(item)
        if item.text:
            emit(separator + item.text)
            flush()
            separator = "\n"
        codes.add(item.code)
    return worst(codes)


def _overview(results: Iterator[_Answer]) -> int:
    """Write a row per file, then the errors. Return the exit code."""
    from ..reports.summary import OVERVIEW
    from .summary import SPARE

    rows = Rows(OVERVIEW, right=(1, 4), spare=[OVERVIEW.index(name) for name in SPARE])
    codes = set()
    errors: list[CkptoolError] = []
    files = size = bad = 0
    remarkable, worst_level = "", ""
    for item in results:
        rows.add(item.row)
        codes.add(item.code)
        files += 1
        size += item.size
        if item.error is not None:
            bad += 1
            errors += [item.error] if bad <= _EACH else []
        elif item.row[-1] and (not remarkable or (item.row[-1].startswith("error") and worst_level != "error")):
            remarkable, worst_level = item.row[0], item.row[-1].partition(":")[0]
    rows.close()
    emit(f"\n{pluralize(files, 'file')}, {human_bytes(size)}" + (f"; {bad:,} not read" if bad else ""))
    if remarkable:
        emit("\n".join(step_lines(str(command("inspect", remarkable)))))
    flush()
    for error in errors:
        say_error(error)
    if bad > len(errors):
        say(f"{bad - len(errors):,} more could not be read: --format jsonl says why")
    return worst(codes)


KEYS_EPILOG = """\b
Examples:
  ckptool keys model.pth
  ckptool keys model.pth --names --include '*.weight'
  ckptool keys model.pth --all --sort bytes
  ckptool keys model.pth --format json
  ckptool keys runs/ --format csv > keys.csv
"""


@click.command(epilog=KEYS_EPILOG)
@paths
@click.option("--names", is_flag=True, help="Print only the names, one per line.")
@listing
@sort_option(("file", "name", "bytes"))
@key_option
@engine_options
@format_option(ALL_FORMATS)
@progress_option
def keys(
    paths: tuple[str, ...],
    names: bool,
    everything: bool,
    only: Globs,
    sort: str,
    key: str | None,
    working: Working,
    style: str,
    no_progress: bool,
) -> int:
    """List the keys of the state dicts: name, dtype, shape, device, bytes.

    Takes files, folders (searched for checkpoints by content) and globs. JSON is an object for one named file,
    otherwise a list. For a tensor spread over ranks (DTensor, ShardedTensor) the table shows which part the file holds;
    JSON has sharding, local_shape, placements, mesh, rank, and parts with their offsets and ranges.
    """
    paths = as_one(paths)
    several = not names_one_file(paths)
    how = {"key": key, "everything": everything, "globs": only, "sort": sort}
    bar = not no_progress and (style in ("json", "markdown", "plain") or not on_terminal())
    with _files(paths, bar) as (files, progress):
        work = partial(_listed, how=how, names=names, several=several, style=style)
        with closing(answers(work, files, working, partial(_not_read, "keys", style))) as every:
            results = _counted(every, progress)
            if style in ("json", "jsonl"):
                return _json(results, Reports(style, several))
            return _keys(results, style, names, several)


#: Columns of the formats for programs; "file" comes first if there are several files.
_COLUMNS: Final = ("state_dict", "key", "path", "dtype", "shape", "device", "bytes")


def _listed(path: str, *, how: dict[str, Any], names: bool, several: bool, style: str) -> _Answer:
    try:
        answer, parts, rest = _read(path, how, names, several, style)
    except CkptoolError as error:
        return _not_read("keys", style, path, error)
    if parts is not None:
        # Draw the tables after the checkpoint is closed, so that the text reuses its memory.
        answer = answer._replace(text="\n".join([clean(path)] * several + [drawn(parts, rest)]))
    return answer


def _read(
    path: str, how: dict[str, Any], names: bool, several: bool, style: str
) -> tuple[_Answer, list[Section] | None, int]:
    """Return the answer for a file, the tables still to be drawn, and the number of tensors that they leave out."""
    text, rows = "", []
    parts, rest = None, 0
    with ckptool.open(path) as checkpoint:
        survey = checkpoint.survey
        entries = select_entries(checkpoint, **how)
        remarks = problem_lines(checkpoint)
        if how["globs"] and not entries:
            remarks.append(f"ckptool: {path}: {unmatched(checkpoint, how['globs'], how['key'], how['everything'])}")
    if style in ("json", "jsonl"):
        text = report_text(keys_report(checkpoint, entries), style)
    elif names:
        text = "\n".join(labels(entries))
    elif style == "table":
        parts = sections(survey, entries, how["sort"] == "bytes")
        rest = 0 if how["everything"] else len(survey.tensors) - len(entries)
    else:
        rows = [((path,) if several else ()) + cells(survey, entry) for entry in entries]
        if style == "csv" and rows:
            text, rows = table(_headers(several), rows, style), []
    return _Answer(0, text, remarks=tuple(remarks), rows=tuple(rows)), parts, rest


def _headers(several: bool) -> tuple[str, ...]:
    return (("file",) if several else ()) + _COLUMNS


def _keys(results: Iterator[_Answer], style: str, names: bool, several: bool) -> int:
    codes = set()
    rows: list[tuple[str, ...]] = []
    begun = False
    for number, item in enumerate(results):
        _say(item)
        codes.add(item.code)
        text = item.text
        if text and not names and style == "table" and number:
            text = "\n" + text
        elif text and not names and style == "csv" and begun:
            text = text.partition("\n")[2]
        if text:
            emit(text)
            flush()
            begun = True
        rows += item.rows  # the rows of all files are drawn as one table
    if not names and (style in ("markdown", "plain") or (style == "csv" and not begun)):
        headers = _headers(several)
        emit(table(headers, rows, style, right=(len(headers) - 1,)))
    return worst(codes)

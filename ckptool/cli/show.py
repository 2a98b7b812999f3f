"""The commands that show checkpoints: inspect, keys and get."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import click

from ..base.errors import CkptoolError, RefusedError
from ..base.globs import Globs
from ..base.map_location import MapLocation, parse_map_location
from ..base.records import NamedTuple
from ..base.steps import as_step, command
from ..base.suffixes import CHECKPOINTS, SAFETENSORS
from ..base.text import cut, human_bytes, join_limited, pluralize, shape_text, shortened
from ..checkpoint.checkpoint import file_mode
from ..checkpoint.selection import select_entries
from ..checkpoint.survey import Survey, TensorEntry
from ..checkpoint.tensors import Tensor, is_sharded
from ..files.archives import refuse_address
from ..formats.checkpoint_search import as_one, names_one_file
from ..formats.opening import open_checkpoint
from ..reports.file_rows import FileVerdict
from .help import GroupedCommand
from .inputs import Inputs, input_options
from .options import (
    ALL_FORMATS,
    PLAIN_KINDS,
    AnyPath,
    Workers,
    completed,
    force_option,
    format_option,
    key_option,
    listing,
    one_path,
    sort_option,
    unmatched_lines,
)
from .render import clean, cleaned, emit, emit_pieces, pairs, problem_lines, say, say_problems, step_lines, table
from .runner import JSON, OVERVIEW, Answer, Columns, ErrorLog, FileCommand, Totals, failed, report_text, run
from .terminal import judged, on_terminal, painted, wrapped

if TYPE_CHECKING:
    from ..checkpoint.sharding import ShardingSummary
    from ..pickles.nodes import Ref
    from ..reports.inspection import FindingReport, InspectReport

#: The most errors printed one by one below an overview.
_EACH: Final = 5
#: Overview columns that a narrow terminal loses, first to last.
_SPARE: Final = ("prefix", "devices", "layout", "keys", "bytes")


@click.command(cls=GroupedCommand)
@input_options
@click.option(
    "--map-location", metavar="SPEC", help="Show where each tag would go: cpu, cuda:0, or cuda:1=cuda:0,cuda:2=cpu."
)
@click.option("--load", is_flag=True, help="Also load it with torch, weights_only=True.")
@format_option()
@click.option("-v", "--verbose", is_flag=True, help="Show full details of every file, even for folders and globs.")
def inspect(inputs: Inputs, map_location: str | None, load: bool, working: Workers, style: str, verbose: bool) -> int:
    """Show what a checkpoint contains and what to do about it.

    Takes files, folders (searched for checkpoints by content) and globs; several files from a folder become a table
    with one line each. Reads only the metadata: nothing in the file is run, and torch is imported for --load only.
    JSON is an object for one named file, otherwise a list.
    """
    mapped, inputs = parse_map_location(map_location), inputs._replace(paths=as_one(inputs.paths))
    files = inputs.checkpoints()
    overview = False
    if style == "table" and not (verbose or load):
        first = list(islice(files, 2))
        files = chain(first, files)
        overview = len(first) > 1 and not all(names_one_file([path]) for path in inputs.paths)
    style = OVERVIEW if overview else style
    work = partial(_inspected, location=mapped, load=load, style=style)
    label = "reading" if (style == "json" or not on_terminal()) else ""
    if style == OVERVIEW:
        from ..reports.summary import OVERVIEW_COLUMNS

        spare = [OVERVIEW_COLUMNS.index(name) for name in _SPARE]
        each = FileCommand("inspect", OVERVIEW, work, _not_inspected, Columns(OVERVIEW_COLUMNS, (1, 4), spare))
        return run(each, inputs, files, working, bar="reading", errors=ErrorLog(_EACH), finish=_end_overview)
    each = FileCommand("inspect", style, work)
    return run(each, inputs, files, working, bar=label, spaced=True)


def _inspected(path: str, *, location: MapLocation, load: bool, style: str) -> Answer:
    from ..reports.inspection import inspection
    from ..reports.summary import overview_row

    code = 0
    with open_checkpoint(path) as checkpoint:
        single = style != OVERVIEW  # an overview shows neither the verdict nor the next steps
        report = inspection(checkpoint, location, judged=single, steps=single)
    if load:
        from ..reports.loads import load_report

        report["load"] = load_report(path, location)
        code = 0 if report["load"]["ok"] else 1
    verdict = FileVerdict(path, "inspected", code)
    if style in JSON:
        return Answer(verdict, report_text(report, style))
    row = overview_row(report)
    text = "" if style == OVERVIEW else summary(report)
    return Answer(verdict, text, (row,), level=row[-1].partition(":")[0], size=report["bytes"])


def _not_inspected(path: str, error: CkptoolError) -> Answer:
    row = (path, "", getattr(error, "kind", ""), "", "", "", "", f"error: {cut(error.what, 60)}")
    return failed("inspect", OVERVIEW, path, error)._replace(rows=(row,))


def _end_overview(totals: Totals) -> int:
    """Write the totals of an overview, and the command that shows the first file with the gravest findings."""
    files, bad = sum(totals.words.values()), totals.errors.count
    emit(f"\n{pluralize(files, 'file')}, {human_bytes(totals.size)}" + (f"; {bad:,} not read" if bad else ""))
    remarkable = totals.first.get("error") or next(iter(totals.first.values()), "")
    if remarkable:
        emit("\n".join(step_lines(str(command("inspect", remarkable)))))
    return totals.code()


def summary(report: InspectReport) -> str:
    """Return the report of ``inspect`` as text."""
    from ..reports.summary import ENTRY_COLUMNS, entry_rows, facts, headline

    texts = [(label, clean(text)) for label, text in facts(report)]
    parts = [painted(clean(headline(report)), "head"), pairs(texts, report["safety"]["verdict"])]
    if report["entries"]:
        parts.append(table(ENTRY_COLUMNS, entry_rows(report), right=(3,), prose=2))
    if report["findings"]:
        parts.append("\n".join(_findings(report["findings"])))
    return "\n\n".join(parts)


def _findings(findings: Iterable[FindingReport]) -> Iterator[str]:
    """Yield the lines of findings. A step that helps with several findings is printed once, after the first."""
    said: set[str] = set()
    for finding in findings:
        level, step = finding["level"], finding["next"]
        text = wrapped(shortened(f"{level}: {clean(finding['message'])}"), 2)
        yield judged(level) + text.removeprefix(level)
        yield from () if step in said else step_lines(step)
        said.add(step)


@click.command(cls=GroupedCommand)
@input_options
@click.option("--names", is_flag=True, help="Print only the names, one per line.")
@listing
@sort_option(("file", "name", "bytes"))
@key_option
@format_option(ALL_FORMATS)
def keys(
    inputs: Inputs, names: bool, everything: bool, only: Globs, sort: str, key: str | None, working: Workers, style: str
) -> int:
    """List the keys of the state dicts: name, dtype, shape, device, bytes.

    Takes files, folders (searched for checkpoints by content) and globs. JSON is an object for one named file,
    otherwise a list. For a tensor spread over ranks (DTensor, ShardedTensor) the table shows which part the file holds;
    JSON has sharding, local_shape, placements, mesh, rank, and parts with their offsets and ranges.
    """
    inputs = inputs._replace(paths=as_one(inputs.paths))
    several = inputs.several
    how = {"key": key, "everything": everything, "globs": only, "sort": sort}
    headers = (("file",) if several else ()) + _COLUMNS
    each = FileCommand(
        "keys",
        style,
        partial(_listed, how=how, names=names, several=several, style=style),
        columns=Columns(headers, (len(headers) - 1,)) if style == "markdown" and not names else None,
    )
    label = "reading" if (style in ("json", "markdown") or not on_terminal()) else ""
    return run(each, inputs, inputs.checkpoints(), working, bar=label, spaced=style == "table" and not names)


#: Columns of a Markdown table; "file" comes first if there are several files.
_COLUMNS: Final = ("state_dict", "key", "path", "dtype", "shape", "device", "bytes")


def _listed(path: str, *, how: dict[str, Any], names: bool, several: bool, style: str) -> Answer:
    text = ""
    rows: list[tuple[str, ...]] = []
    with open_checkpoint(path) as checkpoint:
        survey = checkpoint.survey
        entries = select_entries(checkpoint, **how)
        remarks = problem_lines(checkpoint)
        if how["globs"] and not entries:
            remarks += unmatched_lines(checkpoint, how["globs"], how["key"], how["everything"])
        sizes: dict[Ref, int] = {}
        if style == "table" and survey.may_be_quantized and not (names or how["everything"] or how["globs"]):
            from ..checkpoint.quantized import quantization  # few models are quantized
            from ..reports.keys import plain_entries

            entries, sizes = plain_entries(entries, quantization(checkpoint))
    if style in JSON:
        from ..reports.keys import keys_report  # tables do not need it

        text = report_text(keys_report(checkpoint, entries), style)
    elif names:
        text = "\n".join(labels(entries))
    elif style == "table":
        parts = sections(survey, entries, sizes, together=how["everything"] and how["sort"] != "file")
        rest = 0 if how["everything"] else len(survey.tensors) - len(entries)
        texts = list(checkpoint.metadata) if checkpoint.container.holds_texts and not how["globs"] else []
        more = [f"metadata: {clean(join_limited(texts, most=6))}"] if {*texts} - {"format"} else []
        del survey, entries, checkpoint  # the text reuses their memory
        text = "\n".join([clean(path)] * several + [drawn(parts, rest), *more])
    else:
        rows = [((path,) if several else ()) + _cells(survey, entry) for entry in entries]
    return Answer(FileVerdict(path, "listed", 0), text, tuple(rows), tuple(remarks))


def labels(entries: Sequence[TensorEntry]) -> Sequence[str]:
    """Return the keys if all tensors are in one state dict, otherwise the paths; "." for a tensor that is the file."""
    places = {entry.state_dict for entry in entries}
    if len(places) == 1 and -1 not in places:
        return cleaned([entry.key or "." for entry in entries])
    return cleaned([entry.path or "." for entry in entries])


def _cells(survey: Survey, entry: TensorEntry) -> tuple[str, ...]:
    """Return a row of a Markdown table, which always has the same columns."""
    tensor = entry.tensor
    where = survey.state_dicts[entry.state_dict].path if entry.state_dict >= 0 else ""
    return where, entry.key, entry.path, tensor.dtype, shape_text(tensor.shape), tensor.location, str(tensor.own_bytes)


class Section(NamedTuple):
    """A table as a list of columns, and the line below it."""

    headers: tuple[str, ...]
    columns: tuple[list[str], ...]
    total: str


def sections(
    survey: Survey, listed: Sequence[TensorEntry], sizes: Mapping[Ref, int], *, together: bool = False
) -> list[Section]:
    """Return a table per state dict, and one for the tensors outside of them; ``together``: one table with paths.

    ``sizes`` has the bytes of entries that stand for several tensors.
    """
    groups: dict[int, list[TensorEntry]] = {}
    for entry in listed:
        groups.setdefault(-1 if together else entry.state_dict, []).append(entry)
    # Many tensors share few dtypes, shapes and sizes, so each shape and size is formatted only once.
    shape, size = cache(shape_text), cache("{:,}".format)
    tables = []
    for place, entries in groups.items():
        tensors = [entry.tensor for entry in entries]
        stored = [sizes.get(entry.ref) or entry.tensor.own_bytes for entry in entries]
        inner = _sharding_summary(survey, entries)
        columns = (
            [entry.path or "." for entry in entries] if place < 0 else [entry.key or "." for entry in entries],
            [_dtype(tensor) for tensor in tensors],
            [shape(tensor.shape) for tensor in tensors],
            *(_parts(survey, entries) if inner else ()),
            [tensor.location for tensor in tensors],
            [size(nbytes) for nbytes in stored],
        )
        base = survey.state_dicts[place].path if place >= 0 else None
        where = f" in {base!r}" if base else "" if base is not None or len(groups) == 1 else " outside of them"
        total = human_bytes(sum(stored))
        headers = ("path" if place < 0 else "key", "dtype", "shape", *(_PARTS if inner else ()), "device", "bytes")
        line = f"{pluralize(len(entries), 'tensor')}{clean(where)}, {total}"
        if inner:
            line += clean(f": what {inner.owner} had, spread over {inner.over}")
        tables.append(Section(headers, columns, line))
    return tables


#: Columns for tensors spread over ranks: the shape of the part in this file, its indices, and how it was cut.
_PARTS = ("here", "indices", "placements")


def _sharding_summary(survey: Survey, entries: Sequence[TensorEntry]) -> ShardingSummary | None:
    if not any(is_sharded(entry.tensor) for entry in entries):
        return None
    from ..checkpoint.sharding import sharding_summary  # few checkpoints have such tensors

    return sharding_summary(survey.reader, entries)


def _parts(survey: Survey, entries: Sequence[TensorEntry]) -> tuple[list[str], ...]:
    from ..checkpoint.sharding import sharding  # few checkpoints have such tensors

    rows = []
    for entry in entries:
        cut = sharding(survey.reader, entry.ref, entry.tensor)
        rows.append((cut.here, cut.slices(entry.tensor.shape), ", ".join(cut.placements)) if cut else ("", "", ""))
    return tuple(list(column) for column in zip(*rows))


def _dtype(tensor: Tensor) -> str:
    plain = tensor.kind in PLAIN_KINDS or is_sharded(tensor)
    return tensor.dtype if plain else f"{tensor.dtype} ({tensor.kind})"


def drawn(sections: Sequence[Section], rest: int) -> str:
    """Return the tables one below the other. ``rest`` is the number of tensors that they do not list."""
    parts = []
    for headers, columns, total in sections:
        # A narrow terminal loses the columns about rank parts first.
        spare = [headers.index(name) for name in (*_PARTS, "device", "dtype") if name in headers]
        right = range(headers.index("bytes"), len(headers))
        parts.append(f"{table(headers, (), columns=columns, right=right, spare=spare)}\n\n{total}")
    if rest and not parts:
        return f"no tensor matches; the file has {rest:,}"
    return "\n\n".join(parts or ["no tensors"]) + (f"; {rest:,} more in the file: --all" if rest else "")


@click.command(cls=GroupedCommand)
@one_path
@click.argument("key", metavar="KEY", shell_complete=completed("keys"))
@click.option("-o", "--output", type=AnyPath(), metavar="OUT", help="Save the tensor as .npy, for numpy.load.")
@force_option
@format_option()
def get(path: str, key: str, output: str | None, force: bool, style: str) -> int:
    """Print one entry or tensor: a scalar as it is, a dict as a tree, a tensor with its numbers.

    A tensor of more than 1,000 elements is shown by its edges; --json and -o give all of it. This needs neither
    torch nor NumPy, and runs nothing in the file.
    """
    from ..files.downloads import expect_plan
    from ..files.write.output import check_output, write_file
    from ..formats.claims import claims_of
    from ..reports.entries import entry_lines, find_value, json_pieces
    from ..values.npy import array_of, npy_plan

    if style != "table" and output is not None:
        raise click.UsageError("--format and -o exclude each other.")
    if force and output is None:
        raise click.UsageError("--force is for -o.")
    if output is not None:
        refuse_address(output)
    with open_checkpoint(path) as opened:
        say_problems(opened)
        checkpoint, place = find_value(opened, key)
        if output is not None:
            check_output(output, checkpoint.sources, force=force)
            array = array_of(checkpoint, place.ref, place.path)
            if output.lower().endswith(CHECKPOINTS):
                place_of = place.path or "."
                step = as_step(command("extract", path, place_of, output=output))
                if output.lower().endswith(SAFETENSORS):
                    step = as_step(command("edit", path, keep=place_of, output=output))
                raise RefusedError("get writes arrays (.npy)", path=output, next=step)
            if array.widened:
                say(f"{place.path or 'the tensor'}: {array.dtype} becomes {array.widened}, which has all its values")
            mode = file_mode(checkpoint.source)
            plan = npy_plan(array)
            plan = plan._replace(expected_checksums=claims_of(checkpoint, [plan]))
            expect_plan(plan, checkpoint.path)
            written = write_file(plan, output, checkpoint.sources, force=force, mode=mode)
            what = f"{array.widened or array.dtype} {shape_text(array.shape)}, {human_bytes(written.size)}"
            emit(clean(f"{path} {place.path or '.'} -> {written.path}: {what}"))
        elif style != "table":
            pieces = json_pieces(checkpoint, place.ref, place.path)
            # Strings in JSON contain no line breaks, so every line break here is layout between values.
            emit_pieces(pieces if style == "json" else (re.sub("\n *", "", piece) for piece in pieces))
        else:
            for line in entry_lines(checkpoint, place.ref, place.path):
                emit(clean(line))
    return 0

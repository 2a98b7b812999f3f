"""The page: one HTML file with its style, program and data, which loads nothing else.

Without JavaScript it shows facts, findings, checks, changes and entries.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any, Final

from ...base.globs import Globs, Patterns
from ...base.text import human_bytes, join_limited, pluralize, shape_text, visible
from ...files.sources import FilePath, Plan
from ...files.write.output import Written, check_output, write_file
from ...formats.opening import CheckpointOrPath, file_of, open_checkpoint, path_text
from ..comparing.diff import Scope, scope_words
from ..html import middle, number, text
from ..inspection import InspectReport
from ..summary import entry_rows, facts
from ..validate import ValidateReport
from .content import RENAMED, Comparison, Content, Tensors, content_of, packed

if TYPE_CHECKING:
    from ...files.write.copying import Progress

_ASSETS: Final = os.path.dirname(__file__)


def page_of(content: Content) -> str:
    """Return the page; equal content gives equal text."""
    style, program = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(program)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    comparison, several = content.comparison, content.inspection["tensors"] > 1
    name = os.path.basename(content.tensors.path.rstrip("/"))
    title = name if comparison is None else f"{name} and {os.path.basename(comparison.tensors.path.rstrip('/'))}"
    which, of = ("it", "") if comparison is None else ("A", " of A")
    listed = _section("all", "Tensors", tensors(content)) if content.tensors.rows else ""
    sections = [] if comparison is None else [_section("changes", "What changed", changes(content)), listed]
    sections.append(_section("about", f"What {which} is", summary(content.inspection, content.without_numbers)))
    found = findings(content.inspection, content.validation)
    sections.append(_section("findings", f"What to do with {which}", found))
    if comparison is not None:
        sections.append(_section("about-b", "What B is", summary(comparison.inspection)))
        found = findings(comparison.inspection, comparison.validation)
        sections.append(_section("findings-b", "What to do with B", found))
    if several:
        sections.append(_section("map", "Where the bytes are", "", hidden=True))
    if comparison is None:
        sections.append(listed)
    for key, title_of, inside in (
        ("entries", f"Other entries{of}", entries(content)),
        ("shared", f"Shared storages{of}", shared(content)),
        ("checks", f"Checks{of}", checks(content.validation)),
        ("checks-b", "Checks of B", "" if comparison is None else checks(comparison.validation)),
    ):
        if inside:
            sections.append(_section(key, title_of, inside))
    return _PAGE.format(
        policy=policy,
        title=escape(visible(title)),
        style=style,
        header=heading(content),
        main="\n".join(sections),
        data=packed(content),
        program=program,
    )


_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>{header}</header>
<main>
<noscript><p class="note">
Without JavaScript this page shows the facts and the findings, but no tensors.
</p></noscript>
{main}
</main>
<footer>Made by ckptool. This file holds everything that it shows, and asks for nothing else.</footer>
<script type="application/octet-stream" id="data">{data}</script>
<script>{program}</script>
</body>
</html>
"""


def _section(key: str, title: str, inside: str, hidden: bool = False) -> str:
    start = f'<section id={key} aria-labelledby="{key}-title"{" hidden" if hidden else ""}>'
    return f'{start}<h2 id="{key}-title">{title}</h2>{inside}</section>'


def _asset(name: str) -> str:
    """Return an asset file without the indentation of its lines, and without comment lines."""
    with open(os.path.join(_ASSETS, name), encoding="utf-8") as file:
        lines = (line.strip() for line in file)
        return "\n".join(line for line in lines if not line.startswith("//"))


def _hash(asset: str) -> str:
    return f"'sha256-{b64encode(sha256(asset.encode()).digest()).decode()}'"


# -- the parts

#: Maximum number of lines in lists.
_LISTED: Final = 100

#: The classes of words that are verdicts.
_TONES: Final = {
    **dict.fromkeys(("weights-only", "valid", "pass", "same"), "good"),
    **dict.fromkeys(("unsafe", "invalid", "unreadable", "fail", "error"), "bad"),
    **dict.fromkeys(("program", "unknown", "warning"), "doubtful"),
}

_SAFETY: Final = {"weights-only": "loads with weights_only=True: no code", "unsafe": "unsafe: it runs code"}

#: The columns of the table: sort key, heading, and whether it has numbers.
_IDENTITY: Final = (("dtype", "dtype", False), ("shape", "shape", False), ("bytes", "bytes", True))
_CHANGE: Final = (
    ("fate", "change", False),
    ("rel_l2", "rel. L2", True),
    ("cosine", "cosine", True),
    ("max_abs", "max |Δ|", True),
)
_NUMBERS: Final = (
    ("chart", "min … max", False),
    *((name, name, True) for name in ("min", "max", "mean", "std")),
    ("zeros", "zeros", True),
    ("bad", "NaN, Inf", True),
)
#: The meanings of short headings.
_HINTS: Final = {
    "rel_l2": "the L2 norm of the difference over that of B",
    "cosine": "the cosine of the angle between A and B",
    "max_abs": "the largest difference of two elements",
    "bad": "elements that are not finite",
}


def badge(word: str, words: str = "") -> str:
    """Return a verdict, coloured according to ``word``."""
    return f'<span class="badge {_TONES.get(word, "")}">{text(words or word)}</span>'


def heading(content: Content) -> str:
    """Return the top of the page: the path and the verdicts."""
    comparison = content.comparison
    names = [_path("A" if comparison is not None else "", content.tensors.path)]
    if comparison is not None:
        names.append(_path("B", comparison.tensors.path))
    return f"{''.join(names)}<p class=badges>{''.join(_badges(content))}</p>"


def _path(side: str, path: str) -> str:
    folder, name = os.path.split(path.rstrip("/"))
    mark = f"<b class=side>{side}</b> " if side else ""
    where = f"<small>{middle(folder + os.sep, 80)}</small><wbr>" if folder else ""
    level = "h1" if side != "B" else "p class=h1"
    return f'<{level} title="{text(path, 2000)}">{mark}{where}{middle(name, 70)}</{level.split()[0]}>'


def _badges(content: Content) -> Iterator[str]:
    comparison = content.comparison
    sides: list[tuple[str, Content | Comparison]] = [("" if comparison is None else "A: ", content)]
    if comparison is not None:
        sides.append(("B: ", comparison))
    for side, own in sides:
        safety, validation = own.inspection["safety"]["verdict"], own.validation
        yield badge(safety, side + _SAFETY.get(safety, f"safety {safety}"))
        failed = f": {pluralize(validation['failures'], 'check')} failed" if validation["failures"] else ""
        checked = " (checksums not read)" if validation["valid"] and "checksums" in validation["not_checked"] else ""
        yield badge(validation["status"], f"{side}{validation['status']}{failed}{checked}")
    for side, own in sides if not content.without_numbers else ():
        bad = sum(1 for row in own.tensors.rows if row["nans"] or row["infs"])
        words = f"NaN or Inf in {pluralize(bad, 'tensor')}" if bad else "no NaN, no Inf"
        yield badge("fail" if bad else "pass", side + words)
    if comparison is not None:
        diff = comparison.diff
        yield badge("same" if diff["same"] else "warning", diff["verdict"])


def summary(report: InspectReport, without_numbers: str = "") -> str:
    """Return the facts from ``inspect``."""
    size = f"{human_bytes(report['bytes'])}, {report['format']}, written by {report['writer']}"
    pairs = [("file", size), *facts(report)]
    if without_numbers:
        pairs.append(("numbers", f"none: {without_numbers}"))
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(words, 1000)}</dd></div>" for name, words in pairs)
    return f"<dl>{items}</dl>"


def findings(inspection: InspectReport, validation: ValidateReport) -> str:
    """Return the findings of ``inspect`` and the failed checks of ``validate``, with their commands."""
    items = [_finding(item["level"], item["message"], item["next"]) for item in inspection["findings"][:_LISTED]]
    known = {item["code"] for item in inspection["findings"]}
    if "weights-only" in known:
        known.add("global")  # the finding already names the globals
    step = validation["next"]
    if step in {item["next"] for item in inspection["findings"]}:
        step = ""
    for check in validation["checks"]:
        if check["status"] in ("fail", "warning") and known.isdisjoint(note["code"] for note in check["notes"]):
            level = "error" if check["status"] == "fail" else "warning"
            items.append(_finding(level, f"{check['name']}: {check['message']}", step))
            step = ""  # one command fixes all of them
    return f"<ul class=findings>{''.join(items)}</ul>" if items else "<p>Nothing to do.</p>"


def _finding(level: str, message: str, step: str) -> str:
    command = f"<pre class=command><code>{text(step, 2000)}</code></pre>" if step else ""
    return f"<li>{badge(level)} {text(message, 1000)}{command}</li>"


def checks(validation: ValidateReport) -> str:
    """Return the checks of ``validate``."""
    rows = ((badge(check["status"]), text(check["name"]), text(check["message"])) for check in validation["checks"])
    return table("Checks", ("status", "check", "result"), rows)


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], total: int = 0, right: int = 99) -> str:
    """Return a table of markup cells, right-aligned from the column ``right`` on; ``total`` counts all rows."""
    figure = ["" if place < right else " class=n" for place in range(len(headings))]
    head = "".join(f"<th scope=col{of}>{text(name)}</th>" for of, name in zip(figure, headings))
    lines = ["".join(f"<td{of}>{cell}</td>" for of, cell in zip(figure, row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p class=more>and {total - len(lines):,} more</p>" if total > len(lines) else ""
    frame = f'<div class=frame tabindex=0 role=group aria-label="{text(title)}">'
    caption = f"<caption class=unseen>{text(title)}</caption>"
    return f"{frame}<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"


# -- what changed


def changes(content: Content) -> str:
    """Return the differences between A and B, except values, which are in the table of tensors."""
    comparison = content.comparison
    assert comparison is not None
    diff = comparison.diff
    scope = Scope(diff["key"], diff["other_key"], frozenset(diff["ignored"]))
    words = scope_words(scope, Globs(diff["include"], diff["exclude"]))
    parts = [f"<p>{text(diff['stat'], 1000)}</p>"]
    if words:
        parts.append(f"<p class=aside>Compared with <code>{text(words)}</code></p>")
    if diff["not_measured"]:
        parts.append(f"<p class=aside>{text(diff['not_measured'])}</p>")
    total = diff["total"]
    if total is not None:
        figures = ((name, total[name]) for name in ("rel_l2", "cosine", "max_abs", "mean_abs"))
        items = "".join(
            f"<div><dt>{_FIGURE[name]}</dt><dd>{_figure(name, value)}</dd></div>" for name, value in figures
        )
        aside = f", without {pluralize(diff['counters'], 'counter')}" if diff["counters"] else ""
        parts.append(
            f"<p>The values of {pluralize(total['tensors'], 'tensor')} differ. Together{aside}:</p><dl>{items}</dl>"
        )
    lists = [
        f"<div><h3>{text(title)} <small>{len(rows):,}</small></h3>"
        f"{table(title, headings, rows[:_LISTED], len(rows))}</div>"
        for title, headings, rows in _lists(content.tensors, comparison)
        if rows
    ]
    return f"{''.join(parts)}<div class=lists>{''.join(lists)}</div>"


_FIGURE: Final = {"rel_l2": "relative L2", "cosine": "cosine", "max_abs": "max |Δ|", "mean_abs": "mean |Δ|"}


def _lists(ours: Tensors, comparison: Comparison) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    diff, theirs = comparison.diff, comparison.tensors
    places = [row for row, fate in enumerate(comparison.fate) if fate == RENAMED]
    pairs = ((ours.rows[row], theirs.rows[comparison.partners[row]]) for row in places)
    yield "Renamed", ("in A", "in B"), [(middle(one["path"]), middle(other["path"])) for one, other in pairs]
    renamed = {theirs.rows[row]["path"] for row in comparison.partners.values()}
    renamed |= {ours.rows[row]["path"] for row in places}
    for title, items in (("Only in A", diff["only_in_a"]), ("Only in B", diff["only_in_b"])):
        rows = [(middle(item["path"]), _content(item)) for item in items if item["path"] not in renamed]
        yield title, ("path", "what"), rows
    changed = [
        (middle(item["path"]), text(item["what"]), text(str(item["a"])), text(str(item["b"])))
        for item in diff["changed"]
    ]
    yield "Changed", ("tensor", "what", "A", "B"), changed
    entries = [(middle(item["path"]), _typed(item["a"]), _typed(item["b"])) for item in diff["entries"]]
    yield "Entries", ("entry", "A", "B"), entries
    kept = [*diff["container"], *diff["program"]]
    yield "File", ("what", "A", "B"), [(text(item["what"]), _value(item["a"]), _value(item["b"])) for item in kept]
    ties = [(middle(item["path"]), middle(item["with"]), item["only_in"].upper()) for item in diff["sharing"]]
    yield "Shared memory in one only", ("tensor", "with", "in"), ties
    order = [(middle(item["path"] or "."), text(item["a"]), text(item["b"])) for item in diff["order"]]
    yield "Order of keys", ("mapping", "first other key in A", "in B"), order


def _content(item: Mapping[str, Any]) -> str:
    if "shape" in item:
        return f"{text(item['dtype'])} {shape_text(item['shape'])}"
    if "value" in item:
        return _value(item["value"])
    return text(item["type"]) + (f", {pluralize(item['tensors'], 'tensor')}" if item["tensors"] else "")


def _value(value: object) -> str:
    return text(repr(value) if isinstance(value, str) else str(value))


def _typed(item: Mapping[str, Any]) -> str:
    return _value(item["value"]) if "value" in item else text(item["type"])


# -- tensors and entries


def tensors(content: Content) -> str:
    """Return the head of the table of tensors, whose rows the program adds."""
    head = [("name", "name", False)]
    head += _CHANGE if content.comparison is not None else ()
    head += _IDENTITY
    if not content.without_numbers:
        rows = content.tensors.rows
        known = {by for by, _, _ in _NUMBERS if any(row.get(by) is not None for row in rows)}
        head += [item for item in _NUMBERS if item[0] in known or item[0] in ("chart", "bad")]
    cells = "".join(
        f'<th scope=col data-by="{by}"{" class=n" if right else ""}'
        f"{f' title={chr(34)}{_HINTS[by]}{chr(34)}' if by in _HINTS else ''}>{label}</th>"
        for by, label, right in head
    )
    return (
        '<div class="frame rows" tabindex=0 role=group aria-label="All tensors"><table id=tensors>'
        f"<caption class=unseen>All tensors</caption><thead><tr>{cells}</tr></thead><tbody></tbody></table></div>"
    )


def _figure(by: str, value: object) -> str:
    """Return a figure from ``diff``; a cosine near 1 is shown by its distance from 1."""
    if by == "cosine" and isinstance(value, float) and 1e-12 < 1 - value < 5e-5:
        return f"1 - {1 - value:.2g}"
    return number(value)


def entries(content: Content) -> str:
    """Return the entries that are not tensors: the top level as in ``inspect``, and the levels below."""
    report = content.inspection
    parts = []
    if listed := entry_rows(report):
        rows = [tuple(map(text, row)) for row in listed[:_LISTED]]
        parts.append(table("Entries", ("entry", "type", "value", "bytes"), rows, len(listed), right=3))
    if content.entries:
        lines = "\n".join(text(line) for line in content.entries)
        parts.append(f"<details><summary>What is in them</summary><pre>{lines}</pre></details>")
    return "".join(parts)


def shared(content: Content) -> str:
    """Return the storages that several tensors use; "" if there are none."""
    users: dict[str, list[Mapping[str, Any]]] = {}
    for row in content.tensors.rows:
        if row["storage"]:
            users.setdefault(row["storage"], []).append(row)
    several = [rows for rows in users.values() if len(rows) > 1]
    lines = [
        (text(rows[0]["storage"]), f"{len(rows):,}", join_limited([middle(row["path"]) for row in rows], most=6))
        for rows in several[:_LISTED]
    ]
    return table("Shared storages", ("storage", "tensors", "names"), lines, len(several)) if lines else ""


def report(
    a: CheckpointOrPath,
    b: CheckpointOrPath | None = None,
    *,
    output: FilePath,
    force: bool = False,
    no_values: bool = False,
    key: str | None = None,
    other_key: str | None = None,
    ignore: Collection[str] = (),
    include: Patterns = (),
    exclude: Patterns = (),
    progress: Progress | None = None,
) -> Written:
    """Write a page on a checkpoint, and with ``b`` on the changes, to ``output``: one HTML file for a browser.

    ``key``, ``other_key``, ``ignore``, ``include`` and ``exclude`` are as for ``diff``; for one checkpoint ``key`` and
    the patterns choose the tensors. With ``no_values``, or without torch, the page has no values. Equal input gives
    equal bytes. Raise the errors of ``open``, ``diff`` and ``save``.

    >>> written = ckptool.report("model.pth", output="report.html", no_values=True)
    >>> open(written.path).readline()
    '<!doctype html>\\n'
    """
    one, other = file_of(a), None if b is None else file_of(b)
    name = path_text(output)
    scope, only = Scope(key, other_key, frozenset(ignore)), Globs(include, exclude)
    with ExitStack() as stack:
        first, second = (None if path is None else stack.enter_context(open_checkpoint(path)) for path in (one, other))
        assert first is not None
        sources = (*first.sources, *(second.sources if second is not None else ()))
        check_output(name, sources, force=force)
        page = page_of(content_of(first, second, scope, only, not no_values, progress))
        return write_file(Plan((page.encode("utf-8"),)), name, sources, force=force)

"""The page: one HTML file with its style, program and data, which loads nothing else."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Collection
from contextlib import ExitStack
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Final

from ...base.globs import Globs, Patterns
from ...base.text import visible
from ...files.sources import FilePath, Plan
from ...files.write.output import Written, check_output, write_file
from ...formats.opening import CheckpointOrPath, file_of, open_checkpoint, path_text
from ..comparing.diff import Scope
from . import markup
from .content import Choice, Content, content_of, packed

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
    table = _section("all", "Tensors", markup.tensors(content)) if content.tensors.rows else ""
    sections = [] if comparison is None else [_section("changes", "What changed", markup.changes(content)), table]
    sections.append(_section("about", f"What {which} is", markup.summary(content.inspection, content.without_numbers)))
    found = markup.findings(content.inspection, content.validation)
    sections.append(_section("findings", f"What to do with {which}", found))
    if comparison is not None:
        sections.append(_section("about-b", "What B is", markup.summary(comparison.inspection)))
        found = markup.findings(comparison.inspection, comparison.validation)
        sections.append(_section("findings-b", "What to do with B", found))
    if several:
        sections.append(_section("map", "Where the bytes are", "", hidden=True))
    if comparison is None:
        sections.append(table)
    for key, heading, inside in (
        ("entries", f"Other entries{of}", markup.entries(content)),
        ("shared", f"Shared storages{of}", markup.shared(content)),
        ("checks", f"Checks{of}", markup.checks(content.validation)),
        ("checks-b", "Checks of B", "" if comparison is None else markup.checks(comparison.validation)),
    ):
        if inside:
            sections.append(_section(key, heading, inside))
    return _PAGE.format(
        policy=policy,
        title=escape(visible(title)),
        style=style,
        header=markup.heading(content),
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
Without JavaScript this page shows the facts, the findings and the first tensors.
</p></noscript>
{main}
</main>
<footer>Made by ckptool. This file holds everything that it shows, and asks for nothing else.</footer>
<script type="application/octet-stream" id="data">{data}</script>
<script>{program}</script>
</body>
</html>
"""


def _section(key: str, heading: str, inside: str, hidden: bool = False) -> str:
    start = f'<section id={key} aria-labelledby="{key}-title"{" hidden" if hidden else ""}>'
    return f'{start}<h2 id="{key}-title">{heading}</h2>{inside}</section>'


def _asset(name: str) -> str:
    """Return an asset file without the indentation of its lines, and without comment lines."""
    with open(os.path.join(_ASSETS, name), encoding="utf-8") as file:
        lines = (line.strip() for line in file)
        return "\n".join(line for line in lines if not line.startswith("//"))


def _hash(text: str) -> str:
    """Return the policy source that allows exactly this text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


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
    choice = Choice(Scope(key, other_key, frozenset(ignore)), Globs(include, exclude), not no_values)
    with ExitStack() as stack:
        first, second = (None if path is None else stack.enter_context(open_checkpoint(path)) for path in (one, other))
        assert first is not None
        sources = (*first.sources, *(second.sources if second is not None else ()))
        check_output(name, sources, force=force)
        text = page_of(content_of(first, second, choice, progress))
        return write_file(Plan((text.encode("utf-8"),)), name, sources, force=force)

"""The ``inspect`` summary as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..base.text import cut, human_bytes
from ..reports.summary import ENTRY_COLUMNS, entry_rows, facts, headline
from .render import clean, pairs, step_lines, table
from .terminal import bar, columns, elided, judged, painted, wrapped

if TYPE_CHECKING:
    from ..reports.entries import BranchReport
    from ..reports.inspection import FindingReport, InspectReport

#: Overview columns that a narrow terminal loses, first to last.
SPARE = ("prefix", "devices", "layout", "keys", "bytes")


def summary(report: InspectReport) -> str:
    """Return the report of ``inspect`` as text."""
    texts = [(label, clean(text)) for label, text in facts(report)]
    parts = [painted(clean(headline(report)), "head"), pairs(texts, report["safety"]["verdict"])]
    if report["entries"]:
        parts.append(table(ENTRY_COLUMNS, entry_rows(report), right=(3,), prose=2))
    if "tree" in report:
        parts.append("\n".join(_tree_lines(report["tree"])))
    if report["findings"]:
        parts.append("\n".join(_findings(report["findings"])))
    return "\n\n".join(parts)


def _tree_lines(tree: list[BranchReport]) -> Iterator[str]:
    """Yield a line per branch. The bytes of its tensors and a bar with their share come first."""
    total = tree[0]["bytes"]
    most = columns()
    for line in tree:
        value = f" {cut(line['value'], 80)}" if line["value"] else ""
        text = clean(f"{'  ' * line['depth']}{cut(line['name'], 80)}: {line['type']}{value}")
        size = f"{human_bytes(line['bytes']):>9}  {bar(line['bytes'] / total)}" if line["bytes"] else " " * 21
        before = f"{size}  " if total else ""
        yield before + (elided(text, most - len(before)) if most else text)


def _findings(findings: Iterable[FindingReport]) -> Iterator[str]:
    """Yield the lines of findings. A step that helps with several findings is printed once, after the first."""
    said: set[str] = set()
    for finding in findings:
        level, step = finding["level"], finding["next"]
        text = wrapped(f"{level}: {clean(finding['message'])}", 2)
        yield judged(level) + text.removeprefix(level)
        yield from () if step in said else step_lines(step)
        said.add(step)

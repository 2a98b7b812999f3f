"""The report of an edit: its typed fields, and the lines that show it to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base.records import TypedDict
from ..base.steps import undo_step
from ..base.text import human_bytes, join_limited, pluralize, shortened, shown
from ..checkpoint.checkpoint import Change
from .render import clean, step_lines, to_json
from .terminal import painted

if TYPE_CHECKING:
    from typing import NotRequired

#: The most changes, and the most renamed tensors, listed for people; JSON lists all.
_SHOWN: Final = 40
_RENAMED: Final = 5


class ChangeReport(TypedDict):
    """One change at a path: the ``edit`` that made it, ``what`` it did, and ``notes`` with remarks.

    ``number`` counts the changed items, and ``kept`` the items of the same kind that stayed unchanged.
    """

    edit: str
    path: str
    number: int
    kept: int
    what: str
    notes: tuple[str, ...]


class UntrueReport(TypedDict):
    """A ``field`` of config.json that contradicts the weights: the ``old`` value, and the ``new`` one they imply."""

    field: str
    old: object
    new: object


class OutputReport(TypedDict):
    """The output of an edit. ``output`` is its path, or None if a dry run names none.

    ``exact`` is true if encoding the unedited pickle again gives the same bytes. ``shortage``, in a dry run, tells why
    the output would not fit on the disk. For a folder, ``copied`` lists the files copied unchanged, ``not_copied`` the
    files left behind, ``links`` the links that lead out of it, and ``config`` the fields of config.json that no longer
    match the weights; ``config_updated`` is true if the edit corrects them. For an edit in place, ``names`` counts the
    hard links of the file, ``unused_bytes`` the bytes of removed storages that stay in it, and ``reclaimed`` the bytes
    that --reclaim gave back to the disk, or is None if the edit can be undone. ``journal`` is the path of the file with
    the old header, if the edit replaced a header.
    """

    output: str | None
    output_bytes: int
    exact: bool
    copied: NotRequired[tuple[str, ...]]
    not_copied: NotRequired[tuple[str, ...]]
    links: NotRequired[tuple[str, ...]]
    config: NotRequired[list[UntrueReport]]
    config_updated: NotRequired[bool]
    shortage: NotRequired[str]
    traffic: NotRequired[dict[str, int]]
    names: NotRequired[int]
    unused_bytes: NotRequired[int]
    reclaimed: NotRequired[int | None]
    journal: NotRequired[str]


class EditReport(OutputReport):
    """The report of a command that writes. ``changed`` is false if there was nothing to do.

    If no state dict is left, ``pickled_modules`` holds the path of the first pickled module, and ``next`` the command
    that makes a state dict of it; otherwise both are empty. ``left_alone`` lists unedited entries that look like one.
    """

    schema: str
    path: str
    bytes: int
    dry_run: bool
    in_place: bool
    changed: bool
    changes: list[ChangeReport]
    pickled_modules: list[str]
    next: str
    left_alone: list[str]


class RenamedKey(TypedDict):
    """A tensor with its ``old`` and ``new`` key."""

    old: str
    new: str


class RenameReport(EditReport):
    """``ckptool.rename/1``: ``renamed`` lists the tensors whose keys changed."""

    renamed: list[RenamedKey]


class SanitizeReport(EditReport):
    """``ckptool.sanitize/1``: ``pickled`` is true if the input holds a pickle."""

    pickled: bool


def edit_head(report: EditReport) -> str:
    """Return the line with the input, the output and their sizes."""
    path, size, output_size = clean(report["path"]), report["bytes"], report["output_bytes"]
    if report["in_place"]:
        more = human_bytes(output_size - size)
        if not report["changed"]:
            return f"{path}: {human_bytes(size)}"
        if "journal" in report:
            rewritten = "" if size == output_size else f", and the file written again: {human_bytes(output_size)}"
            would = "nothing is written, the header would be" if report["dry_run"] else "the header is"
            return f"{path}: {would} replaced in place{rewritten}{_short(report)}"
        if report["dry_run"]:
            return f"{path}: nothing is written, {more} would be appended in place{_short(report)}"
        return f"{path}: edited in place, {human_bytes(size)} + {more}"
    if report["dry_run"]:
        more = f"{_short(report)}{_traffic(report)}"
        return f"{path}: nothing is written, the output would be {human_bytes(output_size)}{more}"
    output = clean(report["output"] or "")
    return f"{path} -> {output}: {human_bytes(size)} -> {human_bytes(output_size)}{_traffic(report)}"


def _traffic(report: EditReport) -> str:
    if "traffic" not in report:
        return ""
    traffic = report["traffic"]
    moved = [("down", "down"), ("up", "up"), ("copied", "copied on the server")]
    parts = [f"{human_bytes(traffic[name])} {words}" for name, words in moved if traffic[name]]
    return "; " + ", ".join([f"about {pluralize(traffic['requests'], 'request')}", *parts])


def _short(report: EditReport) -> str:
    return f"; there is no room: {report['shortage']}" if "shortage" in report else ""


def _lines_of(change: Change) -> list[str]:
    if len(change.notes) < 2:
        return [f"  {shortened(clean(change.words))}"]
    return [f"  {shortened(clean(change.head))}", *(f"    {shortened(clean(str(note)))}" for note in change.notes)]


def conversion_lines(report: EditReport) -> list[str]:
    """Return the lines about a conversion to another format, or [] without one."""
    changes = [Change(**change) for change in report["changes"]]
    return [line for change in changes if change.edit == "convert" for line in _lines_of(change)]


def change_lines(report: EditReport) -> list[str]:
    """Return the changes as lines for people."""
    changes = [change for change in report["changes"] if change["edit"] != "update-config"]
    lines = [line for change in changes[: shown(_SHOWN)] for line in _lines_of(Change(**change))]
    if len(changes) > shown(_SHOWN):
        lines.append(f"  and {pluralize(len(changes) - _SHOWN, 'more change')}: --format json")
    if not changes:
        lines.append("  there is nothing to edit in it")
    if not report["changed"]:
        same = report["bytes"] == report["output_bytes"]
        written = "the output is the input, byte for byte" if same else "the output has the same content"
        what = "the file stays as it is" if report["in_place"] else written
        lines.append(f"  nothing to do: {what}")
        lines += [
            f"  note: it contains a pickled module at {clean(path or 'the root')}: its names are attributes, not keys"
            for path in report["pickled_modules"]
        ]
        lines += step_lines(report["next"])
    if report.get("copied"):
        lines.append(f"  copied as they are: {clean(join_limited(report['copied']))}")
    lines += _config_lines(report)
    if report.get("not_copied"):
        lines.append(f"  note: not copied: {clean(join_limited(report['not_copied']))}")
    if report.get("links"):
        links = clean(join_limited(report["links"]))
        lines.append(f"  note: links out of the folder, not followed without --follow-links: {links}")
    if report["changed"] and not report["exact"]:
        lines.append("  note: another program wrote the pickle; the new one is equal, but not byte for byte")
    for path in report["left_alone"]:
        lines.append(f"  note: {clean(repr(path))} may be a state dict; it is unchanged unless --key names it")
    if report["in_place"] and report["changed"]:
        lines += _ways_back(report)
    return lines


def rename_lines(report: RenameReport) -> list[str]:
    """Return the changes as lines, with the first few renamed tensors."""
    renamed = report["renamed"]
    names = [clean(f"    {pair['old']} -> {pair['new']}") for pair in renamed[: shown(_RENAMED)]]
    more = len(renamed) - shown(_RENAMED)
    return [*change_lines(report), *names, *([f"    and {more:,} more"] if more > 0 else [])]


def sanitize_lines(report: SanitizeReport) -> list[str]:
    """Return the changes as lines, or one line about an unchanged file."""
    if report["changed"]:
        return change_lines(report)
    if report["pickled"] and (report["output"] or "").endswith(".safetensors"):
        return ["  nothing to do, except to rename it: torch.load reads a file named .safetensors as safetensors"]
    return ["  nothing to do: torch.load loads it; the output is the input, byte for byte"]


def _config_lines(report: EditReport) -> list[str]:
    lines = []
    for item in report.get("config", ()):
        old, new = (to_json({item["field"]: value}, None)[1:-1] for value in (item["old"], item["new"]))
        lines += [f"    {painted('- ' + old, 'bad')}", f"    {painted('+ ' + new, 'good')}"]
    if lines and report.get("config_updated"):
        return ["  config.json:", *lines]
    return ["  note: config.json no longer matches the weights; --update-config updates it:", *lines] if lines else []


def _ways_back(report: EditReport) -> list[str]:
    from ..reports.edit_steps import edit_step

    path = report["path"]
    lines = []
    if report["names"] > 1:
        lines.append(f"  note: the file has {report['names']:,} names (hard links): it changed under all of them")
    reclaimed = report.get("reclaimed")
    if reclaimed is not None:
        given = "would be given" if report["dry_run"] else "were given"
        lines.append(f"  note: {human_bytes(reclaimed)} {given} back to the disk: there is no undo")
    elif report["unused_bytes"]:
        lines.append(f"  note: {human_bytes(report['unused_bytes'])} of dropped data stay in the file")
    if not report["dry_run"] and "journal" in report:
        lines.append(f"  note: the old header is in {clean(report['journal'])}; restore it, or delete that file")
        lines += step_lines(undo_step(path).line)
    elif not report["dry_run"] and reclaimed is None:
        lines.append("  note: the old version is still in the file; restore it, or write a copy without it")
        lines += [
            *step_lines(undo_step(path).line),
            *step_lines(edit_step("edit", path, word="clean", repack=True).line),
        ]
    return lines

"""The tables of one run as plain text and Markdown, made from its JSON (figures.py). Nothing here measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any, Final

from tabulate import tabulate

NOTES = """\
Seconds are medians of wall time, ~ where the slowest run took over 1.5 times as long as the fastest. Peaks are the
largest ru_maxrss, which counts mapped file pages; 1 MB = 10^6 bytes. A ratio is ckptool's time by the other's: below 1
ckptool is faster. A peak is "small" where it is below what the start of a process shows. ckptool and cp leave the
output on the disk, torch.save leaves it to be written back later."""

PEAKS = "peaks"
#: The most characters of a failure's reason that a table shows.
_REASON: Final = 20
# The headings of the tables, by the beginning of the group's name.
_HEADINGS = {
    "read": "Reading",
    "write": "Writing a new file",
    "share blocks": "Writing a new file where blocks can be shared",
    "in place": "In place",
    "check": "Checking, computing, comparing",
    "convert": "Other formats",
    "dcp": "Other formats",
    "join": "The files of many ranks as one",
    "adapters": "Adapters",
    "dequantize": "Quantized weights",
    "cast": "Checking, computing, comparing",
    "edit": "Checking, computing, comparing",
    "compare": "Checking, computing, comparing",
    "match": "Checking, computing, comparing",
    "pieces": "The files of many ranks as one",
    "planning": "The files of many ranks as one",
    "measure": "Checking, computing, comparing",
    "report": "Checking, computing, comparing",
    "many files": "Many small files",
    "fleet": "Several processes",
    "workers": "Several processes",
    "linear": "Ten times the tensors",
    "remote": "Remote files",
    "peers": "Other tools",
}

Figures = Mapping[str, Any]


def plain(document: Figures) -> str:
    """Return everything for a terminal: the comparisons, the peaks, and the groups left out."""
    columns = ("file", "on", "ckptool", "s", "peak MB", "against", "s", "peak MB", "ratio", "new on disk", "target")
    lines = [
        (row["file"], _place(row), row["job"], *_cost(row), *_other(row), _disk(row), _target(row))
        for row in _compared(document)
    ]
    parts = [_github(lines, columns)] if lines else []
    peaks = _peaks(document)
    if peaks:
        parts.append(f"Peak memory of every command, {_file_of(document)}:\n\n{peaks}")
    left = [f"left out: {gone['what']}: {gone['why']}" for gone in document["left_out"]]
    return "\n\n".join([*parts, *(["\n".join(left)] if left else [])])


#: The rows at the head of docs/performance.md: the job, and the beginning of the name of the job it is compared with.
_HEADLINES: Final = (("keys", "torch.load"), ("strip-module", "torch.load"), ("strip-module --in-place", "cp"))


def headline(document: Figures) -> str:
    """Return a few rows for the 2 GB file as one Markdown table."""
    rows = [row for row in _compared(document) if row["reader"] and row["file"].startswith("2 GB")]
    lines = [
        (_code(job), _both(row), *_short(row))
        for job, against in _HEADLINES
        for row in rows
        if row["job"] == job and _short(row)[0].startswith(against)
    ]
    return _markdown(lines, ("2 GB, 400 tensors", "ckptool", "against", "ratio"))


def sections(document: Figures) -> str:
    """Return the rows with a target and those of other tools as Markdown: a section per heading."""
    columns = ("ckptool", "s", "MB", "against", "s", "MB", "ratio", "new on disk", "target")
    parts = []
    for heading in dict.fromkeys(_HEADINGS.values()):
        rows = [row for row in _compared(document) if _heading(row) == heading]
        rows = [row for row in rows if row["target"] or _answers_as_peer(row)]
        if rows:
            parts.append(f"### {heading}")
        for file, place in dict.fromkeys((row["file"], _place(row)) for row in rows):
            lines = [
                (_code(row["job"]), *_cost(row), *_other(row), _disk(row), _target(row))
                for row in rows
                if (row["file"], _place(row)) == (file, place)
            ]
            kept = [number for number in range(len(columns)) if any(line[number] for line in lines)]
            cells = [tuple(line[number] for number in kept) for line in lines]
            parts.append(f"{file}; {place}:\n\n{_markdown(cells, tuple(columns[number] for number in kept))}")
    left = [f"- {gone['what']}: {gone['why']}" for gone in document["left_out"]]
    return "\n\n".join([*parts, *(["Left out in this run:\n\n" + "\n".join(left)] if left else [])])


def peak(document: Figures) -> str:
    """Return a sentence about the largest peak of the commands that compute nothing, or "" if it was not measured."""
    rows = [row for row in document["rows"] if row["group"] == PEAKS and not row["torch"] and row["peak"]]
    if not rows:
        return ""
    most = max(rows, key=lambda row: float(row["peak"]))
    return (
        f"Of the {len(rows)} commands that compute no values, run on {_file_of(document)}, "
        f"`{most['job']}` takes the most memory: {most['peak'] / 1e6:.0f} MB."
    )


def machine(document: Figures) -> str:
    """Return the facts about the machine and the run, one per line."""
    return "\n".join(document["machine"])


def peers(document: Figures) -> str:
    """Return a Markdown list of what each of the other tools does."""
    return "\n".join(
        f"- **{peer['package']}** {peer['version'] or '(not installed)'}: {peer['does']}" for peer in document["peers"]
    )


def faster_peers(document: Figures) -> str:
    """Return a Markdown list of the comparisons in which another tool is faster than ckptool."""
    rows = [row for row in _compared(document) if (row["ratio"] or 0) > 1 and _is_peer(row)]
    return "\n".join(
        f"- `{row['job']}`, {row['file']}: {row['ratio']:.2f} times the time of {row['against']['job']}" for row in rows
    )


def _is_peer(row: Figures) -> bool:
    """Return whether a row compares ckptool with another tool, not with a bare start of Python or a copy."""
    other = row["against"]["job"]
    return "picklescan" in other or (row["group"].startswith("peers") and not other.startswith("python"))


def _answers_as_peer(row: Figures) -> bool:
    return bool(row["reader"] and row["against"]) and _is_peer(row) and "fails" not in row["against"]


def _compared(document: Figures) -> list[Figures]:
    return [row for row in document["rows"] if row["group"] != PEAKS]


def _file_of(document: Figures) -> str:
    return next(str(row["file"]) for row in document["rows"] if row["group"] == PEAKS)


def _peaks(document: Figures) -> str:
    rows = [row for row in document["rows"] if row["group"] == PEAKS]
    lines = [
        (_code(row["job"]), *_cost(row), "computes (torch or NumPy)" if row["torch"] else _target(row)) for row in rows
    ]
    return _markdown(lines, ("command", "s", "peak MB", "target")) if rows else ""


def _heading(row: Figures) -> str:
    return next(heading for start, heading in _HEADINGS.items() if row["group"].startswith(start))


def _place(row: Figures) -> str:
    return f"{_filesystem(row)}, {row['cache']}"


def _filesystem(row: Figures) -> str:
    return {"xfs": "XFS"}.get(row["filesystem"], str(row["filesystem"]))


def _cost(job: Figures) -> tuple[str, str]:
    if "fails" in job:
        return f"fails: {shorten(job['fails'], _REASON, placeholder=' ...')}", ""
    noisy = max(job["runs"]) > 1.5 * min(job["runs"])
    each = f" ({job['each'] * 1000:.2f} ms each)" if job.get("each") is not None else ""
    peak = "small" if job["peak"] is None else f"{job['peak'] / 1e6:,.0f}"
    return f"{'~' if noisy else ''}{_seconds(job['seconds'])}{each}", peak


def _other(row: Figures) -> tuple[str, str, str, str]:
    if row["against"] is None:
        return "", "", "", ""
    ratio = "" if row["ratio"] is None else _ratio(row["ratio"])
    return row["against"]["job"], *_cost(row["against"]), ratio


def _both(row: Figures) -> str:
    seconds, peak = _cost(row)
    if "fails" in row:
        return seconds
    number, _, rest = seconds.partition(" ")
    return f"{number} s{' ' if rest else ''}{rest}, {peak} MB"


def _short(row: Figures) -> tuple[str, str]:
    name, seconds, _, ratio = _other(row)
    if not name:
        return "", ""
    return (f"{name}: {seconds}", "") if "fails" in row["against"] else (f"{name}: {seconds} s", ratio)


def _disk(row: Figures) -> str:
    jobs = (row, row["against"] or {})
    return " / ".join(f"{max(job['disk'], 0) / 1e6:,.1f} MB" for job in jobs if job.get("disk") is not None)


def _target(row: Figures) -> str:
    if not row["target"]:
        return ""
    return row["target"] if row["met"] is None else f"{row['target']}: {'met' if row['met'] else 'missed'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def _code(name: str) -> str:
    """Return the name of a job as Markdown, with the command in backticks and a remark after a comma outside."""
    command, comma, rest = name.partition(", ")
    return f"`{command}`{comma}{rest}"


def _github(lines: Iterable[tuple[str, ...]], columns: tuple[str, ...]) -> str:
    return tabulate(lines, headers=columns, tablefmt="github", disable_numparse=True)


def _markdown(lines: Iterable[tuple[str, ...]], columns: tuple[str, ...]) -> str:
    """Return a table without padded cells, because one long cell would make every line as long."""
    rows = [columns, ("---",) * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)

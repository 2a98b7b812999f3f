"""The output formats of ``validate``: tables for people; JUnit, SARIF and GitHub annotations for CI."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from .. import __version__
from ..base.addresses import is_remote
from ..base.text import cut, human_bytes, shortened
from ..reports.summary import safety_words
from .render import advised_step, clean, table, to_json
from .terminal import judged

if TYPE_CHECKING:
    from ..reports.validate import CheckReport, GlobalReport, ValidateReport

#: The most notes of one check listed for people.
_SHOWN: Final = 20
#: Characters of a message in the table. A longer message is cut there, and printed in full below the table.
_WIDE: Final = 160
_BAD: Final = ("fail", "warning")


def _head(report: ValidateReport) -> str:
    size = human_bytes(report["bytes"]) if report["bytes"] is not None else ""
    facts = ", ".join(filter(None, (report["format"], size)))
    status = judged(report["status"].upper())
    return f"{clean(report['path'])}: {status}" + (f" ({facts})" if facts else "")


def table_lines(report: ValidateReport, verbose: bool) -> list[str]:
    """Return a table of the checks, the notes of checks with several notes, and the coverage."""
    if report["status"] == "unreadable" and not report["pickles"]:
        return [_head(report)]
    rows = [(check["name"], check["status"], cut(check["message"], _WIDE)) for check in report["checks"]]
    lines = [_head(report), *_safety(report), "", table(("check", "result", "what"), rows, verdicts=1, prose=2)]
    # The "readable" check is left out: stderr already explains in full why a file is not a checkpoint.
    for check in (check for check in report["checks"] if check["name"] != "readable"):
        if (check["notes_in_all"] > 1 or len(check["message"]) > _WIDE) and is_notable(check):
            lines += ["", f"{check['name']}:"]
            notes = check["notes"] if verbose else check["notes"][:_SHOWN]
            marked = [(note["level"], shortened(f"{note['level']}: {clean(note['message'])}")) for note in notes]
            lines += [f"  {judged(level)}{text.removeprefix(level)}" for level, text in marked]
            rest = check["notes_in_all"] - len(notes)
            lines += [f"  and {rest:,} more: {'--format json' if verbose else '--verbose'}"] if rest else []
    if verbose and report["globals"]:
        named = [(item["mapped"], item["word"], f"{item['times']:,}", _spelled(item)) for item in report["globals"]]
        lines += ["", table(("global", "word", "times", "in"), named, right=(2,))]
        rest = report["globals_in_all"] - len(report["globals"])
        lines += [f"and {rest:,} more"] if rest else []
    coverage = _partial(report) or "COMPLETE: every check was made"
    if report["strict"] and report["valid"] and report["inherent"]:
        lacks = f"{report['format']} has no checksums, which is no failure: 'ckptool lock --content' makes up for them"
        return [*lines, "", f"coverage {coverage}", f"--strict: {lacks}"]
    return [*lines, "", f"coverage {coverage}", *_strict(report), *_next(report)]


def _safety(report: ValidateReport) -> list[str]:
    if report["safety"] is None:
        return []
    words = shortened(clean(safety_words(report["safety"])))
    verdict = report["safety"]["verdict"]
    return [f"safety: {judged(verdict)}{words.removeprefix(verdict)}"]


def is_notable(check: CheckReport) -> bool:
    """Return whether a check is bad, or was not possible and lists the reasons."""
    return check["status"] in _BAD or (check["status"] == "not possible" and bool(check["notes"]))


def _next(report: ValidateReport) -> list[str]:
    if report["status"] == "unreadable":
        return []
    return advised_step(report["advice"], report["next"])


def _strict(report: ValidateReport) -> list[str]:
    """Return why --strict rejects a file that has no failure, or [] if it does not."""
    if not report["strict"] or report["failures"] or report["valid"]:
        return []
    return ["--strict: warnings, and checks that were not possible, are failures"]


def _spelled(item: GlobalReport) -> str:
    """Return the pickle that names a global, with its spelling there if Python 3 spells it differently."""
    spelled = f"{item['module']}.{item['name']}"
    return item["pickle"] if spelled == item["mapped"] else f"{item['pickle']}, as {item['module']} {item['name']}"


def _partial(report: ValidateReport) -> str:
    return "" if report["coverage"] == "complete" else f"PARTIAL: not checked: {', '.join(report['not_checked'])}"


def short_lines(report: ValidateReport) -> list[str]:
    """Return a line with the verdict, and one per check that did not pass."""
    if report["status"] == "unreadable":
        return [_head(report)]
    lines = [", ".join(filter(None, (_head(report), _partial(report)))), *(f"  {line}" for line in _strict(report))]
    bad = (check for check in report["checks"] if is_notable(check))
    rows = [
        (check["status"], shortened(clean(f"{check['status']}: {check['name']}: {check['message']}"))) for check in bad
    ]
    lines += [f"  {judged(status)}{text.removeprefix(status)}" for status, text in rows]
    return lines + _next(report)


# -- for programs


def _finds(report: ValidateReport) -> Iterator[tuple[str, str, str, int]]:
    """Yield (check, level, message, offset) for every failure and warning. An unknown offset is -1."""
    for check in report["checks"]:
        if check["status"] in _BAD and check["group"] == "expectations":
            # This one message says what was expected, and lists everything found instead.
            yield check["name"], "error", check["message"], -1
        elif is_notable(check):
            for note in check["notes"]:
                yield check["name"], note["level"], note["message"], note["offset"]
        elif _fails(check, report):
            yield check["name"], "warning", f"not checked: {check['message']}", -1


def github_lines(report: ValidateReport) -> list[str]:
    """Return workflow commands for GitHub Actions, one per annotation."""
    return [
        f"::{'error' if level == 'error' or report['strict'] else 'warning'}"
        f" file={_property(_relative(report['path']))},title={_property('ckptool ' + check)}::{_data(message)}"
        for check, level, message, _ in _finds(report)
    ]


def _relative(path: str) -> str:
    """Return the path without a leading ``./``, as a repository spells it; an address unchanged."""
    return path if not path or is_remote(path) else os.path.normpath(path)


def _data(text: str) -> str:
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(reports: Sequence[ValidateReport]) -> str:
    """Return JUnit XML: a test suite per file, a test case per check. A check that was not possible is skipped."""
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    root = Element("testsuites", name="ckptool validate")
    for report in reports:
        checks = report["checks"]
        skipped = sum(check["status"] == "not possible" and not _fails(check, report) for check in checks)
        unreadable = report["status"] == "unreadable"
        failed = sum(_fails(check, report) for check in checks)
        suite = SubElement(
            root,
            "testsuite",
            name=clean(report["path"]),
            tests=str(len(checks)),
            failures=str(0 if unreadable else failed),
            errors=str(failed if unreadable else 0),
            skipped=str(skipped),
        )
        if report["policy"]:
            properties = SubElement(suite, "properties")
            SubElement(properties, "property", name="policy", value=clean(report["policy"]))
        for check in checks:
            case = SubElement(suite, "testcase", name=check["name"], classname=clean(report["path"]))
            notes = "\n".join(clean(note["message"]) for note in check["notes"])
            if _fails(check, report):
                kind = "error" if unreadable else "failure"
                SubElement(case, kind, type=check["name"], message=clean(check["message"])).text = notes
            elif check["status"] == "not possible":
                SubElement(case, "skipped", message=clean(check["message"]))
            elif check["status"] == "warning":
                SubElement(case, "system-out").text = f"warning: {clean(check['message'])}\n{notes}"
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode")


def _fails(check: CheckReport, report: ValidateReport) -> bool:
    if not report["strict"] or check["name"] in report["inherent"]:
        return check["status"] == "fail"
    return check["status"] != "pass"


def sarif(reports: Sequence[ValidateReport]) -> str:
    """Return SARIF 2.1.0, with a rule per check and a result per note."""
    rules: dict[str, dict[str, Any]] = {}
    results = []
    for report in reports:
        for check, level, message, offset in _finds(report):
            rules.setdefault(check, {"id": check, "shortDescription": {"text": f"ckptool validate: {check}"}})
            place: dict[str, Any] = {"artifactLocation": {"uri": _uri(_relative(report["path"]))}}
            if offset >= 0:
                place["region"] = {"startLine": 1, "byteOffset": offset, "byteLength": 0}
            results.append(
                {
                    "ruleId": check,
                    "level": "error" if level == "error" or report["strict"] else "warning",
                    "message": {"text": clean(message)},
                    "locations": [{"physicalLocation": place}],
                }
            )
    over = [clean(report["path"]) for report in reports if report["status"] == "skipped"]
    notes = [{"level": "note", "message": {"text": f"skipped: {path}"}} for path in over]
    ran = all(report["status"] != "unreadable" for report in reports)
    policy = next((clean(report["policy"]) for report in reports if report["policy"]), "")
    invocation = {"executionSuccessful": ran} | ({"toolExecutionNotifications": notes} if notes else {})
    driver = {"name": "ckptool", "version": __version__, "rules": list(rules.values())}
    return to_json(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [
                {
                    "tool": {"driver": driver},
                    "invocations": [invocation],
                    "results": results,
                    **({"properties": {"policy": policy}} if policy else {}),
                }
            ],
        }
    )


def _uri(path: str) -> str:
    """Return the URI of a path. A relative path stays relative, because code scanning requires it."""
    parts = path.replace(os.sep, "/").encode("utf-8", "surrogateescape")
    return ("file://" if os.path.isabs(path) else "") + quote(parts)

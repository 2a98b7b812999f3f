"""The report of ``validate`` for people and for the machines of CI: table, JUnit, SARIF, GitHub annotations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from .. import __version__
from ..base.text import cut, human_bytes
from .render import clean, table, to_json

if TYPE_CHECKING:
    from ..reports.validate import CheckReport, GlobalReport, ValidateReport

#: Notes of one check that are printed one by one for people.
_SHOWN: Final = 20
#: Characters of a message in the table; what is longer stands below it.
_WIDE: Final = 160
_BAD: Final = ("fail", "warning")


def _head(report: ValidateReport) -> str:
    words = [report["format"] or "", human_bytes(report["bytes"]) if report["bytes"] is not None else ""]
    facts = ", ".join(filter(None, words))
    return f"{clean(report['path'])}: {report['status'].upper()}" + (f" ({facts})" if facts else "")


def table_lines(report: ValidateReport, verbose: bool) -> list[str]:
    """A table of the checks, the single finds of those that have several, and how much was looked at."""
    if report["status"] == "unreadable" and not report["pickles"]:
        return [_head(report)]
    rows = [(check["name"], check["status"], cut(check["message"], _WIDE)) for check in report["checks"]]
    lines = [_head(report), "", table(("check", "result", "what"), rows)]
    # Why a file is no checkpoint stands on stderr as a whole.
    told = (check for check in report["checks"] if check["name"] != "readable")
    for check in told:
        if (check["notes_in_all"] > 1 or len(check["message"]) > _WIDE) and _is_told(check):
            lines += ["", f"{check['name']}:"]
            notes = check["notes"] if verbose else check["notes"][:_SHOWN]
            lines += [f"  {note['level']}: {clean(note['message'])}" for note in notes]
            rest = check["notes_in_all"] - len(notes)
            lines += [f"  and {rest:,} more: {'--format json' if verbose else '--verbose'}"] if rest else []
    if verbose and report["globals"]:
        named = [(item["mapped"], item["word"], f"{item['times']:,}", _spelled(item)) for item in report["globals"]]
        lines += ["", table(("global", "word", "times", "in"), named, right=(2,))]
        rest = report["globals_in_all"] - len(report["globals"])
        lines += [f"and {rest:,} more"] if rest else []
    return [*lines, "", _coverage(report), *_strict(report), *_next(report)]


def _is_told(check: CheckReport) -> bool:
    """Is there something to say of it: it is bad, or could not be made for reasons that are named one by one?"""
    return check["status"] in _BAD or (check["status"] == "not possible" and bool(check["notes"]))


def _next(report: ValidateReport) -> list[str]:
    """What to do about it; of a file that is no checkpoint stderr tells."""
    return [f"  -> {clean(report['next'])}"] if report["next"] and report["status"] != "unreadable" else []


def _strict(report: ValidateReport) -> list[str]:
    """Why a file without a failure is not valid."""
    if not report["strict"] or report["failures"] or report["valid"]:
        return []
    return ["--strict: warnings, and checks that could not be made, are failures"]


def _spelled(item: GlobalReport) -> str:
    """Where it is named, and how, where Python 3 spells it otherwise."""
    spelled = f"{item['module']}.{item['name']}"
    return item["pickle"] if spelled == item["mapped"] else f"{item['pickle']}, as {item['module']} {item['name']}"


def _coverage(report: ValidateReport) -> str:
    if report["coverage"] == "complete":
        return "coverage COMPLETE: every check was made"
    return f"coverage PARTIAL: not checked: {', '.join(report['not_checked'])}"


def _partial(report: ValidateReport) -> str:
    """What was left unchecked, behind the verdict."""
    return "" if report["coverage"] == "complete" else f", PARTIAL: not checked: {', '.join(report['not_checked'])}"


def short_lines(report: ValidateReport) -> list[str]:
    """One line, and one for each check that did not pass."""
    if report["status"] == "unreadable":
        return [_head(report)]
    lines = [_head(report) + _partial(report), *(f"  {line}" for line in _strict(report))]
    bad = (check for check in report["checks"] if _is_told(check))
    lines += [f"  {check['status']}: {check['name']}: {clean(check['message'])}" for check in bad]
    return lines + _next(report)


# -- for machines -------------------------------------------------------------------------------------


def _finds(report: ValidateReport) -> Iterator[tuple[str, str, str, int]]:
    """(check, level, message, offset) of everything that failed or warns."""
    for check in report["checks"]:
        if check["status"] in _BAD and check["group"] == "expectations":
            # One says what was expected and all that was found instead.
            yield check["name"], "error", check["message"], -1
        elif _is_told(check):
            for note in check["notes"]:
                yield check["name"], note["level"], note["message"], note["offset"]
        elif check["status"] == "not possible" and report["strict"]:
            yield check["name"], "warning", f"not checked: {check['message']}", -1


def github_lines(report: ValidateReport) -> list[str]:
    """Workflow commands, one an annotation."""
    found = [
        f"::{'error' if level == 'error' or report['strict'] else 'warning'}"
        f" file={_property(_relative(report['path']))},title={_property('ckptool ' + check)}::{_data(message)}"
        for check, level, message, _ in _finds(report)
    ]
    if report["valid"]:
        text = _head(report) + _partial(report)
        found.append(f"::notice file={_property(_relative(report['path']))},title=ckptool::{_data(text)}")
    return found


def _relative(path: str) -> str:
    """The path as a repository spells it: without a leading ``./``."""
    return os.path.normpath(path) if path else path


def _data(text: str) -> str:
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(reports: Sequence[ValidateReport]) -> str:
    """A test suite a file, a test case a check; what could not be checked is skipped."""
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    root = Element("testsuites", name="ckptool validate")
    for report in reports:
        checks = report["checks"]
        skipped = 0 if report["strict"] else sum(check["status"] == "not possible" for check in checks)
        unreadable = report["status"] == "unreadable"
        failed = sum(_fails(check, report["strict"]) for check in checks)
        suite = SubElement(
            root,
            "testsuite",
            name=clean(report["path"]),
            tests=str(len(checks)),
            failures=str(0 if unreadable else failed),
            errors=str(failed if unreadable else 0),
            skipped=str(skipped),
        )
        for check in checks:
            case = SubElement(suite, "testcase", name=check["name"], classname=clean(report["path"]))
            notes = "\n".join(clean(note["message"]) for note in check["notes"])
            if _fails(check, report["strict"]):
                kind = "error" if unreadable else "failure"
                SubElement(case, kind, type=check["name"], message=clean(check["message"])).text = notes
            elif check["status"] == "not possible":
                SubElement(case, "skipped", message=clean(check["message"]))
            elif check["status"] == "warning":
                SubElement(case, "system-out").text = f"warning: {clean(check['message'])}\n{notes}"
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode")


def _fails(check: CheckReport, strict: bool) -> bool:
    return check["status"] == "fail" or (strict and check["status"] != "pass")


def sarif(reports: Sequence[ValidateReport]) -> str:
    """SARIF 2.1.0: a rule a check, a result a find."""
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
    ran = all(report["status"] != "unreadable" for report in reports)
    driver = {"name": "ckptool", "version": __version__, "rules": list(rules.values())}
    return to_json(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "invocations": [{"executionSuccessful": ran}], "results": results}],
        }
    )


def _uri(path: str) -> str:
    """Relative paths stay relative, as code scanning wants them."""
    parts = path.replace(os.sep, "/").encode("utf-8", "surrogateescape")
    return ("file://" if os.path.isabs(path) else "") + quote(parts)

"""What ``validate`` prints for machines, beyond the transcripts: each format by the rules of who reads it."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import torch
from conftest import CHECKPOINTS, FIXTURES, MANIFEST, by_name
from safetensors.torch import save_file

import ckptool
from ckptool import __version__
from ckptool.cli.main import run
from ckptool.cli.render import clean

Validate: TypeAlias = Callable[..., tuple[int, str]]


@pytest.fixture
def validate(capsys: pytest.CaptureFixture[str]) -> Validate:
    """Run ``validate`` here; (exit code, stdout)."""

    def called(*arguments: str | Path) -> tuple[int, str]:
        code = run(["validate", *map(str, arguments)])
        return code, capsys.readouterr().out

    return called


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(target: Path, fixture: str = "bare.pth") -> Path:
    """A copy of a fixture."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.write_bytes((FIXTURES / fixture).read_bytes())
    except OSError:
        pytest.skip("this file system has no such name")
    return target


def replaced(target: Path, old: str, new: str) -> Path:
    """``bare.pth`` with another text for one in its pickle."""

    def pickled(text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data

    with zipfile.ZipFile(FIXTURES / "bare.pth") as source, zipfile.ZipFile(target, "w") as made:
        for record in source.infolist():
            data = source.read(record)
            if record.filename.endswith("/data.pkl"):
                assert pickled(old) in data
                data = data.replace(pickled(old), pickled(new))
            made.writestr(record.filename, data)
    return target


def reports_of(out: str) -> list[dict[str, Any]]:
    found = json.loads(out)
    return found if isinstance(found, list) else [found]


# -- the same answer in every format ------------------------------------------------------------------


def test_every_fixture_has_an_answer_in_every_format(validate: Validate) -> None:
    """The formats agree with each other on every fixture, whole, damaged or none."""
    files = [item.path for item in MANIFEST]
    code, out = validate(*files, "--format", "json")
    assert code == 3
    reports = reports_of(out)
    assert [report["path"] for report in reports] == list(map(str, files))
    code, out = validate(*files, "--format", "jsonl")
    assert [json.loads(line) for line in out.splitlines()] == reports
    suites = ElementTree.fromstring(validate(*files, "--format", "junit")[1])
    assert [suite.get("name") for suite in suites] == list(map(str, files))
    results = json.loads(validate(*files, "--format", "sarif")[1])["runs"][0]["results"]
    lines = validate(*files, "--format", "github")[1].splitlines()
    finds = sum(len(check["notes"]) for report in reports for check in report["checks"] if check["status"] != "pass")
    assert len(results) == finds
    assert len(lines) == finds


@pytest.mark.parametrize("item", CHECKPOINTS, ids=by_name)
def test_a_report_agrees_with_itself(item: Any, validate: Validate) -> None:
    for options in ([], ["--strict"], ["--quick"]):
        code, out = validate(item.path, "--format", "json", *options)
        (report,) = reports_of(out)
        states = [check["status"] for check in report["checks"]]
        skipped = [check["name"] for check in report["checks"] if check["status"] == "not possible"]
        assert code == {"valid": 0, "invalid": 1, "unreadable": 3}[report["status"]]
        assert report["valid"] == (code == 0)
        assert (report["failures"], report["warnings"]) == (states.count("fail"), states.count("warning"))
        if report["error"] is None:
            assert report["not_checked"] == skipped
            assert report["coverage"] == ("partial" if skipped else "complete")
            bad = report["failures"] or (
                options == ["--strict"] and (report["warnings"] or set(skipped) - set(report["inherent"]))
            )
            assert report["valid"] == (not bad)
        else:
            assert (report["coverage"], report["valid"]) == ("partial", False)


# -- JUnit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_junit_counts_agree(strict: bool, validate: Validate) -> None:
    """The numbers of a suite are those of its cases, and a suite is green where ``validate`` says valid."""
    names = [item.path for item in MANIFEST]
    options = ["--strict"] if strict else []
    reports = reports_of(validate(*names, *options, "--format", "json")[1])
    root = ElementTree.fromstring(validate(*names, *options, "--format", "junit")[1].encode())
    assert root.tag == "testsuites"
    assert len(root) == len(reports) > 100
    for suite, report in zip(root, reports):
        assert suite.tag == "testsuite"
        cases = suite.findall("testcase")
        assert len(cases) == len(suite) == int(suite.get("tests", "")) == len(report["checks"])
        assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("errors", "")) == len(suite.findall("testcase/error"))
        assert int(suite.get("skipped", "")) == len(suite.findall("testcase/skipped"))
        red = int(suite.get("failures", "")) + int(suite.get("errors", ""))
        assert bool(red) != report["valid"]
        assert all(case.get("name") and case.get("classname") for case in cases)
        assert all(len(case) <= 1 for case in cases)


def test_junit_survives_what_xml_cannot_hold(here: Path, validate: Validate) -> None:
    path = replaced(here / "nonchar.pth", "conv1.weight", "a\ufffeb\uffff")
    out = validate(path, "--forbid", "*", "--format", "junit")[1]
    ElementTree.fromstring(out.encode())


# -- SARIF --------------------------------------------------------------------------------------------


def check_sarif(log: dict[str, Any]) -> list[dict[str, Any]]:
    """What SARIF 2.1.0 requires of the parts that are used; returns the results."""
    assert log["version"] == "2.1.0"
    assert urlsplit(log["$schema"]).scheme == "https"
    assert set(log) == {"$schema", "version", "runs"}
    (one,) = log["runs"]
    driver = one["tool"]["driver"]
    assert driver["name"] == "ckptool"
    assert driver["version"] == __version__
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    results = one["results"]
    assert isinstance(results, list)
    for result in results:
        assert set(result) == {"ruleId", "level", "message", "locations"}
        assert result["ruleId"] in ids
        assert result["level"] in ("none", "note", "warning", "error")
        assert isinstance(result["message"]["text"], str) and result["message"]["text"]
        for location in result["locations"]:
            place = location["physicalLocation"]
            assert re.fullmatch(r"[A-Za-z0-9._~/%:@!$&'()*+,;=-]+", place["artifactLocation"]["uri"])
            region = place.get("region", {"byteOffset": 0, "byteLength": 0})
            assert region["byteOffset"] >= 0 and region["byteLength"] >= 0
    return list(results)


@pytest.mark.parametrize("strict", [False, True])
def test_sarif_has_what_the_standard_requires(strict: bool, validate: Validate) -> None:
    options = ["--strict"] if strict else []
    names = [item.path for item in MANIFEST]
    results = check_sarif(json.loads(validate(*names, *options, "--format", "sarif")[1]))
    assert {result["level"] for result in results} == ({"error"} if strict else {"error", "warning"})
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results}
    assert uris <= {path.as_uri() for path in names}


@pytest.mark.parametrize("name", ["a b#c?d%.pth", "a:b,c.pth", "ö\u202e\n.pth", os.fsdecode(b"bad\xff.pth")])
def test_sarif_paths_are_uris(here: Path, name: str, validate: Validate) -> None:
    put(here / name, "zip_wrong_crc.pth")
    (result,) = check_sarif(json.loads(validate(name, "--format", "sarif")[1]))
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert not urlsplit(uri).scheme
    assert os.fsdecode(unquote(uri, errors="surrogateescape").encode("utf-8", "surrogateescape")) == name


# -- GitHub -------------------------------------------------------------------------------------------


def read_command(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner reads it."""
    assert line.startswith("::")
    head, data = line[2:].split("::", 1)
    name, _, words = head.partition(" ")
    fields = dict(word.split("=", 1) for word in words.split(","))
    for token, text in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        fields = {key: value.replace(token, text) for key, value in fields.items()}
        data = data if text in ":," else data.replace(token, text)
    return name, fields, data


@pytest.mark.parametrize("name", ["a:b,c%.pth", "100%0A.pth", "x::error::y.pth", "new\nline.pth", "a b=c.pth"])
def test_github_paths_and_messages_come_back(here: Path, name: str, validate: Validate) -> None:
    put(here / name, "zip_wrong_crc.pth")
    code, out = validate(name, "--format", "github")
    assert code == 1
    (line,) = out.splitlines()
    (report,) = reports_of(validate(name, "--format", "json")[1])
    (message,) = [check["message"] for check in report["checks"] if check["status"] == "fail"]
    assert read_command(line) == ("error", {"file": clean(name), "title": "ckptool checksums"}, message)
    put(here / name)
    assert validate(name, "--format", "github") == (0, "")


@pytest.mark.parametrize("name", ["legacy_bare.pth", "weights.safetensors"])
def test_strict_is_about_warnings_and_not_about_checksums_that_a_format_lacks(
    name: str, here: Path, validate: Validate
) -> None:
    if name.endswith(".safetensors"):
        save_file({"w": torch.ones(3)}, here / name)
    else:
        put(here / name, name)
    code, out = validate(name, "--strict")
    assert code == 0 and "PARTIAL" in out and "lock --content" in out
    assert validate(name, "--strict", "--quick")[0] == 1, "what was left out still counts"
    (suite,) = ElementTree.fromstring(validate(name, "--strict", "--format", "junit")[1])
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    ckptool.write_lock(name, "lock.json", content=True)
    code, out = validate(name, "--strict", "--lock", "lock.json")
    assert code == 0 and "COMPLETE" in out and "every tensor is as locked" in out


@pytest.mark.parametrize("words", [["inspect"], ["keys", "--all"], ["get", "."], ["validate"]])
@pytest.mark.parametrize("style", ["json", "table", "sarif", "junit", "github", "jsonl", "markdown"])
def test_nothing_of_a_file_is_a_command_of_github(
    here: Path, style: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    keys = ["##[error]x", "a##[group]", "::error::x", "  ::set-output name=x::y", "x ##[warning] ##[debug]y"]
    torch.save({key: torch.zeros(2) for key in keys} | {"note": "##[error]::error::"}, "x##[error].pth")
    forbid = ["--forbid", "*"] if words[0] == "validate" else []
    run([*words, "x##[error].pth", *forbid, "--format", style])
    told = capsys.readouterr()
    for line in (told.out + told.err).splitlines():
        assert "##[" not in line
        assert style == "github" or not line.lstrip().startswith("::")
    if style == "json" and told.out:
        assert "x##[error].pth" in json.dumps(json.loads(told.out))


# -- JSON ---------------------------------------------------------------------------------------------


def test_json_is_an_object_for_one_file_and_a_list_for_more(here: Path, validate: Validate) -> None:
    put(here / "release" / "one.pth")
    assert isinstance(json.loads(validate("release/one.pth", "--format", "json")[1]), dict)
    # A folder may have one checkpoint today and two tomorrow.
    assert [report["path"] for report in json.loads(validate("release", "--format", "json")[1])] == ["release/one.pth"]
    put(here / "release" / "two.pth")
    assert len(json.loads(validate("release/*.pth", "--format", "json")[1])) == 2


# -- folders and globs --------------------------------------------------------------------------------


def found_in(validate: Validate, *paths: str) -> list[str]:
    lines = map(json.loads, validate(*paths, "--format", "jsonl")[1].splitlines())
    return [report["path"] for report in lines if report["status"] != "skipped"]


@pytest.fixture
def tree(here: Path) -> Path:
    """A folder of checkpoints, of what stands in place of one, and of other things."""
    put(here / "t" / "a.pth")
    put(here / "t" / "deep" / "er" / "weights", "legacy_bare.pth")
    put(here / "t" / "cut.ckpt", "truncated.pth")
    put(here / "t" / "lfs.pth", "lfs_pointer.pth")
    put(here / "t" / "lfs.bin", "lfs_pointer.pth")
    put(here / "t" / "page.pth", "html_page.pth")
    put(here / "t" / "empty.pt", "empty.pth")
    for other in ("array.npy", "arrays.npz", "model.gguf", "model.safetensors", "torchscript.pt", "exported.pt2"):
        put(here / "t" / "others" / other, other)
    put(here / "t" / "others" / "package.pt", "package.pt")
    put(here / "t" / "others" / "pointer.txt", "lfs_pointer.pth")
    put(here / "t" / "others" / "page.html", "html_page.pth")
    put(here / "t" / ".git" / "hidden.pth")
    put(here / "elsewhere" / "linked.pth")
    (here / "t" / "link").symlink_to(here / "elsewhere", target_is_directory=True)
    return here


def test_a_folder_is_searched_by_content(tree: Path, validate: Validate) -> None:
    claims = ["t/a.pth", "t/cut.ckpt", "t/empty.pt", "t/lfs.bin", "t/lfs.pth", "t/page.pth", "t/deep/er/weights"]
    programs = ["t/others/exported.pt2", "t/others/package.pt", "t/others/torchscript.pt"]
    claims += [programs[0], "t/others/model.gguf", "t/others/model.safetensors", *programs[1:]]
    assert found_in(validate, "t") == claims
    statuses = [json.loads(line)["status"] for line in validate("t", "--format", "jsonl")[1].splitlines()]
    told = [status for status in statuses if status != "skipped"]
    assert told == ["valid", "invalid", *["unreadable"] * 4, *["valid"] * 6]
    for path in claims[-5:]:
        (tree / path).unlink()
    assert validate("t/others")[0] == 3
    assert found_in(validate, "t/others") == ["t/others"]  # the folder itself: nothing is in it


def test_globs(tree: Path, validate: Validate) -> None:
    assert found_in(validate, "t/*.pth") == ["t/a.pth", "t/lfs.pth", "t/page.pth"]
    assert found_in(validate, "t/**/weights") == ["t/deep/er/weights"]
    assert found_in(validate, "t/?.pth", "t/[ac]*.*") == ["t/a.pth", "t/cut.ckpt"]
    assert found_in(validate, "t/d*") == ["t/deep/er/weights"]
    assert validate("t/*.nothing")[0] == 3
    # A pattern without a match does not hide the others.
    code, out = validate("t/*.nothing", "t/a.pth", "--format", "jsonl")
    assert (code, [json.loads(line)["status"] for line in out.splitlines()]) == (3, ["unreadable", "valid"])


def test_a_name_with_brackets_is_a_name_first(here: Path, validate: Validate) -> None:
    put(here / "epoch[1].pth")
    put(here / "epoch1.pth")
    assert found_in(validate, "epoch[1].pth") == ["epoch[1].pth"]


# -- loading ------------------------------------------------------------------------------------------


def test_what_torch_refuses_is_a_failure_whatever_it_says(here: Path, validate: Validate) -> None:
    pytest.importorskip("torch")
    path = replaced(here / "tag.pth", "cpu", "needs torch")
    code, out = validate(path, "--load", "--format", "json")
    assert json.loads(out)["checks"][-1]["status"] == "fail"
    assert code == 1


@pytest.mark.parametrize(
    ("name", "damaged"),
    [("none.pth", False), ("lfs_pointer.pth", False), ("array.npy", False), ("empty.pth", True), ("zeros.pth", True)],
)
def test_what_is_damaged(name: str, damaged: bool, validate: Validate, here: Path) -> None:
    """A missing file and an intact one of another kind are unreadable, but not damaged."""
    if name != "none.pth":
        put(here / name, name)
    code, out = validate(name, "--json")
    assert code == 3 and json.loads(out)["damaged"] is damaged
    code, out = validate("folder", "--json")
    assert code == 3 and json.loads(out)["damaged"] is False

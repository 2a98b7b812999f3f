"""Names come from the file: nothing of them acts on a terminal, decides a path, or breaks the JSON."""

from __future__ import annotations

import json
import os
import unicodedata
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import say
from conftest import FIXTURES
from crafted_files import (
    FLOATS,
    ROOT,
    TENSOR,
    Code,
    Entry,
    altered,
    archive,
    call,
    dumped,
    entries,
    name,
    plain,
    storage,
    tensor,
    with_record,
)

from ckptool.cli.main import run

#: What a name could do: clear the screen, set a title, ring, turn the direction of text, begin a line of its own.
ACTING = {
    "escape": "\x1b[2J\x1b]0;title\x07",
    "C1": "\x9b2J\x85",
    "bidi": "\u202etxt.\u2066\u200f\u061c",
    "lines": "a\nb\rc\x0bd\x0ce\u2028f\u2029g",
    "NUL and DEL": "\0\x7f",
    "surrogate": "\ud800x",
    "marks": "\ufeff\u200e",
    "markup": '"><script>]]>&amp;|`$(reboot)`::error::',
}


def made(text: str) -> dict[str, bytes]:
    """A file for each place in which a name can stand."""
    unknown = Code(b"\x8c" + bytes([len(raw(text))]) + raw(text) + b"\x8c\x01x\x93")
    files = {
        "key": plain({f"w{text}": TENSOR, text: 1}),
        "prefix": plain({f"module.{text}.w": TENSOR, f"module.{text}.v": TENSOR}),
        "value": plain({"w": TENSOR, "note": text}),
        "global": plain({"w": TENSOR, "x": Code(unknown.raw + b")R")}),
        "argument": plain({"x": call(name("posix", "system"), text)}),
        "location": plain({"w": tensor(of=storage(location=f"cuda:{text}"))}),
        "storage key": plain({"w": tensor(of=storage(f"0{text}"))}, {f"0{text}" if utf8(text) else "0": FLOATS}),
        "missing storage": plain({"w": tensor(of=storage(f"9{text}"))}),
        "damaged": altered("data/0", entries({f"w{text}": TENSOR}), listed={"crc": 5}),
        "bad geometry": plain({f"w{text}": tensor((9,))}),
        "version": altered("version", data=raw(text)),
        "byteorder": altered("byteorder", data=raw(text)),
        "cut": plain({f"w{text}": TENSOR})[:-300],
    }
    if utf8(text):
        files["record"] = with_record(Entry(f"{ROOT}/{text}.pkl", dumped(call(name("posix", "system"), "x"))))
        files["root"] = archive(entries(root=f"seed{text}").values())
        files["local name"] = altered("data/0", local_name=text.encode())
    return files


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def acting(said: str) -> str:
    """The characters in a text that a terminal could obey, but for the ends of lines."""
    kinds = ("Cc", "Cs", "Zl", "Zp")
    found = {char for char in said if unicodedata.category(char) in kinds or char in BIDI}
    return "".join(sorted(found - {"\n"}))


BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")

CALLS = (
    ("validate", "-v"),
    ("validate", "--format", "github"),
    ("validate", "--format", "junit"),
    ("validate", "--format", "sarif"),
    ("inspect",),
    ("get",),
    ("keys",),
    ("keys", "--names"),
    ("keys", "--format", "markdown"),
    ("strip-module", "--dry-run"),
    ("salvage", "--dry-run"),
)


@pytest.mark.parametrize("kind", ACTING)
def test_no_name_acts_on_the_terminal(kind: str, tmp_path: Path) -> None:
    for place, data in made(ACTING[kind]).items():
        path = tmp_path / f"{place}.pth"
        path.write_bytes(data)
        for arguments in CALLS:
            said = say(*arguments, path, *["."] * (arguments == ("get",)))
            assert said.code in (0, 1, 3, 4), (place, arguments, said)
            assert (place, arguments, acting(said.all)) == (place, arguments, "")


@pytest.mark.parametrize("kind", ACTING)
def test_json_is_json_and_tells_the_names_unchanged(kind: str, tmp_path: Path) -> None:
    for place, data in made(ACTING[kind]).items():
        path = tmp_path / f"{place}.pth"
        path.write_bytes(data)
        for arguments in (("validate",), ("inspect",), ("keys", "--all"), ("salvage", "--dry-run")):
            said = say(*arguments, "--format", "json", path)
            if said.out:
                told = json.loads(said.out)
                assert acting(said.out) == ""
                if place == "key" and arguments[0] == "keys":
                    assert [item["key"] for item in told["tensors"]] == [f"w{ACTING[kind]}"]


@pytest.mark.parametrize("style", ["github", "short"])
def test_a_name_begins_no_line_of_its_own(style: str, tmp_path: Path) -> None:
    """A workflow command of GitHub begins a line: a name must not."""
    path = tmp_path / "seed.pth"
    path.write_bytes(plain({"w\n::stop-commands::x": tensor((9,))}))
    said = say("validate", path, *(("--format", "github") if style == "github" else ()))
    assert [line for line in said.all.splitlines() if line.startswith("::stop")] == []


def test_xml_stays_xml(tmp_path: Path) -> None:
    for kind, text in ACTING.items():
        for place, data in made(text).items():
            path = tmp_path / "seed.pth"
            path.write_bytes(data)
            said = say("validate", "--format", "junit", path)
            assert ElementTree.fromstring(said.out) is not None, (kind, place)


def test_the_name_of_the_file_itself_is_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\nb\u202e.pth"
    path.write_bytes(plain({"module.w": TENSOR}))
    for arguments in (*CALLS, ("validate", "--format", "json")):
        said = say(*arguments, path, *["."] * (arguments == ("get",)))
        assert said.code in (0, 1), said
        assert acting(said.all) == "", arguments


# -- paths ------------------------------------------------------------------------------------------------------


def test_no_name_in_a_file_decides_a_path(tmp_path: Path) -> None:
    """Record names and keys are never names of files: salvage and strip write the output and nothing else."""
    inside = tmp_path / "inside"
    inside.mkdir()
    key = "../../outside"
    path = inside / "seed.pth"
    path.write_bytes(plain({"module.w": tensor(of=storage(key))}, {key: FLOATS}))
    before = set(tmp_path.rglob("*"))
    for command in ("salvage", "strip-module"):
        out = inside / f"{command}.pth"
        said = say(command, path, "-o", out)
        assert set(tmp_path.rglob("*")) - before <= {out, inside / "salvage.pth"}, said
    assert not os.path.lexists(tmp_path.parent / "outside")


# -- the name of the writer ------------------------------------------------------------------------------------
# The first line of inspect says who wrote a file, in the words of the file.


@pytest.mark.parametrize(
    ("name", "record"),
    [("torchscript.pt", "version"), ("package.pt", "python_version"), ("exported.pt2", "archive_version")],
)
def test_the_name_of_the_writer_does_not_act_on_the_terminal(
    name: str, record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(FIXTURES / name) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            new.writestr(item.filename, b"3\x1b[31m\xc2\x9b" if item.filename.endswith(f"/{record}") else data)
    run(["inspect", str(path)])
    out, err = capsys.readouterr()
    assert out and not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in (out + err).replace("\n", ""))

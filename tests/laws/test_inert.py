"""Law 1, inert: whatever a file holds, nothing of it is imported, executed or opened; and nothing of it reaches the
terminal that could act there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import FIXTURES, MANIFEST, ROOT, corpus_files, sample
from crafted_files import Code, put, storage, tensor

import ckptool
from ckptool.checkpoint.configurations import OTHER_CONFIGS
from ckptool.cli.main import run

FILES = [item.path for item in MANIFEST] + corpus_files()
#: Files for the run that is watched: those with code, and a part of the others.
WITH_CODE = [path for path in FILES if path.name.startswith(("hostile", "unknown", "whole"))]
WATCHED_FILES = [*WITH_CODE, *sample([path for path in FILES if path not in WITH_CODE], 4)]
PACKAGE = Path(ckptool.__file__).parent
every = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)

# -- nothing runs -----------------------------------------------------------------------------------------------

#: Works on every file that it is given a name of, with an audit hook that notes each event of the interpreter.
WATCHED = """
    import importlib, io, json, os, pkgutil, sys
    import ckptool
    from ckptool.cli.main import run

    folder, benign, *paths = sys.argv[1:]
    watching, events, opened = [], {}, {}

    def hook(event, arguments):
        if watching:
            events.setdefault(event, repr(arguments)[:200] + " in " + watching[0])
            if event == "open":
                path, mode, flags = arguments
                writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
                opened.setdefault(watching[0], set()).add((str(path), writes))

    def work(path):
        out = os.path.join(folder, "out.pth")
        writing = ["-o", out, "--force"]
        for call in (
            ["inspect"],
            ["inspect", "--map-location", "cpu", "--format", "json"],
            ["keys", "--all"],
            ["keys", "--key", "state_dict", "--format", "jsonl"],
            ["keys", "--names", "--include", "*weight"],
            ["keys", "--format", "markdown"],
            ["strip-module", "--repeat", "all", *writing],
            ["strip-module", "--wrappers", "--format", "json", *writing],
            ["add-module", *writing],
            ["remap", "--to", "cpu", "--include-cpu", "--strings", *writing],
            ["remap", "--visible", "1", *writing],
            ["sanitize", *writing],
            ["sanitize", "--as-state-dict", "--drop-unknown", *writing],
        ):
            sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
            code = run([*call, path])
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            assert code in (0, 2, 3, 4), (call, path, code)
        try:
            with ckptool.open(path) as checkpoint:
                edits = (ckptool.strip_module, ckptool.add_module, lambda c: ckptool.remap(c, "cuda:1"))
                for edit in edits:
                    ckptool.save(edit(checkpoint), out, force=True)
                ckptool.save(checkpoint, out, force=True)
        except ckptool.CkptoolError:
            pass

    # Modules of ckptool itself are imported when a file may be one of theirs.
    for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # What ckptool itself imports late, it has imported then: tabulate, json, csv, zlib, hashlib, a codec of protocol 0.
    for name in ("ddp4_training.pth", "tensor.pt", "gzipped.pth", "legacy_protocol0.pth", "torch01.tar"):
        work(os.path.join(benign, name))
    for codec in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):  # of texts in search of configuration
        bytes(4).decode(codec)
    sys.addaudithook(hook)
    for path in paths:
        watching[:] = [path]
        work(path)
        watching.clear()
    modules = sorted(sys.modules)
    if "control" in os.environ.get("CKPTOOL_TEST", ""):
        watching[:] = ["control"]
        import pickle, wave
        pickle.loads(b"cposix\\nsystem\\n(S'true'\\ntR.")
        exec("1")
        open(os.path.join(folder, "..", "elsewhere"), "w").close()
        watching.clear()
    told = {"events": events, "opened": {key: sorted(value) for key, value in opened.items()}, "modules": modules}
    print(json.dumps(told))
"""

#: What reading and writing files raises. Everything else, known today or not, is something that ran.
HARMLESS = {
    *("open", "os.listdir", "os.chmod", "fcntl.flock", "os.link", "os.rename", "os.remove", "builtins.id"),
    "array.__new__",  # numbers in a row, such as the offsets of strings
}


class Watched(NamedTuple):
    """``events`` by name with one example; ``opened`` the (path, for writing) of each file that was worked on."""

    events: dict[str, str]
    opened: dict[str, list[tuple[str, bool]]]
    modules: set[str]
    folder: Path


def watched(folder: Path, paths: list[Path], control: bool = False) -> Watched:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CKPTOOL_TEST": "control" if control else ""}
    command = [sys.executable, "-c", textwrap.dedent(WATCHED), str(folder), str(FIXTURES), *map(str, paths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    opened = {path: [(name, writes) for name, writes in names] for path, names in told["opened"].items()}
    return Watched(told["events"], opened, set(told["modules"]), folder)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """One run over the fixtures and the real checkpoints, and over a file made to provoke."""
    place = tmp_path_factory.mktemp("inert")
    provoking = place / "provoking.pth"
    provoking.write_bytes(b"")
    nasty_checkpoint(provoking)
    (place / "outputs").mkdir()
    return watched(place / "outputs", [*WATCHED_FILES, provoking])


def test_nothing_is_imported_executed_or_called(seen: Watched) -> None:
    assert {event: example for event, example in seen.events.items() if event not in HARMLESS} == {}


def test_nothing_is_opened_but_the_file_and_the_output(seen: Watched) -> None:
    assert len(seen.opened) == len(WATCHED_FILES) + 1
    for path, names in seen.opened.items():
        outside = {name for name, _ in names if Path(name) != seen.folder and seen.folder not in Path(name).parents}
        outside -= {name for name in outside if PACKAGE in Path(name).parents}  # tables of ckptool itself
        # Of a file with codes, the configuration beside it says whether they are quantized weights.
        outside -= {str(Path(path).with_name(name)) for name in ("config.json", *OTHER_CONFIGS)}
        assert outside == {path}


def test_nothing_is_written_to_but_the_output(seen: Watched) -> None:
    written = {Path(name) for names in seen.opened.values() for name, writes in names if writes}
    assert written
    assert {path.parent for path in written} == {seen.folder}
    assert all(path.name.endswith(".ckptool-tmp") for path in written)
    assert {path.name for path in seen.folder.iterdir()} == {"out.pth"}


def test_no_module_that_a_checkpoint_names_is_loaded(seen: Watched) -> None:
    assert seen.modules.isdisjoint({"torch", "numpy", "argparse", "research_lib", "model", "pathlib2", "omegaconf"})


def test_the_watch_would_see_it(tmp_path: Path) -> None:
    """The control: the same hook, and code that does what no checkpoint may."""
    (tmp_path / "outputs").mkdir()
    found = watched(tmp_path / "outputs", [FIXTURES / "bare.pth"], control=True)
    assert found.events.keys() - HARMLESS >= {"import", "pickle.find_class", "os.system", "exec", "compile"}
    assert any(writes and "elsewhere" in name for name, writes in found.opened["control"])


# -- nothing acts on the terminal -----------------------------------------------------------------------------------

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def acting(text: str) -> list[str]:
    """The characters of a text that a terminal would act on: controls, line separators, bidi marks, surrogates."""
    return [
        f"U+{ord(char):04X}"
        for char in set(text) - {"\n"}
        if unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")
        or unicodedata.bidirectional(char) in BIDI
        or char in "\u061c\u200e\u200f\ufeff"
    ]


CALLS = {
    "inspect": ["inspect", "--map-location", "cpu"],
    "inspect-json": ["inspect", "--format", "json"],
    "keys": ["keys", "--all"],
    "keys-names": ["keys", "--names"],
    "keys-json": ["keys", "--all", "--format", "json"],
    "keys-markdown": ["keys", "--format", "markdown"],
    "keys-key": ["keys", "--key", "no.such.key"],
    "strip": ["strip-module", "--dry-run"],
    "strip-json": ["strip-module", "--dry-run", "--wrappers", "--format", "json"],
    "add": ["add-module", "--dry-run"],
    "remap": ["remap", "--to", "cuda:3", "--include-cpu", "--dry-run"],
    "remap-json": ["remap", "--to", "cpu", "--strings", "--dry-run", "--format", "json"],
    "remap-visible": ["remap", "--visible", "7", "--dry-run"],
}


def answer(call: list[str], path: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; checks what holds for every answer."""
    code = run([*call, str(path)])
    out, err = capsys.readouterr()
    assert acting(out) == [] and acting(err) == []
    assert "Traceback" not in out + err and "a bug in ckptool" not in err
    assert code in (0, 1, 2, 3, 4)
    assert err or code not in (2, 3, 4)  # what is refused is explained
    if "json" in call and out:
        json.loads(out)
    return code, out, err


@every
def test_every_answer_on_every_file_is_harmless(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for call in CALLS.values():
        code, out, err = answer(call, path, capsys)
        assert out or err or (code == 0 and "--names" in call)


#: One text with each thing that must not come out: escape, carriage return, line feed, NUL, C1, DEL, the bidi
#: override, the line separator, the byte-order mark, a lone surrogate, and what only a table would break on.
NASTY = "a\x1b[2J\r\n\x00\x9b31m\x7f\u202e\u2066\u2028\u061c\ufeff\udce4|\t,\"'z"


def nasty_checkpoint(path: Path) -> None:
    """A checkpoint in which every name is nasty: keys, paths, classes, locations, storages, records, strings."""
    plain = NASTY.replace("\udce4", "")
    root = {
        f"state{NASTY}": {
            f"module.{NASTY}.weight": _vector(plain, "\x1b[31mcuda:0\n"),
            f"module.{NASTY}.weight2": _vector("missing\x1b\u202e", "cuda:1"),
            "module.huge": _vector(plain + "2", "cpu", 1 << 40),
        },
        "config\x1b": {NASTY: "x\x1b[31m", "\u202edevice": "cuda:1", "": True},
        "hook\n\u202e": Code(put(_named(f"os{plain}", "sys\x1btem\n")) + put((NASTY,)) + b"R" + put({NASTY: 1}) + b"b"),
        "class": _named("evil\x1b", "Cla\u2028ss"),
        b"\x1b[1m": 2,
        "bytes": b"\x1b[1m",
        "float": Code(b"G\x7f\xf0" + bytes(6)),  # infinity
        "list": [NASTY, Code(b"G\xff\xf8" + bytes(6))],  # NaN
    }
    with zipfile.ZipFile(path, "w") as archive:
        top = "ro\x1bot\u202e"
        archive.writestr(f"{top}/data.pkl", b"\x80\x04" + put(root) + b".")
        archive.writestr(f"{top}/version", b"\x1b[31m\n")
        archive.writestr(f"{top}/byteorder", b"\x9b\x1b")
        archive.writestr(f"{top}/data/{plain.partition(chr(0))[0]}", bytes(8))
        archive.writestr("second\x1b\u202e/notes", b"")


def _named(module: str, name: str) -> Code:
    """STACK_GLOBAL, which takes any name."""
    return Code(put(module) + put(name) + b"\x93")


def _vector(key: str, location: str, elements: int = 2) -> Code:
    return tensor((elements,), of=storage(key, elements, location=location))


@pytest.fixture
def nasty(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "na\x1b[31msty\n\u202e.pth"
    nasty_checkpoint(path)
    yield path


def test_the_nasty_checkpoint_is_as_nasty_as_it_says(nasty: Path) -> None:
    with ckptool.open(nasty) as checkpoint:
        key = f"module.{NASTY}.weight"
        assert [entry.key for entry in checkpoint.survey.tensors] == [key, key + "2", "module.huge"]
        assert len(acting(NASTY)) == 12
        assert "\x1b[31mcuda:0\n" in {entry.tensor.location for entry in checkpoint.survey.tensors}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_name_reaches_the_terminal_as_it_is(
    call: list[str], nasty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answer(call, nasty, capsys)
    if code == 0 and "--names" not in call:
        assert "x1b" in out or "u001b" in out
    elif code:
        assert "x1b" in err


def test_json_is_strict_where_numbers_are_not_finite(nasty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    for call in (CALLS["inspect-json"], CALLS["keys-json"]):
        json.loads(answer(call, nasty, capsys)[1], parse_constant=refuse)


def test_one_line_stays_one_line(nasty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(answer(["keys", "--names"], nasty, capsys)[1].splitlines()) == 3
    drawn = answer(["keys", "--format", "markdown"], nasty, capsys)[1].splitlines()
    assert len(drawn) == 5
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in drawn} == {8}


@pytest.mark.parametrize("name", ["no\x1b[31mwhere\n.pth", "\u202efile", "\udce4.pth", "\x9b.pth"])
@pytest.mark.parametrize("call", [["inspect"], ["keys", "--format", "json"], ["strip-module", "-o", "x"]])
def test_names_of_files_are_harmless_too(call: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(call, name, capsys)
    assert code == 3 and "no such file" in err


@pytest.mark.parametrize(
    "call",
    [
        ["inspect", "--\u202eoption", "x"],
        ["\u202ecommand"],
        ["keys", "--sort", "\u202e", "x"],
        ["stats", "--sort", "\x9b", "x"],
        ["remap", "--map", "\u202e", "x"],
        ["strip-module", "--repeat", "\u202e", "x"],
    ],
    ids=["option", "command", "choice", "number", "map", "repeat"],
)
def test_usage_errors_do_not_echo_what_acts(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A file name that begins with dashes is an option to click: ``ckptool inspect *`` echoes names of files."""
    assert run(call) == 2
    told = capsys.readouterr()
    assert acting(told.err) == [] and told.out == ""


def test_a_nasty_output_is_named_harmlessly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o\x1b[31mut\n\u202e.pth"
    for style in ([], ["--format", "json"]):
        assert run(["strip-module", str(FIXTURES / "gan.pth"), "-o", str(out), "--force", *style]) == 0
        told = capsys.readouterr()
        assert acting(told.out) == [] and told.err == ""
    assert run(["strip-module", str(FIXTURES / "gan.pth"), "-o", str(out)]) == 4
    assert acting(capsys.readouterr().err) == []

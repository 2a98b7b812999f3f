"""Every JSON output is valid by the schema that is made from the types of its command."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES, MANIFEST, REAL, corpus_files, needs_corpus, sample
from docs_modules import docs_module
from test_transcripts import ckptool_steps

from ckptool.base.errors import ReadBackError
from ckptool.cli.main import COMMANDS
from ckptool.cli.render import failure

jsonschema = pytest.importorskip("jsonschema")

OTHER = str(FIXTURES / "bare.pth")

#: A line of each command, without its name: PATH is a checkpoint. What writes writes nothing.
LINES = {
    "inspect": ["PATH --map-location cpu --load"],
    "keys": ["PATH --all"],
    "stats": ["PATH --all"],
    "scan": ["PATH", "PATH --format jsonl"],
    "validate": ["PATH --weights-only", "PATH --quick --dtype float16 --layout bare"],
    "diff": [f"PATH {OTHER}", f"{OTHER} PATH --rtol 1e-3 --ignore prefix,container"],
    "match": [f"PATH {OTHER} --lenient", f"PATH {OTHER} --apply -o OUT --force"],
    "get": ["PATH optimizer.param_groups", "PATH hyper_parameters"],
    "explain": ["'Ran out of input' PATH"],
    "hash": ["PATH --each"],
    "lock": ["PATH --content"],
    "strip-module": ["PATH --dry-run", "PATH --in-place --dry-run"],
    "add-module": ["PATH --dry-run -o OUT"],
    "rename": ["PATH --rename '*.weight=*.w' --dry-run"],
    "remap": ["PATH --to cuda:3 --include-cpu --strings --dry-run"],
    "extract": ["PATH state_dict --dry-run"],
    "drop": ["PATH '*.bias' --dry-run", "PATH '*.bias' --in-place --reclaim --dry-run"],
    "set": ["PATH epoch=1 --dry-run"],
    "slim": ["PATH --for inference --dedupe --dry-run"],
    "cast": ["PATH --to-dtype bf16 --dry-run"],
    "dequantize": ["PATH --dry-run"],
    "resize": ["PATH --vocab 7 --include '*head.*' --dry-run"],
    "edit": ["PATH --repack --wrap model --set epoch=1 --dry-run", "PATH --sanitize --strip-module --to cpu --dry-run"],
    "merge": [f"PATH {OTHER} --dry-run"],
    "average": ["PATH PATH --dry-run"],
    "lora merge": [f"PATH {OTHER} --dry-run"],
    "lora convert": ["PATH peft --dry-run"],
    "lora extract": [f"PATH {OTHER} --rank 2 --dry-run"],
    "lora resize": ["PATH --rank 2 --dry-run"],
    "convert": ["PATH --to-format safetensors --allow-loss entries --dry-run", "PATH --to-format legacy --dry-run"],
    "sanitize": ["PATH --drop-unknown --as-state-dict --dry-run"],
    "redact": ["PATH", "PATH --redact all --dry-run"],
    "salvage": ["PATH --dry-run"],
    "undo": ["PATH --dry-run", "PATH --list"],
}


schemas = docs_module("schemas")


def test_every_command_with_a_report_has_a_schema_and_a_line_here() -> None:
    assert LINES.keys() == COMMANDS.keys() - schemas.WITHOUT


@functools.cache
def validator(command: str) -> Any:
    schema = schemas.schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def reports(text: str, style: str) -> list[Any]:
    """The reports in an output; NaN and Infinity are not JSON."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    values = [json.loads(part, parse_constant=refused) for part in (text.splitlines() if style == "jsonl" else [text])]
    return [report for value in values for report in (value if isinstance(value, list) else [value])]


def check(command: str, text: str, style: str = "json") -> int:
    """Hold every report in an output against the schema; their number."""
    found = reports(text, style)
    for report in found:
        errors = list(validator(command).iter_errors(report))
        # Of the kinds of reports, the one that fits best is meant.
        inner = [inside for error in errors for inside in (error.context or [error])]
        assert not errors, [f"{error.json_path}: {error.message[-300:]}" for error in inner]
    return len(found)


@pytest.mark.parametrize("name", [*LINES])
def test_what_the_transcripts_record(name: str) -> None:
    count = 0
    for command, _, step in ckptool_steps():
        words = shlex.split(step.command)
        style = "jsonl" if "jsonl" in words else "json" if {"json", "--json"} & {*words} else ""
        style = "json" if command == "lock" and "-o" not in words else style
        text = "\n".join(line for line in step.output if not line.startswith("! "))
        if command == name and style and step.code != 2 and text and not {"|", ">"} & {*words}:
            count += check(name, text, style)
    assert count


def lines(command: str, path: Path, out: Path) -> Iterator[tuple[list[str], str]]:
    """The words of the lines of a command, and their formats."""
    for line in LINES[command]:
        words = [{"PATH": str(path), "OUT": str(out)}.get(word, word) for word in shlex.split(line)]
        style = "jsonl" if "jsonl" in words else "json"
        json_wanted = [] if command == "lock" or style in words else ["--json"]
        yield [command, *words, *json_wanted], style


def check_lines(number: int, path: Path, out: Path) -> None:
    """Run a third of the lines on a checkpoint, other ones for the next, or all in ``make torture``."""
    chosen = sample([line for command in LINES for line in lines(command, path, out)], 3, first=number)
    assert sum(checked(words, style) for words, style in chosen) > len(chosen) // 2


def checked(words: list[str], style: str = "json") -> int:
    said = say(*words)
    assert said.code != 70 and not said.err.startswith("Usage:"), (words, said.err)
    return check(words[0], said.out, style) if said.out else 0


def numbered(paths: Iterable[Path]) -> Any:
    """Parametrise a test with paths and their numbers."""
    return pytest.mark.parametrize(
        ("number", "path"), [pytest.param(number, path, id=path.name) for number, path in enumerate(paths)]
    )


@pytest.mark.sampled(every=10)
@numbered([*(item.path for item in MANIFEST), *(item.path for item in REAL)])
def test_commands_on_every_fixture(number: int, path: Path, out: Path) -> None:
    check_lines(number, path, out)


@needs_corpus
@pytest.mark.sampled(every=6)
@numbered(corpus_files())
def test_commands_on_the_corpus(number: int, path: Path, out: Path) -> None:
    check_lines(number, path, out)


# -- files of lines -----------------------------------------------------------------------------------


# -- what no fixture shows ----------------------------------------------------------------------------


def report_of(*words: str | Path) -> Any:
    """The one report of a command, held against its schema."""
    said = say(*words, *([] if words[0] == "lock" else ["--json"]))
    assert check(str(words[0]), said.out) == 1, said.err
    return json.loads(said.out)


def test_versions_in_a_file(tmp_path: Path) -> None:
    path = shutil.copy(FIXTURES / "ddp4_training.pth", tmp_path)
    assert {"names", "unused_bytes"} <= report_of("edit", path, "--set", "epoch=1", "--in-place").keys()
    assert len(report_of("undo", path, "--list")["versions"]) == 2
    assert len(report_of("undo", path)["undone"]) == 1


def test_the_lock_of_a_folder(tmp_path: Path) -> None:
    for name in ("bare.pth", "tied.pth"):
        shutil.copy(FIXTURES / name, tmp_path)
    assert len(report_of("lock", tmp_path, "--content")["files"]) == 2


def test_differences_in_order_and_sharing(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    torch.save({"a": tensor, "b": tensor}, tmp_path / "shared.pth")
    torch.save({"b": tensor, "a": tensor.clone()}, tmp_path / "apart.pth")
    report = report_of("diff", tmp_path / "shared.pth", tmp_path / "apart.pth")
    assert report["order"] and report["sharing"]


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(100_000)}, tmp_path / "model.pth")
    status = list(os.statvfs(tmp_path))
    status[1:5] = 1, 1 << 40, 100, 100
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(status))
    assert report_of("add-module", tmp_path / "model.pth", "-o", tmp_path / "out.pth", "--dry-run")["shortage"]


@pytest.mark.parametrize("name", ["lightning.ckpt", "extra_state.pth", "sparse.pt", "tied.pth"])
def test_a_whole_value(name: str) -> None:
    assert checked(["get", str(FIXTURES / name), ".", "--json"]) == 1


def test_the_schema_of_values_knows_special_ones(tmp_path: Path) -> None:
    """A dict is valid in any case: each kind is held against its own definition."""
    own: list[Any] = [torch.ones(2)]
    own.append(own)
    values = {
        "bytes": b"a",
        "ref": own,
        "global": torch.Size,
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "parts": torch.eye(2).to_sparse(),
    }
    torch.save(values, tmp_path / "a.pth")
    schema = schemas.schema("get")
    for name in values:
        value = json.loads(say("get", tmp_path / "a.pth", name, "--json").out)
        part = {**schema, "$ref": f"#/$defs/{name}"}
        jsonschema.Draft202012Validator(part).validate(value[-1] if name == "ref" else value)


def test_a_line_of_scan_has_its_schema() -> None:
    lines = say("scan", FIXTURES / "bare.pth", FIXTURES / "tied.pth", "--format", "jsonl").out.splitlines()
    assert [json.loads(line)["schema"] for line in lines] == ["ckptool.scan-file/1"] * 2


def test_match_reports_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"nothing")
    for paths in ((tmp_path / "a.pth", OTHER), (OTHER, tmp_path / "a.pth")):
        said = say("match", *paths, "--json")
        assert said.code == 3 and check("match", said.out) == 1
        assert json.loads(said.out)["path"] == str(tmp_path / "a.pth") and said.err


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    report_of("convert", OTHER, "-o", folder, "--to-format", "safetensors", "--max-shard-size", "1kB")
    return folder


def test_a_config_beside_the_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "config.json").write_text('{"dtype": "float32"}')
    for options in ([], ["--update-config"]):
        report = report_of("cast", folder, "--to-dtype", "bf16", "--dry-run", *options)
        assert report["config"] and report["config_updated"] == bool(options)


def test_links_out_of_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (folder / "notes.txt").symlink_to("../secret")
    assert report_of("add-module", folder, "-o", tmp_path / "out")["links"] == ["notes.txt"]


def test_a_bug() -> None:
    report = failure("cast", "model.pth", ReadBackError("it has another size", promised="1", read="2"))
    assert check("cast", json.dumps(report)) == 1 and report["report"]


def test_a_key_too_many_a_key_too_few_and_a_wrong_type_are_not_valid() -> None:
    report = report_of("inspect", OTHER)
    entry = report["state_dicts"][0]
    for wrong in ({**entry, "more": 1}, {"key": entry["key"]}, {**entry, "tensors": "9"}, {**entry, "metadata": 1}):
        with pytest.raises(AssertionError, match="state_dicts"):
            check("inspect", json.dumps(report | {"state_dicts": [wrong]}))
    with pytest.raises(AssertionError, match="NaN is not JSON"):
        check("inspect", json.dumps(report | {"bytes": float("nan")}))

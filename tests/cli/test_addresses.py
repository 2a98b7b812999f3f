"""Addresses within archives: every command takes them wherever it takes the path of an input, and writes into none."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from command_line import Said, say
from every_input import INPUT_NAMES, INPUTS, REST, make_files, said_with

from ckptool.base.errors import OutputError, RefusedError
from ckptool.cli.main import COMMANDS, cli
from ckptool.cli.options import AnyPath, InputPath
from ckptool.files.archives import beside, exists
from ckptool.remote import libraries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addresses")
    make_files(folder)
    return folder


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("start", ["outer.zip!run/", "outer.zip!m.tar.gz!run/"])
@pytest.mark.parametrize(("name", "parameter"), INPUTS, ids=INPUT_NAMES)
def test_an_address_is_as_good_as_the_file(name: str, parameter: click.Parameter, start: str, folder: Path) -> None:
    """The exit code is that of the unpacked file, and so is what is said, apart from names and sizes of bars."""
    address = f"{folder}/{start}"
    said, plain = (said_with(name, parameter, begin, folder) for begin in (address, f"{folder}/plain/"))
    if name == "undo":
        assert said.code == 4 and "cannot be changed in place" in said.err
        return
    if name == "dequantize":  # no fixture is quantized
        assert said.code == plain.code == 4 and "none of its weights is quantized" in said.err
        return
    assert plain.code in (0, 1), plain.err
    assert said.code == plain.code, said.err
    texts = [text.all.replace(address, "").replace(f"{folder}/plain/", "").splitlines()[1:] for text in (said, plain)]
    if name == "inspect":  # a note says how to get it out of the archive
        assert texts[0][-2].startswith("note: it is inside an archive")
        texts = [[line for line in text if line][:-2] if text is texts[0] else [*filter(None, text)] for text in texts]
    assert texts[0] == texts[1]


def test_every_path_that_is_read_has_the_type_of_one() -> None:
    """An option for a path is either an input, or names an output or a list."""
    others = {
        (name, parameter.opts[0])
        for name in COMMANDS
        for parameter in cli.get_command(click.Context(cli), name).params  # type: ignore[union-attr]
        if isinstance(parameter.type, AnyPath) and not isinstance(parameter.type, InputPath)
    }
    outputs = {"-o", "--out-dir", "--files-from"}
    assert {option for _, option in others} == outputs


@pytest.mark.parametrize(
    "words",
    [
        ["cast", "bare.pth", "--to-dtype", "bf16", "-o", "outer.zip!x.pth"],
        ["cast", "bare.pth", "--to-dtype", "bf16", "--out-dir", "outer.zip!x"],
        ["convert", "bare.pth", "--to-format", "dcp", "-o", "outer.zip!dcp"],
        ["convert", "bare.pth", "--to-format", "safetensors", "-o", "outer.zip!m.tar.gz!x.safetensors"],
        ["lock", "bare.pth", "-o", "outer.zip!lock.json"],
        ["get", "bare.pth", "fc.bias", "-o", "outer.zip!x.npy"],
        ["match", "bare.pth", "bare.pth", "--apply", "-o", "outer.zip!x.pth"],
    ],
)
def test_archives_are_not_written_into(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    said = say(*(word if word != "bare.pth" else "plain/bare.pth" for word in words))
    assert said.code == RefusedError.exit_code
    assert "archives are not written into" in said.err
    assert "then add it with zip or tar" in said.err
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ["rename", "plain/bare.pth", "--rename-like", "outer.zip!run/bare.pth"],
        ["rename", "plain/bare.pth", "@outer.zip!run/table.txt"],
        ["merge", "plain/bare.pth", "outer.zip!run/bare.pth"],
        ["average", "plain/bare.pth", "outer.zip!run/bare.pth"],
        ["edit", "plain/bare.pth", "--merge-entry", "outer.zip!run/bare.pth:fc.bias"],
        ["cast", "outer.zip!run/bare.pth", "--to-dtype", "bf16"],
    ],
)
def test_an_archive_that_is_read_is_not_replaced(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = (folder / "outer.zip").read_bytes()
    said = say(*words, "-o", "outer.zip", "--force")
    assert said.code == RefusedError.exit_code and "input" in said.err
    assert (folder / "outer.zip").read_bytes() == before


def test_a_name_in_a_policy_is_relative_to_the_policy(folder: Path) -> None:
    for start in ("plain/", "outer.zip!run/", "outer.zip!m.tar.gz!run/"):
        assert say("validate", folder / "plain/bare.pth", "--policy", f"{folder}/{start}policy.toml", "-q").code == 0
    archive = f"{folder}/outer.zip"
    assert beside(f"{archive}!run/policy.toml", "../lock.json") == f"{archive}!lock.json"
    assert beside(f"{archive}!m.tar.gz!run/policy.toml", "a/l.json") == f"{archive}!m.tar.gz!run/a/l.json"
    assert beside(f"{archive}!run/policy.toml", "/etc/lock.json") == "/etc/lock.json"
    assert beside(f"{folder}/plain/policy.toml", "lock.json") == f"{folder}/plain/lock.json"
    assert exists(f"{archive}!x") and not exists(f"{folder}/nothing.zip!x")


# -- remote addresses ------------------------------------------------------------------------------------------

REMOTE = "s3://bucket/run/"
#: The same with secrets, as S3, Azure and presigned addresses have them.
SECRETS = ("s3://AK:se/CRET@bucket/run/", "http://CRET@nobody.invalid/run?X-Sig=CRET&n=")
READ_REFUSAL = "this must be a local file; download it first, then run the command on the file"
NO_VERSIONS = "remote files are never edited in place, so they have no former versions"
WRITE_REFUSAL = "this output must be a local file; write to a local path, then upload it"
#: What a command says that tried to open an address: no test here has credentials, or a server.
OPENED = ("there are no credentials for S3", "obstore is not installed", "nobody.invalid cannot be found")
OPENED += ("nobody.invalid does not answer", "no connection to nobody.invalid")
_OUTPUTS = [
    (name, parameter)
    for name in COMMANDS
    for parameter in cli.get_command(click.Context(cli), name).params  # type: ignore[union-attr]
    if isinstance(parameter.type, AnyPath) and not isinstance(parameter.type, InputPath)
    and parameter.opts[0] in ("-o", "--out-dir")
]  # fmt: skip


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take away the credentials of the machine, and the patience with servers."""
    for variable in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(libraries, "LIMITS", libraries.LIMITS._replace(retries=0))


def was_opened(said: Said) -> bool:
    return any(text in said.all for text in OPENED)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "parameter"), INPUTS, ids=INPUT_NAMES)
def test_a_remote_input_is_opened(name: str, parameter: click.Parameter, folder: Path, offline: None) -> None:
    said = said_with(name, parameter, REMOTE, folder)
    assert said.code == (2 if parameter.opts[0] in ("--policy", "--lock") else 3)
    assert REMOTE in said.err
    assert READ_REFUSAL in said.err or NO_VERSIONS in said.err or was_opened(said)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "parameter"), _OUTPUTS, ids=[f"{name} {item.opts[0]}" for name, item in _OUTPUTS])
def test_a_remote_output_is_opened_or_refused_by_name(
    name: str, parameter: click.Parameter, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    plain = str(folder / "plain" / "bare.pth")
    monkeypatch.chdir(tmp_path)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    inputs = [plain for item in command.params if isinstance(item, click.Argument) and isinstance(item.type, InputPath)]
    inputs += [plain] if name == "average" else []
    flags = ["--apply"] if name == "match" else ["--redact", "all"] if name == "redact" else []
    rest = [*REST.get(name, []), *flags]
    said = say(name, *inputs, *rest, parameter.opts[0], REMOTE + ("" if parameter.opts[0] == "--out-dir" else "x.pth"))
    edits = parameter.opts[0] == "-o" and name not in ("get", "lock", "report")
    assert said.code == (OutputError if edits else RefusedError).exit_code, said.all
    assert was_opened(said) if edits else WRITE_REFUSAL in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", [REMOTE, *SECRETS], ids=["plain", "user", "query"])
@pytest.mark.parametrize("output", ["x.pth", "x.safetensors", "x.dcp"])
def test_outputs_print_no_secrets(output: str, start: str, folder: Path, offline: None) -> None:
    for words in (["-o", start + output, "--dry-run"], ["-o", start + output]):
        said = say("convert", folder / "plain" / "bare.pth", *words)
        assert said.code in (2, RefusedError.exit_code, OutputError.exit_code)
        assert "CRET" not in said.all
        if output.endswith(".dcp") and start != SECRETS[1]:
            assert "a folder cannot be written to remote storage" in said.err


@pytest.mark.parametrize("name", ["validate", "scan"])
def test_remote_files_in_a_list(name: str, folder: Path, tmp_path: Path, offline: None) -> None:
    names = tmp_path / "list"
    names.write_text(f"{folder}/plain/bare.pth\n{REMOTE}x.pth\n{SECRETS[0]}y.pth\n{SECRETS[1]}z.pth\n")
    for style in ("table", "json", "rows"):
        said = say(name, "--files-from", names, "--format", style)
        assert said.code == 3
        assert was_opened(said) and f"{REMOTE}y.pth" in said.all and "http://nobody.invalid/run" in said.all
        assert "CRET" not in said.all
    assert READ_REFUSAL in say(name, folder / "plain" / "bare.pth", "--files-from", f"{REMOTE}list").err


def test_a_policy_that_names_a_remote_lock(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "ckptool.toml"
    policy.write_text(f'lock = "{SECRETS[0]}lock.json"\n')
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--policy", policy]):
        said = say("validate", folder / "plain" / "bare.pth", *words)
        assert said.code == 2
        assert f"{REMOTE}lock.json" in said.err and "this must be a local file" in said.err
        assert "CRET" not in said.all


def test_typing_errors_do_not_print_secrets(offline: None) -> None:
    lines = [
        ["diff", f"{SECRETS[0]}a.pth"],
        ["get", f"{SECRETS[0]}a.pth", "x", f"{SECRETS[0]}b.pth"],
        ["convert", f"{SECRETS[0]}a.pth"],
        ["strip-module", f"{SECRETS[0]}a.pth", f"--output={SECRETS[0]}b.pth", f"--outptu={SECRETS[0]}b.pth"],
        ["report", f"{SECRETS[0]}a.pth"],
        [f"{SECRETS[0]}a.pth"],
        ["match", f"{SECRETS[0]}a.pth", "--key"],
    ]
    for words in lines:
        said = say(*words)
        assert said.code in (2, 3)
        assert "CRET" not in said.all, words


def test_the_uri_of_a_local_file(folder: Path) -> None:
    path = folder / "plain" / "bare.pth"
    said = say("keys", f"file://{path}")
    assert said.code == 3
    assert said.err.endswith(f"it is the URI of a local file; name its path: {path}\n")


def test_a_local_folder_that_looks_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert say("edit", folder / "plain" / "bare.pth", "--wrap", "model", "-o", "./s3:/bucket/x.pth").code == 0
    assert say("keys", "./s3:/bucket/x.pth").code == 0
    assert was_opened(say("keys", "s3://bucket/x.pth"))

"""No output, file, log or traceback has a secret: a query string, user information, a key or a token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import click
import pytest
from command_line import say
from conftest import FIXTURES, ROOT, WHOLE
from every_input import INPUT_NAMES, INPUTS, make_files, said_with
from remote.server import KEY, SECRET, TOKEN, Server

pytest.importorskip("obstore")
pytest.importorskip("huggingface_hub")

from ckptool.cli.main import COMMANDS, cli
from ckptool.remote import folder as folders
from ckptool.remote import libraries, source, web, wire

#: What nothing may show. SECRET is in passwords, query strings, and in what the server says of its errors.
SECRETS = ("SECRET", SECRET, KEY, TOKEN, "X-Amz-Signature")
#: Addresses with their secrets, as what comes before and after a name. The hub and S3 also get secrets from variables.
ADDRESSES = {
    "http": ("{web}/plain/run/", "?X-Amz-Signature=SECRETQUERY&X-Amz-Credential=SECRETKEY"),
    "s3": ("s3://bucket/run/", ""),
    "s3 with keys": ("s3://AKSECRET:se/SECRET@bucket/run/", ""),
    "hub": ("hf://org/private/run/", ""),
}
FAULTS = ("", "denied", "expired", "region", "unauthorized", "500", "reset", "short", "length", "whole", "etag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server() as found:
        for path in sorted((folder / "plain").iterdir()):
            for bucket in ("bucket", "plain"):
                found.put(bucket, f"run/{path.name}", path.read_bytes())
            found.put("org--private", f"run/{path.name}", path.read_bytes())
            found.put("plain", f"org--private/run/{path.name}", path.read_bytes())
        yield found


@pytest.fixture(autouse=True)
def environment(server: Server, alone: None, monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    for name, value in variables(server, empty_home).items():
        monkeypatch.setenv(name, value)
    for module in (libraries, web, wire):
        monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(retries=0))
    server.redirect = server.url
    forget(server)


def variables(server: Server, home: Path) -> dict[str, str]:
    """Return the variables that have credentials, and those that show the most."""
    return {
        "HOME": str(home),
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_ENDPOINT": f"{server.url}/hub",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "SECRETTOKEN",
        "AWS_ENDPOINT_URL": server.url,
        "CKPTOOL_DEBUG": "1",
    }


def forget(server: Server, fault: str = "") -> None:
    """Let the next command begin as a new process does, and meet a fault at every request."""
    source._OPENED.clear()
    folders._OPENED.clear()
    web._repository.cache_clear()
    server.clear()
    if fault:
        server.faults = dict.fromkeys(range(1, 200), fault)


def check(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text], text


def address(kind: str, server: Server) -> tuple[str, str]:
    start, end = ADDRESSES[kind]
    return start.format(web=server.url.replace("//", "//user:SECRETPASSWORD@")), end


def one_of(kinds: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return all kinds of a test, or two of them, chosen by its name."""
    at = sha256(name.encode()).digest()[0]
    return kinds if WHOLE else (kinds[0], kinds[1 + at % (len(kinds) - 1)])


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("kind", ADDRESSES)
@pytest.mark.parametrize(("name", "parameter"), INPUTS, ids=INPUT_NAMES)
def test_what_a_command_says(
    name: str, parameter: click.Parameter, kind: str, server: Server, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, end = address(kind, server)
    codes = {}
    for fault in one_of(FAULTS, f"{name} {parameter.opts[0]} {kind}"):
        forget(server, fault)
        said = said_with(name, parameter, start, folder, end, ["--verbose"])
        check(said.all)
        codes[fault] = said.code
    assert 70 not in codes.values()
    check(caplog.text)
    check((folder / "page.html").read_text() if (folder / "page.html").exists() else "")


STYLES = [
    (name, style)
    for name in COMMANDS
    for parameter in cli.get_command(click.Context(cli), name).params  # type: ignore[union-attr]
    if "--format" in parameter.opts and isinstance(parameter.type, click.Choice)
    for style in parameter.type.choices
    if any(isinstance(other, click.Argument) for other in cli.get_command(click.Context(cli), name).params)  # type: ignore[union-attr]
]
#: What commands need besides their first input.
REST = {"get": ["fc.bias"], "extract": ["."], "redact": ["--redact", "all"]}
TWICE = ("diff", "match")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("name", "style"), STYLES, ids=lambda value: value)
def test_every_format_of_a_report(name: str, style: str, server: Server) -> None:
    start, end = address("http", server)
    words = [name, *[f"{start}bare.pth{end}"] * (2 if name in TWICE else 1), *REST.get(name, [])]
    for fault in ("", "denied", "expired"):
        forget(server, fault)
        check(say(*words, "--format", style).all)


WRITING = [
    ["lock", "{file}", "-o", "{out}/lock.json"],
    ["report", "{file}", "-o", "{out}/page.html"],
    ["strip-module", "{file}", "-o", "{out}/a.pth"],
    ["remap", "{file}", "--to", "cpu", "-o", "{out}/a.pth"],
    ["convert", "{file}", "-o", "{out}/a.safetensors"],
    ["convert", "{file}", "--to-format", "dcp", "-o", "{out}/dcp"],
    ["get", "{file}", "fc.bias", "-o", "{out}/a.npy"],
    ["add-module", "{file}", "--out-dir", "{out}/folder"],
]


@pytest.mark.parametrize("fault", ["", "denied"])
@pytest.mark.parametrize("kind", ADDRESSES)
@pytest.mark.parametrize("words", WRITING, ids=lambda words: " ".join([words[0], words[-1][6:]]))
def test_files_that_are_written(words: list[str], kind: str, fault: str, server: Server, tmp_path: Path) -> None:
    start, end = address(kind, server)
    out = tmp_path / "out"
    out.mkdir()
    forget(server, fault)
    said = say(*(word.format(file=f"{start}bare.pth{end}", out=out) for word in words))
    check(said.all)
    assert said.code == (3 if fault else said.code) and said.code in (0, 1, 3), said.all
    written = [path for path in out.rglob("*") if path.is_file()]
    assert fault or written, said.all
    for path in written:
        check(path.name)
        check(path.read_bytes().decode("latin-1"))


#: Bugs where the secrets are: while a store is asked, while its error is understood, and while bytes are read.
BUGS = ["web.Web.get", "wire._answer", "s3.Account.signed", "source.RemoteSource.read"]
BUGS += ["store.error_of", "source.error_of", "web._Repository.facts", "source.open_store"]


@pytest.mark.parametrize("kind", ADDRESSES)
@pytest.mark.parametrize("place", BUGS)
def test_a_traceback(place: str, kind: str, server: Server, tmp_path: Path) -> None:
    """A bug in ckptool, shown with CKPTOOL_DEBUG=1, has no secret either, whatever error it comes upon."""
    start, end = address(kind, server)
    forget(server, "denied" if "error" in place or "failed" in place else "")
    module, _, name = place.partition(".")
    program = f"""
import ckptool.remote.{module} as module
def bug(*_, **__):
    raise ZeroDivisionError("a planted bug")
module.{name} = bug
from ckptool.__main__ import main
main()
"""
    words = [sys.executable, "-c", program, "keys", f"{start}bare.pth{end}"]
    environment = {**os.environ, **variables(server, tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    unused = {"s3.Account.signed": ("http", "hub"), "web._Repository.facts": ("s3", "http")}.get(place, ())
    assert done.returncode or kind in unused, done.stdout
    assert "a planted bug" in done.stderr or place != "source.RemoteSource.read", done.stderr
    check(done.stdout + done.stderr.replace(program, ""))


@pytest.mark.parametrize("fault", ["", "denied", "500"])
def test_secrets_of_endpoints_and_proxies(fault: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    web = server.url.replace("//", "//user:SECRETPASSWORD@")
    for words in (
        ["keys", "s3://bucket/run/bare.pth", "--endpoint-url", f"{web}/?key=SECRETKEY"],
        ["keys", "s3://bucket/run/bare.pth", "--endpoint-url", web],
        ["keys", "s3://bucket/run/bare.pth", "--endpoint-url", f"{web}SECRETPORT"],
        ["strip-module", "s3://bucket/run/bare.pth", "--endpoint-url", web],
        ["strip-module", "s3://bucket/run/bare.pth", f"--endpoint-url={web}", "--outptu", "x.pth"],
        ["strip-module", FIXTURES / "bare_module.pth", "-o", FIXTURES / "bare.pth", "--endpoint-url", web],
        ["validate", "s3://bucket/run/bare.pth", "--endpoint-url", web, "--policy", "none.toml"],
        ["keys", "hf://org/private/run/bare.pth", "--endpoint-url", f"{web}/hub"],
    ):
        forget(server, fault)
        check(say(*words).all)
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, web)
        for place in ("https://example.invalid/a.pth?sig=SECRET", "http://example.invalid/a.pth?sig=SECRET"):
            said = say("keys", place)
            assert said.code == 3
            check(said.all)

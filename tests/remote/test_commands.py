"""Every command that reads prints the same for an address as for the same file or folder on a disk."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Said, say
from conftest import FIXTURES, ROOT
from remote.server import FAULTS, KEY, MIB, SECRET, Server

from ckptool.formats import folder_format
from ckptool.remote import obstores

pytest.importorskip("obstore")

_SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors", ".bin", ".tar", ".zip")
FILES = [path.name for path in sorted(FIXTURES.iterdir()) if path.is_file() and path.name.endswith(_SUFFIXES)]
FOLDERS = [
    str(Path(root).relative_to(FIXTURES)) for root, _, _ in sorted(os.walk(FIXTURES)) if folder_format(root) is not None
]
#: Where the suggested name of an output, or the advice, depends on what is on the disk.
ELSEWHERE = {"ranks/partial", "ranks/trainer_zero2/checkpoint-2", "real/lora", "real/lora_bin", "real/accelerate_state"}
ELSEWHERE |= {"ranks/lightning_zero2.ckpt"} | {name for name in FOLDERS if "megatron_dist" in name}
CALLS = [
    *(["keys"], ["keys", "--format", "json"], ["inspect"], ["inspect", "--tree"], ["inspect", "--format", "json"]),
    *(["validate"], ["validate", "--quick"], ["hash"], ["scan"], ["lock"], ["strip-module", "--dry-run"]),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with Server() as server:
        for path in FIXTURES.rglob("*"):
            if path.is_file() and path.stat().st_size < 4 * MIB:
                server.put("bucket", str(path.relative_to(FIXTURES)).replace(os.sep, "/"), path.read_bytes())
        yield server


@pytest.fixture
def server(served: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    for name in [name for name in os.environ if name.startswith(("AWS_", "CKPTOOL_")) and name != "CKPTOOL_TESTS"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
    served.clear()
    return served


def plain(said: Said, root: Path = FIXTURES) -> tuple[int, str, str]:
    """What a command said, without the folder that the files are in, and the folder of a suggested output."""
    texts = []
    for text in (said.out, said.err):
        text = text.replace(f"{root}/", "").replace("s3://bucket/", "")
        text = re.sub(r"; [^;\n]*, about [\d,]+ requests?$", "", text, flags=re.MULTILINE)  # what a dry run would move
        text = re.sub(r"-o \S*?([^/\s\"']+)(?=[\s\"'])", r"-o \1", text)
        texts.append(re.sub(r"[\s─-]+", " ", text.replace(".2.", ".").replace(".2 ", " ")))
    return said.code, *texts  # type: ignore[return-value]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", FILES)
def test_a_file(name: str, server: Server) -> None:
    for call in CALLS:
        assert plain(say(*call, f"s3://bucket/{name}", "-v")) == plain(say(*call, FIXTURES / name, "-v")), call


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in ELSEWHERE])
def test_a_folder(name: str, server: Server) -> None:
    for call in CALLS:
        assert plain(say(*call, f"s3://bucket/{name}", "-v")) == plain(say(*call, FIXTURES / name, "-v")), call


@pytest.mark.parametrize("name", ["dcp4", "dcp4/"])
def test_a_folder_with_and_without_its_slash(name: str, server: Server) -> None:
    assert plain(say("keys", f"s3://bucket/{name}")) == plain(say("keys", FIXTURES / name))


def test_two_files_and_a_member(server: Server) -> None:
    one, two = "bare.pth", "bare_module.pth"
    for call in (["diff"], ["match"]):
        local = say(*call, FIXTURES / one, FIXTURES / two)
        assert plain(say(*call, f"s3://bucket/{one}", f"s3://bucket/{two}")) == plain(local)
        assert plain(say(*call, f"s3://bucket/{one}", FIXTURES / two)) == plain(local)
    member = "zipped.pth!run3/model.pth"
    assert plain(say("keys", f"s3://bucket/{member}")) == plain(say("keys", FIXTURES / member))


def test_an_edit_of_a_remote_file_is_the_edit_of_a_local_one(server: Server, tmp_path: Path) -> None:
    one, two = tmp_path / "one.pth", tmp_path / "two.pth"
    assert say("strip-module", "s3://bucket/bare_module.pth", "-o", one).code == 0
    assert say("strip-module", FIXTURES / "bare_module.pth", "-o", two).code == 0
    assert one.read_bytes() == two.read_bytes()
    assert say("convert", "s3://bucket/dcp4", "--key", "model", "-o", tmp_path / "one.safetensors").code == 0
    assert say("convert", FIXTURES / "dcp4", "--key", "model", "-o", tmp_path / "two.safetensors").code == 0
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_what_a_remote_file_cannot(server: Server) -> None:
    for words in (["strip-module", "--in-place"], ["undo"], ["history"]):
        said = say(*words, "s3://bucket/bare_module.pth")
        assert said.code in (3, 4) and "remote file" in said.err


def test_names_that_are_not_there(server: Server) -> None:
    for name in ("keys", "validate", "scan", "hash"):
        said = say(name, "s3://bucket/none.pth")
        assert said.code == 3
        assert "s3://bucket/none.pth: no such file" in said.all
    server.put("bucket", "texts/readme.txt", b"hello")
    said = say("keys", "s3://bucket/texts/")
    assert said.code == 3
    assert "no checkpoint in this folder" in said.err


@pytest.fixture
def runs(server: Server, tmp_path: Path) -> Path:
    """A folder of checkpoints, on the disk and in the bucket."""
    folder = tmp_path / "runs"
    for name in ("a.pth", "b.safetensors", "notes.txt", "sub/c.pth", "sub/deep/d.pth", ".hidden.pth", "dcp/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = (FIXTURES / "bare.pth").read_bytes() if name.endswith(".pth") else b"text"
        if name.endswith(".safetensors"):
            data = next(FIXTURES.glob("*.safetensors")).read_bytes()
        (folder / name).write_bytes(data)
        server.put("bucket", f"runs/{name}", data)
    for path in (FIXTURES / "dcp4").iterdir():
        shutil.copy(path, folder / "dcp")
        server.put("bucket", f"runs/dcp/{path.name}", path.read_bytes())
    return folder


@pytest.mark.parametrize("call", [["keys"], ["inspect"], ["validate"], ["scan"], ["hash"]])
@pytest.mark.parametrize("rest", ["/", "", "/*.pth", "/**/*.pth", "/sub/*", "/[ab]*", "/sub/?.pth", "/dcp"])
def test_a_folder_of_checkpoints_and_globs(call: list[str], rest: str, runs: Path) -> None:
    remote, local = say(*call, f"s3://bucket/runs{rest}", "-v"), say(*call, f"{runs}{rest}", "-v")
    assert plain(remote) == plain(local, runs.parent)


def test_worker_processes_read_remote_files(runs: Path) -> None:
    words = [sys.executable, "-m", "ckptool", "scan", "s3://bucket/runs/", "-v", "--format", "rows"]
    alone, together = (
        subprocess.run(
            [*words, *more], capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        for more in ([], ["--jobs", "2"])
    )
    assert alone.returncode == together.returncode == 0, together.stderr
    assert sorted(alone.stdout.splitlines()) == sorted(together.stdout.splitlines())


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> list[bytes]:
    """Two files with the same names and shapes, and other values: 2.9 MB each, so commands need several requests."""
    torch = pytest.importorskip("torch")
    files = []
    for start in (0, 100):
        file = io.BytesIO()
        torch.save({"state_dict": {f"module.{at}": torch.full((60_000,), float(start + at)) for at in range(12)}}, file)
        files.append(file.getvalue())
    return files


READING = [["keys"], ["inspect"], ["validate"], ["hash"], ["scan"], ["lock"], ["stats"], ["strip-module", "--dry-run"]]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("fault", [*(fault for fault in FAULTS if fault not in ("stall", "complete")), "replaced"])
@pytest.mark.parametrize("call", READING, ids=" ".join)
def test_a_fault_at_any_request_of_a_command(
    call: list[str], fault: str, large: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is right, also of the replaced file, or it is an error. It never has a secret."""
    monkeypatch.setattr(obstores, "LIMITS", obstores.LIMITS._replace(retries=1))
    right = []
    for data in reversed(large):
        server.put("bucket", "large.pth", data)
        server.clear()
        right.append(say(*call, "s3://bucket/large.pth"))
    assert {said.code for said in right} <= {0, 1}
    for number in range(1, server.count() + 1):
        server.put("bucket", "large.pth", large[0])
        server.clear()
        if fault == "replaced":
            server.replaced = {number: ("bucket", "large.pth", large[1])}
        else:
            server.faults = {number: fault}
        said = say(*call, "s3://bucket/large.pth")
        if said not in right:
            assert said.code == 3 or (call == ["scan"] and "unknown: " in said.out), said.all
            assert fault not in ("500", "503", "reset", "short", "length")
        assert not any(word in said.all for word in ("SECRET", SECRET, KEY, "Signature", "Generic", "reqwest"))
    server.put("bucket", "large.pth", large[0])


# -- options ------------------------------------------------------------------------------------------------------


def test_the_options_of_remote_files(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for variable in ("ENDPOINT_URL", "ANONYMOUS", "PROFILE", "MAX_DOWNLOAD"):  # restored after the test
        monkeypatch.setenv(f"CKPTOOL_{variable}", "")
    assert say("keys", "s3://bucket/bare.pth", "--endpoint-url", server.url).code == 0
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    keys = f"[team]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / ".aws" / "credentials").write_text(keys, encoding="utf-8")
    said = say("keys", "s3://bucket/bare.pth", "--profile", "team")
    assert said.code == 0, said.err
    server.put("bucket", "large.bin", bytes(3 * MIB))
    assert "it would download" in say("scan", "s3://bucket/large.bin", "--max-download", "1MB").all
    assert say("keys", "s3://bucket/bare.pth", "--max-download", "much").code == 2
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    server.signed = False
    try:
        assert say("keys", "s3://bucket/bare.pth", "--anonymous").code == 0
        assert "authorization" not in server.seen[-1].headers
    finally:
        server.signed = True


def test_requests_of_commands(server: Server) -> None:
    for words, most in ((["keys"], 2), (["inspect"], 2), (["scan"], 2), (["validate"], 4)):
        server.clear()
        assert say(*words, "s3://bucket/bare.pth").code == 0
        assert server.count() <= most
    server.clear()
    assert say("keys", "s3://bucket/dcp4/").code == 0
    assert server.count() <= 6


@pytest.mark.parametrize(
    ("kind", "call", "requests", "round_trips"),
    [
        ("zip", ["keys"], 2, 1),
        ("zip", ["validate", "--quick"], 26, 3),
        ("zip", ["strip-module", "--dry-run"], 26, 2),
        ("legacy", ["keys"], 26, 2),
        ("names", ["keys"], 5, 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) if isinstance(value, list) else "",
)
def test_readers_ask_ahead(
    kind: str, call: list[str], requests: int, round_trips: int, server: Server, tmp_path: Path
) -> None:
    """24 tensors of 160 kB, or 20,000 of one element: what a reader needs comes in one batch, not one by one."""
    torch = pytest.importorskip("torch")
    count, size = (20_000, 1) if kind == "names" else (24, 40_000)
    state = {f"module.layers.{at}.weight": torch.zeros(size) for at in range(count)}
    torch.save(state, tmp_path / "model.pth", _use_new_zipfile_serialization=kind != "legacy")
    server.put("asked", "model.pth", (tmp_path / "model.pth").read_bytes())
    server.clear()
    server.delay = 0.05
    try:
        said = say(
            *call, "s3://asked/model.pth", *(["-o", str(tmp_path / "out.pth")] if call[0] == "strip-module" else [])
        )
    finally:
        server.delay = 0
    assert said.code == 0, said.err
    assert server.count() <= requests
    assert server.round_trips <= round_trips

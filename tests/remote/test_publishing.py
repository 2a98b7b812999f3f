"""An output at an address is the local output, byte for byte. It appears as a whole, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command_line import say
from conftest import FIXTURES, ROOT
from hypothesis import given
from hypothesis import strategies as st
from remote.server import MIB, Server

from ckptool.base.errors import OutputError, ReadBackError
from ckptool.base.limits import LIMITS
from ckptool.files.sources import BytesSource, Plan, Span
from ckptool.remote import libraries, publishing
from ckptool.remote.publishing import cut_into_parts, publish
from ckptool.remote.s3 import S3
from ckptool.remote.source import open_remote, open_store
from ckptool.remote.store import Failed, Settings
from ckptool.remote.wire import Reply

pytest.importorskip("obstore")
torch: Any = pytest.importorskip("torch")

#: Edits of metadata, which copy all tensors.
EDITS = [
    ["strip-module"],
    ["add-module"],
    ["remap", "--to", "cpu"],
    ["rename", "--rename", "module.layers.*=module.blocks.*"],
    ["drop", "optimizer"],
    ["edit", "--set", "epoch=7"],
]
SOURCE, TARGET = "s3://bucket/model.pth", "s3://bucket/out/new.pth"
#: One of half the size, which is still written in parts.
SHORTER = "s3://bucket/shorter.pth"


def save(path: Path, size: int) -> Path:
    """Save a checkpoint with 25 tensors of ``size`` numbers."""
    state = {f"module.layers.{at}.weight": torch.full((size,), float(at)) for at in range(25)}
    moments = {at: {"exp_avg": torch.zeros(1_000)} for at in range(10)}
    torch.save({"state_dict": state, "epoch": 3, "optimizer": {"state": moments, "param_groups": []}}, path)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 24 MB: with its 25 tensors, a short form of those that are worth an edit on the server."""
    return save(tmp_path_factory.mktemp("large") / "model.pth", 240_000)


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("shorter") / "shorter.pth", 120_000)


@pytest.fixture(scope="module")
def served(large: Path, shorter: Path) -> Iterator[Server]:
    with Server() as server:
        server.put("bucket", "model.pth", large.read_bytes())
        server.put("bucket", "shorter.pth", shorter.read_bytes())
        server.put("bucket", "small.pth", (FIXTURES / "bare_module.pth").read_bytes())
        yield server


@pytest.fixture(autouse=True)
def no_outputs(server: Server) -> None:
    """Remove the outputs of other tests."""
    for key in [key for key in server.buckets["bucket"] if key.startswith("out/")]:
        del server.buckets["bucket"][key]
    server.uploads.clear()


@pytest.fixture
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies on the server, as from another account: everything streams."""
    monkeypatch.setattr(S3, "copies_from", lambda *of: False)


# -- the bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit[0])
def test_an_edit_on_the_server_is_the_local_edit(edit: list[str], large: Path, server: Server, tmp_path: Path) -> None:
    said = say(edit[0], SOURCE, *edit[1:], "-o", TARGET)
    assert said.code == 0, said.all
    local = tmp_path / "new.pth"
    assert say(edit[0], large, *edit[1:], "-o", local).code == 0
    assert server.get("bucket", "out/new.pth") == local.read_bytes()
    assert server.down + server.up < 12 * MIB
    assert server.copied > 17 * MIB
    assert not server.uploads
    assert "copied on the server" in said.out and said.out.startswith(f"{SOURCE} -> {TARGET}: ")


@pytest.mark.parametrize("source", [SOURCE, "local"])
def test_a_conversion_streams(source: str, large: Path, server: Server, tmp_path: Path) -> None:
    source = str(large) if source == "local" else source
    local = tmp_path / "new.safetensors"
    assert say("convert", large, "-o", local).code == 0
    said = say("convert", source, "-o", "s3://bucket/out/new.safetensors")
    assert said.code == 0, said.all
    assert server.get("bucket", "out/new.safetensors") == local.read_bytes()
    assert server.copied == 0
    read = large.stat().st_size if source == SOURCE else 0
    assert server.down < read * 1.1 + 2 * MIB  # each byte once, although its checksum is verified


@pytest.mark.parametrize("edit", [["cast", "--to-dtype", "bf16"], ["slim"], ["sanitize"]], ids=lambda edit: edit[0])
def test_computed_bytes(edit: list[str], shorter: Path, server: Server, tmp_path: Path) -> None:
    local = tmp_path / "new.pth"
    assert say(edit[0], shorter, *edit[1:], "-o", local).code == 0
    said = say(edit[0], SHORTER, *edit[1:], "-o", TARGET)
    assert said.code == 0, said.all
    assert server.get("bucket", "out/new.pth") == local.read_bytes()
    assert server.down < shorter.stat().st_size + MIB  # the read-back computes nothing again


def test_the_read_back_downloads_nothing_again(large: Path, server: Server, tmp_path: Path) -> None:
    local, new = tmp_path / "model.safetensors", tmp_path / "new.pth"
    assert say("convert", large, "-o", local).code == say("convert", local, "-o", new).code == 0
    server.put("bucket", "model.safetensors", local.read_bytes())
    most = str(local.stat().st_size + MIB)
    said = say("convert", "s3://bucket/model.safetensors", "-o", TARGET, "--max-download", most)
    assert said.code == 0, said.all
    assert server.get("bucket", "out/new.pth") == new.read_bytes()
    assert server.down < local.stat().st_size + 100_000


@pytest.mark.parametrize("words", [["convert"], ["cast", "--to-dtype", "bf16"]], ids=lambda words: words[0])
def test_the_read_back_of_a_large_last_tensor(words: list[str], server: Server) -> None:
    """The directory of the archive is short, so what is looked for at its end could lie in the tensor."""
    data = pytest.importorskip("safetensors.torch").save({"a": torch.ones(9_000_000)})
    server.put("bucket", "one.safetensors", data)
    said = say(words[0], "s3://bucket/one.safetensors", *words[1:], "-o", TARGET, "--max-download", str(len(data)))
    assert said.code == 0, said.all
    assert server.down < len(data) + 100_000


@pytest.mark.parametrize("scheme", ["gs://bucket", "az://bucket", "abfs://bucket@account"])
def test_streams_to_google_and_azure(
    scheme: str, shorter: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("CKPTOOL_ENDPOINT_URL", server.url)
    key = {
        "gcs_base_url": server.url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    if scheme.startswith("gs"):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    else:
        monkeypatch.setenv("CKPTOOL_ANONYMOUS", "1")
    monkeypatch.setattr(server, "signed", False)
    local = tmp_path / "new.pth"
    for source in (shorter, FIXTURES / "bare_module.pth"):
        target = f"{scheme}/out/{source.name}"
        local.unlink(missing_ok=True)
        assert say("strip-module", source, "-o", local).code == 0
        said = say("strip-module", source, "-o", target)
        assert said.code == 0, said.all
        assert server.get("bucket", f"out/{source.name}") == local.read_bytes()
        said = say("strip-module", source, "-o", target)
        assert said.code == 4 and "the output exists" in said.err
        assert say("strip-module", source, "-o", target, "--force").code == 0
    assert say("strip-module", f"{scheme}/shorter.pth", "-o", f"{scheme}/out/again.pth").code == 0
    assert say("diff", f"{scheme}/out/again.pth", f"{scheme}/out/shorter.pth").code == 0
    assert not server.uploads and not server.blocks


def test_a_small_output_is_one_request(server: Server, tmp_path: Path) -> None:
    local = tmp_path / "new.pth"
    assert say("strip-module", FIXTURES / "bare_module.pth", "-o", local).code == 0
    assert say("strip-module", "s3://bucket/small.pth", "-o", TARGET).code == 0
    assert server.get("bucket", "out/new.pth") == local.read_bytes()
    assert [one.headers.get("if-none-match") for one in server.seen if one.method == "PUT"] == ["*"]


def test_the_library_writes_to_an_address(server: Server) -> None:
    import ckptool

    with ckptool.open(SOURCE) as checkpoint:
        saved = ckptool.save(ckptool.strip_module(checkpoint), TARGET)
    assert saved.traffic is not None and saved.traffic.copied == server.copied > 17 * MIB
    seen = server.count(), server.down, server.up  # with what XML takes, and the look at the output
    assert saved.traffic[:3] == pytest.approx(seen, rel=0.01)
    assert next(iter(ckptool.open(TARGET)["state_dict"])) == "layers.0.weight"


def test_a_dry_run_tells_what_moves(server: Server) -> None:
    said = say("strip-module", SOURCE, "-o", TARGET, "--dry-run")
    assert said.code == 0, said.all
    assert " down, " in said.out and " up, " in said.out and "copied on the server" in said.out
    assert [one for one in server.seen if one.method in ("PUT", "POST", "DELETE")] == []
    before = server.down
    again = say("strip-module", SOURCE, "-o", TARGET)
    moved = again.out.partition("; ")[2].splitlines()[0]
    assert moved and moved in said.out
    assert server.up < 6 * MIB and server.down - before < 8 * MIB


# -- parts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=12))
def test_parts_have_the_bytes_of_the_plan(sizes: list[tuple[bool, int]]) -> None:
    """Parts are 5 MiB to 5 GiB, except the last one; each byte of the plan is in one part, in order."""
    source = BytesSource(b"")
    source.size = 1 << 40
    begins = [*accumulate((size for _, size in sizes), initial=0)]
    pieces = [Span(source, begin, size) for begin, (_, size) in zip(begins, sizes)]
    copied = {piece for piece, (is_copied, _) in zip(pieces, sizes) if is_copied}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_is_copied", lambda piece, copier, plan: piece in copied)
        patch.setattr(publishing, "_MAX_PART", 16 * MIB)
        cut = cut_into_parts(Plan(tuple(pieces)), None)
    assert all(5 * MIB <= part.size <= 16 * MIB for part in cut.parts[:-1])
    assert sum(part.size for part in cut.parts) == begins[-1]
    at, left = 0, iter(cut.streamed.pieces)
    stream, offset = next(left, None), 0
    for size, span in cut.parts:
        if span is not None:
            assert (span.offset, span.size) == (at, size)
        count = 0 if span is not None else size
        while count:
            assert isinstance(stream, Span) and stream.offset + offset == at + size - count
            taken = min(count, stream.size - offset)
            offset, count = offset + taken, count - taken
            if offset == stream.size:
                stream, offset = next(left, None), 0
        at += size
    assert stream is None


@pytest.mark.parametrize("size", [8 * MIB, 2 << 30, 1 << 37, LIMITS.object_bytes])
def test_a_streamed_output_has_as_many_parts_as_s3_takes(size: int) -> None:
    store = Mock()
    libraries.ObStore(store).put("key", [], size, "")
    part = store.put.call_args.kwargs["chunk_size"]
    assert -(-size // part) <= 10_000
    assert part == 8 * MIB or size > 2 << 30  # parts are in memory


# -- what stays as it is --------------------------------------------------------------------------------------------


@pytest.fixture(params=["copies", "streams", "small"])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if request.param == "streams":
        monkeypatch.setattr(S3, "copies_from", lambda *of: False)
    return ["strip-module", "s3://bucket/small.pth" if request.param == "small" else SHORTER]


def telling(server: Server) -> list[int]:
    """The numbers of requests before which something may change: some that read, and all that write."""
    last = max(at for at, one in enumerate(server.seen, 1) if one.method in ("PUT", "POST"))
    return sorted({2, 3, last // 2, *range(max(last - 7, 2), last + 1)})


def test_an_output_that_somebody_else_writes_meanwhile(command: list[str], server: Server) -> None:
    """Whoever was there first stays, and the command says so."""
    assert say(*command, "-o", TARGET).code == 0
    made = server.get("bucket", "out/new.pth")
    for number in telling(server):
        server.buckets["bucket"].pop("out/new.pth", None)
        server.clear()
        server.replaced = {number: ("bucket", "out/new.pth", b"another")}
        said = say(*command, "-o", TARGET)
        there = server.get("bucket", "out/new.pth")
        assert (said.code > 3, there) == (True, b"another") or (said.code, there) == (0, made), number
        if said.code:
            # If a request of the first run was repeated, the last number is a request after the object was visible.
            assert any(words in said.err for words in ("exists", "meanwhile", "somebody replaced it")), said.err
    assert not server.uploads


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("count", [50_000, 3_000_000])  # numbers in a tensor: one request, and several parts
def test_an_output_of_the_same_size_is_not_ours(
    copies: bool, count: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run wrote other numbers of the same shapes. With computed bytes at both ends, only these tell it."""
    if not copies and count > 1_000_000:
        pytest.skip("streams in several parts take no condition")
    if not copies:
        monkeypatch.setattr(S3, "copies_from", lambda *of: False)
    numpy = pytest.importorskip("safetensors.numpy")
    one: Any = pytest.importorskip("numpy").ones(count, "float32")
    # A header of more than 4 KiB has the same bytes at the beginning; the last tensor is the same, too.
    for at in (1, 2):
        tensors = {"a": one * at, "z": one[:5000] * 3} | {f"name of a tensor {n:05}": one[:0] for n in range(80)}
        server.put("bucket", f"{at}.safetensors", numpy.save(tensors))
    command = ["cast", "s3://bucket/1.safetensors", "--to-dtype", "bf16", "-o", "s3://bucket/out/1.safetensors"]
    assert say("cast", "s3://bucket/2.safetensors", *command[2:-1], "s3://bucket/out/2.safetensors").code == 0
    other = server.get("bucket", "out/2.safetensors")
    server.clear()
    assert say(*command).code == 0
    last = max(at for at, one in enumerate(server.seen, 1) if one.method in ("PUT", "POST"))
    assert len(server.get("bucket", "out/1.safetensors")) == len(other)
    del server.buckets["bucket"]["out/1.safetensors"]
    server.clear()
    server.replaced = {last: ("bucket", "out/1.safetensors", other)}
    said = say(*command)
    assert (said.code, "somebody else wrote to it meanwhile" in said.err) == (5, True), said.all
    assert server.get("bucket", "out/1.safetensors") == other
    assert not server.uploads


@pytest.mark.parametrize("error", [ReadBackError("it is wrong", promised="a", read="b"), KeyboardInterrupt()], ids=type)
def test_what_does_not_pass_its_check_is_never_visible(
    error: BaseException, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object) -> None:
        raise error

    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(S3, "copies_from", lambda *of: False)
        with closing(open_remote(SOURCE)) as source, pytest.raises(type(error)):
            publish(Plan((b"x" * 100, Span(source, 0, source.size))), TARGET, [source], check=refuse)
        assert "out/new.pth" not in server.buckets["bucket"]
        assert not server.uploads


@pytest.mark.parametrize("copies", [True, False])
def test_an_upload_that_the_server_keeps_is_named(
    copies: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permission to write may come without the one to abort."""

    def refuse(*_: object) -> None:
        raise Failed("", 403, "AccessDenied")

    def interrupt(source: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(S3, "abort", refuse)
    if not copies:
        monkeypatch.setattr(S3, "copies_from", lambda *of: False)
    try:
        with closing(open_remote(SOURCE)) as source, pytest.raises(OutputError) as caught:
            publish(Plan((b"x" * 100, Span(source, 0, source.size))), TARGET, [source], check=interrupt)
        (upload,) = server.uploads
        assert upload in str(caught.value) and "abort-multipart-upload" in str(caught.value.step)
        assert "out/new.pth" not in server.buckets["bucket"]
    finally:
        server.uploads.clear()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_upload(number: int, server: Server, tmp_path: Path) -> None:
    """The process of the command, not one function of it."""
    words = [sys.executable, "-m", "ckptool", "convert", SOURCE, "-o", "s3://bucket/out/new.safetensors", "--key"]
    before = len(server.log)
    server.delay = 0.1
    try:
        with subprocess.Popen(
            [*words, "state_dict"], stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
        ) as process:
            end = time.monotonic() + 30
            while not server.uploads and process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            assert server.uploads, process.communicate()
            process.send_signal(number)
            said = process.communicate(timeout=30)[1].decode()
    finally:
        server.delay = 0.0
    assert process.returncode not in (0, 1, 70), said
    assert "Traceback" not in said
    assert len(server.log) > before and not server.uploads, said
    assert "out/new.safetensors" not in server.buckets["bucket"]


def test_a_damaged_input_makes_no_output(shorter: Path, server: Server) -> None:
    data = bytearray(shorter.read_bytes())
    data[len(data) // 2] ^= 1
    server.put("bucket", "damaged.pth", bytes(data))
    said = say("convert", "s3://bucket/damaged.pth", "-o", "s3://bucket/out/new.safetensors")
    assert said.code == 3, said.all
    assert "does not match its checksum" in said.err
    assert "out/new.safetensors" not in server.buckets["bucket"]
    assert not server.uploads


def test_leftovers_of_killed_runs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload of the same key that is older than a day is removed, no other."""
    copier = open_store("s3://bucket/x", Settings(server.url))[0]
    assert isinstance(copier, S3)
    young = copier.begin("out/new.pth")
    for key in ("out/new.pth", "out/new.pth.2", "out/other.pth"):
        copier.begin(key)
    old = time.time() - 90_000
    server.uploads.update({name: one._replace(begun=old) for name, one in server.uploads.items() if name != young})
    assert say("strip-module", SOURCE, "-o", TARGET).code == 0
    assert sorted(one.key for one in server.uploads.values()) == ["out/new.pth", "out/new.pth.2", "out/other.pth"]
    assert young in server.uploads


# -- servers that can do less ---------------------------------------------------------------------------------------


def test_a_server_that_cannot_copy_gets_the_bytes(
    shorter: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
        raise Failed("", 501, "NotImplemented")

    monkeypatch.setattr(S3, "copy", refuse)
    local = tmp_path / "new.pth"
    assert say("strip-module", shorter, "-o", local).code == 0
    assert say("strip-module", SHORTER, "-o", TARGET).code == 0
    assert server.get("bucket", "out/new.pth") == local.read_bytes()
    assert not server.uploads


def test_streams_are_bounded(server: Server, without_copies: None) -> None:
    """A stream of more than a command may download is refused before its first byte."""
    said = say("strip-module", SOURCE, "-o", TARGET, "--max-download", "10MB")
    assert said.code == 4, said.all
    assert "it would download 2" in said.err
    assert server.down < 2 * MIB and server.up == 0


@pytest.mark.parametrize(
    "address", ["https://host.invalid/x.pth", "hf://org/model/x.pth", "s3://bucket", "s3://bucket/x/"]
)
def test_addresses_that_cannot_be_written(address: str, server: Server) -> None:
    for more in ([], ["--dry-run"]):
        said = say("strip-module", SOURCE, "-o", address, *more)
        assert said.code in (4, 5), said.all
        assert "SECRET" not in said.all
    assert server.seen == [] or all(one.method in ("GET", "HEAD") for one in server.seen)


def test_the_output_is_the_input(server: Server) -> None:
    said = say("strip-module", SOURCE, "-o", SOURCE, "--force")
    assert said.code == 4 and "the output is the input" in said.err


@pytest.mark.parametrize("one", ["az://bucket", "abfss://bucket@account.dfs.core.windows.net"])
@pytest.mark.parametrize("other", ["abfs://bucket@account", "az://bucket"])
def test_an_object_of_azure_has_several_addresses(
    one: str, other: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("CKPTOOL_ENDPOINT_URL", server.url)
    monkeypatch.setenv("CKPTOOL_ANONYMOUS", "1")
    monkeypatch.setattr(server, "signed", False)
    said = say("strip-module", f"{one}/small.pth", "-o", f"{other}/small.pth", "--force")
    assert said.code == 4 and "the output is the input" in said.err


def test_empty_parts_of_keys(server: Server) -> None:
    """obstore drops a slash at the beginning of a key, and botocore does not."""
    before = server.get("bucket", "small.pth")
    for output in ("s3://bucket//small.pth", "s3://bucket//out/new.pth"):
        said = say("strip-module", SOURCE, "-o", output, "--force")
        assert said.code == 5 and "empty part" in said.err
    assert say("keys", "s3://bucket//small.pth").code == say("scan", "s3://bucket//out/").code == 3
    assert server.get("bucket", "small.pth") == before and [one for one in server.seen if one.method == "PUT"] == []


def test_an_output_that_cannot_be_read_again(command: list[str], server: Server) -> None:
    """It is visible, so the error does not speak of a failed upload."""
    assert say(*command, "-o", TARGET).code == 0
    complete = max(at for at, one in enumerate(server.seen, 1) if one.method in ("PUT", "POST"))
    requests = server.count()
    for number in range(complete + 1, requests + 1):
        del server.buckets["bucket"]["out/new.pth"]
        server.clear()
        server.faults = {number: "denied"}
        said = say(*command, "-o", TARGET)
        assert said.code == 5 and "it was written, but cannot be read again: " in said.err, said.all
        assert server.get("bucket", "out/new.pth")


@pytest.mark.parametrize("answer", ["uploads", "partNumber", "x-amz-copy-source"])
def test_an_answer_without_what_it_should_have(answer: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    request = S3.request

    def emptied(self: S3, method: str, key: str, *of: Any, **more: Any) -> Reply:
        found = request(self, method, key, *of, **more)
        return Reply(200, {}, b"") if method != "GET" and any(answer in each for each in of[:2]) else found

    monkeypatch.setattr(S3, "request", emptied)
    said = say("strip-module", SOURCE, "-o", "s3://bucket/out/odd.pth")
    assert said.code == 5 and "does not answer as it should" in said.err
    assert server.uploads == {} and "out/odd.pth" not in server.buckets["bucket"]

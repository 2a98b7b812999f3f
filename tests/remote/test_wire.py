"""Requests are bounded in bytes, time and number, and no other host learns an address."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import say
from conftest import FIXTURES
from remote.server import MIB, Failure, Server, _Handler
from remote.test_odd_servers import Answers, odd

pytest.importorskip("obstore")
torch: Any = pytest.importorskip("torch")

from ckptool.remote import folder, source, web, wire  # noqa: E402
from ckptool.remote.store import Failed  # noqa: E402

DATA = (FIXTURES / "bare.pth").read_bytes()


@pytest.fixture(autouse=True)
def forgotten(server: Server) -> None:
    source._OPENED.clear()
    folder._OPENED.clear()
    web._repository.cache_clear()


def endless(one: Answers, status: int) -> None:
    """Answer with 200 MB in chunks."""
    one.send_response(status)
    one.send_header("Transfer-Encoding", "chunked")
    one.end_headers()
    for _ in range(200):
        one.wfile.write(b"100000\r\n" + b" " * MIB + b"\r\n")
    one.wfile.write(b"0\r\n\r\n")


ADDRESSES = ["s3://bucket/a.pth", "s3://bucket/run/", "{url}/a.pth?Signature=SECRET", "hf://org/model/a.pth"]


@pytest.mark.parametrize("status", [200, 206, 403, 500])
@pytest.mark.parametrize("address", ADDRESSES)
def test_every_answer_is_bounded(address: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = wire._Connection.readinto
    monkeypatch.setattr(wire._Connection, "readinto", lambda *of: sizes.append(receive(*of)) or sizes[-1])
    with odd(lambda one: endless(one, status)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        said = say("scan", address.format(url=server.url), "--max-download", "2MB")
    assert said.code in (3, 4), said.all
    assert sum(sizes) < 12 * MIB  # four attempts, of two ends


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("user", ["", "user:PASSWORD@"])
def test_another_host_learns_nothing(status: int, user: str) -> None:
    with (
        odd(lambda one: one.send_range(DATA)) as there,
        odd(lambda one: one.send(status, Location=f"{there.url}/x.pth")) as here,
    ):
        assert say("keys", here.url.replace("//", f"//{user}") + "/a.pth?Signature=SECRET").code == 0
        for path, headers in there.seen:
            assert "SECRET" not in path
            assert not {"referer", "authorization", "cookie"} & headers.keys()


@pytest.mark.parametrize("command", ["keys", "inspect", "scan", "validate", "hash", "diff", "strip-module"])
@pytest.mark.parametrize("large", [False, True])
def test_a_server_that_names_no_version(command: str, large: bool, tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save({"module.a": torch.zeros(100_000 if large else 100)}, file)
    with odd(lambda one: one.send_range(file.getvalue(), ETag="")) as server:
        words = [command, f"{server.url}/a.pth", *([f"{server.url}/a.pth"] if command == "diff" else [])]
        words += ["-o", str(tmp_path / "out.pth")] if command == "strip-module" else []
        said = say(*words)
        assert (said.code == 0) is not large, said.all
        if large:
            assert "sends neither ETag nor Last-Modified" in said.all
            assert not [*tmp_path.iterdir()]
            assert say(*words, "--allow-unversioned").code == 0


@pytest.mark.parametrize("fault", ["reset", "500", "503", "short", "length"])
@pytest.mark.parametrize("command", ["keys", "scan", "validate", "hash"])
@pytest.mark.parametrize("address", ["s3://bucket/a.pth", "{url}/plain/a.pth"])
def test_four_attempts_in_all(address: str, command: str, fault: str, server: Server) -> None:
    server.put("bucket", "a.pth", DATA)
    server.put("plain", "a.pth", DATA)
    server.faults = dict.fromkeys(range(1, 100), fault)
    assert say(command, address.format(url=server.url)).code == 3
    ranges = [one.headers.get("range") for one in server.seen]
    assert max(map(ranges.count, ranges)) <= 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that only the test moves."""
    now = [0.0]
    monkeypatch.setattr(wire.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(wire.time, "sleep", lambda _seconds: None)
    yield now


def test_a_server_that_never_answers_ends_in_a_minute(clock: list[float]) -> None:
    def ask() -> None:
        clock[0] += wire.LIMITS.connect_seconds + wire.LIMITS.read_seconds
        raise Failed("timeout")

    with pytest.raises(Failed):
        wire.retried(ask)
    assert clock[0] <= wire.LIMITS.retry_seconds == 60


def test_a_server_that_drips_ends_in_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire.LIMITS.request_seconds == 120
    monkeypatch.setattr(wire, "LIMITS", wire.LIMITS._replace(request_seconds=0.4))
    stop = threading.Event()

    def drip(send: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                send(connection)
                while not stop.wait(0.02):
                    try:
                        connection.send(b"x")
                    except OSError:
                        return

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    heads = (b"", b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    heads += (b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for head in heads:
        begun = time.perf_counter()
        with pytest.raises(Failed) as caught:
            wire.ask("GET", drip(lambda connection, head=head: connection.sendall(head)), {}, 1000)
        assert caught.value.kind in ("slow", "timeout", "answer", "body", "")
        assert time.perf_counter() - begun < 5
    stop.set()


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (403, "<Code>InvalidObjectState</Code>", "Glacier"),
        (400, "<Code>KMS.DisabledException</Code>", "the KMS key"),
        (400, "<Code>KMS.KMSInvalidStateException</Code>", "the KMS key"),
        (403, "<Code>AccessDenied</Code><Message>not authorized to perform: kms:Decrypt</Message>", "the KMS key"),
    ],
)
@pytest.mark.parametrize("command", ["keys", "validate", "scan"])
def test_the_cause_of_an_error(
    command: str, status: int, body: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with odd(lambda one: one.send(status, f"<Error>{body}</Error>".encode())) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        assert cause in say(command, "s3://bucket/a.pth").all


@pytest.mark.parametrize("command", ["keys", "scan", "validate"])
@pytest.mark.parametrize("address", ["s3://bucket/many/", "hf://org/many"])
def test_a_listing_counts_as_a_download(
    address: str, command: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/hub")
    for at in range(300):
        for bucket, prefix in (("bucket", "many/"), ("org--many", "")):
            server.put(bucket, f"{prefix}{'x' * 100}{at}.bin", b"")
    said = say(command, address, "--max-download", "20kB")
    assert said.code in (3, 4) and "more than" in said.all and "--max-download" in said.all, said.all


@pytest.mark.parametrize("name", ["b.pth", "model-00002-of-00002.safetensors"])
def test_an_object_that_cannot_be_read_is_named(name: str, server: Server) -> None:
    """The others of its folder are scanned all the same."""
    for other in ("a.pth", name, "c.pth"):
        server.put("bucket", f"one/{other}", DATA)
    denied = f"/bucket/one/{name}"
    route = _Handler._route

    def refuse(self: Any) -> Any:
        if denied == self.raw and self.command == "GET":
            raise Failure(403, "AccessDenied")
        return route(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Handler, "_route", refuse)
        said = say("scan", "s3://bucket/one/")
    assert said.code == 3, said.all
    assert "2 files: 2 weights-only" in said.out and f"{name}: no permission to read it" in said.err, said.all

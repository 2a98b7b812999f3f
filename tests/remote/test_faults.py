"""A fault at any request of a command: the output is right, or an error says what failed, and nothing is left behind.

``CKPTOOL_TESTS=all`` has every fault at every request; otherwise each command meets each fault at a few requests.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import Said, has_next_step, say
from conftest import ROOT, WHOLE
from remote.server import KEY, KILLS, LOST, REPLACED, SECRET, TOKEN, Server

pytest.importorskip("obstore")
pytest.importorskip("huggingface_hub")

from ckptool.remote import folder, libraries, s3, source, web, wire

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

#: What may go wrong with one request, and whether a second request makes it good.
FAULTS = {
    "reset": True,
    LOST: True,
    "stall": True,
    "500": True,
    "503": True,
    "short": True,
    "length": True,
    "whole": False,
    "etag": False,
    "expired": False,
    REPLACED: False,
}
#: Requests of one command, at most.
MANY = 400
#: Seconds that a server may take for the next bytes.
PATIENCE = 0.3
#: What no output may contain: keys, a token, a query string, what the server says, texts of libraries.
SECRETS = (SECRET, "SECRET", "PASSWORD", KEY, TOKEN, "Signature", "Generic", "reqwest", "Traceback", "a bug in ckptool")


class Case(NamedTuple):
    """A command by its words, and its objects.

    In words, ``{url}`` is the server, ``{web}`` the server with user information, and ``{out}`` a local output.
    ``objects`` are (bucket, key) and may be replaced; their other bytes give another output. ``listed`` says that the
    command lists them first, so that none of them may be another one when it is read. ``published`` says that the
    output is ``TARGET``, and ``former`` has the bytes that are there before.
    """

    words: tuple[str, ...]
    objects: tuple[tuple[str, str], ...]
    listed: bool = False
    published: bool = False
    former: bytes | None = None


#: An output in the bucket.
TARGET = "bucket", "out/new.pth"
OUT = "s3://bucket/out/new.pth"
FORMER = b"what was there before"
SHARDS = tuple(("bucket", f"shards/model-0000{at}-of-00004.safetensors") for at in range(1, 5))
COMMANDS = {
    "keys": Case(("keys", "s3://bucket/a.pth"), (("bucket", "a.pth"),)),
    "inspect": Case(("inspect", "s3://bucket/shards"), SHARDS, listed=True),
    "validate": Case(("validate", "s3://bucket/a.pth"), (("bucket", "a.pth"),)),
    "get": Case(("get", "{web}/plain/a.pth?Signature=SECRETQUERY", 'state_dict["module.7"]'), (("plain", "a.pth"),)),
    "scan": Case(("scan", "s3://bucket/a.pth"), (("bucket", "a.pth"),)),
    "scan hub": Case(("scan", "hf://org/model/a.pth"), ()),
    "hash": Case(("hash", "s3://bucket/a.pth"), (("bucket", "a.pth"),)),
    "diff": Case(("diff", "s3://bucket/a.pth", "s3://bucket/b.pth"), (("bucket", "a.pth"), ("bucket", "b.pth"))),
    "strip-module": Case(("strip-module", "s3://bucket/a.pth", "-o", "{out}"), (("bucket", "a.pth"),)),
}
#: Outputs in the bucket: in one request, in parts that the server copies, and both again in the place of an object.
_LARGE = ("strip-module", "s3://bucket/large.pth", "-o", OUT), (("bucket", "large.pth"),)
_SMALL = ("strip-module", "s3://bucket/a.pth", "-o", OUT), (("bucket", "a.pth"),)
COMMANDS |= {
    "publish": Case(*_LARGE, published=True),
    "publish --force": Case((*_LARGE[0], "--force"), _LARGE[1], published=True, former=FORMER),
    "publish small": Case(*_SMALL, published=True),
    "publish small --force": Case((*_SMALL[0], "--force"), _SMALL[1], published=True, former=FORMER),
}
#: Faults of one answer only, for outputs in parts: an error inside a 200 to the request that makes them visible.
COMPLETE = "complete"


def checkpoint(start: int, count: int = 24, size: int = 40_000) -> bytes:
    """Return 24 tensors of 160 kB, so far apart that their headers are requests of their own."""
    file = io.BytesIO()
    state = {f"module.{at}": torch.full((size,), float(start + at)) for at in range(count)}
    torch.save({"state_dict": state}, file)
    return file.getvalue()


class Outcome(NamedTuple):
    """What a command said, and the file or object that it wrote."""

    said: Said
    written: bytes | None


class Bench:
    """The server with its objects, and the right outcomes of each command."""

    def __init__(self, server: Server, out: Path) -> None:
        self.server, self.out = server, out
        one, two, three = (checkpoint(start) for start in (0, 100, 200))
        large, other = (checkpoint(start, 6, 600_000) for start in (0, 100))
        self.firsts = {("bucket", "a.pth"): one, ("bucket", "b.pth"): two, ("plain", "a.pth"): one}
        self.seconds = {("bucket", "a.pth"): three, ("bucket", "b.pth"): three, ("plain", "a.pth"): two}
        self.firsts["bucket", "large.pth"], self.seconds["bucket", "large.pth"] = large, other
        weights = {}
        for at, place in enumerate(SHARDS):
            for objects in (self.firsts, self.seconds):
                objects[place] = safetensors.save({f"layers.{at}.weight": torch.full((90_000,), float(len(objects)))})
            weights[f"layers.{at}.weight"] = place[1].removeprefix("shards/")
        index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
        self.firsts["bucket", "shards/model.safetensors.index.json"] = index
        self.firsts["org--model", "a.pth"] = self.firsts["plain", "org--model/a.pth"] = one
        self._clean: dict[str, tuple[list[Outcome], int]] = {}

    def run(self, case: Case) -> Outcome:
        """Run a command as a new process would, with the objects and the faults of the server as they are."""
        source._OPENED.clear()
        folder._OPENED.clear()
        web._repository.cache_clear()
        self.out.unlink(missing_ok=True)
        url = self.server.url
        signed = url.replace("//", "//user:PASSWORD@")
        said = say(*(word.format(url=url, web=signed, out=self.out) for word in case.words))
        return Outcome(
            said, self.published() if case.published else self.out.read_bytes() if self.out.exists() else None
        )

    def published(self) -> bytes | None:
        """Return the bytes of the output in the bucket, or None."""
        assert self.server.seen is not None  # nothing is under way any more
        return self.server.get(*TARGET) if self.server.buckets[TARGET[0]].get(TARGET[1]) else None

    def reset(self, case: Case, seconds: int = 0) -> None:
        """Put all objects back; the bits of ``seconds`` choose objects that are replaced from the beginning."""
        self.server.uploads.clear()
        self.server.buckets.get(TARGET[0], {}).pop(TARGET[1], None)
        if case.former is not None:
            self.server.put(*TARGET, case.former)
        for place, data in self.firsts.items():
            self.server.restore(*place, data)
        for at, (place, data) in enumerate(self.seconds.items()):
            if seconds >> at & 1:
                self.server.put(*place, data)
        self.server.clear()

    def clean(self, name: str) -> tuple[list[Outcome], int]:
        """Return the right outcomes of a command, for every choice of its replaced objects, and its requests."""
        if name not in self._clean:
            case = COMMANDS[name]
            bits = [1 << at for at, place in enumerate(self.seconds) if place in case.objects and not case.listed]
            chosen = [0]
            for bit in bits:
                chosen += [each | bit for each in chosen]
            outcomes = []
            for seconds in reversed(chosen):
                self.reset(case, seconds)
                outcomes.append(self.run(case))
            assert {outcome.said.code for outcome in outcomes} <= {0, 1}, outcomes[-1].said.all
            self._clean[name] = outcomes, self.server.count()
        return self._clean[name]


def do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Send failed requests again at once, by obstore and by us."""
    client, at_once = libraries._client, timedelta(milliseconds=1)

    def hurried(*of: Any) -> dict[str, Any]:
        options = client(*of)
        options["retry_config"]["backoff"] = {"init_backoff": at_once, "max_backoff": at_once}
        return options

    patch.setattr(libraries, "_client", hurried)
    patch.setattr(wire, "_PAUSE", 0.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    home = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, Server() as server:
        for name in [name for name in os.environ if name.startswith(("AWS_", "HF_", "HUGGING", "CKPTOOL_"))]:
            if name != "CKPTOOL_TESTS":
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("HF_HOME", str(home))
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("HF_ENDPOINT", f"{server.url}/hub")
        for module in (libraries, web, wire):
            patch.setattr(module, "LIMITS", module.LIMITS._replace(retries=1))
        do_not_wait(patch)
        server.redirect = server.url
        yield Bench(server, home / "out.pth")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do not wait long for servers that stall."""
    for module in (libraries, web, wire):
        monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(read_seconds=PATIENCE))
    monkeypatch.setattr(s3, "_SLOW", PATIENCE)
    libraries._bucket.cache_clear()
    yield
    libraries._bucket.cache_clear()


def chosen(requests: int, name: str) -> list[tuple[int, bool]]:
    """Return (request, persistent) for the faults of a test: all, or one of them, chosen by its name."""
    faults = [(number, persistent) for number in range(1, requests + 1) for persistent in (False, True)]
    if WHOLE:
        return faults
    at = int.from_bytes(sha256(name.encode()).digest()[:4], "big")
    return [faults[at % len(faults)]]


CASES = [(name, fault) for name, case in COMMANDS.items() for fault in FAULTS if fault != REPLACED or case.objects]
CASES += [(name, COMPLETE) for name in ("publish", "publish --force")]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault_at_any_request(name: str, fault: str, bench: Bench, request: pytest.FixtureRequest) -> None:
    case = COMMANDS[name]
    right, requests = bench.clean(name)
    if fault == "stall":
        request.getfixturevalue("impatient")
    for number, persistent in chosen(requests, f"{name} {fault}"):
        bench.reset(case)
        numbers = range(number, MANY) if persistent else [number]
        bench.server.faults = dict.fromkeys(numbers, fault)
        bench.server.seconds = {place: bench.seconds[place] for place in case.objects}
        outcome = bench.run(case)
        where = f"{fault} at request {number} of {requests}{' and all later ones' * persistent}: {outcome.said}"
        assert bench.server.count() < MANY
        assert not [word for word in SECRETS if word in outcome.said.all], where
        check_uploads(bench.server, persistent, where)
        if outcome in right:
            continue
        assert not FAULTS.get(fault) or persistent or fault == "stall", where
        check_error(outcome, fault, where, case, [each.written for each in right])


def check_uploads(server: Server, persistent: bool, where: str) -> None:
    """Check that no upload is left. If the server failed to the end, an attempt to remove it must have been made."""
    if server.uploads:
        assert persistent, where
        last = [each.method for each in server.seen if "uploadId" in each.query or "uploads" in each.query][-1]
        assert last in ("DELETE", "GET"), where


def check_error(outcome: Outcome, fault: str, where: str, case: Case, right: list[bytes | None]) -> None:
    """Check that a command failed with an error that says what to do next. Its output is not there, or whole."""
    said = outcome.said
    assert said.code in (3, 5), where  # 5: once an output was begun
    assert outcome.written == case.former or (case.published and outcome.written in right), where
    assert has_next_step(said), where
    if fault == REPLACED or (fault == "etag" and not case.published):
        assert "the file changed while it was read" in said.all, where


def test_there_are_faults_enough(bench: Bench) -> None:
    """At least 1,500 faults of at least eight commands: one of a request, and one of it and all later ones."""
    counts = {name: bench.clean(name)[1] for name in COMMANDS}
    assert len(counts) >= 8
    assert 2 * sum(counts[name] for name, _ in CASES) >= 1500, counts


# -- kill -9 --------------------------------------------------------------------------------------------------------


def kills(requests: int, name: str) -> list[tuple[int, str]]:
    """Return (request, moment) for all deaths, or one of them, chosen by the name."""
    moments = [(number, kill) for number in range(1, requests + 1) for kill in KILLS]
    at = sha256(name.encode()).digest()[0]
    return moments if WHOLE else [moments[at % len(moments)]]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", [name for name, case in COMMANDS.items() if case.published])
def test_a_process_killed_at_any_request(name: str, bench: Bench) -> None:
    """The target is as before, unless the request that makes the output visible was handled: then it is whole."""
    case = COMMANDS[name]
    right, requests = bench.clean(name)
    for number, kill in kills(requests, name):
        bench.reset(case)
        bench.server.faults = {number: kill}
        process = subprocess.Popen(
            [sys.executable, "-m", "ckptool", *case.words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        bench.server.victims.put(process.pid)
        where = f"{kill} at request {number} of {requests}"
        assert process.wait(timeout=120) == -signal.SIGKILL, where
        requested = [each for each in bench.server.seen if each.status == 200 and each.path.endswith("/new.pth")]
        visible = any(each.method == "POST" and "uploadId" in each.query for each in requested)
        visible = visible or any(each.method == "PUT" and "uploadId" not in each.query for each in requested)
        assert bench.published() == (right[-1].written if visible else case.former), where
        if not visible:  # a later run
            bench.server.clear()
            again = bench.run(case)
            assert again.said.code == 0 and again.written == right[-1].written, where

"""Remote objects are read as local files are, with few requests, and never as a mixture of two objects."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from remote.server import DELAYS, FAULTS, MIB, Server

pytest.importorskip("obstore")

from ckptool.base.errors import ChangedError, CkptoolError, RefusedError, UnreadableError
from ckptool.base.limits import LIMITS
from ckptool.remote import libraries, source
from ckptool.remote.source import ENDS, RemoteSource, open_remote
from ckptool.remote.store import Settings

DATA = random.Random(1).randbytes(3 * MIB)
#: The kinds of stores, and an address for each; plain HTTP needs the address of the server before it.
KINDS = {"s3": "s3://bucket/run/a.pth", "http": "/plain/run/a.pth?Signature=SECRETQUERY"}
KINDS |= {"gs": "gs://bucket/run/a.pth", "az": "az://bucket/run/a.pth", "abfs": "abfs://bucket@host/run/a.pth"}
Open = Callable[..., RemoteSource]


@pytest.fixture(autouse=True)
def impatient(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setattr(libraries, "LIMITS", libraries.LIMITS._replace(retries=1))


@pytest.fixture(params=KINDS)
def opened(server: Server, request: pytest.FixtureRequest) -> Open:
    """Store bytes under the address of one kind of store, and open it."""
    kind = request.param

    def open_it(data: bytes = DATA, **settings: Any) -> RemoteSource:
        server.signed = kind == "s3"
        server.put("plain" if kind == "http" else "bucket", "run/a.pth", data)
        address = server.url + KINDS[kind] if kind == "http" else KINDS[kind]
        anonymous = kind not in ("s3", "http")
        return open_remote(address, Settings(server.url, anonymous=anonymous, **settings))

    return open_it


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("size", [1, 100, ENDS, ENDS + 1, 2 * ENDS - 1, 2 * ENDS + 1, 3 * MIB])
def test_random_reads_are_right(size: int, opened: Open, server: Server) -> None:
    data, chance = DATA[:size], random.Random(size)
    found = opened(data)
    assert found.size == size
    for _ in range(200):
        offset, wanted = chance.randrange(size + 2), chance.choice((1, 30, 1000, MIB))
        assert found.read(offset, wanted) == data[offset : offset + wanted]
    assert found.read(0, 0) == found.read(size, 5) == found.read(5, -1) == b""
    # What was read is kept: every byte comes once, but those at both ends of a small file come twice.
    assert server.down <= size + min(size, ENDS)


def test_an_empty_object(opened: Open, server: Server) -> None:
    found = opened(b"")
    assert (found.size, found.read(0, 10)) == (0, b"")
    found.check_unchanged()
    server.clear()
    server.faults = {1: "whole"}  # some servers answer so, because there is no range
    assert opened(b"").size == 0


def test_both_ends_come_first_and_at_once(opened: Open, server: Server, request: pytest.FixtureRequest) -> None:
    round_trips = 2 if "az" in request.node.name or "abfs" in request.node.name else 1
    found = server.slowly(opened, round_trips)
    assert (server.count("GET"), server.down) == (2, 2 * ENDS)
    assert server.round_trips == round_trips
    assert found.read(0, ENDS) == DATA[:ENDS] and found.read(3 * MIB - ENDS, MIB) == DATA[-ENDS:]
    assert server.count() == 2


def test_a_safetensors_file_has_its_metadata_at_the_beginning(server: Server) -> None:
    server.put("bucket", "model.safetensors", DATA)
    found = open_remote("s3://bucket/model.safetensors", Settings(server.url))
    assert (server.count(), server.down) == (1, ENDS)
    assert found.read(ENDS - 10, 20) == DATA[ENDS - 10 : ENDS + 10]
    assert (server.count(), server.down) == (2, ENDS + (64 << 10))


def test_ranges_that_lie_close_together_are_one_request(server: Server) -> None:
    server.put("bucket", "a", DATA)
    close = [(ENDS + 1000 * number, 100) for number in range(300)]
    far = [(MIB + 200_000 * number, 100) for number in range(5)]

    def ask() -> RemoteSource:
        found = open_remote("s3://bucket/a", Settings(server.url))
        found.prefetch([*far, *close, (0, 50), (3 * MIB - 10, 50), (4 * MIB, 1)])
        return found

    found = server.slowly(ask, 2)
    assert (server.count(), server.round_trips) == (8, 2)  # both ends, then six at once
    for offset, size in [*close, *far]:
        assert found.read(offset, size) == DATA[offset : offset + size]
    found.prefetch(close)
    assert server.count() == 8
    assert {each.headers["if-match"] for each in server.seen[2:]} == {server.object("bucket", "a").etag}


def test_requests_in_flight_are_limited(server: Server) -> None:
    server.put("bucket", "a", bytes(12 * MIB))
    for delay in DELAYS:  # on a busy machine, the first requests may end before the next ones begin
        found = open_remote("s3://bucket/a", Settings(server.url))
        server.clear()
        server.delay = delay
        found.prefetch([(ENDS + at * 80_000, 10) for at in range(100)])
        server.delay = 0.0
        moments = sorted([(each.begun, 1) for each in server.seen] + [(each.ended, -1) for each in server.seen])
        most = max(accumulate(change for _, change in moments))
        assert server.count() == 100
        assert most <= LIMITS.requests
        if most > 16:
            return
    raise AssertionError(most)


def test_memory_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LIMITS", source.LIMITS._replace(remote_bytes=MIB))
    server.put("bucket", "a", DATA)
    found = open_remote("s3://bucket/a", Settings(server.url))
    chance = random.Random(3)
    for _ in range(300):
        offset, size = chance.randrange(3 * MIB), chance.randrange(1, 300_000)
        assert found.read(offset, size) == DATA[offset : offset + size]
        assert sum(len(data) for data, _ in found._allowance._kept.values()) == found._allowance._nbytes <= MIB
    found.prefetch([(0, 3 * MIB)])
    assert found._allowance._nbytes <= MIB
    found.close()
    assert found._allowance._nbytes == 0
    with pytest.raises(UnreadableError, match="closed"):
        found.read(0, 1)


def test_threads_read_one_source(server: Server) -> None:
    server.put("bucket", "a", DATA)
    found = open_remote("s3://bucket/a", Settings(server.url))
    wrong: list[int] = []

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            offset, size = chance.randrange(3 * MIB), chance.randrange(1, 100_000)
            if found.read(offset, size) != DATA[offset : offset + size]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- bounds ---------------------------------------------------------------------------------------------------


def test_a_large_download_is_refused_before_the_first_byte(opened: Open, server: Server) -> None:
    found = opened(max_download=2 * MIB)
    server.clear()
    with pytest.raises(RefusedError, match=r"it would download 2\.\d\d MB, more than 2\.10 MB") as caught:
        found.prefetch([(0, 3 * MIB)])
    assert caught.value.next == "download the file first, or allow more with max_download"
    with pytest.raises(RefusedError):
        found.read(0, 3 * MIB)
    assert server.count() == 0
    assert found.read(MIB, ENDS) == DATA[MIB : MIB + ENDS]
    with pytest.raises(RefusedError):
        for offset in range(0, 3 * MIB, 100_000):
            found.read(offset, 100_000)
    assert server.down <= 2 * MIB


# -- replaced objects -----------------------------------------------------------------------------------------


def test_a_replaced_object_is_noticed_by_every_kind_of_request(opened: Open, server: Server) -> None:
    other = DATA[::-1]
    requests: list[Callable[[RemoteSource], object]] = [
        lambda found: found.read(MIB, 100),
        lambda found: found.prefetch([(MIB, 100), (2 * MIB, 100)]),
        lambda found: found.check_unchanged(),
    ]
    for request in requests:
        found = opened()
        found.check_unchanged()
        for bucket in server.buckets:
            server.put(bucket, "run/a.pth", other)
        with pytest.raises(ChangedError, match="the file changed while it was read") as caught:
            request(found)
        assert caught.value.next == "try again when nobody writes to it"
        assert found.read(0, ENDS) == DATA[:ENDS]  # what was read before is still right


def test_a_server_that_ignores_conditions_is_compared_with(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("plain", "a", DATA)
    found = open_remote(f"{server.url}/plain/a", Settings())
    server.faults = dict.fromkeys(range(3, 9), "etag")
    with pytest.raises(ChangedError):
        found.read(MIB, 10)


def test_weak_etags_are_compared_but_not_demanded(server: Server) -> None:
    server.put("plain", "a", DATA, etag='W/"weak"')
    found = open_remote(f"{server.url}/plain/a", Settings())
    assert found.read(MIB, 10) == DATA[MIB : MIB + 10]
    assert "if-match" not in server.seen[-1].headers
    server.put("plain", "a", DATA, etag='W/"other"')
    with pytest.raises(ChangedError):
        found.read(2 * MIB, 10)


# -- faults ---------------------------------------------------------------------------------------------------

#: Faults of one answer that a second one makes good.
PASSING = {"500", "503", "reset", "short", "length"}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("stall", "complete")])
@pytest.mark.parametrize("kind", ["s3", "http"])
def test_one_fault_at_any_request(kind: str, fault: str, server: Server) -> None:
    """A fault of one request is made good, or is an error: never wrong bytes."""
    address = server.url + KINDS["http"] if kind == "http" else KINDS["s3"]
    server.put("plain" if kind == "http" else "bucket", "run/a.pth", DATA)
    outcomes = []
    for number in range(1, 6):
        server.clear()
        server.faults = {number: fault}
        try:
            found = open_remote(address, Settings(server.url))
            assert found.read(MIB, 1000) == DATA[MIB : MIB + 1000]
            found.prefetch([(2 * MIB - 100_000, 10), (2 * MIB, 10)])
            assert found.read(2 * MIB, 10) == DATA[2 * MIB : 2 * MIB + 10]
            assert found.read(0, 3 * MIB) == DATA
            outcomes.append("")
        except CkptoolError as error:
            outcomes.append(type(error).__name__)
            assert not any(text in f"{error} {error.next}" for text in ("SECRET", "http error", "Generic"))
    expected = "" if fault in PASSING else "ChangedError" if fault == "etag" else "UnreadableError"
    assert outcomes == [expected] * 5


# -- other processes ------------------------------------------------------------------------------------------


def test_a_pickled_source_reads_the_same_object_or_fails(server: Server) -> None:
    server.put("bucket", "a", DATA)
    found = open_remote("s3://bucket/a", Settings(server.url))
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.name, copy.size, copy.identity) == (found.name, found.size, found.identity)
    assert copy.read(MIB, 10) == DATA[MIB : MIB + 10]
    copy = pickle.loads(pickle.dumps(found))
    server.put("bucket", "a", DATA[::-1])
    with pytest.raises(ChangedError):
        copy.read(0, 10)


def _read_in_child(found: RemoteSource, pipe: Any) -> None:
    try:
        pipe.send(found.read(MIB, 10))
    except CkptoolError as error:
        pipe.send(error.what)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_forked_process_does_not_wait_for_ever(kind: str, server: Server) -> None:
    """The threads of obstore do not live on in it."""
    server.signed = kind == "s3"
    server.put("bucket", "a", DATA)
    found = open_remote(f"{kind}://bucket/a", Settings(server.url, anonymous=kind == "gs"))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(found, theirs))
    child.start()
    assert ours.poll(30)
    said = DATA[MIB : MIB + 10] if kind == "s3" else "a forked process cannot read what its parent opened"
    assert ours.recv() == said
    child.join()


# -- the protocol ---------------------------------------------------------------------------------------------


def test_names_and_identities(server: Server) -> None:
    server.put("plain", "a", DATA)
    one = open_remote(f"{server.url}/plain/a?Signature=one", Settings())
    two = open_remote(f"{server.url}/plain/a?Signature=two", Settings())
    again = open_remote(two.name, Settings())  # the text that stands for an address
    assert (one.name, two.name) == (f"{server.url}/plain/a", f"{server.url}/plain/a#2")
    assert two.identity == again.identity != one.identity
    assert [each.query for each in server.seen[::2]] == ["Signature=one", "Signature=two", "Signature=two"]
    assert one.local_file() is None  # type: ignore[func-returns-value]
    server.put("bucket", "a", DATA)
    assert open_remote("s3://bucket/a", Settings(server.url)).identity != one.identity

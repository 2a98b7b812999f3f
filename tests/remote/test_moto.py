"""The same on moto, a server for tests by other people: what it knows must not only hold on ours."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.base.errors import ChangedError, UnreadableError
from ckptool.remote import obstores
from ckptool.remote.folder import open_folder
from ckptool.remote.source import open_remote
from ckptool.remote.store import Failed, Settings

pytest.importorskip("obstore")
threaded: Any = pytest.importorskip("moto.server")

MIB = 1 << 20
DATA = random.Random(1).randbytes(3 * MIB)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = threaded.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def settings(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    boto3: Any = pytest.importorskip("boto3")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anything")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    for key in ("run/a.pth", "run/b.pth", "run/sub/c.json", "other"):
        client.put_object(Bucket="bucket", Key=key, Body=DATA)
    return Settings(url)


def test_reading(settings: Settings) -> None:
    found = open_remote("s3://bucket/run/a.pth", settings)
    chance = random.Random(2)
    for _ in range(50):
        offset, size = chance.randrange(3 * MIB), chance.randrange(1, 100_000)
        assert found.read(offset, size) == DATA[offset : offset + size]
    found.prefetch([(MIB, 10), (2 * MIB, 10)])
    found.check_unchanged()
    with pytest.raises(UnreadableError, match="no such file"):
        open_remote("s3://bucket/none", settings)
    with pytest.raises(UnreadableError, match="there is no bucket none"):
        open_remote("s3://none/a", settings)


def test_a_folder(settings: Settings) -> None:
    found = open_folder("s3://bucket/run", settings)
    assert found.names() == {"a.pth", "b.pth", "sub"}
    assert found.inner("sub").size("c.json") == len(DATA)
    assert [found.open(name).read(5, 5) for name in ("a.pth", "b.pth")] == [DATA[5:10]] * 2


def test_a_replaced_object(settings: Settings) -> None:
    found = open_remote("s3://bucket/run/a.pth", settings)
    store, key = obstores.open_store("s3://bucket/run/a.pth", settings)
    store.put(key, [DATA[::-1]], create=False)
    with pytest.raises(ChangedError):
        found.read(MIB, 10)
    with pytest.raises(ChangedError):
        found.check_unchanged()


def test_writing(settings: Settings) -> None:
    store, key = obstores.open_store("s3://bucket/new", settings)
    for data in (b"", DATA, DATA * 3):
        store.put(key, [data[at : at + MIB] for at in range(0, len(data), MIB)], create=False)
        found = open_remote("s3://bucket/new", settings)
        assert found.read(0, len(data)) == data
        with pytest.raises(Failed) as caught:
            store.put(key, [data], create=True)
        assert caught.value.status == 412

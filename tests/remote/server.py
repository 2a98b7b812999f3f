"""A server for tests on loopback: S3 by path, plain HTTP with ranges, and a model hub. It counts, delays and fails.

Azure's blocks are known, too, and Google Cloud Storage speaks S3. Anything ``/hub/...`` is the hub, ``/plain/...`` are
the objects of the bucket "plain" over plain HTTP, and everything else is S3. Conditions hold as S3 documents
them, which other servers for tests ignore in part.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import re
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

T = TypeVar("T")
#: The only access key, and its secret.
KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
#: The token of the hub.
TOKEN = "hf_exampletoken"
MIB = 1 << 20
#: Seconds before each answer of a server that counts round trips; the longer ones are for busy machines.
DELAYS = (0.04, 0.08, 0.16, 0.32, 0.64)
#: Faults that answer with an error of S3: (status, code).
ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "expired 403": (403, "ExpiredToken"),
    "region": (301, "PermanentRedirect"),
    "skew": (403, "RequestTimeTooSkewed"),
    "denied": (403, "AccessDenied"),
    "unauthorized": (401, "Unauthorized"),
}
#: Faults of the answer itself.
FAULTS = (*ERRORS, "reset", "stall", "short", "length", "whole", "etag", "complete")
#: Faults that only some tests use. The process of the test is killed before a request is handled, or answered; a
#: request is handled, but its answer is lost; the object of a request is replaced before it is handled, see
#: ``Server.seconds``.
KILLS = ("kill", "kill later")
LOST, REPLACED = "lost", "replaced"


class Object(NamedTuple):
    """An object of a bucket."""

    data: bytes
    etag: str
    when: float


class Upload(NamedTuple):
    """A multipart upload that is neither complete nor aborted; parts by number are (etag, data)."""

    bucket: str
    key: str
    parts: dict[int, tuple[str, bytes]]
    begun: float


class Seen(NamedTuple):
    """A request that was answered: bytes of the two bodies, and when it began and ended, in seconds."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    status: int
    down: int
    up: int
    begun: float
    ended: float


class Failure(Exception):
    """An error of S3 as the answer."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Server:
    """The server, running from the start of a ``with`` block to its end.

    ``delay`` is the seconds before each answer, ``bandwidth`` the bytes per second of all answers together (0: no
    limit), ``page`` the keys in one page of a listing. ``signed`` says whether S3 requests need a signature.
    """

    def __init__(self, *, delay: float = 0.0, bandwidth: int = 0, page: int = 1000, signed: bool = True) -> None:
        self.delay, self.bandwidth, self.page, self.signed = delay, bandwidth, page, signed
        self.buckets: dict[str, dict[str, Object]] = {}
        self.regions: dict[str, tuple[str, int, str]] = {}  # by bucket: its region, and the error for other regions
        self.uploads: dict[str, Upload] = {}
        self.blocks: dict[tuple[str, str], dict[str, bytes]] = {}  # of Azure, for objects that are not made yet
        self.expired: set[str] = set()  # session tokens
        self.commit = "0123456789abcdef0123456789abcdef01234567"
        self.redirect = ""  # the address of another server, to which the hub redirects
        self.unquoted = False  # whether the condition of a write needs the ETag without its quotes, as in Ceph 16
        self.min_part = 5 * MIB
        self.stall = 30.0  # seconds of the fault, unless the client gives up before
        self.ranges = True  # plain HTTP: whether ranges are honoured
        self.faults: dict[int, str] = {}
        self.replaced: dict[int, tuple[str, str, bytes]] = {}  # before request N, (bucket, key) gets other bytes
        self.seconds: dict[tuple[str, str], bytes] = {}  # what the fault "replaced" puts in the place of an object
        self.victims: queue.Queue[int] = queue.Queue()  # the process that the fault "kill" kills
        self.log: list[Seen] = []
        self.busy = 0
        self.copied = 0
        self.lock = threading.RLock()
        self.pipe = threading.Lock()
        self.number = 0
        self.http = Listener(type("Handler", (_Handler,), {"server_of": self}))
        self.url = self.http.url

    def __enter__(self) -> Server:
        self.http.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.end()

    def put(self, bucket: str, key: str, data: bytes, etag: str = "") -> Object:
        """Store an object without a request."""
        with self.lock:
            found = Object(data, etag or f'"{hashlib.md5(data).hexdigest()}"', time.time())
            self.buckets.setdefault(bucket, {})[key] = found
            return found

    def restore(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object unless it has these very bytes, as ``put`` does: their checksum takes time."""
        found = self.buckets.get(bucket, {}).get(key)
        if found is None or found.data is not data:
            self.put(bucket, key, data)

    def get(self, bucket: str, key: str) -> bytes:
        return self.object(bucket, key).data

    def object(self, bucket: str, key: str) -> Object:
        if bucket not in self.buckets:
            raise Failure(404, "NoSuchBucket")
        if key not in self.buckets[bucket]:
            raise Failure(404, "NoSuchKey")
        return self.buckets[bucket][key]

    def clear(self) -> None:
        """Forget the counts and the faults."""
        assert self.seen is self.log
        self.log, self.copied, self.number, self.faults, self.replaced = [], 0, 0, {}, {}

    def replace(self, path: str) -> None:
        """Replace the object of a request, if it is one of ``seconds``; its ETag is new each time."""
        bucket, _, key = unquote(path)[1:].partition("/")
        with self.lock:
            if (bucket, key) in self.seconds:
                self.put(bucket, key, self.seconds[bucket, key], f'"v{self.number}-{time.time_ns()}"')

    def kill(self) -> None:
        """Kill the process of the test."""
        os.kill(self.victims.get(timeout=60), signal.SIGKILL)

    @property
    def seen(self) -> list[Seen]:
        """All requests that were answered; waits for answers under way."""
        until = time.monotonic() + 10
        while self.busy and time.monotonic() < until:
            time.sleep(0.001)
        return self.log

    def count(self, method: str = "") -> int:
        return sum(method in ("", each.method) for each in self.seen)

    @property
    def down(self) -> int:
        return sum(each.down for each in self.seen)

    @property
    def up(self) -> int:
        return sum(each.up for each in self.seen)

    def slowly(self, do: Callable[[], T], round_trips: int) -> T:
        """Return what ``do`` returns, with counts of its requests alone, each of which takes a while.

        On a busy machine, a request of a batch may begin when another one has ended. So while there are more than
        ``round_trips``, ``do`` is called again, and the server takes twice as long.
        """
        for delay in DELAYS:
            self.clear()
            self.delay = delay
            try:
                found = do()
            finally:
                self.delay = 0.0
            if self.round_trips <= round_trips:
                break
        return found

    @property
    def round_trips(self) -> int:
        """The longest chain of requests that each began after the one before had ended."""
        chain, ended = 0, 0.0
        for each in sorted(self.seen, key=lambda one: one.ended):
            if each.begun >= ended:
                chain, ended = chain + 1, each.ended
        return chain


class Listener(ThreadingHTTPServer):
    """Requests to loopback, each connection in a thread of its own, from ``begin`` to ``end``.

    ``serve_forever`` looks every few milliseconds whether it should end; this one is told by a connection.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.begin = self._thread.start

    def _serve(self) -> None:
        while not self._ended:
            self.handle_request()

    def end(self) -> None:
        self._ended = True
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.server_port)).close()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are no error."""


class _Handler(BaseHTTPRequestHandler):
    server_of: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def handle_expect_100(self) -> bool:
        done = super().handle_expect_100()
        self.wfile.flush()
        return done

    def _answer(self) -> None:
        server, begun = self.server_of, time.monotonic()
        with server.lock:
            server.number += 1
            server.busy += 1
            self.fault = server.faults.get(server.number, "")
            if replaced := server.replaced.get(server.number):
                server.put(*replaced)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        self.raw, self.query, self.body = url.path, dict(parse_qsl(url.query, keep_blank_values=True)), body
        time.sleep(server.delay)
        if self.fault == "stall":
            self._wait_for_the_client(server.stall)
        elif self.fault == REPLACED:
            server.replace(self.raw)
        elif self.fault == "kill":
            server.kill()
        status, down, self.ended = 0, 0, 0.0
        try:
            if self.fault in ("reset", "stall", "kill"):
                self._reset()
                return
            try:
                if self.fault in ERRORS:
                    raise Failure(*ERRORS[self.fault])
                status, headers, data = self._route()
            except Failure as failure:
                text = f"<Error><Code>{failure.code}</Code><Message>SECRETMESSAGE</Message></Error>"
                status, headers, data = failure.status, {"Content-Type": "application/xml"}, text.encode()
                if status == 503:
                    headers["Retry-After"] = "0"
                if self.raw.startswith("/hub/"):
                    headers["X-Error-Code"] = failure.code
                if elsewhere := server.regions.get(self.raw.split("/")[1]):
                    headers["x-amz-bucket-region"] = elsewhere[0]
            if self.fault == "kill later":
                server.kill()
            if self.fault in ("lost", "kill later"):
                self._reset()
                return
            down = self._send(status, headers, data)
        finally:
            with server.lock:
                kept = {name.lower(): value for name, value in self.headers.items()}
                server.busy -= 1
                server.log.append(
                    Seen(self.command, self.raw, url.query, kept, status, down, len(body), begun, self.ended)
                )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _wait_for_the_client(self, seconds: float) -> None:
        """Wait until the client gives up and closes the connection, but not for ever."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.select(seconds)

    def _reset(self) -> None:
        """Close the connection without an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def _send(self, status: int, headers: Mapping[str, str], data: bytes | memoryview) -> int:
        """Send an answer; return the bytes of its body."""
        size = len(data)
        if self.fault == "length" and size > 7 and status == 206:
            data, size = data[:-7], size - 7
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, '"another"' if self.fault == "etag" and name == "ETag" else value)
        if "Content-Length" not in headers and status != 204:
            self.send_header("Content-Length", str(size))
        self.end_headers()
        self.ended = time.monotonic()  # before the client can see the end, and ask for more
        if self.command == "HEAD" or status == 204:
            self.wfile.flush()
            return 0
        if self.fault == "short":
            data, self.close_connection = data[: size // 2], True
        step = 1 << 18 if self.server_of.bandwidth else max(len(data), 1)
        for at in range(0, len(data), step):
            self.ended = time.monotonic()
            self.wfile.write(data[at : at + step])
            if self.server_of.bandwidth:
                with self.server_of.pipe:
                    time.sleep(min(step, len(data) - at) / self.server_of.bandwidth)
        self.wfile.flush()
        return len(data)

    def _route(self) -> tuple[int, Mapping[str, str], bytes | memoryview]:
        path = unquote(self.raw)
        if path.startswith("/hub/"):
            return self._hub(path.removeprefix("/hub"))
        bucket, _, key = path[1:].partition("/")
        if self.command == "HEAD" and "Signature" in self.query:
            raise Failure(403, "SignatureDoesNotMatch")  # it is signed for GET
        if bucket == "plain":
            found = self.server_of.object(bucket, key)
            return self._read(found, self.server_of.ranges)
        region, *error = self.server_of.regions.get(bucket, ("", 0, ""))
        if region and f"/{region}/" not in self.headers.get("authorization", ""):
            raise Failure(*error)
        if self.server_of.signed:
            check_signature(self.command, self.raw, self.query, self.headers, self.body, self.server_of.expired)
        with self.server_of.lock:
            return self._s3(bucket, key)

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self, found: Object, ranges: bool = True) -> tuple[int, Mapping[str, str], bytes | memoryview]:
        """Answer GET or HEAD of an object with its conditions and its range."""
        wanted, unwanted = self.headers.get("if-match"), self.headers.get("if-none-match")
        if wanted not in (None, "*", found.etag):
            raise Failure(412, "PreconditionFailed")
        if unwanted in ("*", found.etag):
            return 304, {"ETag": found.etag}, b""
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.when, usegmt=True)}
        if ranges:
            headers["Accept-Ranges"] = "bytes"
        size, data = len(found.data), memoryview(found.data)
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", "")) if ranges else None
        if self.command == "HEAD":
            return 200, {**headers, "Content-Length": str(size)}, b""
        if not span or self.fault == "whole":
            return 200, headers, data
        first, last = span.groups()
        begin = int(first) if first else max(size - int(last), 0)
        end = min(int(last) + 1, size) if first and last else size
        if begin >= end:
            raise Failure(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return 206, headers, data[begin:end]

    # -- S3 ---------------------------------------------------------------------------------------------------

    def _s3(self, bucket: str, key: str) -> tuple[int, Mapping[str, str], bytes | memoryview]:
        server, query, method = self.server_of, self.query, self.command
        if bucket not in server.buckets:
            raise Failure(404, "NoSuchBucket")
        if not key:
            return 200, {"Content-Type": "application/xml"}, self._listing(bucket).encode()
        if method in ("GET", "HEAD") and "uploadId" not in query:
            return self._read(server.object(bucket, key))
        if method == "POST" and "uploads" in query:
            upload = f"upload-{server.number}-{time.time_ns()}"
            server.uploads[upload] = Upload(bucket, key, {}, time.time())
            return 200, {}, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>{END}".encode()
        if "uploadId" in query:
            return self._multipart(bucket, key)
        if method == "DELETE":
            server.buckets[bucket].pop(key, None)
            return 204, {}, b""
        if "comp" in query:
            return self._blocks(bucket, key)
        self._condition(bucket, key)
        data = self._source()[0] if "x-amz-copy-source" in self.headers else self.body
        etag = server.put(bucket, key, data).etag
        copy = f"<CopyObjectResult><ETag>{escape(etag)}</ETag></CopyObjectResult>".encode()
        return 200, {"ETag": etag}, copy if "x-amz-copy-source" in self.headers else b""

    def _blocks(self, bucket: str, key: str) -> tuple[int, Mapping[str, str], bytes]:
        """Put a block of Azure, or make an object of blocks."""
        blocks = self.server_of.blocks.setdefault((bucket, key), {})
        if self.query["comp"] == "block":
            blocks[self.query["blockid"]] = self.body
            return 201, {}, b""
        self._condition(bucket, key)
        names = [each.text or "" for each in ElementTree.fromstring(self.body)]
        etag = self.server_of.put(bucket, key, b"".join(blocks[name] for name in names)).etag
        del self.server_of.blocks[bucket, key]
        return 201, {"ETag": etag}, b""

    def _condition(self, bucket: str, key: str) -> None:
        """Raise Failure if a condition of a write does not hold."""
        found = self.server_of.buckets[bucket].get(key)
        wanted = self.headers.get("if-match")
        if self.headers.get("if-none-match") == "*" and found:
            raise Failure(412, "PreconditionFailed")
        if wanted and not found:
            raise Failure(404, "NoSuchKey")
        etag = found.etag if found else ""
        if wanted and wanted not in ("*", etag.strip('"') if self.server_of.unquoted else etag):
            raise Failure(412, "PreconditionFailed")

    def _source(self) -> tuple[bytes, str]:
        """Return the bytes that a copy takes, and their ETag."""
        bucket, _, key = unquote(self.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        found = self.server_of.object(bucket, key)
        wanted = self.headers.get("x-amz-copy-source-if-match")
        if wanted and wanted.strip('"') != found.etag.strip('"'):
            raise Failure(412, "PreconditionFailed")
        data = found.data
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-amz-copy-source-range", "")):
            begin, end = int(span[1]), int(span[2]) + 1
            if end > len(data):
                raise Failure(400, "InvalidArgument")
            data = data[begin:end]
        self.server_of.copied += len(data)
        return data, found.etag

    def _multipart(self, bucket: str, key: str) -> tuple[int, Mapping[str, str], bytes]:
        server, name = self.server_of, self.query["uploadId"]
        upload = server.uploads.get(name)
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise Failure(404, "NoSuchUpload")
        if self.command == "DELETE":
            del server.uploads[name]
            return 204, {}, b""
        if self.command == "PUT":
            copied = "x-amz-copy-source" in self.headers
            data = self._source()[0] if copied else self.body
            etag = f'"{hashlib.md5(data).hexdigest()}"'
            upload.parts[int(self.query["partNumber"])] = etag, data
            text = f"<CopyPartResult><ETag>{escape(etag)}</ETag></CopyPartResult>".encode()
            return 200, {} if copied else {"ETag": etag}, text if copied else b""
        if self.fault == "complete":
            return 200, {}, b"<Error><Code>InternalError</Code><Message>SECRETMESSAGE</Message></Error>"
        self._condition(bucket, key)
        tree = [each for each in ElementTree.fromstring(self.body).iter() if each.tag.endswith("}Part")]
        tree = tree or [each for each in ElementTree.fromstring(self.body).iter() if each.tag == "Part"]
        texts = [{child.tag.rpartition("}")[2]: child.text or "" for child in part} for part in tree]
        wanted = [(int(part["PartNumber"]), part["ETag"].strip('"')) for part in texts]
        known = {at: etag.strip('"') for at, (etag, _) in upload.parts.items()}
        if not wanted or any(known.get(at) != etag for at, etag in wanted):
            raise Failure(400, "InvalidPart")
        if sorted(wanted) != wanted:
            raise Failure(400, "InvalidPartOrder")
        pieces = [upload.parts[at][1] for at, _ in wanted]
        if any(len(piece) < server.min_part for piece in pieces[:-1]):
            raise Failure(400, "EntityTooSmall")
        digest = hashlib.md5(b"".join(bytes.fromhex(etag) for _, etag in wanted)).hexdigest()
        found = server.put(bucket, key, b"".join(pieces), f'"{digest}-{len(pieces)}"')
        del server.uploads[name]
        text = f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        return 200, {}, f"{text}<ETag>{escape(found.etag)}</ETag></CompleteMultipartUploadResult>".encode()

    def _listing(self, bucket: str) -> str:
        server, query = self.server_of, self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        objects = {key: each for key, each in sorted(server.buckets[bucket].items()) if key.startswith(prefix)}
        name = quote if query.get("encoding-type") == "url" else escape
        if "uploads" in query:
            items = "".join(
                f"<Upload><Key>{escape(one.key)}</Key><UploadId>{upload}</UploadId><Initiated>{_iso(one.begun)}"
                "</Initiated></Upload>"
                for upload, one in server.uploads.items()
                if one.bucket == bucket and one.key.startswith(prefix)
            )
            return f"<ListMultipartUploadsResult>{items}</ListMultipartUploadsResult>"
        rows: dict[str, str] = {}
        for key, found in objects.items():
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folder = prefix + head + cut
                rows[folder] = f"<CommonPrefixes><Prefix>{name(folder)}</Prefix></CommonPrefixes>"
            else:
                rows[key] = f"<Contents><Key>{name(key)}</Key>{_facts(found)}</Contents>"
        after = query.get("continuation-token") or query.get("start-after", "")
        left = [(key, row) for key, row in sorted(rows.items()) if key > after]
        page = left[: min(server.page, int(query.get("max-keys", 1000)))]
        more = len(page) < len(left)
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        text = f"<Name>{bucket}</Name><Prefix>{name(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
        text += "<EncodingType>url</EncodingType>" if name is quote else ""
        text += f"<MaxKeys>1000</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        return f"<ListBucketResult>{text}{''.join(row for _, row in page)}</ListBucketResult>"

    # -- the hub ----------------------------------------------------------------------------------------------

    def _hub(self, path: str) -> tuple[int, Mapping[str, str], bytes | memoryview]:
        """Answer the hub: repository "org/model" is the bucket "org--model"; large files are on another host."""
        server, given = self.server_of, self.headers.get("authorization", "")
        if "private" in path and given != f"Bearer {TOKEN}":
            raise Failure(401, "Unauthorized")
        if tree := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(tree|revision)/([^/]+)(?:/(.*))?", path):
            repository, kind, revision, folder = tree.groups()
            files = self._repository(repository, revision)
            if kind == "revision":
                siblings = [
                    {"rfilename": name, "size": len(each.data), "blobId": each.etag.strip('"')}
                    for name, each in sorted(files.items())
                ]
                found: Any = {"id": repository, "sha": server.commit, "siblings": siblings}
            else:
                prefix = f"{folder}/" if folder else ""
                found = [
                    {"type": "file", "path": name, "size": len(each.data), "oid": each.etag.strip('"')}
                    for name, each in sorted(files.items())
                    if name.startswith(prefix)
                ]
            return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
        parts = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not parts:
            raise Failure(404, "NotFound")
        repository, revision, name = parts.groups()
        files = self._repository(repository, revision)
        if name not in files:
            raise Failure(404, "EntryNotFound")
        file = files[name]
        headers = {"X-Repo-Commit": server.commit}
        if not server.redirect or len(file.data) < 1024:  # small files are in the repository itself
            status, more, data = self._read(file)
            return status, {**more, **headers}, data
        headers |= {"X-Linked-ETag": file.etag, "X-Linked-Size": str(len(file.data))}
        bucket = repository.replace("/", "--")
        headers["Location"] = f"{server.redirect}/plain/{bucket}/{quote(name)}?Signature=SECRETSIGNATURE"
        return 302, headers, b""

    def _repository(self, repository: str, revision: str) -> dict[str, Object]:
        files = self.server_of.buckets.get(repository.replace("/", "--"))
        if files is None or revision not in ("main", self.server_of.commit):
            raise Failure(404, "RepoNotFound" if files is None else "RevisionNotFound")
        return files


END = "</InitiateMultipartUploadResult>"


def _facts(one: Object) -> str:
    return f"<LastModified>{_iso(one.when)}</LastModified><ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size>"


def _iso(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def check_signature(
    method: str, path: str, query: Mapping[str, str], headers: Any, body: bytes, expired: set[str]
) -> None:
    """Raise Failure unless a request has a valid signature, version 4, of the only key."""
    given = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/s3/aws4_request, *SignedHeaders=([^,]+), *Signature=(\w+)",
        headers.get("authorization", ""),
    )
    if not given:
        raise Failure(403, "AccessDenied")
    key, day, region, names, signature = given.groups()
    when, digest = headers.get("x-amz-date", ""), headers.get("x-amz-content-sha256", "")
    if key != KEY:
        raise Failure(403, "InvalidAccessKeyId")
    if headers.get("x-amz-security-token") in expired:
        raise Failure(400, "ExpiredToken")
    then = datetime.strptime(when, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    if abs(then.timestamp() - time.time()) > 900:
        raise Failure(403, "RequestTimeTooSkewed")
    if digest != "UNSIGNED-PAYLOAD" and digest != hashlib.sha256(body).hexdigest():
        raise Failure(400, "XAmzContentSHA256Mismatch")
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
    lines = [method, path, "&".join(f"{name}={value}" for name, value in pairs)]
    lines += [f"{name}:{' '.join(headers.get(name, '').split())}" for name in names.split(";")]
    request = "\n".join([*lines, "", names, digest])
    scope = f"{day}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    secret = f"AWS4{SECRET}".encode()
    for word in (day, region, "s3", "aws4_request"):
        secret = hmac.new(secret, word.encode(), hashlib.sha256).digest()
    if hmac.new(secret, text.encode(), hashlib.sha256).hexdigest() != signature:
        raise Failure(403, "SignatureDoesNotMatch")

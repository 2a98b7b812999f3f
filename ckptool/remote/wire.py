"""Requests over HTTP/1.1: every answer is bounded in bytes and in time, and no redirect learns where it came from.

Libraries read whole error pages and listings into memory, and put the address of a file, with its signature, into the
``Referer`` of redirects. So the requests to S3, to web servers and to the hub are sent here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from http.client import HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from io import BufferedReader, RawIOBase
from string import punctuation
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

from ..base.limits import LIMITS
from ..base.records import NamedTuple
from .store import Failed, Spend

T = TypeVar("T")
_CHUNK: Final = 1 << 18
_REDIRECTED: Final = (301, 302, 303, 307, 308)
#: Seconds before a request is sent again, at most; each further pause is twice as long.
_PAUSE: Final = 0.1
#: Variables with certificates that are trusted besides the system's.
_CERTIFICATES: Final = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
#: Idle connections by process, scheme, host, port and proxy.
_IDLE: Final[dict[object, list[_Connection]]] = {}


class Reply(NamedTuple):
    """The answer to a request; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def retried(do: Callable[[], T]) -> T:
    """Return the result of a request, which is sent again after failures that may pass.

    This is the only place that does so, except in obstore for Google Cloud Storage and Azure.
    """
    end = time.monotonic() + LIMITS.retry_seconds
    for attempt in range(LIMITS.retries):
        try:
            return do()
        except Failed as failed:
            passes = failed.kind in ("timeout", "reset", "body", "length") or failed.status == 429
            failed.once = attempt == 0
            if not (passes or failed.status >= 500) or time.monotonic() > end - LIMITS.read_seconds:
                raise
        time.sleep((1 + os.urandom(1)[0] / 255) / 2 * _PAUSE * 2**attempt)  # 50 to 100 ms, then twice as long
    return do()


def ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    most: int,
    body: bytes | bytearray = b"",
    *,
    follow: bool = True,
    spend: Spend | None = None,
    patience: float = 0.0,
) -> Reply:
    """Return the answer to a request that is sent once, with at most ``most`` bytes; raises Failed.

    Raises Failed for an error status, too. Redirects are followed with ``follow``; another host gets no authorization.
    ``spend`` is called with the number of bytes of each chunk of the answer. The answer may
    take ``patience`` seconds, if that is more than others.
    """
    until = time.monotonic() + max(LIMITS.request_seconds, patience)
    for _ in range(10):
        reply = _answer(method, url, headers, most, body, until, spend, patience)
        if not (follow and reply.status in _REDIRECTED and "location" in reply.headers):
            break
        before = urlsplit(url)
        try:
            there = urlsplit(urljoin(url, reply.headers["location"]))
        except ValueError:
            raise Failed("redirect") from None
        if there.scheme not in ("http", "https") or there.scheme < before.scheme or not there.hostname:
            raise Failed("redirect")
        if there[:2] != before[:2]:
            headers = {name: value for name, value in headers.items() if name != "authorization"}
        url = there._replace(fragment="").geturl()
    else:
        raise Failed("redirect")
    if reply.status // 100 != 2:
        begin, end = reply.body.find(b"<Code>") + 6, reply.body.find(b"</Code>")
        code = reply.body[begin:end].decode("ascii", "replace") if 6 <= begin < end <= begin + 64 else ""
        code = "KMS" if code.startswith("KMS.") or b"kms:" in reply.body else reply.headers.get("x-error-code", code)
        kind, region = "region" if reply.status in _REDIRECTED else "", reply.headers.get("x-amz-bucket-region", "")
        raise Failed(kind, reply.status, code, region)
    return reply


def _answer(
    method: str,
    url: str,
    headers: Mapping[str, str],
    most: int,
    body: bytes | bytearray,
    until: float,
    spend: Spend | None,
    patience: float,
) -> Reply:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        proxy = _proxy(parts.scheme, host, port)
        target = quote(parts.path or "/", safe="/%:=&?~+!$,;'@()*[]") + (f"?{parts.query}" if parts.query else "")
        name = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii").decode()
    except ValueError:
        raise Failed("server") from None
    more = {"host": name, "user-agent": "ckptool", "accept-encoding": "identity", **headers}
    if body or method in ("PUT", "POST"):
        more["content-length"] = str(len(body))
    if proxy and parts.scheme == "http":
        target = f"http://{name}{target}"
        more |= _authorized(proxy)
    lines = [f"{method} {quote(target, safe=punctuation)} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in more.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")
    place = os.getpid(), parts.scheme, host, port, proxy, certificates()
    idle = _IDLE.setdefault(place, [])
    while True:
        try:
            connection, fresh = idle.pop(), False
        except IndexError:
            connection, fresh = _Connection(parts.scheme, host, port, proxy, until), True
        try:
            connection.until, connection.patience = until, max(LIMITS.read_seconds, patience)
            reply = connection.ask(method, head, body, most, spend)
        except BaseException as error:
            connection.close()
            if isinstance(error, Failed) and error.kind == "reset" and not (fresh or connection.began):
                continue  # the server had closed it meanwhile
            raise
        if connection.reusable and len(idle) < LIMITS.requests:
            idle.append(connection)
        else:
            connection.close()
        return reply


class _Reader(BufferedReader):
    """The bytes that arrive on a connection. The end of an answer does not close it."""

    def close(self) -> None:
        pass


class _Connection(RawIOBase):
    """A connection to a server, through a proxy or not. ``began`` tells whether the last answer began to arrive."""

    def __init__(self, scheme: str, host: str, port: int, proxy: str, until: float) -> None:
        self.until, self.patience = until, LIMITS.read_seconds
        self.began, self.reusable = False, False
        self._reader = _Reader(self, 16 << 10)
        way = urlsplit(proxy)
        try:
            there = (way.hostname or "", way.port or 80) if proxy else (host, port)
            self._socket: Any = socket.create_connection(there, LIMITS.connect_seconds)
        except socket.gaierror:
            raise Failed("proxy" if proxy else "name") from None
        except (OSError, ValueError) as error:
            timeout = isinstance(error, TimeoutError)
            raise Failed("proxy" if proxy else "timeout" if timeout else "route") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if scheme == "https":
            try:
                if proxy:
                    lines = [f"CONNECT {host}:{port} HTTP/1.1", f"host: {host}:{port}"]
                    lines += [f"{name}: {value}" for name, value in _authorized(proxy).items()]
                    if self.ask("CONNECT", "\r\n".join([*lines, "", ""]).encode(), b"", 0, None).status != 200:
                        raise Failed("proxy")
                self._socket = _trusted(certificates()).wrap_socket(self._socket, server_hostname=host)
            except (OSError, ValueError) as error:
                self.close()
                raise Failed("timeout" if isinstance(error, TimeoutError) else "tls") from None
            except Failed:
                self.close()
                raise Failed("proxy") from None

    def close(self) -> None:
        self._socket.close()

    def ask(self, method: str, head: bytes, body: bytes | bytearray, most: int, spend: Spend | None) -> Reply:
        """Send a request and return its answer; of an error, only the beginning of its page."""
        self.began = self.reusable = False
        self._send(head)
        self._send(body)
        try:
            return self._answer(method, b"\r\nrange:" in head, most, spend)
        except RemoteDisconnected:
            raise Failed("reset") from None
        except IncompleteRead:
            raise Failed("body") from None
        except (HTTPException, ValueError):
            raise Failed("answer") from None

    def _answer(self, method: str, ranged: bool, most: int, spend: Spend | None) -> Reply:
        while True:
            response = HTTPResponse(self, method="HEAD" if method == "CONNECT" else method)  # type: ignore[arg-type]
            response.begin()
            if response.status // 100 != 1:
                break
        status, headers = response.status, {name.lower(): text for name, text in response.getheaders()}
        if status == 200 and ranged:
            raise Failed("whole")
        length = headers.get("content-length", "")
        if length and not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise Failed("answer")
        room = most if status // 100 == 2 else 64 << 10
        found = bytearray()
        while len(found) <= room and (data := response.read1(min(_CHUNK, room + 1 - len(found)))):
            found += data
            if spend:
                spend(len(data))
        ended = len(found) <= room
        if ended and response.length:
            raise Failed("body")
        if not ended and status // 100 == 2:
            raise Failed("length" if ranged else "large")
        self.reusable = ended and not response.will_close
        return Reply(status, headers, bytes(found))

    def makefile(self, _mode: str) -> BufferedReader:
        """Return what ``HTTPResponse`` reads: each wait ends with the time of the request."""
        return self._reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wait()
        try:
            size: int = self._socket.recv_into(buffer)
        except TimeoutError:
            raise Failed("timeout") from None
        except OSError:
            raise Failed("body" if self.began else "reset") from None
        self.began = self.began or size > 0
        return size

    def _send(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            self._wait()
            try:
                view = view[self._socket.send(view[:_CHUNK]) :]
            except TimeoutError:
                raise Failed("timeout") from None
            except OSError:
                raise Failed("reset") from None

    def _wait(self) -> None:
        """Let the next call of the socket wait for no longer than the request may take."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise Failed("slow")
        self._socket.settimeout(min(self.patience, left))


def _proxy(scheme: str, host: str, port: int) -> str:
    """Return the address of the proxy for a host, or ""; raises Failed for one that is not supported."""
    names = [f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"]
    proxy = next(filter(None, map(os.environ.get, names)), "")
    excluded = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")) if proxy else ""
    for each in excluded.split(","):
        name = each.strip().lower().removeprefix("*").removeprefix(".")
        if each.strip() == "*" or (name and (host == name or host.endswith(f".{name}") or name == f"{host}:{port}")):
            return ""
        if "/" in name:
            from ipaddress import ip_address, ip_network

            with suppress(ValueError):
                if ip_address(host) in ip_network(name, strict=False):
                    return ""
    proxy = proxy if not proxy or "://" in proxy else f"http://{proxy}"
    if proxy and not proxy.startswith("http://"):
        raise Failed("proxy")
    return proxy


def _authorized(proxy: str) -> dict[str, str]:
    user = urlsplit(proxy).netloc.rpartition("@")[0]
    return {"proxy-authorization": basic(user)} if user else {}


def basic(user: str) -> str:
    """Return the authorization for a quoted ``USER:PASSWORD``."""
    from base64 import b64encode

    return f"Basic {b64encode(unquote(user).encode()).decode()}"


def certificates() -> tuple[str, ...]:
    """Return the paths of the files with more certificates."""
    return tuple(path for name in _CERTIFICATES if os.path.isfile(path := os.environ.get(name, "")))


@lru_cache(maxsize=8)
def _trusted(certificates: tuple[str, ...]) -> Any:
    """Return what checks certificates: it trusts the system's and those in files, also one that signed itself."""
    import ssl  # only for https

    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    for path in certificates:
        context.load_verify_locations(path)
    return context

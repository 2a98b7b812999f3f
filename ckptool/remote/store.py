"""What ckptool asks of a store of remote objects, and the errors for everything that fails there.

A store is a module with one class that has the methods of ``Store``. It raises ``Failed`` with plain facts;
``error_of`` turns them into errors of ckptool. The text of a library is never shown: it may contain signatures.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final, Generic, TypeVar

from ..base.addresses import Address, conceal, parse
from ..base.errors import NO_FILE, ChangedError, CkptoolError, OutputError, RefusedError, UnreadableError
from ..base.lazy import regex, table
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.steps import Line
from ..base.text import human_bytes, parse_bytes

T = TypeVar("T")
#: What counts the bytes of an answer while they arrive, and raises RefusedError if they are too many.
Spend = Callable[[int], None]
Result = TypeVar("Result")
#: A range of an object: its first byte, and its size in bytes.
Range = tuple[int, int]


class Settings(NamedTuple):
    """How stores are reached. An empty field means that the environment tells.

    ``max_download`` is the most bytes that one command reads from afar. ``allow_unversioned`` accepts servers that
    do not say whether a file was replaced between two answers.
    """

    endpoint_url: str = ""
    anonymous: bool = False
    profile: str = ""
    max_download: int = LIMITS.download_bytes
    allow_unversioned: bool = False


def current() -> Settings:
    """Return the settings of this process: the options of a command are in variables, which its workers inherit.

    Raises TargetError if the limit of downloads is not a number of bytes.
    """
    endpoint_url, anonymous, profile, most, unversioned = (
        os.environ.get(f"CKPTOOL_{name.upper()}", "") for name in Settings._fields
    )
    limit = parse_bytes(most) if most else LIMITS.download_bytes
    return Settings(endpoint_url, bool(anonymous), profile, limit, bool(unversioned))


class Facts(NamedTuple):
    """An object: its key, its size in bytes, and its ETag, which changes with its bytes; "" if the server has none."""

    key: str
    size: int
    etag: str


class Answer(NamedTuple):
    """Bytes of an object, and the facts of the object that they come from."""

    data: bytes
    facts: Facts


class Store:
    """One bucket, container or server. Every method may be called from several threads, and raises ``Failed``.

    A store that is only read has ``head`` and ``get``, and ``list`` if it can.
    """

    #: Whether ``get`` returns the last bytes of an object whose size is unknown.
    has_tail = False

    def head(self, key: str) -> Facts:
        """Return the facts of an object."""
        raise NotImplementedError

    def get(self, key: str, begin: int | None, size: int, etag: str = "") -> Answer:
        """Return ``size`` bytes from ``begin``, or the last ones for None; fewer if the object has fewer.

        With ``etag``, they only come from the object that has it.
        """
        raise NotImplementedError

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        """Return all objects whose keys begin with ``prefix`` and "/"; all objects if it is "".

        ``spend`` is called with the sizes of what arrives.
        """
        raise Failed("listing")

    def put(self, key: str, chunks: Iterable[bytes], size: int, former: str) -> None:
        """Write an object of ``size`` bytes. ``former`` is the ETag of what it may replace, "" if there must be none.

        Nothing is visible before the last chunk. If the chunks raise an error, nothing is written; ``Failed`` may take
        the place of the error. A large object takes no condition.
        """
        raise Failed("writing")


class Failed(Exception):
    """A request that failed: the HTTP status (0 without an answer), the server's code, and the kind of failure.

    The code is one word, such as ``NoSuchBucket``. The kind is one of failures.json, or "". ``region`` is where the
    bucket is, if the server says so. ``once`` tells that the request was sent once only: no earlier answer was lost.
    """

    def __init__(self, kind: str = "", status: int = 0, code: str = "", region: str = "") -> None:
        super().__init__(kind, status, code)
        self.kind, self.status, self.code, self.region, self.once = kind, status, code, region, False


_SERVER: Final = regex(r"https?://(?:[^/?#\s]*@)?(?:[\w.~-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?(?:[/?#]\S*)?")
#: An empty part of a key, except at its end, a dot or two as a part, and control characters.
_ODD_KEY: Final = regex(r"(\A|/)\.{0,2}/|(\A|/)\.{1,2}\Z|[\x00-\x1f\x7f]")


def check_server(url: str) -> None:
    """Raise Failed unless a URL, or "", names a server."""
    found = _SERVER.fullmatch(url)
    if url and (not found or int(found[1] or 0) > 65_535):
        raise Failed("server")


def check_bucket(address: str) -> Address:
    """Return the parts of an address in a bucket; raises Failed if there can be no such bucket or key."""
    parts = parse(address)
    if parts.query:
        raise Failed("query")
    if not regex(r"[\w.@$~-]+").fullmatch(parts.host):
        raise Failed("bucket")
    if _ODD_KEY.search(parts.path):
        raise Failed("key")
    return parts


@cache
def failures() -> dict[str, Any]:
    """Return the messages and steps by the kind of a failure, and the kinds by the facts of an answer or error.

    The ``words`` are expressions that the text of an error of obstore matches, in the order in which they are tried.
    """
    return table("remote/failures")


def error_of(failed: Failed, address: str, *, writing: bool = False) -> CkptoolError:
    """Return the error for a failed request about the object at an address."""
    known, parts, status = failures(), parse(address), failed.status
    kind = known["codes"].get(failed.code, failed.kind)
    host = known["hosts"].get(parts.scheme, f"{parts.scheme}://{parts.host}")
    if parts.scheme in ("http", "https"):  # the codes of a signed address say nothing about credentials of the user
        host = parts.host
        kind = "address" if kind == "expired" else "redirect" if failed.kind == "region" else failed.kind
    statuses = known["statuses"][""] | known["statuses"].get("writing" if writing else parts.scheme, {})
    said = kind or statuses.get(str(status)) or ("fails" if status >= 500 else "status" if status else "unknown")
    message, step = known["messages"].get(f"{said} {parts.scheme}") or known["messages"][said]
    what = message.format(
        host=host,
        bucket=parts.host.partition("@")[0],
        scheme=parts.scheme,
        status=status,
        verb="write" if writing else "read",
        limits=LIMITS,
        answer=human_bytes(LIMITS.answer_bytes),
        no_file=NO_FILE,
    )
    error: type[CkptoolError] = OutputError if writing else UnreadableError
    error = {"writing": RefusedError, "unversioned": RefusedError, "changed": ChangedError}.get(said, error)
    found = error(what, path=conceal(address), next=Line(step[2:]) if step.startswith("$ ") else step)
    found.of_server = kind != "listing" and (kind != "" or status not in (401, 403, 404, 410))
    return found


class Recent(Generic[T]):
    """What was found at addresses within the last ``seconds``, with the same settings and credentials.

    Finding out what an address is, and opening it, are separate calls; together they take one request. At most ``most``
    things are kept.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._found: dict[object, tuple[float, T]] = {}

    def get(self, address: str) -> T | None:
        """Return what was found at an address, or None."""
        when, found = self._found.get(_asked(address), (0.0, None))
        return found if time.monotonic() - when < self._seconds else None

    def keep(self, address: str, found: T) -> T:
        """Keep what was found, and return it."""
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[_asked(address)] = time.monotonic(), found
        return found

    def clear(self) -> None:
        self._found.clear()


def _asked(address: str) -> object:
    """Return the same for two questions about an address that have the same answer."""
    credentials = ("AWS_", "GOOGLE_", "AZURE_", "HF_")
    return address, current(), tuple(item for item in os.environ.items() if item[0].startswith(credentials))


def together(requests: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of several requests, in order; they run and fail as in ``at_once``."""
    return at_once(requests, lambda request: request())


def at_once(work: Sequence[T], do: Callable[[T], Result], seconds: float | None = None) -> list[Result]:
    """Return the results of ``do`` for each item, in order, from up to ``LIMITS.requests`` threads.

    Raises the first error; the threads then stop at their next item. Even one item runs in a thread: libraries wait for
    an answer without looking at signals, so ^C would have no effect for as long. Raises Failed after ``seconds``.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    items, lock, done = iter(enumerate(work)), threading.Lock(), threading.Event()

    def run() -> None:
        try:
            while not done.is_set():
                with lock:
                    at, item = next(items, (-1, None))
                if item is None:
                    return
                results[at] = do(item)
        except BaseException as error:
            errors.append(error)
            done.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(len(work), LIMITS.requests))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
            if thread.is_alive():
                raise Failed("endless")
    finally:
        done.set()
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(work))]

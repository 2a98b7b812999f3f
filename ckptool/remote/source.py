"""One remote object as a source: bytes that were read are kept, and ranges close together are one request."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from ..base import lazy
from ..base.addresses import conceal, parse, reveal
from ..base.errors import NO_FILE, OutputError, RefusedError, UnreadableError
from ..base.limits import ANNOUNCED, LIMITS
from ..base.text import human_bytes
from ..files.downloads import GAP
from ..files.sources import Source, Span
from .store import Answer, Facts, Failed, Range, Recent, Settings, Store, at_once, current, error_of, together

T = TypeVar("T")
#: Bytes at both ends of an object that are asked for first: they hold all that lists of tensors need, as a rule.
ENDS: Final = 256 << 10
#: The most bytes of one request, and the most that is read ahead of a reader that goes straight on.
REQUEST: Final = 4 << 20
_AHEAD: Final = 8 << 20
#: The same where larger gaps would fill the memory with bytes that nobody reads.
_NEAR: Final = 4 << 10
#: How many ends of an object are asked for first, if not both: files with their metadata at the beginning, and files of
#: a folder whose index tells what is where.
_ENDS: Final = {".safetensors": 1, ".gguf": 1, ".distcp": 0}
#: The modules of stores by the schemes of addresses; every other scheme is left to libraries.
_STORES: Final = {"http": "web", "https": "web", "hf": "web", "s3": "s3"}
_A_FOLDER: Final = "it is the address of a folder, not of a file"
#: What ``is_file`` opened, or the error that is raised when it is opened.
_OPENED: Final[Recent[RemoteSource | UnreadableError]] = Recent(1, seconds=5)


def is_file(address: str) -> bool:
    """Return whether there is a file at an address; other failures are left to ``open_remote``, which comes next.

    What was asked for is not asked for again: ``open_remote`` returns the same source.
    """
    if reveal(address).endswith("/"):
        return False
    if _OPENED.get(reveal(address)):
        return True
    try:
        _OPENED.keep(reveal(address), open_remote(address))
    except UnreadableError as error:
        if error.what in (NO_FILE, _A_FOLDER):
            return False
        _OPENED.keep(reveal(address), error)
    return True


def size_at(address: str) -> int:
    """Return the bytes of the file at an address, or -1 if they are unknown; costs as much as ``is_file``."""
    opened = _OPENED.get(reveal(address)) if is_file(address) else None
    return opened.size if isinstance(opened, RemoteSource) else -1


def open_remote(address: str, settings: Settings | None = None) -> RemoteSource:
    """Open a remote file by its address, or the text that stands for it: two requests at once, for both its ends.

    Raises UnreadableError and RefusedError as for a local file.
    """
    opened = _OPENED.get(reveal(address)) if settings is None else None
    if isinstance(opened, UnreadableError):
        raise opened
    if opened:
        _OPENED.clear()
        return opened
    settings, address = settings or current(), meant(address)
    store, key = open_store(address, settings)
    path = parse(address).path if parse(address).scheme.startswith("http") else key
    if path.endswith("/") or not path:
        raise UnreadableError(_A_FOLDER, path=conceal(address), next="name a checkpoint file in it")
    source = RemoteSource(store, address, settings, Allowance(settings.max_download), Facts(key, 0, ""))
    source.begin()
    return source


def meant(text: str) -> str:
    """Return the address that a text stands for. For a web page of the hub this is what the page shows."""
    address = reveal(text)
    if not address.lower().startswith("http"):
        return address
    from .web import page_shows

    return page_shows(parse(address)) or address


def open_store(address: str, settings: Settings, *, writing: bool = False) -> tuple[Store, str]:
    """Return the store of an address and the key of its object; raises UnreadableError or, to write, OutputError."""
    parts = parse(address)
    if not parts.host:
        error = OutputError if writing else UnreadableError
        raise error("the address names no bucket or host", path=conceal(address))
    try:
        module = lazy.module(f"remote.{_STORES.get(parts.scheme, 'libraries')}")
        found: tuple[Store, str] = module.open_store(address, settings)
        return found
    except Failed as failed:
        raise error_of(failed, address, writing=writing) from None


def identity_of(address: str, settings: Settings) -> object:
    """Return the same for all addresses of one object, whatever it contains. Azure has several for each."""
    parts = parse(address)
    if parts.scheme not in ("az", "abfs", "abfss"):
        return settings.endpoint_url, conceal(address)
    container, _, host = parts.host.partition("@")
    account = host.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    return settings.endpoint_url, account, container, parts.path


class RemoteSource(Source):
    """A remote object. If it is replaced, ChangedError follows: every answer must have the ETag of the first one.

    ``facts`` come from a listing. With size 0 and no ETag they are unknown: then ``begin`` must be called. ``blocks``
    are the bytes that its folder keeps.
    """

    def __init__(
        self,
        store: Store,
        address: str,
        settings: Settings,
        allowance: Allowance,
        facts: Facts,
        blocks: Blocks | None = None,
    ) -> None:
        self.name = conceal(address)
        self.identity: object = identity_of(address, settings)
        self._store, self._address, self._settings, self._allowance = store, address, settings, allowance
        self._key, self.size, self._etag = facts
        self._begun = self._closed = False
        self._blocks, self._owned = blocks or Blocks(allowance), blocks is None
        #: Called before the first read.
        self.start: Callable[[], None] = self.begin
        self._next = -1  # where a reader would go straight on
        self._window = GAP
        self._asked: list[Range] = []  # ranges that threads download
        self._announced: list[Range] = []  # what is read later, in this order, in pieces of one request
        self._arrived = threading.Condition(allowance.lock)

    def begin(self) -> None:
        """Ask for the first bytes and, unless they hold all metadata, for the last ones at the same time."""
        self._begun = True
        ends = next((number for suffix, number in _ENDS.items() if self.name.endswith(suffix)), 2)
        if not (self.size or self._etag):
            self._ask_unknown([0, None] if ends == 2 and self._store.has_tail else [0])
        self.prefetch([(0, ENDS), (max(self.size - ENDS, 0), ENDS)][:ends])

    def _ask_unknown(self, begins: Sequence[int | None]) -> None:
        try:
            answers = together([partial(self._store.get, self._key, begin, ENDS) for begin in begins])
        except Failed as failed:
            if failed.status == 416 or failed.kind == "whole":  # an empty object has no first byte
                self.size, self._etag = self._head()[1:]
                if not self.size:
                    return
            raise error_of(failed, self._address) from None
        self.size, self._etag = answers[0].facts[1:]
        for at, answer in zip((0, max(self.size - ENDS, 0)), answers):
            self._keep(at, answer)

    def check_unchanged(self) -> None:
        """Raise ChangedError if the object was replaced since it was opened."""
        if self._head()[1:] != (self.size, self._etag):
            raise error_of(Failed("", 412), self._address)

    def read(self, offset: int, size: int) -> bytes:
        if self._closed:
            raise UnreadableError("the checkpoint is closed", path=self.name, next="save it before it is closed")
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        if not self._begun and self.missing([(offset, size)]):
            self._begun = True
            self.start()
        with self._allowance.lock:
            kept, gaps = self._blocks.split(offset, offset + size)
            # Another thread asked for some of these bytes.
            while any(at < begin + count and begin < at + asked for at, asked in self._asked for begin, count in gaps):
                self._arrived.wait()
                kept, gaps = self._blocks.split(offset, offset + size)
            if gaps:
                wanted = self._wanted(gaps[0][0], offset + size)
                missing = self._split(wanted, _NEAR)
                self._asked += wanted
        if gaps:
            try:
                self._allowance.spend(sum(span.size for span in missing), self.name)
                requests = [part for span in missing for part in _requests(*span[1:])]
                kept += at_once(requests, lambda one: self.fetch(*one))
            finally:
                with self._allowance.lock:
                    for each in wanted:
                        self._asked.remove(each)
                    self._arrived.notify_all()
        return _cut(sorted(kept), offset, size)

    def _wanted(self, begin: int, end: int) -> list[Range]:
        """Return what to ask for to read a range: also what was announced behind it, or what a reader comes to next."""
        for first, (start, size) in reversed([*enumerate(self._announced)]):
            if start <= begin < start + size:
                last, room = first + 1, batch_size() - size
                while last < len(self._announced) and self._announced[last][1] <= room:
                    room -= self._announced[last][1]
                    last += 1
                behind = self._announced[first + 1 : last]
                del self._announced[first:last]
                return [(begin, max(end, start + size) - begin), *behind]
        straight = 0 <= begin - self._next < GAP
        self._window = min(max(self._window, end - begin) * 2, _AHEAD) if straight else GAP
        others = [at for at, _ in self._asked if at >= end]  # other threads read from there
        self._next = min(max(begin + self._window, end), self.size, *others)
        return [(begin, self._next - begin)]

    def prefetch(self, ranges: Iterable[Range]) -> None:
        fetch(self.missing(ranges))

    def announce(self, ranges: Iterable[Range]) -> None:
        """Ask for these ranges in batches, in this order, once the first of a batch is read."""
        with self._allowance.lock:
            self._announced += (part for begin, size in ranges for part in _requests(begin, size))

    def origin(self) -> tuple[Store, Facts]:
        """Return where the server finds the bytes, if it can copy them."""
        return self._store, Facts(self._key, self.size, self._etag)

    def received(self) -> tuple[int, int]:
        """Return how many answers had bytes of the object, and how many bytes."""
        return self._blocks.answers, self._blocks.nbytes

    def missing(self, ranges: Iterable[Range]) -> list[Span]:
        ranges = [*ranges]
        spans = self._split(ranges, GAP)
        if sum(span.size for span in spans) > _room():
            near = self._split(ranges, _NEAR)
            if sum(span.size for span in near) < sum(span.size for span in spans) // 2:
                return near  # headers all over a large file: with all that lies between them they would fill the memory
        return spans

    def _split(self, ranges: Iterable[Range], gap: int) -> list[Span]:
        """Return what of these ranges is not in memory; ranges with fewer than ``gap`` bytes between them as one."""
        with self._allowance.lock:
            parts = (self._blocks.split(begin, min(begin + size, self.size)) for begin, size in ranges)
            found: list[Range] = []
            for begin, size in sorted(each for _, gaps in parts for each in gaps):
                last, length = found[-1] if found else (begin, 0)
                if found and begin - (last + length) < gap:
                    found[-1] = last, max(length, begin + size - last)
                else:
                    found.append((begin, size))
        return [Span(self, *each) for each in found]

    def fetch(self, begin: int, size: int) -> tuple[int, bytes]:
        """Download a range that was allowed, keep it in memory, and return it as (offset, bytes)."""
        answer = self._do(lambda: self._store.get(self._key, begin, size, self._etag))
        self._keep(begin, answer)
        return begin, answer.data

    def close(self) -> None:
        self._closed = True
        if self._owned:  # else the folder keeps them for the next reader of the file
            with self._allowance.lock:
                for begin in [*self._blocks.begins]:
                    self._allowance.forget(self._blocks, begin)

    def _keep(self, at: int, answer: Answer) -> None:
        """Keep the bytes of an answer; raises ChangedError if they come from another object than the first ones."""
        if answer.facts[1:] != (self.size, self._etag):
            raise error_of(Failed("", 412), self._address)
        if not (self._etag or self._settings.allow_unversioned or len(answer.data) == self.size):
            raise error_of(Failed("unversioned"), self._address)
        with self._allowance.lock:
            self._blocks.add(at, answer.data)

    def _head(self) -> Facts:
        return self._do(lambda: together([lambda: self._store.head(self._key)]))[0]

    def _do(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except Failed as failed:
            error = error_of(failed, self._address)
            # The file is there, so this is no missing file of a folder.
            error.of_server = error.of_server or failed.status in (401, 403)
            raise error from None

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self._address, self._settings, self.size, self._etag)


def _reopened(address: str, settings: Settings, size: int, etag: str) -> RemoteSource:
    """Reopen the object of a pickled source; the first read raises ChangedError if it was replaced."""
    store, key = open_store(address, settings)
    return RemoteSource(store, address, settings, Allowance(settings.max_download), Facts(key, size, etag))


class Allowance:
    """What the files of one command share: the bytes that they may still download, and the memory for their bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0
        self.lock = threading.RLock()
        # The blocks in memory, in the order of their use: the bytes of each, and whether it is a small answer's.
        self._kept: dict[tuple[Blocks, int], tuple[bytes, bool]] = {}
        self._nbytes = 0

    def spend(self, nbytes: int, path: str) -> None:
        """Count bytes before they are asked for; raise RefusedError if they exceed the limit."""
        with self.lock:
            _check(0, self.spent + nbytes, self.limit, path)
            self.spent += nbytes

    def keep(self, blocks: Blocks, begin: int, data: bytes, *, small: bool) -> None:
        """Keep a new block, and forget the blocks that were used longest ago if memory is full.

        Those of small answers are forgotten last: to ask for each again would be a request of its own.
        """
        self._kept[blocks, begin] = data, small
        self._nbytes += len(data)
        while self._nbytes > LIMITS.remote_bytes:
            large = (place for place, (_, small) in self._kept.items() if not small)
            self.forget(*next(large, next(iter(self._kept))))

    def use(self, blocks: Blocks, begin: int) -> bytes:
        """Return the bytes of a block, and record its use."""
        self._kept[blocks, begin] = found = self._kept.pop((blocks, begin))
        return found[0]

    def forget(self, blocks: Blocks, begin: int) -> None:
        self._nbytes -= len(self._kept.pop((blocks, begin))[0])
        blocks.begins.remove(begin)


def batch_size() -> int:
    """Return the most bytes to announce at once."""
    return LIMITS.remote_bytes * 2 // 5


def _room() -> int:
    """Return the most bytes to fetch at once: the batch before may still be needed, and the ends of objects."""
    return LIMITS.remote_bytes * 9 // 20


def fetch(spans: Iterable[Span]) -> None:
    """Download spans of several objects at the same time, until they fill nearly half of the memory."""
    requests: list[tuple[RemoteSource, int, int]] = []
    room = _room()
    for source, offset, wanted in spans:
        assert isinstance(source, RemoteSource)
        size = min(wanted, room)
        if not size:
            break
        room -= size
        source._allowance.spend(size, source.name)
        requests += ((source, *part) for part in _requests(offset, size))
    at_once(requests, lambda request: request[0].fetch(*request[1:]))


def announce(spans: Iterable[Span], nbytes: int, path: str) -> None:
    """Record that spans are read in this order. Nothing is downloaded yet.

    Raise RefusedError if the command under way may not download ``nbytes`` more.
    """
    before = ANNOUNCED.get()
    _check(before or 0, nbytes, current().max_download, path)
    ranges: dict[Source, list[Range]] = {}
    for source, offset, size in spans:
        ranges.setdefault(source, []).append((offset, size))
    for source, read in ranges.items():
        if isinstance(source, RemoteSource):
            source.announce(read)
    if before is not None:
        ANNOUNCED.set(before + nbytes)


def _check(before: int, nbytes: int, limit: int, path: str) -> None:
    if before + nbytes > limit:
        after = f" after {human_bytes(before)}" if before else ""
        what = f"it would download {human_bytes(nbytes)}{after}, more than {human_bytes(limit)}"
        step = "download the file first, or allow more with `--max-download=`"
        error = RefusedError(what, path=path, next=step)
        error.of_server = True
        raise error


class Blocks:
    """Ranges of one object in memory, and the number and the bytes of all answers.

    The lock of the allowance must be held.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self.begins: list[int] = []
        self.answers = self.nbytes = 0

    def split(self, begin: int, end: int) -> tuple[list[tuple[int, bytes]], list[Range]]:
        """Return the blocks that have bytes of a range as (offset, bytes), and what is missing as (offset, size)."""
        kept: list[tuple[int, bytes]] = []
        missing: list[Range] = []
        at, index = begin, max(bisect_right(self.begins, begin) - 1, 0)
        for start in [*self.begins[index : bisect_left(self.begins, end)], end]:
            if start > at:
                missing.append((at, start - at))
            if start < end and start + len(data := self._allowance.use(self, start)) > at:
                kept.append((start, data))
                at = start + len(data)
        return kept, missing

    def add(self, begin: int, data: bytes) -> None:
        """Keep the bytes of an answer from ``begin``, except those that are kept already."""
        self.answers += 1
        self.nbytes += len(data)
        for at, size in self.split(begin, begin + len(data))[1]:
            insort(self.begins, at)
            self._allowance.keep(self, at, data[at - begin : at - begin + size], small=len(data) < GAP)


def _requests(begin: int, size: int) -> Iterator[Range]:
    """Yield a range as ranges that are small enough for one request."""
    return ((at, min(REQUEST, begin + size - at)) for at in range(begin, begin + size, REQUEST))


def _cut(pieces: Sequence[tuple[int, bytes]], offset: int, size: int) -> bytes:
    """Return a range from pieces in order that cover it."""
    parts, at, end = [], offset, offset + size
    for begin, data in pieces:
        if begin <= at < begin + len(data):
            parts.append(data[at - begin : end - begin])
            at += len(parts[-1])
    return b"".join(parts)

"""Write remote objects from plans: bytes stream through this process, or the server copies them from the inputs.

Before anything becomes visible, the planned bytes are read back, and inputs and target are looked at again. Some
servers ignore conditions, so afterwards the object is looked at once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, Full, Queue
from threading import Lock
from typing import Final

from ..base.addresses import conceal, parse, reveal
from ..base.errors import Again, CkptoolError, OutputError, RefusedError
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.steps import FORCE, advice, as_step
from ..base.text import human_bytes
from ..files.sources import (
    Computed,
    ExpectedChecksum,
    Piece,
    Plan,
    Source,
    Span,
    merge_pieces,
    part_of,
    size_of,
    spans_read,
)
from ..files.threads import Background
from ..files.write.copying import Buffer, Progress, as_output_failure, stream_pieces
from ..files.write.planned import Check, PlanSource
from .obstores import may_pass, retried
from .source import RemoteSource, open_store
from .store import Copier, Facts, Failed, current, error_of

#: Where objects can be written.
_SCHEMES: Final = frozenset(("s3", "gs", "az", "abfs", "abfss"))
#: Bytes of a part of an upload, except the last one; of the parts that stream; and the most parts. From the S3 API.
_MIN_PART: Final = 5 << 20
_MAX_PART: Final = 5 << 30
_PART: Final = 8 << 20
_MOST_PARTS: Final = 10_000
#: Parts in memory: one is filled, the others are on their way.
_SENDING: Final = 4
#: Chunks that wait to be taken by a store.
_QUEUED: Final = 4
#: Bytes at both ends of a written object that are compared.
_COMPARED: Final = 4096
#: Bytes of one request for an input.
_REQUEST: Final = 4 << 20
#: Seconds after which an unfinished upload is a leftover of a killed run.
_DAY: Final = 86_400
#: Codes and statuses of servers that cannot copy a range, but can take the bytes.
_CANNOT_COPY: Final = (405, 501, "NotImplemented", "InvalidRequest", "InvalidArgument", "MethodNotAllowed")


class Traffic(NamedTuple):
    """What writing an object takes: ``requests``, about; bytes ``down`` and ``up``, and bytes copied on the server."""

    requests: int
    down: int
    up: int
    copied: int


class Part(NamedTuple):
    """A part of an upload: ``size`` bytes that stream through this process, or a span that the server copies."""

    size: int
    span: Span | None = None


class Cut(NamedTuple):
    """A plan cut into parts. ``streamed`` has the bytes of those that are not copied, in order."""

    parts: tuple[Part, ...]
    streamed: Plan

    @property
    def copied(self) -> int:
        return sum(part.size for part in self.parts if part.span)


class Target:
    """The object to write, by its address or the text that stands for it; raises OutputError if nothing can be written.

    Raise RefusedError if it is one of the inputs. No request is sent.
    """

    def __init__(self, text: str, sources: Sequence[Source] = ()) -> None:
        self.address, self.name = reveal(text), conceal(text)
        settings = current()
        if parse(self.address).scheme not in _SCHEMES:
            raise self.error(Failed("writing"))
        self.store, self.key = open_store(self.address, settings, writing=True)
        if not self.key or self.key.endswith("/"):
            raise OutputError("it is a folder, not a file", path=self.name, next="name a file in it")
        if "{hash" in parse(self.address).path:
            what = "the name of a remote output cannot have a hash of its content"
            raise OutputError(what, path=self.name, next="write to a local path, then upload it")
        identity = (settings.endpoint_url, self.name)
        if any(source.identity == identity for source in sources):
            raise RefusedError("the output is the input", path=self.name, next="write to another name")

    def facts(self) -> Facts | None:
        """Return the facts of the object that is there, or None."""
        try:
            return self.store.head(self.key)
        except Failed as failed:
            if failed.status == 404 and failed.code != "NoSuchBucket":
                return None
            found = failed
        raise self.error(found)

    def error(self, failed: Failed) -> Exception:
        return error_of(failed, self.address, writing=True)


@as_output_failure()
def publish(
    plan: Plan,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    progress: Progress | None = None,
    check: Check | None = None,
    expect: Callable[[Plan], None] = lambda plan: None,
) -> Traffic:
    """Execute a plan, whose output is a remote object. The object appears as a whole or not at all.

    ``check`` raises ReadBackError if the planned bytes are wrong. ``expect`` is called with the pieces that stream, and
    may refuse to read them. Raises RefusedError if the object exists without ``force``, OutputError if it cannot be
    written or is replaced meanwhile, ChangedError if an input changes.
    """
    target = Target(path, sources)
    former = target.facts()
    if former and not force:
        step = advice("replace it with ", FORCE, ", or choose another name")
        again = Again((FORCE,), "replace it, or choose another name: ")
        raise RefusedError("the output exists", path=target.name, next=step, again=again)
    if plan.size > LIMITS.object_bytes:
        what = f"an object can have {human_bytes(LIMITS.object_bytes)}, not {human_bytes(plan.size)}"
        raise OutputError(what, path=target.name, next="write several files: add a maximum shard size")
    writing = _Writing(target, plan, tuple(sources), former, check, _one_by_one(progress))
    copier = target.store.copies() if plan.size > _PART else None
    cut = cut_into_parts(plan, copier)
    try:
        expect(cut.streamed)
    except RefusedError as error:
        if copier is None and target.address.startswith("s3://"):
            error.step = as_step("with boto3 the server copies them: pip install 'ckptool[s3]'")
        raise
    try:
        writing.write(cut, copier)
    except _CannotCopy:
        cut = cut_into_parts(plan, None)
        expect(cut.streamed)
        writing.write(cut, copier)
    return traffic_of(cut, len(sources))


def _one_by_one(progress: Progress | None) -> Progress:
    """Return a function that reports progress from one thread at a time."""
    lock = Lock()

    def report(size: int) -> None:
        with lock:
            if progress is not None:
                progress(size)

    return report


def planned_traffic(plan: Plan, path: str, sources: Sequence[Source]) -> Traffic:
    """Return what ``publish`` would take. Nothing is written."""
    target = Target(path, sources)
    return traffic_of(cut_into_parts(plan, target.store.copies() if plan.size > _PART else None), len(sources))


def traffic_of(cut: Cut, inputs: int = 0) -> Traffic:
    """Return what it takes to write an output. Without parts it is a local file."""
    read = [piece for piece in cut.streamed.pieces if not (isinstance(piece, Computed) and piece.late)]
    spans = [span for piece in read for span in spans_read(piece)]
    spans += [expected.span for expected in cut.streamed.expected_checksums]
    ranges = {(id(span.source), span.offset): span.size for span in spans if isinstance(span.source, RemoteSource)}
    down, up = sum(ranges.values()), cut.streamed.size if cut.parts else 0
    # To look at the target before and after, and at each input; to begin and to complete.
    more = 5 + inputs + (3 if len(cut.parts) > 1 else 0) + len(cut.parts) if cut.parts else inputs
    return Traffic(more + -(-down // _REQUEST), down, up, cut.copied)


def cut_into_parts(plan: Plan, copier: Copier | None) -> Cut:
    """Cut a plan into parts. Spans that ``copier`` can copy are parts of their own.

    Before a copy, fewer than 5 MiB that stream are topped up from the span that would be copied.
    """
    part, least = max(_PART, -(-plan.size // (_MOST_PARTS // 2))), _MIN_PART
    pieces = plan.pieces if copier is None else merge_pieces(_with_equal_gaps(plan.pieces))
    while True:
        cut = _cut(pieces, plan.expected_checksums, copier, part, least)
        if len(cut.parts) <= _MOST_PARTS:
            return cut
        least *= 2


def _cut(
    pieces: Sequence[Piece], expected: tuple[ExpectedChecksum, ...], copier: Copier | None, part: int, least: int
) -> Cut:
    """Cut pieces into parts; those that stream have ``part`` bytes or more, copied ones at least ``least``."""
    read = [checksum.span for checksum in expected]
    parts: list[Part] = []
    streamed: list[Piece] = []
    run = 0  # bytes that stream and are in no part yet
    for piece in pieces:
        size = size_of(piece)
        top = max(_MIN_PART - run, 0) if run else 0
        if size - top < least or not _is_copied(piece, copier, read):
            streamed.append(piece)
            run += size
            continue
        if top:
            streamed.append(part_of(piece, 0, top))
        parts += [Part(count) for count in _even(run + top, max((run + top) // part, 1))]
        run = 0
        for count in _even(size - top, -(-(size - top) // _MAX_PART)):
            span = part_of(piece, top, count)
            assert isinstance(span, Span)
            parts.append(Part(count, span))
            top += count
    parts += [Part(count) for count in _even(run, max(run // part, 1))]
    return Cut(tuple(parts), Plan(tuple(streamed), expected))


def _with_equal_gaps(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces. Bytes between two spans become a span if they are in the input: most headers of records are."""
    gaps: dict[int, Span] = {}
    ranges: dict[RemoteSource, list[tuple[int, int]]] = {}
    for place, (before, data, after) in enumerate(zip(pieces, pieces[1:], pieces[2:]), 1):
        if isinstance(before, Span) and isinstance(data, bytes) and isinstance(after, Span):
            source, begin = before.source, before.offset + before.size
            if isinstance(source, RemoteSource) and after[:2] == (source, begin + len(data)):
                gaps[place] = Span(source, begin, len(data))
                ranges.setdefault(source, []).append((begin, len(data)))
    for source, wanted in ranges.items():
        source.prefetch(wanted)
    for place, piece in enumerate(pieces):
        gap = gaps.get(place)
        yield gap if gap and gap.source.read(*gap[1:]) == piece else piece


def _even(size: int, count: int) -> Iterator[int]:
    """Divide a size into ``count`` sizes that differ by one at most; nothing for 0."""
    for place in range(count if size else 0):
        yield size * (place + 1) // count - size * place // count


def _is_copied(piece: Piece, copier: Copier | None, read: Sequence[Span]) -> bool:
    """Return whether the server can copy a piece, and no checksum of its bytes must be verified."""
    if copier is None or not isinstance(piece, Span) or not isinstance(piece.source, RemoteSource):
        return False
    origin, end = piece.source.origin(), piece.offset + piece.size
    if origin is None or origin.copier.account != copier.account:
        return False
    return not any(
        span.source is piece.source and span.offset < end and span.offset + span.size > piece.offset for span in read
    )


class _CannotCopy(Exception):
    """The server cannot copy parts of objects."""


class _Writing(NamedTuple):
    """An object that is being written. ``former`` is what was there before, or None."""

    target: Target
    plan: Plan
    sources: tuple[Source, ...]
    former: Facts | None
    check: Check | None
    progress: Progress

    def write(self, cut: Cut, copier: Copier | None) -> None:
        """Write the parts, look at everything again, and make the object visible."""
        etag = self.former.etag if self.former else ""
        try:
            if copier is None:
                self._put(cut.streamed, etag)
            else:
                self._upload(cut, copier, etag)
        except Failed as failed:
            found = failed
        else:
            self._check_written()
            return
        raise self.target.error(found)

    def _put(self, streamed: Plan, etag: str) -> None:
        """Stream the object."""
        with _Putting(self.target, etag) as putting:
            stream_pieces(streamed, partial(self._counted, putting.put))
            self._check_again()
            putting.done()
            try:
                putting.finish()
            except Failed:
                if not self._is_there():
                    raise

    def _counted(self, put: Callable[[Buffer], None], data: Buffer) -> None:
        put(data)
        self.progress(len(data))

    def _upload(self, cut: Cut, copier: Copier, etag: str) -> None:
        """Write the object in parts."""
        key = self.target.key
        known = copier.unfinished(key)
        for upload, seconds in known.items():
            if seconds > _DAY:
                with suppress(Failed):
                    copier.abort(key, upload)
        upload = retried(partial(self._begin, copier, known), may_pass)
        try:
            etags = self._send(cut, copier, upload)
            self._check_again()
            try:
                copier.complete(key, upload, etags, etag)
            except Failed:
                if not self._is_there():
                    raise
        except BaseException:
            with suppress(Failed):
                copier.abort(key, upload)
            raise

    def _begin(self, copier: Copier, known: Mapping[str, float]) -> str:
        """Begin an upload and return its id; ``known`` are unfinished uploads of others."""
        key = self.target.key
        try:
            return copier.begin(key)
        except Failed:
            with suppress(Failed):  # the server may have begun one, and its answer was lost
                for upload in copier.unfinished(key).keys() - known.keys():
                    copier.abort(key, upload)
            raise

    def _send(self, cut: Cut, copier: Copier, upload: str) -> list[str]:
        """Send all parts, or let the server copy them; return their ETags."""
        etags: dict[int, Future[str]] = {}
        left = deque[tuple[int, int]]()  # numbers and sizes of the parts that stream
        sending = deque[Future[str]]()
        buffer = bytearray()
        pool = ThreadPoolExecutor(LIMITS.requests)

        def put(data: Buffer) -> None:
            buffer.extend(data)
            while left and len(buffer) >= left[0][1]:
                number, size = left.popleft()
                etags[number] = pool.submit(self._send_part, copier, upload, number, buffer[:size])
                sending.append(etags[number])
                del buffer[:size]
                if len(sending) == _SENDING:
                    sending.popleft().result()

        try:
            for number, (size, span) in enumerate(cut.parts, 1):
                if span is None:
                    left.append((number, size))
                else:
                    etags[number] = pool.submit(self._copy, copier, upload, number, span)
            stream_pieces(cut.streamed, put)
            return [etags[number].result() for number in range(1, len(cut.parts) + 1)]
        finally:
            # A part that arrives after the upload is removed would stay: wait for all that are on their way.
            pool.shutdown(cancel_futures=True)

    def _send_part(self, copier: Copier, upload: str, number: int, data: bytearray) -> str:
        etag = copier.send(self.target.key, upload, number, data)
        self.progress(len(data))
        return etag

    def _copy(self, copier: Copier, upload: str, number: int, span: Span) -> str:
        source = span.source
        assert isinstance(source, RemoteSource)
        origin = source.origin()
        assert origin is not None
        try:
            etag = copier.copy(self.target.key, upload, number, origin, span[1:])
        except Failed as failed:
            if {failed.status, failed.code} & {*_CANNOT_COPY}:
                raise _CannotCopy from None
            if failed.status == 412:
                source.check_unchanged()
            raise
        self.progress(span.size)
        return etag

    def _check_again(self) -> None:
        """Raise ReadBackError if the planned bytes are wrong, and an error if an input or the target was replaced."""
        if self.check is not None:
            self.check(PlanSource(self.plan, self.target.name))
        for source in self.sources:
            source.check_unchanged()
        if self.target.facts() != self.former:
            raise self.target.error(Failed("", 412))

    def _is_there(self) -> bool:
        """Return whether the object is there, although the request for it failed: an answer was lost."""
        with suppress(CkptoolError, Failed):
            found = self.target.facts()
            return found is not None and found != self.former and self._is_planned(found)
        return False

    def _is_planned(self, found: Facts) -> bool:
        """Return whether an object has the planned size, and the planned bytes at both ends."""
        if found.size != self.plan.size:
            return False
        planned = PlanSource(self.plan, self.target.name)
        size = min(_COMPARED, found.size)
        ranges = [(0, size), (found.size - size, size)] if found.size > size else [(0, size)] if size else []
        answers = self.target.store.many(self.target.key, ranges, found.etag)
        return all(answer.data == planned.read(*place) for answer, place in zip(answers, ranges))

    def _check_written(self) -> None:
        """Raise OutputError if another object is there than the one that was written."""
        found = self.target.facts()
        try:
            if found is not None and self._is_planned(found):
                return
        except Failed as failed:
            if failed.status != 412:
                raise self.target.error(failed) from None
        there = "nothing" if found is None else f"an object of {found.size:,} bytes"
        what = f"it was written, but somebody replaced it: now there is {there}"
        raise OutputError(what, path=self.target.name, next="see what is there, then write again with another name")


class _Putting(Background):
    """Writes one object from chunks that the caller puts. If the caller fails, nothing is written."""

    def __init__(self, target: Target, etag: str) -> None:
        super().__init__(True)
        self._target, self._etag = target, etag
        self._chunks: Queue[bytes | None] = Queue(_QUEUED)

    def put(self, data: Buffer) -> None:
        """Hand a chunk over; raises the error of the store."""
        self._hand_over(bytes(data))

    def done(self) -> None:
        """Say that there are no more chunks."""
        self._hand_over(None)

    def _hand_over(self, data: bytes | None) -> None:
        while self._error is None:
            with suppress(Full):
                self._chunks.put(data, timeout=0.05)
                return
        raise self._error

    def _run(self) -> None:
        self._target.store.put(self._target.key, self._taken(), self._etag)

    def _taken(self) -> Iterator[bytes]:
        while not self._stopped.is_set():
            with suppress(Empty):
                data = self._chunks.get(timeout=0.05)
                if data is None:
                    return
                yield data
        raise Failed("unknown")  # nobody sees it: the caller failed

"""Write remote objects from plans: bytes stream through this process, or the server copies them from the inputs.

Before anything becomes visible, the planned bytes are read back, and inputs and target are looked at again. Some
servers ignore conditions, so afterwards the object is looked at once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from queue import Empty, Full, Queue
from typing import Final

from ..base.addresses import conceal, parse, reveal, split_member
from ..base.errors import CkptoolError, OutputError, RefusedError
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.text import human_bytes
from ..files.downloads import check_unchanged, missing_of, prefetch, spans_of
from ..files.sources import Piece, Plan, Source, Span, merge_pieces, origins, size_of
from ..files.threads import Background
from ..files.write.copying import Buffer, Progress, as_output_failure, ignore, stream_pieces
from ..files.write.output import output_exists
from ..files.write.planned import COMPARED, Check, PlanSource
from .libraries import MOST_PARTS, PART
from .s3 import S3
from .source import REQUEST, RemoteSource, identity_of, open_store
from .store import Facts, Failed, Range, current, error_of, together

#: Bytes of a part of an upload, except the last one, at least and at most. From the S3 API.
_MIN_PART: Final = 5 << 20
_MAX_PART: Final = 5 << 30
#: Parts that are on their way, and chunks that wait to be taken by a store; all are in memory.
_SENDING: Final = 4
#: Codes and statuses of servers that cannot copy a range, but can take the bytes.
_CANNOT_COPY: Final = {405, 501, "NotImplemented", "InvalidRequest", "InvalidArgument", "MethodNotAllowed"}


class Traffic(NamedTuple):
    """The cost of an output: about how many ``requests``; bytes ``down``, ``up``, and ``copied`` on the server.

    It includes what was read to plan the output.
    """

    requests: int
    down: int
    up: int
    copied: int


class Part(NamedTuple):
    """A part of an upload: ``size`` bytes that stream through this process, or a span that the server copies."""

    size: int
    span: Span | None = None


class Cut(NamedTuple):
    """The parts of a plan. ``streamed`` has the bytes of those that are not copied, in order."""

    parts: tuple[Part, ...]
    streamed: Plan

    def traffic(self, sources: Sequence[Source]) -> Traffic:
        """Return what it takes to write the object from these inputs."""
        read = traffic_of([self.streamed], sources)
        # To look at the target before and after, and at each input; to begin and to complete.
        requests = 5 + len(sources) + len(self.parts) + (3 if len(self.parts) > 1 else 0)
        copied = sum(part.size for part in self.parts if part.span)
        return Traffic(read.requests + requests, read.down, self.streamed.size, copied)


class Target:
    """The object to write, by its address or the text that stands for it; raises OutputError if nothing can be written.

    Raise RefusedError if it is one of the inputs. No request is sent.
    """

    def __init__(self, text: str, sources: Sequence[Source] = ()) -> None:
        self.address, self.name = reveal(text), conceal(text)
        settings = current()
        if parse(self.address).scheme not in ("s3", "gs", "az", "abfs", "abfss"):
            raise self.error(Failed("writing"))
        self.store, self.key = open_store(self.address, settings, writing=True)
        if not self.key or self.key.endswith("/"):
            raise OutputError("it is a folder, not a file", path=self.name, next="name a file in it")
        if split_member(text)[0]:
            what = "'!' stands before a member of an archive, and archives are not written into"
            raise OutputError(what, path=self.name, next="write it with a name without '!'")
        if "{hash" in parse(self.address).path:
            what = "the name of a remote output cannot have a hash of its content"
            raise OutputError(what, path=self.name, next="write to a local path, then upload it")
        identity = identity_of(self.address, settings)
        if any(source.identity == identity for source in sources):
            raise RefusedError("the output is the input", path=self.name, next="write to another name")

    def facts(self) -> Facts | None:
        """Return the facts of the object that is there, or None."""
        try:
            return self.store.head(self.key)
        except Failed as failed:
            if failed.status == 404 and failed.code != "NoSuchBucket":
                return None
            raise self.error(failed) from None

    def copier(self, plan: Plan) -> S3 | None:
        """Return the store that writes a plan in parts, or None."""
        return self.store if plan.size > PART and isinstance(self.store, S3) else None

    def error(self, failed: Failed) -> CkptoolError:
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
        raise output_exists(target.name)
    if plan.size > LIMITS.object_bytes:
        what = f"an object can have {human_bytes(LIMITS.object_bytes)}, not {human_bytes(plan.size)}"
        raise OutputError(what, path=target.name, next="write several files: add a maximum shard size")
    writing = _Writing(target, plan, sources, former, target.copier(plan), check, expect, progress or ignore)
    return writing.write(writing.copier)


def planned_traffic(plan: Plan, path: str, sources: Sequence[Source]) -> Traffic:
    """Return what ``publish`` would take. Nothing is written."""
    return cut_into_parts(plan, Target(path, sources).copier(plan)).traffic(sources)


def traffic_of(plans: Iterable[Plan], sources: Sequence[Source]) -> Traffic:
    """Return what it takes to read the inputs of plans; writing local files takes no more."""
    read = (spans_of(plan.pieces, plan.expected_checksums) for plan in plans)
    spans = [*chain.from_iterable(map(origins, chain.from_iterable(read)))]
    missing = missing_of(spans)
    inputs = {source for source in (*sources, *(span.source for span in spans)) if isinstance(source, RemoteSource)}
    received = [source.received() for source in inputs]
    requests = sum(answers for answers, _ in received) + sum(-(-span.size // REQUEST) for span in missing)
    return Traffic(requests, sum(nbytes for _, nbytes in received) + sum(span.size for span in missing), 0, 0)


def cut_into_parts(plan: Plan, copier: S3 | None) -> Cut:
    """Cut a plan into parts. Spans that ``copier`` can copy are parts of their own.

    Before a copy, fewer than 5 MiB that stream are topped up from the span that would be copied.
    """
    if copier is not None:
        plan = plan._replace(pieces=merge_pieces(_with_equal_gaps(plan.pieces)))
    least = _MIN_PART
    while len((cut := _cut(plan, copier, least)).parts) > MOST_PARTS:
        least *= 2
    return cut


def _cut(plan: Plan, copier: S3 | None, least: int) -> Cut:
    """Cut a plan into parts; copied parts have at least ``least`` bytes."""
    part = max(PART, -(-plan.size // (MOST_PARTS // 2)))
    parts: list[Part] = []
    streamed: list[Piece] = []
    run = 0  # bytes that stream and are in no part yet
    for piece in plan.pieces:
        size = size_of(piece)
        top = max(_MIN_PART - run, 0) if run else 0
        if not isinstance(piece, Span) or size - top < least or not _is_copied(piece, copier, plan):
            streamed.append(piece)
            run += size
            continue
        if top:
            streamed.append(piece._replace(size=top))
        parts += [Part(count) for count in _even(run + top, max((run + top) // part, 1))]
        run = 0
        for count in _even(size - top, -(-(size - top) // _MAX_PART)):
            parts.append(Part(count, Span(piece.source, piece.offset + top, count)))
            top += count
    parts += [Part(count) for count in _even(run, max(run // part, 1))]
    return Cut(tuple(parts), plan._replace(pieces=tuple(streamed)))


def _with_equal_gaps(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces. Bytes between two spans become a span if they are in the input: most headers of records are."""
    gaps: dict[int, Span] = {}
    for place, (before, data, after) in enumerate(zip(pieces, pieces[1:], pieces[2:]), 1):
        if isinstance(before, Span) and isinstance(data, bytes) and isinstance(after, Span):
            source, begin = before.source, before.offset + before.size
            if isinstance(source, RemoteSource) and after[:2] == (source, begin + len(data)):
                gaps[place] = Span(source, begin, len(data))
    prefetch(gaps.values())
    for place, piece in enumerate(pieces):
        gap = gaps.get(place)
        yield gap if gap and gap.source.read(*gap[1:]) == piece else piece


def _even(size: int, count: int) -> Iterator[int]:
    """Divide a size into ``count`` sizes that differ by one at most; nothing for 0."""
    for place in range(count if size else 0):
        yield size * (place + 1) // count - size * place // count


def _is_copied(piece: Span, copier: S3 | None, plan: Plan) -> bool:
    """Return whether the server can copy a piece, and no checksum of its bytes must be verified."""
    source, begin, size = piece
    if copier is None or not isinstance(source, RemoteSource) or not copier.copies_from(source.origin()[0]):
        return False
    read = [expected.span for expected in plan.expected_checksums if expected.span.source is source]
    return not any(span.offset < begin + size and span.offset + span.size > begin for span in read)


class _Writing(NamedTuple):
    """An object that is being written. ``former`` is what was there before, or None; ``copier`` sends parts, if any."""

    target: Target
    plan: Plan
    sources: Sequence[Source]
    former: Facts | None
    copier: S3 | None
    check: Check | None
    expect: Callable[[Plan], None]
    progress: Progress

    def write(self, copier: S3 | None) -> Traffic:
        """Write the object and return what it took. ``copier`` copies parts on the server, if any."""
        cut = cut_into_parts(self.plan, copier)
        traffic = cut.traffic(self.sources)
        self.expect(cut.streamed)
        etag = self.former.etag if self.former else ""
        try:
            if self.copier is not None:
                self._upload(cut, self.copier, etag)
            else:
                with _Putting(self.target, self.plan.size, etag, self.progress) as putting:
                    stream_pieces(cut.streamed, putting.put)
                    self._complete(putting.finish)
        except Failed as failed:
            if failed.kind == "copy":
                return self.write(None)
            raise self.target.error(failed) from None
        return traffic

    def _upload(self, cut: Cut, copier: S3, etag: str) -> None:
        key = self.target.key
        upload = copier.begin(key)
        try:
            etags = self._send(cut, copier, upload)
            self._complete(partial(copier.complete, key, upload, etags, etag))
        except BaseException as error:
            try:
                copier.abort(key, upload)
            except Failed:
                what = f"nothing was written, but the server keeps the parts that were sent: upload {upload}"
                step = "remove it with the s3api command abort-multipart-upload, or by a lifecycle rule of the bucket"
                raise OutputError(what, path=self.target.name, next=step) from error
            raise

    def _send(self, cut: Cut, copier: S3, upload: str) -> list[str]:
        """Send or copy all parts, and return their ETags."""
        parts = [*enumerate(cut.parts, 1)]
        left = deque((number, part.size) for number, part in parts if part.span is None)
        etags: dict[int, Future[str]] = {}
        sending = deque[Future[str]]()
        buffer = bytearray()
        pool = ThreadPoolExecutor(LIMITS.requests)

        def put(data: Buffer) -> None:
            buffer.extend(data)
            self.progress(len(data))
            while left and len(buffer) >= left[0][1]:
                number, size = left.popleft()
                etags[number] = pool.submit(copier.part, self.target.key, upload, number, buffer[:size])
                sending.append(etags[number])
                del buffer[:size]
                if len(sending) == _SENDING:
                    sending.popleft().result()

        try:
            for number, (_, span) in parts:
                if span is not None:
                    etags[number] = pool.submit(self._copy, copier, upload, number, span)
            stream_pieces(cut.streamed, put)
            found = []
            for number, (size, span) in parts:
                found.append(etags[number].result())
                self.progress(size if span else 0)
            return found
        finally:
            # A part that arrives after the upload is removed would stay: wait for all that are on their way.
            pool.shutdown(cancel_futures=True)

    def _copy(self, copier: S3, upload: str, number: int, span: Span) -> str:
        source = span.source
        assert isinstance(source, RemoteSource)
        try:
            return copier.copy(self.target.key, upload, number, *source.origin(), span[1:])
        except Failed as failed:
            if {failed.status, failed.code} & _CANNOT_COPY:
                failed.kind = "copy"
            if failed.status == 412:
                source.check_unchanged()
            raise

    def _complete(self, request: Callable[[], None]) -> None:
        """Make the object visible, unless the planned bytes are wrong, or an input or the target was replaced."""
        if self.check is not None:
            self.check(PlanSource(self.plan, self.target.name))
        ends = self._ends(COMPARED)
        check_unchanged(self.sources)
        if self.target.facts() != self.former:
            raise Failed("", 412)
        try:
            request()
        except Failed as failed:
            with suppress(CkptoolError, Failed):
                found, refused = self.target.facts(), failed.status == 412 and failed.once
                all_bytes = self._ends(PART) if self.plan.size <= PART else ends
                if found != self.former and not refused and self._is_planned(found, all_bytes):
                    return  # only the answer was lost
            raise
        what = "somebody replaced it"
        try:
            written = self._is_planned(self.target.facts(), ends)
        except (CkptoolError, Failed) as failed:
            error = self.target.error(failed) if isinstance(failed, Failed) else failed
            written, what = False, f"cannot be read again: {error.what}"
        if not written:
            step = "see what is there, then write again with another name"
            raise OutputError(f"it was written, but {what}", path=self.target.name, next=step)

    def _ends(self, most: int) -> dict[Range, bytes]:
        """Return the planned bytes of both ends by their ranges, at most ``most`` bytes each."""
        planned, size = PlanSource(self.plan, self.target.name), min(most, self.plan.size)
        return {(begin, size): planned.read(begin, size) for begin in (0, self.plan.size - size)}

    def _is_planned(self, found: Facts | None, ends: Mapping[Range, bytes]) -> bool:
        """Return whether an object has the planned size, and the planned bytes at its ends."""
        if found is None or found.size != self.plan.size:
            return False
        answers = together([partial(self.target.store.get, self.target.key, *place) for place in ends])
        return [answer.data for answer in answers] == [*ends.values()]


class _Putting(Background):
    """Writes one object from chunks that the caller puts. If the caller fails, nothing is written."""

    def __init__(self, target: Target, size: int, etag: str, progress: Progress) -> None:
        super().__init__(lambda stopped: target.store.put(target.key, self._taken(), size, etag))
        self._progress = progress
        self._chunks: Queue[bytes | None] = Queue(_SENDING)

    def put(self, data: Buffer) -> None:
        """Hand a chunk over; raises the error of the store."""
        self._hand_over(bytes(data))
        self._progress(len(data))

    def finish(self) -> None:
        """Write the object, whose chunks were all put."""
        self._hand_over(None)
        super().finish()

    def _hand_over(self, data: bytes | None) -> None:
        while self._error is None:
            with suppress(Full):
                self._chunks.put(data, timeout=0.05)
                return
        raise self._error

    def _taken(self) -> Iterator[bytes]:
        while not self._stopped.is_set():
            with suppress(Empty):  # then look whether the caller failed
                yield from iter(partial(self._chunks.get, timeout=0.05), None)
                return
        raise Failed("unknown")  # nobody sees it: the caller failed

"""Cut an output into tasks: byte ranges that any process can write, in any order, and more than once.

A task is plain data with a JSON form (``codec``). It names the staged files that it writes to, which already exist in
their full size. Its id is a hash of its content. Bytes that depend on results of the tasks, such as the checksums in
the directory of an archive, are in no task: they are written when all tasks are done (``write.tasks.complete``).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from ..base.errors import MalformedError
from ..base.records import NamedTuple, TypedDict
from .codec import Decoder, Encoder, InputFile, Vocabulary, has_shape, open_input
from .sources import (
    UNKNOWN_CRC,
    AssembledSource,
    Computed,
    Deferred,
    ExpectedChecksum,
    FileSource,
    Piece,
    Plan,
    Source,
    Span,
    is_divisible,
    part_of,
    size_of,
)

#: Bytes that a task writes, or only reads for checksums.
TASK_SIZE: Final = 1 << 30
#: The most pieces of a task, which bound its memory and its size as JSON.
_MOST_PIECES: Final = 20_000
#: Computed pieces are cut at multiples of this, which are whole elements of any dtype.
_GRAIN: Final = 1 << 20
#: Digits of an id.
_ID_DIGITS: Final = 24


class OutputFile(TypedDict):
    """A staged file: its path, and its size in bytes."""

    path: str
    size: int


class WriteJson(TypedDict):
    """Bytes of an output: its place among ``outputs``, the start offset, the pieces, and the checksums to compute."""

    output: int
    at: int
    pieces: list[Any]
    checks: list[Any]


class TaskJson(TypedDict):
    """A task. ``bytes`` is the number of bytes that it writes; ``deferred`` lists (number, offset, bytes) of each value
    that it computes.
    """

    task: str
    bytes: int
    outputs: list[OutputFile]
    inputs: list[InputFile]
    writes: list[WriteJson]
    deferred: list[list[int]]


class DoneJson(TypedDict):
    """The results of a task.

    ``checksums`` lists (number, offset, bytes, CRC-32) for parts of the checksums that the plan expects; ``deferred``
    lists (number, offset, bytes, value).
    """

    task: str
    bytes: int
    checksums: list[list[int]]
    deferred: list[list[int]]


class Check(NamedTuple):
    """A part of the expected checksum ``number`` of a plan: the bytes of ``expected.span``.

    ``begin`` is the offset of the part within the whole span. If the part is the whole, ``expected.crc`` is the
    recorded checksum. Otherwise it is ``UNKNOWN_CRC``: the checksum of the part is only computed.
    """

    number: int
    begin: int
    expected: ExpectedChecksum


class Write(NamedTuple):
    """Adjacent pieces, to be written to the output ``output`` from byte ``at`` on."""

    output: int
    at: int
    pieces: tuple[Piece, ...]
    checks: tuple[Check, ...]

    @property
    def plan(self) -> Plan:
        """The pieces as a plan, with the checksums to verify or compute."""
        return Plan(self.pieces, tuple(check.expected for check in self.checks))


class Task(NamedTuple):
    """A decoded task; see ``TaskJson``. ``deferred`` lists (number, offset, bytes, object) of each deferred value."""

    id: str
    outputs: tuple[OutputFile, ...]
    inputs: tuple[FileSource, ...]
    writes: tuple[Write, ...]
    deferred: tuple[tuple[int, int, int, Deferred], ...]


class Cutter:
    """Cut the files of one output into tasks; ``deferred`` lists the values that the tasks compute, in order of number.

    ``files`` are the staged files with their plans. Iterating again yields the same tasks.
    """

    def __init__(
        self, files: Sequence[tuple[str, Plan]], vocabulary: Vocabulary, size: int = TASK_SIZE, most: int = _MOST_PIECES
    ) -> None:
        self.files = files
        self.deferred: list[Deferred] = []
        self._numbers: dict[int, int] = {}
        self._inputs: dict[int, InputFile] = {}
        self._vocabulary = vocabulary
        self._size, self._most = size, most

    def expected(self) -> list[ExpectedChecksum]:
        """Return the expected checksums of all plans, in the order of their numbers."""
        return [expected for _, plan in self.files for expected in plan.expected_checksums]

    def __iter__(self) -> Iterator[TaskJson]:
        first = 0
        draft = _Draft(self)
        for path, plan in self.files:
            file: OutputFile = {"path": path, "size": plan.size}
            checks = _Checks(plan.expected_checksums, first)
            first += len(plan.expected_checksums)
            at = 0
            for piece in plan.pieces:
                size = size_of(piece)
                if not (isinstance(piece, Computed) and piece.late):
                    yield from self._cut(draft, file, at, piece, checks)
                at += size
            for check in checks.left():
                if draft.is_full(check.expected.size):
                    yield draft.taken()
                draft.check(file, check)
        if draft:
            yield draft.taken()

    def _cut(self, draft: _Draft, file: OutputFile, at: int, piece: Piece, checks: _Checks) -> Iterator[TaskJson]:
        """Add a piece to the draft, in parts if it is large, and yield the tasks that are full."""
        begin, size = 0, size_of(piece)
        grain = _GRAIN if isinstance(piece, Computed) else 1
        while begin < size:
            room = max(self._size - draft.size, 0)
            length = size - begin
            if length > room:
                # A piece that cannot be divided becomes a task of its own, however large.
                cut = room // grain * grain or (0 if draft else grain)
                length = min(cut, length) if is_divisible(piece) else (0 if draft else length)
            if not length or draft.is_full(0):
                yield draft.taken()
                continue
            draft.write(file, at + begin, part_of(piece, begin, length), begin, checks)
            begin += length

    def number_of(self, deferred: Deferred) -> int:
        """Return the number of a deferred value; assign the next number on first use."""
        number = self._numbers.get(id(deferred))
        if number is None:
            number = self._numbers[id(deferred)] = len(self.deferred)
            self.deferred.append(deferred)
        return number


class _Draft:
    """The next task of a cutter."""

    def __init__(self, cutter: Cutter) -> None:
        self._cutter = cutter
        self._start()

    def _start(self) -> None:
        self._encoder = Encoder(self._cutter._vocabulary, self._cutter.number_of, self._cutter._inputs)
        self._outputs: list[OutputFile] = []
        self._writes: list[WriteJson] = []
        self._deferred: list[list[int]] = []
        self._pieces = self._end = self._bytes = 0
        #: Bytes to write, and bytes to read only for checksums.
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._writes)

    def is_full(self, more: int) -> bool:
        """Return whether ``more`` bytes would exceed the task size."""
        most = self._pieces >= self._cutter._most
        return bool(self._writes) and (most or self.size + more > self._cutter._size)

    def write(self, file: OutputFile, at: int, piece: Piece, begin: int, checks: _Checks) -> None:
        """Add a part of a piece; ``begin`` is the offset of the part within the piece."""
        row = self._row(file, at)
        before = len(self._encoder.deferred)
        checks.copied(piece)
        for part in _parts(piece):
            row["pieces"].append(self._encoder.piece(part))
            row["checks"] += [self._check(check) for check in checks.within(part)]
            self._pieces += 1
        size = size_of(piece)
        self._deferred += [[number, begin, size] for number in self._encoder.deferred[before:]]
        self._end = at + size
        self._bytes += size
        self.size += size

    def check(self, file: OutputFile, check: Check) -> None:
        """Add a checksum of bytes that no piece copies unchanged."""
        self._row(file, self._end if self._writes else 0)["checks"].append(self._check(check))
        self._pieces += 1
        self.size += check.expected.size

    def _row(self, file: OutputFile, at: int) -> WriteJson:
        """Return the row of pieces that ends at ``at``, or a new row."""
        if file not in self._outputs[-1:]:
            self._outputs.append(file)
            self._end = -1
        if not self._writes or self._end != at:
            self._writes.append({"output": len(self._outputs) - 1, "at": at, "pieces": [], "checks": []})
            self._end = at
        return self._writes[-1]

    def _check(self, check: Check) -> list[Any]:
        span, size, compressed, crc, where, _ = check.expected
        return [check.number, check.begin, self._encoder.piece(span), size, compressed, crc, str(where)]

    def taken(self) -> TaskJson:
        """Return the task, and begin the next one."""
        task: TaskJson = {
            "task": "",
            "bytes": self._bytes,
            "outputs": self._outputs,
            "inputs": self._encoder.inputs,
            "writes": self._writes,
            "deferred": self._deferred,
        }
        task["task"] = _id(task)
        self._start()
        return task


def _id(task: TaskJson) -> str:
    from hashlib import sha256  # OpenSSL takes milliseconds to load

    text = json.dumps({**task, "task": ""}, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode("ascii")).hexdigest()[:_ID_DIGITS]


def _parts(piece: Piece) -> Iterator[Piece]:
    """Yield a piece, or the spans that it is assembled from."""
    if not isinstance(piece, Span) or not isinstance(piece.source, AssembledSource):
        yield piece
        return
    for span in piece.source.located(piece.offset, piece.size):
        yield from _parts(span) if span.source is not piece.source and span.size < piece.size else (span,)


class _Checks:
    """The expected checksums of a plan, and which of their bytes the pieces have copied so far."""

    def __init__(self, expected: Sequence[ExpectedChecksum], first: int) -> None:
        self._numbered = [(first + number, check) for number, check in enumerate(expected)]
        self._covered: dict[int, list[tuple[int, int]]] = {}
        #: Bytes that were copied from sources that know their checksums.
        self._copied: dict[int, int] = {}
        self._places: dict[int, list[tuple[int, ExpectedChecksum]]] = {}
        for number, check in sorted(self._numbered, key=lambda item: item[1].span.offset):
            if not check.compressed and check.crc is not None:
                self._places.setdefault(id(check.span.source), []).append((number, check))

    def copied(self, piece: Piece) -> None:
        """Record that a piece is copied."""
        if isinstance(piece, Span) and isinstance(piece.source, AssembledSource):
            source = id(piece.source)
            self._copied[source] = self._copied.get(source, 0) + piece.size

    def within(self, piece: Piece) -> Iterator[Check]:
        """Yield the parts of checksums for the bytes that a piece copies from a file."""
        if not isinstance(piece, Span) or piece.source.local_file() is None:
            return
        places = self._places.get(id(piece.source), ())
        begin, end = piece.offset, piece.offset + piece.size
        for number, check in places[max(bisect_right(places, begin, key=_offset) - 1, 0) :]:
            start, stop = check.span.offset, check.span.offset + check.span.size
            if start >= end:
                return
            low, high = max(start, begin), min(stop, end)
            covered = self._covered.setdefault(number, [])
            if low < high and not any(low < b and a < high for a, b in covered):
                covered.append((low, high))
                yield _part_of_check(number, check, low, high)

    def left(self) -> Iterator[Check]:
        """Yield the parts of checksums for bytes that no piece has copied."""
        for number, check in self._numbered:
            at, end = check.span.offset, check.span.offset + check.span.size
            source = check.span.source
            if check.crc is None and isinstance(source, AssembledSource):
                if self._copied.get(id(source), 0) < source.size:
                    yield from (Check(number, 0, check._replace(span=span)) for span in source.located(0, source.size))
                continue
            if check.compressed:
                yield Check(number, 0, check)
                continue
            for low, high in [*sorted(self._covered.get(number, ())), (end, end)]:
                for begin in range(at, low, TASK_SIZE):
                    yield _part_of_check(number, check, begin, min(begin + TASK_SIZE, low))
                at = high


def _offset(item: tuple[int, ExpectedChecksum]) -> int:
    return item[1].span.offset


def _part_of_check(number: int, check: ExpectedChecksum, begin: int, end: int) -> Check:
    span, size = check.span, end - begin
    part = check._replace(span=Span(span.source, begin, size), size=size)
    whole = size == span.size
    return Check(number, begin - span.offset, part if whole else part._replace(crc=UNKNOWN_CRC))


def decoded(task: TaskJson, vocabulary: Vocabulary) -> Task:
    """Return a task ready to run, with its files open.

    Raises ChangedError for a file that has changed, MalformedError for anything that is not a valid task.
    """
    if not has_shape(task, TaskJson):
        raise MalformedError("it is not a task", next="plan again")
    try:
        if task["task"] != _id(task):
            raise MalformedError("a task was changed: its id does not match its content", next="plan again")
        inputs = tuple(map(open_input, task["inputs"]))
        decoder = Decoder(vocabulary, inputs)
        writes = tuple(_decoded_write(write, decoder) for write in task["writes"])
        for write in writes:
            end = write.at + write.plan.size
            if (
                not 0 <= write.output < len(task["outputs"])
                or not 0 <= write.at <= end <= task["outputs"][write.output]["size"]
            ):
                raise ValueError("it writes beyond the end of its output")
        deferred = tuple((number, at, size, decoder.deferred[number]) for number, at, size in task["deferred"])
        return Task(task["task"], tuple(task["outputs"]), inputs, writes, deferred)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise MalformedError(f"it is not a task: {type(error).__name__}: {error}", next="plan again") from error


def _decoded_write(write: WriteJson, decoder: Decoder) -> Write:
    checks = []
    for number, begin, span, size, compressed, crc, where in write["checks"]:
        checks.append(Check(number, begin, ExpectedChecksum(decoder.decode(span), size, compressed, crc, where)))
    pieces = tuple(map(decoder.decode, write["pieces"]))
    for piece in pieces:
        if not isinstance(piece, bytes | Span | Computed) or size_of(piece) < 0:
            raise TypeError(f"{type(piece).__name__} is not a piece")
    return Write(write["output"], write["at"], pieces, tuple(checks))


def close_inputs(sources: Iterable[Source]) -> None:
    """Close the files of a task."""
    for source in sources:
        source.close()

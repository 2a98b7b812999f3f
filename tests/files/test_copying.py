"""Copying in threads: the same bytes as in one, every checksum verified, and nothing goes on after an error."""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ckptool.base.errors import MalformedError
from ckptool.files import threads
from ckptool.files.sources import Computed, ExpectedChecksum, Piece, Plan, Span, open_source
from ckptool.files.write import copying, planned, space
from ckptool.files.zips.writer import combined_crc
from ckptool.formats.pieces import Chunk, assembled

SIZE = 3_000_000


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several threads work on what one could do."""
    monkeypatch.setattr(threads, "_MIN_PARALLEL", 0)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    for module in (threads, copying):
        monkeypatch.setattr(module, "READ_SIZE", 50_000)
    monkeypatch.setattr(copying, "_COPY_SIZE", 100_000)
    monkeypatch.setattr(copying, "_SMALL", 3000)


def made(size: int) -> list[bytes]:
    return [bytes([size % 251]) * (size // 2), b"#" * (size - size // 2)]


def plan_of(source: Path, chance: random.Random) -> tuple[Plan, bytes, list[Span]]:
    """Return a plan of pieces of all kinds, its bytes, and the spans whose checksums it expects."""
    data, file = source.read_bytes(), open_source(str(source))
    cuts = sorted({0, len(data), *(chance.randrange(len(data)) for _ in range(6))})
    records = [Span(file, begin, end - begin) for begin, end in pairwise(cuts)]
    pieces: list[Piece] = []
    content = b""
    for _ in range(60):
        kind = chance.choice(("literal", "long", "computed", "record", "record", "part", "short"))
        record = chance.choice(records)
        if kind in ("literal", "long"):
            text = chance.randbytes(chance.randrange(1, 40 if kind == "literal" else 200_000))
            pieces.append(text)
            content += text
        elif kind == "computed":
            size = chance.randrange(1, chance.choice((3000, 100_000)))
            pieces.append(Computed(size, made, (size,)))
            content += b"".join(made(size))
        else:
            begin, size = record.offset, record.size
            if kind != "record":
                size = chance.randrange(1, min(size, 2000 if kind == "short" else size) + 1)
                begin += chance.randrange(record.size - size + 1)
            pieces.append(Span(file, begin, size))
            content += data[begin : begin + size]
    return Plan(tuple(pieces)), content, records


def expected(span: Span, data: bytes) -> ExpectedChecksum:
    crc = zlib.crc32(data[span.offset : span.offset + span.size])
    return ExpectedChecksum(span, span.size, False, crc, f"the record at {span.offset}")


def written(plan: Plan, out: Path) -> bytes:
    fd = os.open(out, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        copying.write_pieces(plan, fd)
    finally:
        os.close(fd)
    return out.read_bytes()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copying") / "source"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "buffer"])
@pytest.mark.parametrize("seed", range(8))
def test_threads_write_the_bytes_of_the_plan(
    seed: int, kernel: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range")
    plan, content, records = plan_of(source, random.Random(seed))
    data = source.read_bytes()
    checked = plan._replace(expected_checksums=tuple(expected(span, data) for span in records))
    assert written(checked, tmp_path / "out") == content


@pytest.mark.parametrize("seed", range(6))
def test_each_wrong_checksum_is_found(seed: int, source: Path, tmp_path: Path) -> None:
    plan, _, records = plan_of(source, random.Random(seed))
    data = source.read_bytes()
    for wrong in records:
        checks = [expected(span, data) for span in records]
        place = records.index(wrong)
        checks[place] = checks[place]._replace(crc=checks[place].crc ^ 1)
        with pytest.raises(MalformedError, match=f"the record at {wrong.offset} does not match"):
            written(plan._replace(expected_checksums=tuple(checks)), tmp_path / "out")


def columns(source: Path, rows: int, widths: list[int]) -> tuple[Span, list[Span], bytes]:
    """Return a matrix of bytes whose columns lie one after the other, where they lie, and its bytes."""
    file, data = open_source(str(source)), source.read_bytes()
    begins = [sum(widths[:number]) for number in range(len(widths) + 1)]
    parts = [Span(file, 7 + rows * begin, rows * width) for begin, width in zip(begins, widths)]
    chunks = [
        Chunk(((0, begin), (rows, width)), file, part.offset) for begin, width, part in zip(begins, widths, parts)
    ]
    cut = [data[part.offset : part.offset + part.size] for part in parts]
    lines = (cut[at][row * width : (row + 1) * width] for row in range(rows) for at, width in enumerate(widths))
    return assembled(chunks, (rows, begins[-1]), 1, "matrix").span, parts, b"".join(lines)


@pytest.mark.parametrize("widths", [[700, 700], [1, 999, 30], [40_000, 123, 40_000]], ids=str)
def test_what_is_put_together_is_verified_and_read_once(
    widths: list[int], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 90_000 // sum(widths)  # less than a step: so each column is in a row
    matrix, parts, content = columns(source, rows, widths)
    checks = tuple(expected(part, source.read_bytes()) for part in parts)
    with monkeypatch.context() as patched:
        again: list[int] = []
        whole = copying.checksum
        patched.setattr(copying, "checksum", lambda span, *more: (again.append(span.size), whole(span, *more))[1])
        patched.setattr(threads.os, "cpu_count", lambda: 1)
        assert written(Plan((b"#" * 3001, matrix), checks), tmp_path / "out") == b"#" * 3001 + content
        assert sum(again) == 0
    for number, check in enumerate(checks):
        wrong = [*checks]
        wrong[number] = check._replace(crc=check.crc ^ 1)
        with pytest.raises(MalformedError, match=f"the record at {parts[number].offset} does not match"):
            written(Plan((matrix,), tuple(wrong)), tmp_path / "out")


@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_after_an_error_no_thread_goes_on(
    after: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be closed then, and its number given to another."""
    plan, _, _ = plan_of(source, random.Random(after))
    real, calls, busy = os.pwrite, [0], [0]

    def failing(fd: int, data: memoryview, offset: int) -> int:
        busy[0] += 1
        try:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(28, "no space")
            time.sleep(0.001)
            return real(fd, data, offset)
        finally:
            busy[0] -= 1

    monkeypatch.setattr(os, "pwrite", failing)
    monkeypatch.delattr(os, "copy_file_range")
    before = threading.active_count()
    with pytest.raises(OSError, match="no space"):
        written(plan, tmp_path / "out")
    assert busy[0] == 0 and threading.active_count() == before


def test_a_late_piece_is_computed_after_the_pieces_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_MIN_AHEAD", 0)
    finished: list[int] = []

    def slow(number: int) -> Iterator[bytes]:
        yield b"a"
        time.sleep(0.001 * (number % 3))
        yield b"b"
        finished.append(number)

    def late(number: int) -> Iterator[bytes]:
        yield bytes([set(range(number)) <= set(finished)])

    pieces: list[Piece] = []
    for number in range(60):
        pieces += [Computed(1, late, (number,), late=True), Computed(2, slow, (number,))]
    assert written(Plan(tuple(pieces)), tmp_path / "out") == b"\1ab" * 60


@pytest.mark.parametrize("kind", ["copied", "shared", "sparse"])
def test_blocks_are_reserved_for_bytes_that_take_new_ones(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_can_share", lambda *of: kind == "shared")
    file, size = open_source(str(source)), 17 << 20
    file.sparse = kind == "sparse"
    plan = Plan((b"start", Span(file, 0, SIZE), Computed(size, made, (size,)), b"middle", Span(file, 0, 4000), b"end"))
    with (tmp_path / "output").open("wb") as output:
        with monkeypatch.context() as windows:
            windows.delattr(os, "posix_fallocate")
            windows.setattr(space, "_fallocate", None)
            space.allocate(plan, output.fileno(), str(tmp_path))
        space.allocate(plan, output.fileno(), str(tmp_path))
        status = os.fstat(output.fileno())
        if not status.st_blocks:
            pytest.skip("the filesystem reserves no blocks")
        assert status.st_size == 0
        least = plan.size if kind == "copied" else size
        assert least <= status.st_blocks * 512 <= least + (64 << 10)
        copying.write_pieces(plan, output.fileno())
    data = source.read_bytes()
    expected = b"".join((b"start", data, *made(size), b"middle", data[:4000], b"end"))
    assert (tmp_path / "output").read_bytes() == expected


def test_a_checksum_known_from_computing_is_not_read_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = source.read_bytes()
    span = Span(open_source(str(source)), 0, len(data))
    known: dict[Span, int] = {}

    def read(size: int) -> Iterator[bytes]:
        known[span] = crc
        yield bytes(size)

    plan = Plan((Computed(5, read, (5,)),), (expected(span, data)._replace(known=known),))
    monkeypatch.setattr(copying, "checksum", None)  # it cannot be called
    crc = zlib.crc32(data)
    assert written(plan, tmp_path / "out") == bytes(5)
    crc += 1
    with pytest.raises(MalformedError, match="does not match its checksum"):
        written(plan, tmp_path / "out")


def failing(size: int) -> Iterator[bytes]:
    yield bytes(size // 2)
    raise MalformedError("it cannot be computed")


@pytest.mark.parametrize("ahead", [0, 1 << 40], ids=["ahead", "in-turn"])
def test_what_cannot_be_computed_ends_all_that_is_computed_later(
    ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next thread would wait for ever for bytes that nobody computes any more."""
    monkeypatch.setattr(planned, "_MIN_AHEAD", ahead)
    plan = Plan(
        (*[Computed(4000, made, (4000,))] * 5, Computed(4000, failing, (4000,)), *[Computed(9, made, (9,))] * 30)
    )
    for _ in range(20):
        with pytest.raises(MalformedError, match="cannot be computed"):
            written(plan, tmp_path / "out")


def test_a_signal_waits_for_the_threads(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, _ = plan_of(source, random.Random(1))
    main = threading.current_thread()

    def progress(size: int) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        time.sleep(0.01)

    before = threading.active_count()
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    with pytest.raises(KeyboardInterrupt):
        copying.write_pieces(plan, fd, progress)
    os.close(fd)
    assert threading.active_count() == before


@given(some.binary(max_size=300), some.binary(max_size=300))
def test_the_checksum_of_two_stretches_is_that_of_both(one: bytes, two: bytes) -> None:
    assert combined_crc(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)

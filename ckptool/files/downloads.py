"""Announce what is read next: a large download is refused before its first byte, a small one is a single batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final, TypeVar

from ..base import lazy
from .sources import Computed, ExpectedChecksum, FolderPlan, Plan, Source, Span, origins, spans_read

Item = TypeVar("Item")
#: Ranges with a gap of fewer bytes become one request: at 50 ms and 125 MB/s, a request costs as much as 6 MB, but many
#: are under way at once, and traffic is paid for.
GAP: Final = 64 << 10


def expect_reads(pieces: Iterable[object], checksums: Iterable[ExpectedChecksum] = (), path: str = "") -> None:
    """Announce that the bytes of these pieces, and those for these checksums, are read next.

    Bytes that several pieces read count once, and bytes of local files do not count. Raises RefusedError if a command
    may not download the rest; ``path`` is the file or folder that the error names, by default the first file.
    """
    if not _any_remote():
        return
    spans = [*spans_of(pieces, ())]
    if missing := missing_of([*spans, *(expected.span for expected in checksums)]):
        nbytes = sum(span.size for span in missing)
        read = dict.fromkeys(chain.from_iterable(map(origins, spans)))
        lazy.module("remote.source").announce(read, nbytes, path or missing[0].source.name)


def spans_of(pieces: Iterable[object], checksums: Iterable[ExpectedChecksum]) -> Iterator[Span]:
    """Yield every span that is read for these pieces and checksums."""
    # A late piece depends on the numbers of earlier pieces, and reads nothing.
    reading = (piece for piece in pieces if not (isinstance(piece, Computed) and piece.late))
    return chain(chain.from_iterable(map(spans_read, reading)), (expected.span for expected in checksums))


def expect_plan(plan: Plan | FolderPlan, path: str) -> None:
    """Announce that a plan is carried out in this process; raises as ``expect_reads`` does."""
    plans = [plan] if isinstance(plan, Plan) else [each for _, each in plan.files]
    checksums = chain.from_iterable(each.expected_checksums for each in plans)
    expect_reads(chain.from_iterable(each.pieces for each in plans), checksums, path)


def prefetch(spans: Iterable[Span]) -> None:
    """Announce that spans of several files are read next; remote ones are fetched together, if memory has room."""
    if _any_remote():
        lazy.module("remote.source").fetch(missing_of(spans))


def ahead(items: Iterable[Item], spans: Callable[[Item], Iterable[Span]]) -> Iterator[Item]:
    """Yield the items in order, and ``prefetch`` the spans that each one takes, many items at a time."""
    if not _any_remote():
        yield from items
        return
    batch: list[Item] = []
    wanted: list[Span] = []
    size, most = 0, lazy.module("remote.source").batch_size()
    for item in items:
        batch.append(item)
        for span in spans(item):
            gap = span.offset - sum(wanted[-1][1:]) if wanted and wanted[-1].source is span.source else -1
            wanted.append(span)
            size += span.size + (gap if 0 < gap < GAP else 0)
        if size >= most or len(batch) == 1000:
            prefetch(wanted)
            yield from batch
            batch, wanted, size = [], [], 0
    prefetch(wanted)
    yield from batch


def check_unchanged(sources: Iterable[Source]) -> None:
    """Raise ChangedError if a file changed since it was opened. Remote files are asked about at the same time."""
    if _any_remote():
        lazy.module("remote.store").at_once([*sources], lambda source: source.check_unchanged())
        return
    for source in sources:
        source.check_unchanged()


def _any_remote() -> bool:
    """Return whether any file may be remote. If not, there is no need to look at every piece of an output."""
    return "ckptool.remote.source" in sys.modules


def missing_of(spans: Iterable[Span]) -> list[Span]:
    """Return what must be downloaded to read the spans: each byte once, and neighbours together."""
    missing = list(chain.from_iterable(map(origins, spans)))
    for _ in range(2):  # first slices become parts of their files, then the parts of a file are joined
        ranges: dict[Source, list[tuple[int, int]]] = {}
        for source, offset, size in missing:
            ranges.setdefault(source, []).append((offset, size))
        missing = [span for source, wanted in ranges.items() for span in source.missing(wanted)]
    return missing

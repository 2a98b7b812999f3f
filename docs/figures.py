"""Tables for docs/performance.md, made from the figures of the last published benchmark run."""

from __future__ import annotations

from functools import partial

from bench import tables
from bench.figures import published

_DOCUMENT = published()

NOTES = tables.NOTES
headline = partial(tables.headline, _DOCUMENT)
sections = partial(tables.sections, _DOCUMENT)
peak = partial(tables.peak, _DOCUMENT)
machine = partial(tables.machine, _DOCUMENT)
peers = partial(tables.peers, _DOCUMENT)
faster_peers = partial(tables.faster_peers, _DOCUMENT)

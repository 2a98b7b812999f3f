"""Tables for docs/performance.md and README.md, made from the figures of the last published benchmark run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from bench import tables

_DOCUMENT = json.loads((Path(__file__).resolve().parent.parent / "bench" / "figures.json").read_text(encoding="utf-8"))

NOTES = tables.NOTES
headline = partial(tables.headline, _DOCUMENT)
summary = partial(tables.summary, _DOCUMENT)
sections = partial(tables.sections, _DOCUMENT)
peak = partial(tables.peak, _DOCUMENT)
machine = partial(tables.machine, _DOCUMENT)
peers = partial(tables.peers, _DOCUMENT)

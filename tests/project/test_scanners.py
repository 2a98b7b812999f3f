"""The comparison of scanners: ckptool finds its hostile samples, and its clean ones do not alarm it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import say

from bench import scanners
from bench.samples import Sample, samples
from bench.scanners import ALARM, DOUBT, QUIET, Said

EVERY = list(samples())


def test_samples_have_names_of_their_own() -> None:
    assert len({item.name for item in EVERY}) == len(EVERY)
    assert {item.kind for item in EVERY if item.hostile}.isdisjoint(item.kind for item in EVERY if not item.hostile)


# -- ckptool's answers -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("item", EVERY, ids=lambda item: item.name)
def test_ckptool_misses_nothing_and_gives_no_false_alarm(item: Sample, tmp_path: Path) -> None:
    [(_, path)] = scanners.written([item], tmp_path)
    said = say(*scanners.CKPTOOL.arguments(str(path), ""))
    found = scanners.read_ckptool(Said(said.code, said.out, ""))
    assert found in ((ALARM, DOUBT) if item.hostile else (QUIET, DOUBT))
    if item.hostile:
        # Of lz4 it says that it does not unpack it.
        assert found == ALARM or item.name == "lz4.joblib"

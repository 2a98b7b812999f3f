"""Each situation is tried, and ends as ``recorded.json`` says, which docs/situations.md shows.

``CKPTOOL_UPDATE=1`` records what happens now.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from situations import GROUPS
from situations.situation import Situation, try_out

RECORDED = Path(__file__).with_name("recorded.json")
UPDATE = os.environ.get("CKPTOOL_UPDATE") == "1"
EVERY = [(title, each) for title, situations in GROUPS.items() for each in situations]
NAMES = [each.name for _, each in EVERY]
#: Situations that end well.
AT_LEAST = 132


def records() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("group", "situation"), EVERY, ids=NAMES)
def test_it_ends_as_recorded(group: str, situation: Situation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = try_out(situation)
    record = {"group": group, "where": situation.where, "what": situation.what, **outcome._asdict()}
    if UPDATE:
        new = {**records(), situation.name: record}
        ordered = {name: new[name] for name in NAMES if name in new}
        RECORDED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    assert record == records()[situation.name]


def test_the_record_has_these_situations_and_no_others() -> None:
    assert [*records()] == NAMES
    assert len({*NAMES}) == len(NAMES)


def test_nearly_all_end_well() -> None:
    assert sum(not record["wrong"] for record in records().values()) >= AT_LEAST

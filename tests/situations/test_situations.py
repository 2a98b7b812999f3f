"""Each situation is tried, and ends as ``situations.json`` says.

``CKPTOOL_UPDATE=1`` records what happens now.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from situations import GROUPS
from situations.situation import DATA, Situation, try_out

UPDATE = os.environ.get("CKPTOOL_UPDATE") == "1"
EVERY = [(title, each) for title, situations in GROUPS.items() for each in situations]
#: Situations that end well.
AT_LEAST = 90


def records() -> dict[str, dict[str, Any]]:
    """Return what happened, by the title of the group and the name of the situation."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def record(title: str, name: str, outcome: dict[str, Any]) -> None:
    """Write down what happens now: two lines for each situation."""
    known = records()
    known[title][name][1] = outcome
    dump, groups = json.dumps, []
    for group, rows in known.items():
        lines = (f"  {dump(each)}: [{dump(one)},\n   {dump(two)}]" for each, (one, two) in rows.items())
        groups.append(f" {json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n }")
    DATA.write_text("{\n" + ",\n".join(groups) + "\n}\n", encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("group", "situation"), EVERY, ids=[each.name for _, each in EVERY])
def test_it_ends_as_recorded(group: str, situation: Situation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = try_out(situation)._asdict()
    if UPDATE:
        record(group, situation.name, outcome)
    assert outcome == records()[group][situation.name][1]


def test_the_record_has_these_situations_and_no_others() -> None:
    assert [(group, name) for group, rows in records().items() for name in rows] == [
        (g, each.name) for g, each in EVERY
    ]


def test_nearly_all_end_well() -> None:
    assert sum(not happened["wrong"] for rows in records().values() for _, happened in rows.values()) >= AT_LEAST

"""A large table is drawn here and a small one by tabulate: nobody can tell which."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.cli import render

cells = st.text(st.sampled_from("ab -é層\t\x1b\u202e"), max_size=12)
headers = st.lists(st.sampled_from(("k", "key", "state_dict", "bytes")), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(headers, st.data(), st.sampled_from(("table", "plain")))
def test_it_is_the_table_that_tabulate_draws(heads: list[str], data: st.DataObject, style: str) -> None:
    row = st.lists(cells, min_size=len(heads), max_size=len(heads))
    rows = data.draw(st.lists(row, min_size=1, max_size=8))
    right = data.draw(st.sets(st.integers(0, len(heads) - 1)))
    drawn = {}
    for least in (1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(render, "_LARGE", least)
            patch.setattr(render, "_BLOCK", 3)
            drawn[least] = render.table(heads, rows, style, sorted(right))
    assert drawn[1] == drawn[1000]

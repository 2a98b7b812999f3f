"""Tables are drawn as tabulate draws them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tabulate import tabulate

from ckptool.cli import render

words = st.text(st.sampled_from("ab -é層e\u0301"), max_size=12)
wrapped = st.lists(st.text(st.sampled_from("ab-層"), min_size=1), max_size=3).map("\n".join)
cells = st.one_of(words, words.map(lambda word: f"\x1b[32m{word}\x1b[0m"), wrapped)
headers = st.lists(st.sampled_from(("k", "key", "state_dict", "bytes")), min_size=1, max_size=4)


@settings(max_examples=examples(200))
@given(headers, st.data())
def test_it_is_the_table_that_tabulate_draws(heads: list[str], data: st.DataObject) -> None:
    # tabulate omits some rows that are entirely blank.
    row = st.lists(cells, min_size=len(heads), max_size=len(heads)).filter(lambda row: bool("".join(row).strip()))
    rows = data.draw(st.lists(row, max_size=8))
    right = data.draw(st.sets(st.integers(0, len(heads) - 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "_BLOCK", 3)
        drawn = "\n".join(render._drawn(heads, list(zip(*rows)), sorted(right)))
    align = ["right" if number in right else "left" for number in range(len(heads))]
    other = tabulate(rows, headers=heads, tablefmt="simple", disable_numparse=True, colalign=align if rows else None)
    assert drawn == "\n".join(line.rstrip() for line in other.split("\n"))


# -- linear time -----------------------------------------------------------------------------------------------


def test_keys_of_a_whole_file_are_sorted_together(tmp_path: Path) -> None:
    """Otherwise the largest tensors of a file may be in its last table."""
    state = {f"layer.{name}": torch.zeros(size) for name, size in (("small", 1), ("large", 9))}
    torch.save({"state_dict": state, "optimizer": {"state": {0: {"exp_avg": torch.zeros(7)}}}}, tmp_path / "a.pth")
    lines = say("keys", tmp_path / "a.pth", "--all", "--sort", "bytes").out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == [
        'state_dict["layer.large"]', "optimizer.state[0].exp_avg", 'state_dict["layer.small"]'
    ]  # fmt: skip
    assert len([line for line in say("keys", tmp_path / "a.pth", "--all").out.splitlines() if "dtype" in line]) == 2

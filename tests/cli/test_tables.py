"""A large table is drawn here and a small one by tabulate: nobody can tell which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint.survey import TensorEntry
from ckptool.checkpoint.tensors import Tensor
from ckptool.cli import render
from ckptool.cli.show import labels

cells = st.text(st.sampled_from("ab -é層\t\x1b\u202e"), max_size=12)
headers = st.lists(st.sampled_from(("k", "key", "state_dict", "bytes")), min_size=1, max_size=4)


@settings(max_examples=examples(200))
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


# -- linear time -----------------------------------------------------------------------------------------------


TENSOR = Tensor("dense", "float32", (), (), 0, "0", "cpu", False)


class Counted(list[TensorEntry]):
    passes = 0

    def __iter__(self) -> Iterator[TensorEntry]:
        self.passes += 1
        return super().__iter__()


def test_labels_pass_over_the_tensors_a_fixed_number_of_times() -> None:
    entries = Counted(TensorEntry(f"w{number}", f"w{number}", number, TENSOR, 0, 0) for number in range(50))
    assert list(labels(entries)) == [f"w{number}" for number in range(50)]
    assert entries.passes <= 3

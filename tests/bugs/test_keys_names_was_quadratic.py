"""``keys --names`` looked at all tensors again for each name: 10 s for 20,000."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.checkpoint.survey import TensorEntry
from ckptool.checkpoint.tensors import Tensor
from ckptool.cli.key_tables import labels

TENSOR = Tensor("dense", "float32", (), (), 0, "0", "cpu", False)


class Counted(list[TensorEntry]):
    passes = 0

    def __iter__(self) -> Iterator[TensorEntry]:
        self.passes += 1
        return super().__iter__()


def test_the_tensors_are_passed_over_a_fixed_number_of_times() -> None:
    entries = Counted(TensorEntry(f"w{number}", f"w{number}", number, TENSOR, 0, 0) for number in range(50))
    assert list(labels(entries)) == [f"w{number}" for number in range(50)]
    assert entries.passes <= 3

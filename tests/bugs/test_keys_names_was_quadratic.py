"""``keys --names`` looked at all tensors again for each name: 10 s for 20,000."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.cli.show import _labels


class Counted(list[dict[str, Any]]):
    passes = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.passes += 1
        return super().__iter__()


def test_the_tensors_are_passed_over_a_fixed_number_of_times() -> None:
    tensors = Counted({"state_dict": "", "key": f"w{number}", "path": f"w{number}"} for number in range(50))
    assert _labels({"tensors": tensors}) == [f"w{number}" for number in range(50)]
    assert tensors.passes <= 3

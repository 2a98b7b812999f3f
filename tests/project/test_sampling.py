"""What `make test` leaves to `make torture`: cases of a law that has others, and never a whole law."""

from __future__ import annotations

import random

import pytest
from conftest import WHOLE, examples, part, sample


@pytest.mark.parametrize("every", [2, 3, 4, 5])
@pytest.mark.parametrize("number", [1, 2, 7, 100])
def test_a_part_of_the_cases_stays_whatever_their_order(number: int, every: int) -> None:
    cases = [f"tests/x.py::test_y[{number}]" for number in range(number)]
    chosen = part(cases, every)
    assert chosen <= {*cases} and len(chosen) == -(-number // every)
    assert part(random.Random(every).sample(cases, number), every) == chosen


def test_tests_of_the_same_files_take_different_ones() -> None:
    parts = [part([f"{test}[{number}]" for number in range(100)], 4) for test in ("a", "b", "c")]
    numbers = [{case[2:-1] for case in chosen} for chosen in parts]
    assert numbers[0] != numbers[1] != numbers[2] and len(set().union(*numbers)) > 50


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("number", range(10))
def test_a_sampled_test_keeps_at_least_one_case(number: int, request: pytest.FixtureRequest) -> None:
    own = [item for item in request.session.items if item.nodeid.partition("[")[0].endswith("keeps_at_least_one_case")]
    named = any("::" in argument for argument in request.config.args)
    assert request.node in own and (len(own) == (10 if WHOLE else 1) or named)


def test_examples_and_samples_are_never_none() -> None:
    assert [examples(number) for number in (5, 60, 1000)] == ([5, 60, 1000] if WHOLE else [5, 20, 200])
    assert sample(range(3), 10) and sample(range(3), 3, first=5)

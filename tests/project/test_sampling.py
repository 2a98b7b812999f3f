"""What `make test` leaves to `make torture`: cases of a law that has others, and never a whole law."""

from __future__ import annotations

import itertools
import random

import pytest
from conftest import CHOSEN, FIXTURES, MANY, WHOLE, chosen, pairwise, part


@pytest.mark.parametrize("every", [2, 3, 4, 5])
@pytest.mark.parametrize("number", [1, 2, 7, 100])
def test_a_part_of_the_cases_stays_whatever_their_order(number: int, every: int) -> None:
    cases = [f"tests/x.py::test_y[{number}]" for number in range(number)]
    chosen = part(cases, every)
    assert chosen <= {*cases} and len(chosen) == -(-number // every)
    assert part(random.Random(every).sample(cases, number), every) == chosen


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("number", range(10))
def test_a_sampled_test_keeps_at_least_one_case(number: int, request: pytest.FixtureRequest) -> None:
    own = [item for item in request.session.items if item.nodeid.partition("[")[0].endswith("keeps_at_least_one_case")]
    named = any("::" in argument for argument in request.config.args)
    assert request.node in own and (len(own) == (10 if WHOLE else 1) or named)


def test_every_test_of_many_files_has_the_chosen_ones_and_its_own_others() -> None:
    assert len(CHOSEN) <= MANY and all((FIXTURES / name).is_file() for name in CHOSEN)
    names = [*[*CHOSEN][:8], *map(str, range(100))]
    one, two = (chosen(names, test) for test in ("one", "two"))
    assert len(one) == len(two) == MANY and one & {*CHOSEN} == two & {*CHOSEN} == {*names[:8]} and one != two
    assert chosen(["a", "b"], "one") == {"a", "b"}


@pytest.mark.parametrize("sizes", [(22, 15), (9, 6, 7), (2, 2, 2, 2, 3)])
def test_any_two_values_meet_and_of_two_parameters_every_value_occurs(sizes: tuple[int, ...]) -> None:
    cases = {str(case): tuple(map(str, case)) for case in itertools.product(*map(range, sizes))}
    kept = [cases[case] for case in pairwise(cases)]
    assert len(kept) < len(cases) / 2
    for groups in itertools.combinations(range(len(sizes)), min(2, len(sizes) - 1)):
        values = {tuple(case[group] for group in groups) for case in cases.values()}
        assert {tuple(case[group] for group in groups) for case in kept} == values
    assert pairwise(dict(random.Random(1).sample([*cases.items()], len(cases)))) == pairwise(cases)

"""The simulation of many workers: no task is lost or done twice, and its limits are those of closed forms."""

from __future__ import annotations

import json
import random
import re
from math import inf

import pytest
from conftest import ROOT

from bench import prediction, simulation
from bench.simulation import COSTS, Fleet, Work, duration, limit, parts, simulate

FREE = Work("", 1000, 10.0, 0, 0, 0)


def about(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9)


def cases() -> list[tuple[Work, Fleet]]:
    """Work and fleets of every kind, by chance."""
    chance = random.Random(7)
    found = []
    for _ in range(200):
        some = [chance.choice([0.0, chance.random()]) for _ in range(8)]
        work = Work("", chance.randint(1, 300), chance.random() * 100, some[0], some[1], some[2], some[3])
        workers = chance.choice([1, 2, 3, 40, 400])
        slow = chance.choice([0.0, 0.3])
        storage = chance.choice([inf, chance.random() * 30 + 0.1])
        fleet = Fleet(
            workers, chance.random() * 5 + 0.1, storage, slow, 4 if slow else 1, some[4] / 2, some[5], some[6]
        )
        found.append((work, fleet))
    return found


@pytest.mark.parametrize(("work", "fleet"), cases())
def test_no_task_is_lost_or_done_twice_and_none_is_earlier_than_its_limits(work: Work, fleet: Fleet) -> None:
    outcome = simulate(work, fleet)
    assert outcome.done == bytes([1]) * work.tasks
    assert bool(outcome.lost) <= bool(fleet.lost)
    assert outcome.seconds >= fleet.start + max(parts(work, fleet).values()) * (1 - 1e-9)
    assert simulate(work, fleet) == outcome


@pytest.mark.parametrize(("work", "fleet"), cases())
def test_more_bandwidth_or_storage_is_never_slower(work: Work, fleet: Fleet) -> None:
    even = fleet._replace(slow=0.0, slowness=1.0, lost=0.0)  # else another worker may get the last task
    usual = simulate(work, even).seconds * (1 + 1e-9)
    assert simulate(work, even._replace(bandwidth=2 * even.bandwidth)).seconds <= usual
    assert simulate(work, even._replace(storage=2 * even.storage)).seconds <= usual


def test_one_worker() -> None:
    work = FREE._replace(dispatch=0.5, overhead=0.25, commit=0.125)
    found = simulate(work, Fleet(1, 2.0, start=3.0))
    assert found.seconds == about(3 + 1000 * (0.5 + 0.25 + 5 + 0.125))


@pytest.mark.parametrize("workers", [1, 10, 100, 1000])
def test_workers_alone_share_the_work(workers: int) -> None:
    assert simulate(FREE, Fleet(workers, 2.0)).seconds == about(5 * 1000 / workers)
    assert limit(FREE, Fleet(workers, 2.0)) == "workers"


@pytest.mark.parametrize("workers", [10, 1000])
def test_the_storage_gives_no_more_than_it_has(workers: int) -> None:
    fleet = Fleet(workers, 2.0, 4.0)
    assert simulate(FREE, fleet).seconds == about(10 * 1000 / 4)
    assert limit(FREE, fleet) == "storage"


def test_a_scheduler_gives_one_task_after_the_other() -> None:
    work, fleet = FREE._replace(dispatch=1.0), Fleet(1000, 10.0)
    assert simulate(work, fleet).seconds == about(1000 * 1.0 + 1)
    assert limit(work, fleet) == "scheduler"


def test_what_is_planned_last_is_done_last() -> None:
    work, fleet = FREE._replace(plan=1.0, commit=0.5), Fleet(1000, 10.0)
    assert simulate(work, fleet).seconds == about(1000 * 1.0 + 1 + 1000 * 0.5)
    assert limit(work, fleet) == "planning"


def test_a_slow_worker_ends_last() -> None:
    fleet = Fleet(1000, 10.0, slow=0.01, slowness=4)
    assert simulate(FREE, fleet).seconds == about(4.0)
    assert limit(FREE, fleet) == "slow workers"


def test_slow_workers_leave_the_storage_to_others() -> None:
    fleet = Fleet(2, 3.0, 4.0, slow=0.5, slowness=3)  # 1 and 3 bytes/s
    assert simulate(FREE._replace(tasks=4), fleet).seconds == about(10.0)


def test_what_is_lost_is_carried_out_again() -> None:
    outcome = simulate(FREE, Fleet(1, 2.0, lost=0.2, restart=7.0))
    assert 150 < outcome.lost < 350
    assert outcome.seconds == about(5 * (1000 + outcome.lost) + 7 * outcome.lost)


def test_a_worker_that_is_lost_holds_up_no_other() -> None:
    one = simulate(FREE, Fleet(100, 2.0, lost=0.01, restart=1000.0))
    assert one.lost and one.seconds < 300


def test_the_costs_say_where_they_are_from() -> None:
    for name, figure in COSTS._asdict().items():
        assert figure.value > 0
        assert re.match("assumed|the same, because|.*; measured by `python -m bench.prediction`$", figure.source), name


def test_durations() -> None:
    assert [duration(seconds) for seconds in (8.32, 119, 5000, 99_999)] == ["8.3 s", "2.0 min", "83 min", "28 h"]


def test_the_page_has_what_was_simulated_and_what_was_measured() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    document = json.loads(prediction.PATH.read_text(encoding="utf-8"))
    assert document["schema"] == prediction.SCHEMA
    assert {row["workers"] for row in document["rows"]} == {1, 2}
    assert prediction.table(document) in page and simulation.costs() in page
    work, storage = simulation.CASES[-1]
    fleet = simulation.fleet_of(1000, storage * simulation.GB)
    assert f"{duration(simulate(work, fleet).seconds)}, {limit(work, fleet)} |" in page

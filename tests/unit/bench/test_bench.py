"""The statistics and tables of the benchmarks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench.peers import common as tally
from bench.support import report
from bench.support.handover_analysis import OwnershipEvent, handover, owners_at
from bench.support.statistics import Ages, Goal, Spread, fewest_moves, percentile
from tests.support.cli import command
from tests.support.paths import ROOT

SECOND = 10**9


def test_rates_are_best_when_high_and_costs_when_low() -> None:
    assert Spread.of_rates([3, 1, 2]) == Spread(best=3, median=2, worst=1, runs=3)
    assert Spread.of_costs([3, 1, 2]) == Spread(best=1, median=2, worst=3, runs=3)
    assert Spread.of_rates([3, 1, 2]).spread == 1.0


@pytest.mark.parametrize(
    ("percent", "found"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_a_percentile_is_one_of_the_values(percent: float, found: int) -> None:
    assert percentile(range(100, 0, -1), percent) == found


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile([], 50)


def test_ages_are_milliseconds() -> None:
    assert Ages.of_seconds([0.001, 0.002, 0.009]) == Ages(3, 2.0, 9.0, 9.0)


def test_goals_say_whether_they_were_reached() -> None:
    assert Goal.at_least("rate", 30_000, 31_000, ",.0f") == Goal(
        "rate", ">= 30,000", "31,000", True
    )
    assert not Goal.at_most("time", 0.5, 0.51).reached


@pytest.mark.parametrize(
    ("held", "members", "moves"),
    [
        ({"a": 5, "b": 5}, "ab", 0),
        ({"a": 6, "b": 4}, "ab", 1),
        ({"a": 5, "b": 5}, "abc", 3),
        ({"a": 4, "b": 3, "c": 3}, "ab", 3),
        ({"a": 10}, "b", 10),
        ({"a": 2, "b": 3}, "ab", 0),
    ],
)
def test_fewest_moves(held: dict[str, int], members: str, moves: int) -> None:
    """The share a new member must get, the queues a leaving one had, and no more."""
    owners = {f"{name}{number}": name for name, count in held.items() for number in range(count)}
    assert fewest_moves(owners, members) == moves


def test_a_handover_tells_moved_queues_from_paused_ones() -> None:
    events = [
        OwnershipEvent(0, "claimed", "a", "one"),
        OwnershipEvent(0, "claimed", "a", "two"),
        OwnershipEvent(0, "claimed", "a", "three"),
        OwnershipEvent(0, "claimed", "a", "four"),
        OwnershipEvent(11 * SECOND, "stopped", "a", "one"),
        OwnershipEvent(12 * SECOND, "claimed", "b", "one"),
        OwnershipEvent(11 * SECOND, "stopped", "a", "two"),
        OwnershipEvent(14 * SECOND, "claimed", "b", "two"),
        OwnershipEvent(11 * SECOND, "stopped", "a", "three"),
        OwnershipEvent(13 * SECOND, "claimed", "a", "three"),
    ]
    found = handover(events, 10 * SECOND, ["a", "b"])
    assert (found.moved, found.fewest) == (2, 2)
    assert found.settled_seconds == 4.0
    assert found.gap_seconds == 3.0
    assert (found.paused, found.pause_seconds) == (1, 2.0)
    assert (found.unowned, found.balance) == (0, (2, 2))


def test_a_handover_counts_queues_that_nobody_has() -> None:
    events = [OwnershipEvent(0, "claimed", "a", "one"), OwnershipEvent(11, "stopped", "a", "one")]
    found = handover(events, 10, ["b"])
    assert (found.moved, found.unowned) == (1, 1)
    assert owners_at(events, 11) == {"one": "a"}
    assert owners_at(events, 12) == {}


def test_a_table_sets_numbers_to_the_right() -> None:
    shown = report.table(("what", "n", "how"), [("one", "1", "x"), ("two", "100", "yy")], ("how",))
    assert shown.splitlines() == [
        "====  ===  ===",
        "what    n  how",
        "====  ===  ===",
        "one     1  x",
        "two   100  yy",
        "====  ===  ===",
    ]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="cells"):
        report.table(("one", "two"), [("1",)])


def test_results_are_written_as_json(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    goal = Goal.at_most("time", 1.0, 2.0)
    path = report.publish("trial", {"machine": report.machine()}, [goal])
    written = json.loads(path.read_text())
    assert written["goals"] == [dataclasses.asdict(goal)]
    assert written["machine"]["cores"] >= 1


def test_bodies_have_their_size() -> None:
    assert {len(tally.encoded(number)) for number in (0, 9, 123_456_789)} == {tally.BODY_BYTES}


def test_the_counting_job_reports_once_and_in_time() -> None:
    reports: list[dict[str, float]] = []
    job = tally.counting(3, reports.append)
    for number in range(5):
        job(number)
    assert [found["jobs"] for found in reports] == [3]


def test_the_timing_job_reports_ready_and_drops_the_warm_up() -> None:
    reports: list[dict[str, object]] = []
    total = tally.WARM_UP + 2
    job = tally.timing(total, reports.append)
    for number in range(total + 1):
        job(tally.stamped(number))
    ready, found = reports
    assert ready == {"ready": True}
    ages = found["ages"]
    assert isinstance(ages, list)
    assert len(ages) == 2
    assert min(ages) >= 0


@pytest.mark.slow
def test_the_cost_of_encryption_can_be_measured() -> None:
    """A small run has every figure; the figures mean nothing."""
    ended = command("-m", "bench.encryption", "--messages", "2000", "--json", cwd=ROOT)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert [each["bytes"] for each in found["sealing"]] == [100, 10_000, 1_000_000]
    for name in ("in_clear", "accepting", "encrypted"):
        assert all(rate > 0 for rate in found[name].values())

"""The figures, tables and judgements of the benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.drill.faults import FAULTS, Evidence, Fault
from bench.drill.measure import is_right
from bench.peers import common as tally
from bench.peers.catalog import Rival
from bench.support import postgresql_loads as loads
from bench.support import report
from bench.support.handover_analysis import OwnershipEvent, handover, owners_at
from bench.support.postgresql_runs import QDO, WorkerLoad
from bench.support.statistics import Ages, Goal, Spread, fewest_moves, percentile
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


# --- PostgreSQL ----------------------------------------------------------------------------


def entry(name: str, rate: float, disordered: int = 0, mode: str = "tally") -> loads.LoadResult:
    """Return a program that ran once, for ten seconds."""
    run = WorkerLoad(int(10 * rate), 10.0, 5.0, 2.0, disordered)
    return loads.LoadResult(Rival(name, (), (), "how"), mode=mode, runs=[run])


def test_processes_add_their_jobs(tmp_path: Path) -> None:
    """Another process has its own file; one that is just being created does not count."""
    job = tally.tallying(tmp_path)
    for number in range(3):
        job(tally.body(number))
    (tmp_path / "other").write_bytes((4).to_bytes(8, "little") + (1).to_bytes(8, "little"))
    (tmp_path / "new").write_bytes(b"")
    assert tally.tallies(tmp_path) == (7, 1)


def test_a_job_after_a_later_one_of_its_key_is_counted(tmp_path: Path) -> None:
    """Other keys may overtake."""
    job = tally.tallying(tmp_path, ordered=True)
    for number in (0, tally.KEYS, 1, 5 * tally.KEYS, 2 * tally.KEYS, 2):
        job(tally.body(number))
    assert tally.tallies(tmp_path) == (6, 1)


def test_goals_compare_with_the_fastest_other_program() -> None:
    """Neither the bare loop nor qdo with two processes is one of them."""
    entries = [
        entry(loads.BARE, 100_000), entry(QDO, 60_000), entry(loads.QDO_TWO, 90_000),
        entry("slow", 100), entry("fast", 4_000),
    ]  # fmt: skip
    half, twenty = loads.load_goals(entries)
    assert (half.found, half.reached) == ("0.60", True)
    assert (twenty.found, twenty.reached) == ("15.00", False)
    assert loads.load_goals(entries[:1]) == []


def test_qdo_must_keep_the_order_of_keys() -> None:
    entries = [entry(loads.KEYED, 10, 1, "order"), entry("Procrastinate, lock", 10, 2, "order")]
    (goal,) = loads.key_goals(entries)
    assert not goal.reached


# --- the drill -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.name)
def test_the_guide_has_the_section_of_each_fault(fault: Fault) -> None:
    guide = (ROOT / "docs" / "on-call.rst").read_text()
    assert re.search(rf"^{re.escape(fault.section)}\n-+$", guide, re.MULTILINE)


def test_a_look_is_right_if_it_says_everything() -> None:
    look = Evidence(("status",), ("pay-7", r"block(ed|s)"))
    assert look.title == "qdo status"
    assert is_right("pay-7: blocked", look)
    assert not is_right("pay-7: ok", look)

"""What the parent of the worker processes decides, without any process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qdo.worker import roster
from qdo.worker.roster import Ask, GiveUp, Kill, Restart, Roster, Spawn, Stop

SIGKILL = -9
SIGTERM = -15


def begun(size: int = 1, drain_seconds: float = 30.0) -> Roster:
    places = Roster(size, drain_seconds)
    assert places.begin(0.0) == [Spawn(place) for place in range(size)]
    return places


def test_every_place_is_filled_at_the_start():
    places = Roster(3, 30.0)
    assert places.begin(0.0) == [Spawn(0), Spawn(1), Spawn(2)]
    assert not places.done
    assert places.next_at is None


def test_a_killed_worker_is_replaced_a_tenth_of_a_second_later():
    places = begun()
    assert places.exited(0, SIGKILL, 100.0) == [Restart(0, 0.1)]
    assert places.next_at == pytest.approx(100.1)
    assert places.tick(100.05) == []
    assert places.tick(100.2) == [Spawn(0)]
    assert places.next_at is None


def test_quick_deaths_double_the_pause_up_to_its_limit():
    places = begun()
    pauses, now = [], 0.0
    for _ in range(12):
        (again,) = places.exited(0, 1, now + 1)
        assert isinstance(again, Restart)
        pauses.append(again.after_seconds)
        now = now + 1 + again.after_seconds
        assert places.tick(now) == [Spawn(0)]
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert pauses[-1] == roster.LONGEST_DELAY_SECONDS


def test_a_worker_that_ran_well_starts_with_the_shortest_pause_again():
    places = begun()
    places.exited(0, 1, 1.0)
    places.tick(2.0)
    places.exited(0, 1, 3.0)
    places.tick(4.0)
    assert places.exited(0, 1, 4.0 + roster.RAN_WELL_SECONDS) == [Restart(0, 0.1)]


def test_places_back_off_independently():
    places = begun(2)
    places.exited(0, 1, 1.0)
    places.tick(2.0)
    places.exited(0, 1, 2.0)
    assert places.exited(1, 1, 2.0) == [Restart(1, 0.1)]
    assert places.tick(2.15) == [Spawn(1)]
    assert places.tick(2.25) == [Spawn(0)]


def test_a_worker_that_finished_is_not_replaced():
    places = begun(2)
    assert places.exited(0, 0, 5.0) == []
    assert not places.done
    assert places.exited(1, 0, 6.0) == []
    assert places.done
    assert places.exit_code == 0


@pytest.mark.parametrize("code", sorted(roster.CANNOT_BEGIN))
def test_a_worker_that_cannot_begin_stops_the_others_and_gives_its_code(code: int):
    places = begun(3)
    assert places.exited(1, code, 1.0) == [GiveUp(1, code), Ask(0), Ask(2)]
    assert places.exited(0, 0, 2.0) == []
    assert places.exited(2, 0, 2.0) == []
    assert places.done
    assert places.exit_code == code


def test_a_worker_that_registered_once_is_replaced_whatever_its_code():
    places = begun()
    places.registered(0, True)
    places.registered(0, False)
    assert places.exited(0, 3, 1.0) == [Restart(0, 0.1)]
    places.tick(2.0)
    assert places.exited(0, 3, 2.5) == [Restart(0, 0.2)]


def test_asked_once_all_drain_and_nobody_is_replaced():
    places = begun(3)
    places.exited(2, SIGKILL, 1.0)
    assert places.press(1.05) == [Ask(0), Ask(1)]
    assert places.stop is Stop.DRAIN
    assert places.tick(2.0) == []
    assert places.exited(0, 0, 2.0) == []
    assert places.exited(1, 1, 2.0) == []
    assert places.done


def test_asked_twice_they_abort_and_a_third_time_they_are_killed():
    places = begun(2)
    assert places.press(1.0) == [Ask(0), Ask(1)]
    assert places.exited(0, 0, 1.5) == []
    assert places.press(2.0) == [Ask(1)]
    assert places.stop is Stop.ABORT
    (kill,) = places.press(3.0)
    assert isinstance(kill, Kill)
    assert kill.place == 1
    places.exited(1, SIGKILL, 3.1)
    assert places.done
    assert places.exit_code == roster.KILLED_CODE


def test_a_hang_up_drains_but_never_aborts():
    places = begun()
    assert places.drain(1.0) == [Ask(0)]
    assert places.drain(1.1) == []
    assert places.stop is Stop.DRAIN
    assert places.press(1.2) == [Ask(0)]
    assert places.stop is Stop.ABORT


def test_who_hangs_past_the_drain_is_killed_and_counts_as_failed():
    places = begun(2, drain_seconds=30.0)
    places.press(10.0)
    limit = 10.0 + 30.0 + roster.DRAIN_MARGIN_SECONDS
    assert places.next_at == limit
    places.exited(0, 0, 20.0)
    assert places.tick(limit - 0.1) == []
    (kill,) = places.tick(limit)
    assert kill == Kill(1, "it did not end in the time it had")
    assert places.next_at is None
    places.exited(1, SIGKILL, limit + 0.1)
    assert places.done
    assert places.exit_code == roster.KILLED_CODE


def test_aborting_shortens_the_time_left_but_never_prolongs_it():
    hasty, late = begun(drain_seconds=60.0), begun(drain_seconds=0.0)
    hasty.press(0.0)
    hasty.press(1.0)
    assert hasty.next_at == 1.0 + roster.ABORT_SECONDS
    late.press(0.0)
    late.press(4.0)
    assert late.next_at == roster.DRAIN_MARGIN_SECONDS


def test_a_stop_meets_a_worker_too_young_to_drain():
    """SIGTERM kills a process that has not set up its handlers; it owned nothing yet."""
    places = begun()
    places.press(0.1)
    places.exited(0, SIGTERM, 0.2)
    assert places.done
    assert places.exit_code == 0


def test_a_worker_with_a_session_that_dies_of_sigterm_has_failed():
    places = begun()
    places.registered(0, True)
    places.press(0.1)
    places.exited(0, SIGTERM, 0.2)
    assert places.exit_code == roster.KILLED_CODE


def test_the_exit_code_is_the_worst_of_the_last_ones():
    places = begun(3)
    places.registered(1, True)
    places.exited(0, 1, 1.0)
    places.tick(2.0)
    places.press(3.0)
    places.exited(0, 0, 4.0)
    places.exited(1, 3, 4.0)
    places.exited(2, 1, 4.0)
    assert places.exit_code == 3


def test_the_parent_loads_neither_gevent_nor_the_worker():
    """What an app or gevent does to a process must not be able to happen to the parent."""
    program = (
        "import sys, qdo.worker.supervisor;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'gevent' "
        "or m in ('qdo.app', 'qdo.worker.worker', 'qdo.loading')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

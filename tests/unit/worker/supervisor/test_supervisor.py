"""Decisions of the parent process, without any process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from qdo.settings.settings import Settings
from qdo.worker.supervisor import restarts
from qdo.worker.supervisor.child import Reaper, _DyingProcess
from qdo.worker.supervisor.restarts import (
    GiveUp,
    Kill,
    Restart,
    RestartPolicy,
    Spawn,
    StopLevel,
    Terminate,
)

SIGKILL = -9
SIGTERM = -15


def started(size: int = 1, drain_seconds: float = 30.0) -> RestartPolicy:
    policy = RestartPolicy(size, drain_seconds)
    assert policy.start(0.0) == [Spawn(place) for place in range(size)]
    assert (policy.done, policy.next_at) == (False, None)
    return policy


def test_grow_spawns_only_what_is_missing():
    """Each worker reports the number in the code of the app; while all stop, none is started."""
    policy = started()
    assert policy.grow(3, 1.0) == [Spawn(1), Spawn(2)]
    assert policy.grow(3, 1.0) == []
    assert policy.grow(2, 1.0) == []
    assert policy.drain(2.0) == [Terminate(0), Terminate(1), Terminate(2)]
    assert policy.grow(4, 2.0) == []


def test_killed_worker_restarts_after_a_tenth_of_a_second():
    policy = started()
    assert policy.exited(0, SIGKILL, 100.0) == [Restart(0, 0.1)]
    assert policy.next_at == pytest.approx(100.1)
    assert policy.tick(100.05) == []
    assert policy.tick(100.2) == [Spawn(0)]
    assert policy.next_at is None


def test_quick_deaths_double_the_delay_up_to_its_limit():
    policy = started()
    pauses, now = [], 0.0
    for _ in range(12):
        (again,) = policy.exited(0, 1, now + 1)
        assert isinstance(again, Restart)
        pauses.append(again.after_seconds)
        now = now + 1 + again.after_seconds
        assert policy.tick(now) == [Spawn(0)]
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert pauses[-1] == restarts.RESTART_BACKOFF.max_seconds


def test_worker_that_ran_well_restarts_with_the_first_delay():
    policy = started()
    policy.exited(0, 1, 1.0)
    policy.tick(2.0)
    policy.exited(0, 1, 3.0)
    policy.tick(4.0)
    assert policy.exited(0, 1, 4.0 + restarts.RAN_WELL_SECONDS) == [Restart(0, 0.1)]


def test_places_back_off_independently():
    policy = started(2)
    policy.exited(0, 1, 1.0)
    policy.tick(2.0)
    policy.exited(0, 1, 2.0)
    assert policy.exited(1, 1, 2.0) == [Restart(1, 0.1)]
    assert policy.tick(2.15) == [Spawn(1)]
    assert policy.tick(2.25) == [Spawn(0)]


def test_a_worker_that_finished_is_not_replaced():
    policy = started(2)
    assert policy.exited(0, 0, 5.0) == []
    assert not policy.done
    assert policy.exited(1, 0, 6.0) == []
    assert policy.done
    assert policy.exit_code == 0


@pytest.mark.parametrize("code", sorted(restarts.CANNOT_START))
def test_worker_that_cannot_start_stops_all_with_its_code(code: int):
    policy = started(3)
    assert policy.exited(1, code, 1.0) == [GiveUp(1, code), Terminate(0), Terminate(2)]
    assert policy.exited(0, 0, 2.0) == []
    assert policy.exited(2, 0, 2.0) == []
    assert policy.done
    assert policy.exit_code == code


def test_worker_that_cannot_start_beside_one_that_could_restarts():
    """The broker went away between their starts; the process that runs must not end for that."""
    policy = started(3)
    policy.registered(0, True)
    assert policy.exited(1, 3, 1.0) == [Restart(1, 0.1)]


def test_worker_that_registered_once_always_restarts():
    policy = started()
    policy.registered(0, True)
    policy.registered(0, False)
    assert policy.exited(0, 3, 1.0) == [Restart(0, 0.1)]
    policy.tick(2.0)
    assert policy.exited(0, 3, 2.5) == [Restart(0, 0.2)]


@pytest.mark.parametrize("code", [1, 3])
def test_burst_worker_that_cannot_restart_ends_all(code: int):
    policy = RestartPolicy(1, 30.0, burst=True)
    policy.start(0.0)
    policy.registered(0, True)
    policy.registered(0, False)
    assert policy.exited(0, code, 1.0) == [Restart(0, 0.1)]
    policy.tick(2.0)
    assert policy.exited(0, SIGKILL, 2.5) == [Restart(0, 0.2)]
    policy.tick(3.0)
    assert policy.exited(0, code, 3.5) == [GiveUp(0, code)]
    assert policy.done
    assert policy.exit_code == code


def test_first_stop_signal_drains_all_and_restarts_none():
    policy = started(3)
    policy.exited(2, SIGKILL, 1.0)
    assert policy.stop_signal(1.05) == [Terminate(0), Terminate(1)]
    assert policy.stop is StopLevel.DRAIN
    assert policy.tick(2.0) == []
    assert policy.exited(0, 0, 2.0) == []
    assert policy.exited(1, 1, 2.0) == []
    assert policy.done


def test_second_stop_signal_aborts_and_third_kills():
    policy = started(2)
    assert policy.stop_signal(1.0) == [Terminate(0), Terminate(1)]
    assert policy.exited(0, 0, 1.5) == []
    assert policy.stop_signal(2.0) == [Terminate(1)]
    assert policy.stop is StopLevel.ABORT
    (kill,) = policy.stop_signal(3.0)
    assert isinstance(kill, Kill)
    assert kill.place == 1
    policy.exited(1, SIGKILL, 3.1)
    assert policy.done
    assert policy.exit_code == restarts.KILLED_CODE


def test_hang_up_drains_but_never_aborts():
    policy = started()
    assert policy.drain(1.0) == [Terminate(0)]
    assert policy.drain(1.1) == []
    assert policy.stop is StopLevel.DRAIN
    assert policy.stop_signal(1.2) == [Terminate(0)]
    assert policy.stop is StopLevel.ABORT


def test_worker_that_outlasts_the_drain_is_killed_and_failed():
    policy = started(2, drain_seconds=30.0)
    policy.stop_signal(10.0)
    limit = 10.0 + 30.0 + restarts.DRAIN_MARGIN_SECONDS
    assert policy.next_at == limit
    policy.exited(0, 0, 20.0)
    assert policy.tick(limit - 0.1) == []
    (kill,) = policy.tick(limit)
    assert isinstance(kill, Kill)
    assert kill.place == 1
    assert policy.next_at is None
    policy.exited(1, SIGKILL, limit + 0.1)
    assert policy.done
    assert policy.exit_code == restarts.KILLED_CODE


def test_abort_shortens_the_deadline_but_never_extends_it():
    hasty, late = started(drain_seconds=60.0), started(drain_seconds=0.0)
    hasty.stop_signal(0.0)
    hasty.stop_signal(1.0)
    assert hasty.next_at == 1.0 + restarts.ABORT_SECONDS
    late.stop_signal(0.0)
    late.stop_signal(4.0)
    assert late.next_at == restarts.DRAIN_MARGIN_SECONDS


@pytest.mark.parametrize(("registered", "code"), [(False, 0), (True, restarts.KILLED_CODE)])
def test_worker_without_handlers_may_die_of_sigterm(registered: bool, code: int):
    """SIGTERM kills a process that has not set its handlers yet. It has not registered either."""
    policy = started()
    policy.registered(0, registered)
    policy.stop_signal(0.1)
    policy.exited(0, SIGTERM, 0.2)
    assert policy.done
    assert policy.exit_code == code


def test_exit_code_is_the_highest_of_the_last_codes():
    policy = started(3)
    policy.registered(1, True)
    policy.exited(0, 1, 1.0)
    policy.tick(2.0)
    policy.stop_signal(3.0)
    policy.exited(0, 0, 4.0)
    policy.exited(1, 3, 4.0)
    policy.exited(2, 1, 4.0)
    assert policy.exit_code == 3


def test_parent_imports_neither_gevent_nor_the_worker():
    """So neither the app nor gevent can harm the parent."""
    program = (
        "import sys, qdo.worker.supervisor.supervisor;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'gevent' "
        "or m in ('qdo.app', 'qdo.worker.worker', 'qdo.loading')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- what operators ask for -------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, SIGKILL])
def test_a_retired_worker_ends_whatever_its_code(code: int):
    """A drain that does not finish in time ends with 1, and is no reason to restart."""
    policy = started(2)
    assert policy.retire(0, 1.0) == [Terminate(0)]
    assert policy.retire(0, 2.0) == []  # a second SIGTERM would abort its jobs
    assert policy.is_stopping(0)
    assert policy.exited(0, code, 3.0) == []
    assert not policy.done
    assert policy.reload(4.0) == [Spawn(0), Terminate(1)]


def test_a_restarted_worker_is_replaced_at_once():
    policy = started(2)
    assert policy.restart(1, 1.0) == [Terminate(1)]
    assert policy.restart(1, 2.0) == []
    assert policy.exited(1, 0, 3.0) == [Spawn(1)]
    assert policy.exited(1, 0, 4.0) == []  # later ends are its own


def test_the_later_of_two_wishes_applies():
    policy = started(2)
    assert [policy.retire(0, 1.0), policy.restart(0, 2.0)] == [[Terminate(0)], []]
    assert policy.exited(0, 0, 3.0) == [Spawn(0)]
    assert [policy.restart(1, 1.0), policy.retire(1, 2.0)] == [[Terminate(1)], []]
    assert policy.exited(1, 0, 3.0) == []


def test_a_retired_worker_that_hangs_is_killed():
    policy = started(2, drain_seconds=30.0)
    policy.retire(0, 1.0)
    assert policy.tick(41.0) == [Kill(0, "it did not exit in time")]


def test_wishes_change_nothing_while_all_workers_stop():
    policy = started(2)
    policy.drain(1.0)
    assert policy.retire(0, 2.0) == policy.restart(1, 2.0) == policy.reload(2.0) == []
    assert policy.exited(0, 0, 3.0) == policy.exited(1, 0, 3.0) == []
    assert policy.done


def test_sessions_close_once_the_parent_gets_a_thread(monkeypatch: pytest.MonkeyPatch):
    """It died of the RuntimeError, and with it the restarts of all its workers."""
    refusals = iter([RuntimeError("can't start new thread")])
    start = threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        if (refused := next(refusals, None)) is not None:
            raise refused
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    ended = threading.Event()
    reaper = Reaper(Settings(), ended.set)
    child: Any = SimpleNamespace(
        name="process 1", pid=1, sessions=[], keeper=None, receipts=7, group_gone=lambda: True
    )
    reaper._dying.append(_DyingProcess(child, time.monotonic() + 60.0, [], "died"))
    reaper.step()
    assert (reaper.busy, reaper.left) == (True, [])
    reaper.step()
    assert ended.wait(10.0)
    reaper.step()
    assert (reaper.busy, reaper.left) == (False, [7])

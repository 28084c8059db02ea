"""When a worker takes requests, and what becomes of them when it stops."""

from __future__ import annotations

from typing import Any

import gevent
import pytest

import qdo
from qdo.fleet.pauses import new_pause
from qdo.worker.pools import duty as duty_module
from qdo.worker.pools.duty import PoolDuty
from tests.support.engine import until
from tests.support.fakes.pools import Make, PoolSetup

SLOW = qdo.Policy(attempts=3, backoff_seconds=600, backoff_max_seconds=600)


def crashed(pool: PoolSetup, body: Any) -> None:
    """Ask for a request whose first attempt ended with its worker: it waits in the next hand."""
    pool.ask(body)
    pool.store.take("gone", "p", 1, [])
    pool.store.give_back("gone")


def drain_while_running(pool: PoolSetup) -> Any:
    """Stop a worker while it runs a request; return its handle."""
    pool.hold(1)
    (handle,) = pool.ask(1)
    until(lambda: pool.running)
    pool.stop()
    until(lambda: pool.worker.state == "draining")
    return handle


def test_held_pools_are_left_alone(make: Make) -> None:
    """Also one that is claimed during the hold."""
    pool = make(start=False)
    pool.app.job("more-*", pool=True)(pool.job)
    pool.start()
    pool.look()
    assert pool.registrar.parts is not None
    gate = pool.registrar.parts.gate
    gate.apply([new_pause(("*",), "")])
    pool.ask(1)
    handle = pool.app.request("more-1", 2)
    pool.look()
    assert (pool.counts(), handle.state) == ((1, 0), "waiting")
    gate.apply([])
    pool.finish(1)
    assert handle.result(10) == 2


def test_nothing_is_taken_after_the_lease(make: Make) -> None:
    """What runs ends; a new registration claims the pool anew."""
    pool = make()
    pool.hold(1)
    pool.ask(1)
    until(lambda: pool.running)
    pool.member.lease.end()
    pool.ask(2)
    pool.look()
    pool.gates[1].set()
    pool.finish(1)
    pool.look()
    assert pool.counts() == (1, 0)
    pool.member.expire()
    pool.finish(2)
    (found,) = (each for each in pool.store.records("p") if each.id == "2")
    assert (found.take.owner, pool.runs) == ("worker-0000000001", [(1, 1, 1), (2, 1, 1)])


def test_a_frozen_worker_reports_nothing_of_what_was_given_back(make: Make) -> None:
    """Its session ended while the job ran: the next registration runs it again."""
    pool = make()
    pool.hold(1)
    (handle,) = pool.ask(1, then="q")
    until(lambda: pool.running)
    first, gate = pool.member, pool.gates.pop(1)
    first.expire()
    pool.store.give_back(first.name)
    until(lambda: pool.member is not first)
    pool.look()
    gate.set()
    assert handle.result(10) == 1
    assert pool.runs == [(1, 1, 1), (1, 2, 2)]
    assert len(pool.store.broker.reader("q", 0).fetch(9)) == 1


def test_a_drain_takes_nothing_and_puts_back_what_waits(make: Make) -> None:
    """As it was taken; what runs ends."""
    pool = make(policy=SLOW, start=False)
    crashed(pool, "parked")
    pool.start()
    until(lambda: pool.counts() == (0, 1))
    drain_while_running(pool)
    pool.ask(2)
    gevent.sleep(0.1)  # it would take it at once
    pool.gates[1].set()
    assert pool.join() == 0
    assert (pool.outcome(1), pool.counts(), pool.runs) == ("done", (2, 0), [(1, 1, 1)])
    (taken,) = (each for each in pool.store.take("next", "p", 9, []).requests if each.failed)
    assert (taken.take.id, taken.failed, taken.crashed) == ("parked", 1, True)


def test_a_drain_cancels_what_runs(make: Make) -> None:
    """Otherwise a long request would hold up the stop, although its asker has given it up."""
    pool = make()
    assert drain_while_running(pool).cancel("late")
    assert pool.join() == 0
    assert pool.outcome(1) == "cancelled"


def test_errors_of_libraries_end_no_worker(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged with their traceback; the worker looks again."""
    pool = make(start=False)
    pool.app.job("more-*", pool=True)(pool.job)
    due, errors = pool.store.due, [OSError("of a library")]
    pool.store.due = lambda *args: _raised(errors.pop()) if errors else due(*args)  # type: ignore[method-assign]
    pool.start()
    assert pool.app.request("more-1", 2).result(10) == 2
    assert [each.exc_info and each.exc_info[0] for each in caplog.records] == [OSError]


def _raised(error: Exception) -> Any:
    raise error


def test_a_second_signal_puts_back_what_runs(make: Make) -> None:
    """An aborted attempt does not count."""
    pool = make()
    drain_while_running(pool)
    pool.stop()
    assert pool.join() == 1
    record = pool.store.find("1")
    assert record is not None
    assert (pool.counts(), record.failed) == ((1, 0), 0)


def test_a_drain_claims_no_pool_that_it_finds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began while the worker asked for the names of pools."""
    pool = make(start=False)
    pool.app.job("more-*", pool=True)(pool.job)
    duties: list[PoolDuty] = []

    def due(*args: Any) -> dict[str, float]:
        duties[0].drain()
        return {"more-1": 0.0}

    step = PoolDuty.step
    monkeypatch.setattr(PoolDuty, "step", lambda duty: duties.append(duty) or step(duty))
    monkeypatch.setattr(pool.store, "due", due)
    pool.app.request("more-1", 1)
    pool.start()
    until(lambda: pool.looks)
    assert pool.store.counts()["more-1"].waiting == 1
    assert "more-1" not in pool.dispatcher.slots


def test_a_worker_takes_the_pools_of_its_filter(make: Make) -> None:
    """And pools of globs once they have requests."""
    pool = make(settings={"exclude": ("p",)}, start=False)
    pool.app.job("more-*", pool=True)(pool.job)
    pool.start()
    pool.ask(1)
    assert pool.app.request("more-1", 2).result(10) == 2
    pool.look()
    assert pool.counts() == (1, 0)


def test_a_request_is_taken_when_it_is_due(make: Make) -> None:
    pool = make()
    pool.ask(1, delay_seconds=0.4)
    pool.look()
    assert pool.counts() == (1, 0)
    pool.finish(1)
    record = pool.store.find("1")
    assert record is not None
    assert record.started >= record.due


def idle(pool: PoolSetup, *names: str) -> None:
    """Let a worker find pools by a glob, and end a request in each."""
    pool.app.job("more-*", pool=True)(pool.job)
    pool.start()
    for name in names:
        assert pool.app.request(name, name).result(10) == name
    pool.look()


def test_one_statement_looks_into_idle_pools(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of a glob is forgotten once it was idle for long, and found again."""
    monkeypatch.setattr(duty_module, "FORGET_SECONDS", 600.0)
    pool = make(start=False)
    names = [f"more-{number}" for number in range(5)]
    idle(pool, *names)
    takes = pool.store.calls["take"]
    pool.look(5)
    assert pool.store.calls["take"] == takes
    assert {*names} < {*pool.dispatcher.slots}
    monkeypatch.setattr(duty_module, "FORGET_SECONDS", 0.0)
    until(lambda: {*pool.dispatcher.slots} == {"p"})
    monkeypatch.setattr(duty_module, "FORGET_SECONDS", 600.0)
    assert pool.app.request("more-1", 2).result(10) == 2


def test_an_error_of_one_pool_stops_no_other(make: Make) -> None:
    """Marks of the others are read, and their requests are taken."""
    pool = make(start=False)
    pool.app.job("more-*", pool=True)(pool.job)
    take = pool.store.take
    pool.store.take = lambda owner, name, *args: (  # type: ignore[method-assign]
        _raised(OSError("damaged"))
        if name == "more-1" and pool.running
        else take(owner, name, *args)
    )
    pool.hold("held", 2)
    pool.start()
    held = pool.app.request("more-1", "held")
    until(lambda: pool.running)
    (handle,) = pool.ask(2)
    until(lambda: pool.running == 2)
    assert handle.cancel("enough")
    pool.finish(2)
    assert held.state == "running"

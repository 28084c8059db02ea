"""The runner of duties."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest
from gevent.event import Event

from qdo.worker.duties.duty import Duties, Duty


class Waiting(Duty):
    """A duty that waits until it is stopped.

    :ivar stopped: whether it was.
    """

    name = "waiting"

    def __init__(self) -> None:
        self.stopped = False

    def run(self) -> None:
        try:
            Event().wait()
        finally:
            self.stopped = True


class Lasting(Waiting):
    """The same, also while the worker drains."""

    name = "lasting"
    ends_at_drain = False


class BrokenDuty(Duty):
    """A duty with a bug."""

    name = "broken"

    def run(self) -> None:
        raise RuntimeError("a bug")


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def duties(failures: list[str]) -> Iterator[Duties]:
    made = Duties(lambda: failures.append("called"))
    yield made
    made.end_all()


def test_drain_stops_only_the_duties_that_end_with_it(duties: Duties) -> None:
    """The others run until `end_all`."""
    waiting, lasting = Waiting(), Lasting()
    for duty in (waiting, lasting):
        duties.start(duty)
    gevent.sleep(0)
    duties.begin_drain()
    assert (waiting.stopped, lasting.stopped) == (True, False)
    duties.end_all()
    assert lasting.stopped
    assert duties.failed is None


def test_first_dead_duty_is_named(duties: Duties, failures: list[str]) -> None:
    """Each death is passed on; stopping a duty is not one."""
    for duty in (Waiting(), BrokenDuty()):
        duties.start(duty)
    duties.spawn(BrokenDuty().run)
    gevent.sleep(0)
    duties.end_all()
    assert duties.failed == "broken"
    assert failures == ["called", "called"]


def test_duties_are_quiet_once_each_of_them_is(duties: Duties) -> None:
    """A burst waits for a duty with work to finish."""
    busy = Waiting()
    busy.quiet = False
    for duty in (busy, Lasting()):
        duties.start(duty)
    assert not duties.quiet
    busy.quiet = True
    assert duties.quiet

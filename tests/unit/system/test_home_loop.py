"""Calls of native threads on the event loop of a worker."""

from __future__ import annotations

import gevent
from gevent.event import Event

from qdo.system.home_loop import at_home, home_loop, leave_gevent
from qdo.system.native import Signal, _GreenletSignal, native_lock, raise_in_thread, start_thread

PATIENCE_SECONDS = 20.0


class Interruption(BaseException):
    """What stops a job in a thread."""


def test_what_an_interrupted_thread_took_is_undone() -> None:
    """The call returns in the moment in which the thread that waits for it is interrupted."""
    began, go = Event(), Event()
    taken: list[str] = []
    undone: list[str] = []
    ended: list[BaseException] = []

    def take() -> str:
        began.set()
        go.wait()
        taken.append("permit")
        return "permit"

    def work() -> None:
        try:
            at_home(take, undo=undone.append)
        except Interruption as error:
            ended.append(error)

    with home_loop():
        thread = start_thread(work)
        assert began.wait(PATIENCE_SECONDS)
        raise_in_thread(thread, Interruption)
        go.set()
        with gevent.Timeout(PATIENCE_SECONDS):
            while not ended or undone != taken:
                gevent.sleep(0.001)
    assert undone == taken == ["permit"]


def test_a_call_may_end_after_the_thread_that_made_it() -> None:
    """A job in a thread was interrupted while it waited for the broker, whose thread lives on."""
    signals: list[Signal] = []
    left = native_lock()
    left.acquire()

    def work() -> None:
        signals.append(_GreenletSignal())
        leave_gevent()
        left.release()

    start_thread(work)
    assert left.acquire(timeout=PATIENCE_SECONDS)
    signals[0].set()

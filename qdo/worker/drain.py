"""Steps 2 and 3 of the way down (see `worker`): messages in hand end, queues are released."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

from qdo.coordination.lease import clock
from qdo.worker.dispatcher import Dispatcher
from qdo.worker.registrar import Enrolled

_log = logging.getLogger(__name__)

ABORT_SECONDS = 3.0
"""How long aborted jobs, and the releases after them, may take."""
NAMES_SHOWN = 20


class Drain:
    """Gives everything back.

    :param news: set by whoever has news for the waiting worker: a turn ended, a signal came.
    :param aborted: whether the worker was asked a second time to stop.
    """

    def __init__(
        self, dispatcher: Dispatcher, seconds: float, news: Event, aborted: Callable[[], bool]
    ) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._news = news
        self._aborted = aborted
        self._released: Any = None

    def run(self, member: Enrolled | None) -> bool:
        """Finish what is in hand and release all queues; return whether all was finished.

        :param member: None while there is no registration: only jobs of lost queues may run.
        """
        _log.info(
            "step 2: %d messages in hand may finish within %g s",
            len(self._dispatcher.in_hand()),
            self._seconds,
        )
        if member is not None:
            member.drain()
            self._released = gevent.spawn(member.wait_released, self._seconds + ABORT_SECONDS)
            self._released.rawlink(lambda _: self._news.set())
        self._wait(self._seconds, self._aborted)
        if self._is_over():
            _log.info("step 3: everything is recorded and released")
            return True
        self._name_unfinished()
        self._dispatcher.abort()
        self._wait(ABORT_SECONDS, lambda: False)
        self._name_stuck(member)
        return False

    def _is_over(self) -> bool:
        released = self._released
        if released is not None and not (released.ready() and released.value):
            return False
        return not self._dispatcher.runners

    def _wait(self, seconds: float, cut_short: Callable[[], bool]) -> None:
        """Wait until all has been released and no turn is under way, or for so long."""
        deadline = clock() + seconds
        while not self._is_over() and not cut_short():
            left = deadline - clock()
            if left <= 0:
                return
            self._news.wait(left)
            self._news.clear()

    def _name_unfinished(self) -> None:
        reason = "asked again to stop" if self._aborted() else f"{self._seconds:g} s are over"
        now = clock()
        for slot in self._dispatcher.in_hand():
            message = slot.message
            if message is not None:
                _log.error(
                    "%s: aborting message %s of queue %s, whose turn has lasted %.1f s; its next"
                    " owner runs it again",
                    reason,
                    message.id,
                    slot.queue,
                    now - slot.started_at,
                )

    def _name_stuck(self, member: Enrolled | None) -> None:
        still = [slot.queue for slot in self._dispatcher.in_hand()]
        if still:
            _log.error("jobs that did not even end when aborted: %s", _listed(still))
        unreleased = member.unreleased() if member is not None else []
        if unreleased:
            _log.warning(
                "step 3: not released, free once the session is closed: %s", _listed(unreleased)
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"

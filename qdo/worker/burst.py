"""When a worker that was started with `burst` is done."""

from __future__ import annotations

import logging
from collections.abc import Callable

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.describe import describe
from qdo.worker.registrar import Registrar

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
LOOK_SHARE = 10
"""A pause between two looks is at least so many times the look before it: a look at thousands
of queues takes a while, and the worker has better things to do."""


class Burst:
    """Looks whether everything is done: here, and wherever else the queues are.

    Done here is not enough. A worker killed with -9 is counted as alive until its session ends,
    and if all others left before that, nobody would take over what it had. So a worker stays
    until nothing waits behind the recorded `last` of any queue, and each queue is in the hands
    of a live worker. Left out are queues that this worker does not take, those that the app has
    no job for, and those whose node says that nobody may process them.

    :param idle_here: whether all queues of this worker are claimed and at their tip.
    :param takes: whether this worker takes a queue.
    """

    def __init__(
        self,
        app: App,
        broker: Broker,
        registrar: Registrar,
        idle_here: Callable[[], bool],
        clock: Callable[[], float],
        takes: Callable[[str], bool] = lambda queue: True,
    ) -> None:
        self._app = app
        self._broker = broker
        self._registrar = registrar
        self._idle_here = idle_here
        self._clock = clock
        self._takes = takes

    def step(self) -> float | None:
        """Look once; return None when all is done, else the seconds to the next look."""
        start = self._clock()
        if self._idle_here() and self._done_everywhere() and self._idle_here():
            return None
        return max(LOOK_SECONDS, LOOK_SHARE * (self._clock() - start))

    def _done_everywhere(self) -> bool:
        try:
            names = [
                name
                for name in self._broker.queues()
                if self._takes(name) and self._app.job_for(name) is not None
            ]
            survey = self._registrar.survey(names)
            return not survey.unattended and not any(
                self._broker.backlog(name, last).count for name, last in survey.elsewhere.items()
            )
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning("cannot tell yet whether everything is done: %s", describe(error))
            return False

"""Background duties: greenlets with a name. If one dies, the worker stops."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import gevent

_log = logging.getLogger(__name__)


class Duty(abc.ABC):
    """A background task of a worker.

    :cvar name: for `Duties.end` and the logs.
    :cvar ends_at_drain: False if the duty must also run while the worker drains.
    :ivar quiet: False while the duty has work to finish before a `burst` ends.
    """

    name: ClassVar[str]
    ends_at_drain: ClassVar[bool] = True
    quiet: bool = True

    @abc.abstractmethod
    def run(self) -> None:
        """Work until `Duties` stops the greenlet. A duty that is finished may return."""


class Duties:
    """The background greenlets of a worker.

    :ivar failed: name of the first duty that died, None if all are well.
    :param on_failure: called when a duty died; must not block.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.failed: str | None = None
        self._on_failure = on_failure
        self._running: list[tuple[Duty, Any]] = []

    def start(self, duty: Duty) -> None:
        """Run a duty in a greenlet of its own."""
        self._running.append((duty, gevent.spawn(self._guarded, duty.name, duty.run)))

    def spawn(self, function: Callable[[], None]) -> Any:
        """Run one of many unnamed greenlets of the duty "turns"."""
        return gevent.spawn(self._guarded, "turns", function)

    @property
    def quiet(self) -> bool:
        """True when no duty has work to finish."""
        return all(duty.quiet for duty, _ in self._running)

    def begin_drain(self) -> None:
        """Stop the duties that end at a drain, wherever they wait."""
        ending = [greenlet for duty, greenlet in self._running if duty.ends_at_drain]
        self._running = [each for each in self._running if not each[0].ends_at_drain]
        gevent.killall(ending)

    def end_all(self) -> None:
        """Stop every duty."""
        ending, self._running = [greenlet for _, greenlet in self._running], []
        gevent.killall(ending)

    def _guarded(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except gevent.GreenletExit:
            raise
        except BaseException:  # noqa: BLE001 - whatever it was, the worker must not run on
            self.fail(name)

    def fail(self, name: str) -> None:
        """Record that a duty died of the error being handled."""
        _log.critical("the duty %r died; this worker stops", name, exc_info=True)
        if self.failed is None:
            self.failed = name
        self._on_failure()

"""Background duties: greenlets with a name. If one dies, the worker stops and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gevent

_log = logging.getLogger(__name__)


class Duties:
    """The background greenlets of a worker.

    :ivar failed: name of the first duty that died, None while all are well.
    :param on_failure: called when one died; must not block.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.failed: str | None = None
        self._on_failure = on_failure
        self._greenlets: dict[str, Any] = {}

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Run `function` until `end` stops it; that it returns is its own business."""
        self._greenlets[name] = gevent.spawn(self._guarded, name, function)

    def spawn(self, function: Callable[[], None]) -> Any:
        """Run one of many nameless greenlets of the duty "turns"."""
        return gevent.spawn(self._guarded, "turns", function)

    def end(self, *names: str) -> None:
        """Stop duties, where they wait; unknown names are passed over."""
        ending = [self._greenlets.pop(name) for name in names if name in self._greenlets]
        gevent.killall(ending)

    def end_all(self) -> None:
        """Stop every named duty."""
        self.end(*self._greenlets)

    def _guarded(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except gevent.GreenletExit:
            raise
        except BaseException:  # noqa: BLE001 - whatever it was, the worker must not run on
            self.fail(name)

    def fail(self, name: str) -> None:
        """Take note that a duty died of the error being handled."""
        _log.critical("the duty %r died: this worker stops", name, exc_info=True)
        if self.failed is None:
            self.failed = name
        self._on_failure()

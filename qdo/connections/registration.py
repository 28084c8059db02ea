"""Registers a process that is not a worker, so that `qdo workers --all` shows the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdo.errors import QdoError
from qdo.system.home_loop import at_home

if TYPE_CHECKING:
    from qdo.fleet.locks import LockService

RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class KeptRegistration:
    """Keeps a process registered; after the end of each session, registers it again.

    The locks of the process use the same session, so a process has one node.
    """

    def __init__(
        self, app: str, connect: Callable[[], LockService], timeout_seconds: float
    ) -> None:
        self._app = app
        self._connect = connect
        self._changed = threading.Event()
        self._closed = False
        self._timeout_seconds = timeout_seconds
        self._register()
        name = f"qdo-registration-{app}"
        threading.Thread(target=self._keep, name=name, daemon=True).start()

    def close(self) -> None:
        """Stop the registration; the node ends with the session."""
        self._closed = True
        self._changed.set()

    def _register(self) -> None:
        at_home(self._connect().register, self._changed, self._timeout_seconds)

    def _keep(self) -> None:
        pause = None
        while True:
            self._changed.wait(pause)
            if self._closed:
                return
            self._changed.clear()
            try:
                self._register()
                pause = None
            except QdoError as error:
                if pause is None:
                    _log.warning(
                        "app %s: this process is no longer registered: %s; retrying every %g s",
                        self._app,
                        error,
                        RETRY_SECONDS,
                    )
                pause = RETRY_SECONDS

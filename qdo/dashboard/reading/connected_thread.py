"""A thread that has connections to the app, and runs functions with them one after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from qdo.errors import QdoError
from qdo.sending.connections import Connections, connections_of
from qdo.settings.settings import Settings

IDLE_SECONDS = 60.0
"""Connections that nobody needs are closed: a dashboard that nobody looks at costs nothing."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Task = tuple[Callable[[Connections], Any], "Future[Any]"]


class ConnectedThread:
    """Runs functions with connections, which it opens when needed and closes after an error."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[[Connections], _Result]) -> Future[_Result]:
        """Run a function after those that wait; its result may be an error."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(RuntimeError("the dashboard is closed"))
                return future
            self._tasks.put((function, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after its present function."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._tasks.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Run functions with the same connections; return whether the thread goes on."""
        with ExitStack() as stack:
            opened: Connections | None = None
            while True:
                try:
                    task = self._tasks.get(timeout=IDLE_SECONDS if opened else None)
                except queue.Empty:
                    return True
                if task is None:
                    return False
                function, future = task
                try:
                    if opened is None or None in (opened.client, opened.broker):
                        # A file may have been created since.
                        stack.close()
                        opened = stack.enter_context(connections_of(self._settings))
                    future.set_result(function(opened))
                except Exception as error:  # noqa: BLE001 - the one who waits for it raises it
                    if not isinstance(error, QdoError):
                        _log.exception("dashboard: cannot read")
                    future.set_exception(error)
                    return True

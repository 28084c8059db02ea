"""Ringing for queues: tells their owners that somebody has sent to them.

A ring is a hint. Without it the owner finds the message when it asks the broker the next time;
so a ring that fails is no error of the sender's, and sending never waits for one.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

from kazoo.exceptions import NodeExistsError, NoNodeError

from qdo.coordination.client import Client, connect
from qdo.coordination.layout import Layout
from qdo.describe import describe

_log = logging.getLogger(__name__)
_SILENT = logging.Logger("silent", logging.CRITICAL + 1)
"""For kazoo, which logs every attempt to connect: one line says it all."""

PAUSE_SECONDS = 1.0
"""A queue is rung for at most so often; messages sent meanwhile are rung for at its end."""
CONNECT_SECONDS = 5.0
AGAIN_SECONDS = 30.0
"""Pause after a coordinator could not be reached; nothing is rung meanwhile."""
ANSWER_SECONDS = 5.0
CLOSE_SECONDS = 2.0
"""What closing waits for the last rings, at most."""
NEVER = float("-inf")
MANY = 10_000
"""Times of the last ring are looked through when there are so many."""


class Ringer:
    """Rings for the queues of one app in the background, from any thread, greenlet or loop.

    Its connection, and the thread that uses it, are made with the first ring.

    :param url: the coordinator.
    :param session_timeout_seconds: of its session, in which nothing depends on it.
    """

    def __init__(self, url: str, layout: Layout, session_timeout_seconds: float = 10.0) -> None:
        self._url = url
        self._layout = layout
        self._session_timeout_seconds = session_timeout_seconds
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._rung: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._client: Client | None = None
        self._not_before = 0.0
        self._complained = False

    def ring(self, queues: Iterable[str]) -> None:
        """Have queues rung for, soon; never waits and never raises."""
        with self._changed:
            if self._closed:
                return
            for queue in queues:
                if queue not in self._due:
                    self._due[queue] = self._rung.get(queue, NEVER) + PAUSE_SECONDS
            if self._thread is None and self._due:
                self._thread = threading.Thread(target=self._run, name="qdo-doorbell", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._changed.notify()

    def close(self) -> None:
        """Ring what is to be rung still, for a moment at most, and let go of the connection."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return  # a child of the process that rings has neither its thread nor its connection
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    # --- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while queues := self._wait():
                self._ring_all(queues)
        finally:
            self._disconnect()

    def _wait(self) -> list[str]:
        """Wait for queues that may be rung for; none when all is over."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = [
                    queue for queue, since in self._due.items() if since <= now or self._closed
                ]
                if due or self._closed:
                    break
                earliest = min(self._due.values(), default=None)
                self._changed.wait(None if earliest is None else earliest - now)
            if len(self._rung) > MANY:
                self._rung = {q: at for q, at in self._rung.items() if at + PAUSE_SECONDS > now}
            for queue in due:
                del self._due[queue]
                self._rung[queue] = now
            return due

    def _ring_all(self, queues: list[str]) -> None:
        if time.monotonic() < self._not_before:
            return
        try:
            client = self._connected()
            self._touch(client, queues)
        except Exception as error:  # noqa: BLE001 - kazoo's, its handler's time-outs, the file's
            self._not_before = time.monotonic() + AGAIN_SECONDS
            self._complain(error)
        else:
            self._complained = False

    def _complain(self, error: BaseException) -> None:
        """Say it once: it would come again with every message."""
        if not self._complained:
            self._complained = True
            _log.warning(
                "the doorbell cannot be rung, so that messages are found when their broker is"
                " asked the next time: %s",
                describe(error),
            )

    def _connected(self) -> Client:
        if self._client is None:
            client = connect(
                self._url,
                handler=_handler(),
                session_timeout_seconds=self._session_timeout_seconds,
                logger=_SILENT,
            )
            client.open(CONNECT_SECONDS)
            self._client = client
        return self._client

    def _touch(self, client: Client, queues: list[str]) -> None:
        """Touch the bells, all at once, and make those that were never rung."""
        paths = [self._layout.bell(queue) for queue in queues]
        missing = []
        for path, answer in [(path, client.set_async(path, b"")) for path in paths]:
            try:
                answer.get(timeout=ANSWER_SECONDS)
            except NoNodeError:
                missing.append(path)
        if missing:
            client.ensure_path(self._layout.bells)
        for answer in [client.create_async(path, b"") for path in missing]:
            with contextlib.suppress(NodeExistsError):  # another sender has rung meanwhile
                answer.get(timeout=ANSWER_SECONDS)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.stop()
            client.close()


def _handler() -> str:
    """Return the kind of handler that goes with the threads of this process."""
    monkey = sys.modules.get("gevent.monkey")
    patched: Callable[[str], bool] = getattr(monkey, "is_module_patched", lambda name: False)
    return "gevent" if patched("threading") else "threading"

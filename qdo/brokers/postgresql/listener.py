"""Waking a worker when its queues receive messages.

A notification says only that something was sent. `look` then returns the queues that changed since
the listener's last look, so nothing is missed whatever becomes of notifications: a sender may die
between its commit and its notification, and a pooler in transaction mode delivers none.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from qdo.brokers.postgresql.session import PostgresqlConnection, PostgresqlSession, loop_poll
from qdo.brokers.postgresql.url import SchemaAddress
from qdo.errors import QdoError
from qdo.system.native import guarded

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Time between looks without a notification."""
POLL_SECONDS = 0.1
"""The same behind a pooler, which delivers no notifications."""
RETRY_SECONDS = 1.0
MOVE_MESSAGES = 1000
MOVE_BYTES = 8 * 1024 * 1024
"""Limits of one transaction that moves due messages, because it locks their queues."""
_SECOND = 10_000_000


class NotificationListener:
    """Waits for notifications and due messages on a thread (a greenlet under gevent).

    It has a connection of its own.

    :param wake: called with the names of the queues that received messages.
    """

    def __init__(
        self, address: SchemaAddress, app: str, wake: Callable[[Iterable[str]], None]
    ) -> None:
        self._app = app
        self._wake = wake
        self._pooled = address.pooled
        schema = address.schema
        self._look_statement = f"SELECT * FROM {schema}.look(%s, %s, %s::bigint[])"  # nosec B608 # the address allows a-z, 0-9 and _
        self._move_statement = f"SELECT {schema}.move_due(%s, %s, %s)"  # nosec B608 # as above
        self._channel_statement = f"SELECT {schema}.channel(%s)"  # nosec B608 # as above
        self._session = PostgresqlSession(address, self._prepare, loop_poll)
        self._next_xid: int | None = None
        self._running: list[int] = []
        self._stopping = False
        try:
            self._pause = self._step()  # due messages must be readable when this returns
        except BaseException:
            self._session.close()
            raise
        self._closed = False
        self._closing = threading.Lock()  # so that `stop` does not write to a closed pipe
        self._pipe = os.pipe()
        self._thread = threading.Thread(
            target=guarded("doorbell", self._run), name="qdo-doorbell", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; `wake` is not called afterwards. Idempotent."""
        self._stopping = True
        with self._closing:
            if not self._closed:
                os.write(self._pipe[1], b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- on the listening thread ------------------------------------------------------

    def _prepare(self, connection: PostgresqlConnection) -> None:
        if not self._pooled:
            (channel,) = connection.execute(self._channel_statement, (self._app,)).fetchone() or (
                "",
            )
            connection.execute(f'LISTEN "{channel}"')

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait(self._pause)
                if not self._stopping:
                    self._pause = self._step_or_warn()
        finally:
            with self._closing:
                self._closed = True
                for end in self._pipe:
                    os.close(end)
            self._session.close()

    def _step_or_warn(self) -> float:
        try:
            return self._step()
        except QdoError as error:
            log.warning("%s; retrying in %g s", error, RETRY_SECONDS)
            return RETRY_SECONDS

    def _step(self) -> float:
        """Move due messages and wake changed queues; return the seconds to wait."""
        while (due := self._session.run(self._look)) is not None and due <= 0:
            self._session.run(self._move)
        pause = POLL_SECONDS if self._pooled else LOOK_SECONDS
        return pause if due is None else min(pause, due / _SECOND)

    def _look(self, connection: PostgresqlConnection) -> int | None:
        """Wake the queues that changed; return the ticks until the next message is due."""
        first = self._next_xid is None
        seen = (2**62, []) if self._next_xid is None else (self._next_xid, self._running)
        found = connection.execute(self._look_statement, (self._app, *seen)).fetchone()
        if found is None:
            return None
        self._next_xid, self._running, names, due = found
        if names and not first and not self._stopping:
            self._wake(names)
        return None if due is None else int(due)

    def _move(self, connection: PostgresqlConnection) -> None:
        connection.execute(self._move_statement, (self._app, MOVE_MESSAGES, MOVE_BYTES))

    def _wait(self, seconds: float) -> None:
        """Wait for a notification, the end or a time."""
        poll = loop_poll()
        poll.register(self._pipe[0], select.POLLIN)
        connection = self._session.connection
        if connection is None or connection.closed:
            poll.poll(min(seconds, RETRY_SECONDS) * 1000)
            return
        poll.register(connection.pgconn.socket, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not self._stopping:
            # Rounded up: if it woke a moment too early, no message would be due.
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                return
            try:
                connection.pgconn.consume_input()
            except Exception:  # noqa: BLE001 - psycopg's, when the connection is lost
                self._session.close()
                return
            noticed = False
            while connection.pgconn.notifies() is not None:
                noticed = True
            if noticed:
                return

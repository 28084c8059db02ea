"""Notify the owners of queues of new messages.

A notification is a hint. Without a notification, the owner finds the message at the next poll. So a
failed notification is not an error for the sender, and sending never waits for notifications.
"""

from __future__ import annotations

import atexit

# Import this module early. The thread may connect after the main thread has ended, when imports
# fail.
import concurrent.futures.thread  # noqa: F401
import logging
import os
import threading
import time
from collections.abc import Iterable

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError

from qdo.coordination.access import ANYBODY, Access
from qdo.coordination.bulk_reads import is_refusal
from qdo.coordination.client import Client, connect
from qdo.coordination.side import fitting_handler
from qdo.coordination.znodes.layout import Layout
from qdo.text import describe

_log = logging.getLogger(__name__)
# A logger that silences kazoo, which logs every attempt to connect. The notifier logs one line.
_SILENT = logging.Logger("silent", logging.CRITICAL + 1)
# The minimum time between two notifications of a queue. All messages in between share the second.
PAUSE_SECONDS = 1.0
CONNECT_SECONDS = 5.0
# The pause after the coordinator was unreachable. During the pause, the notifier is silent.
AGAIN_SECONDS = 30.0
ANSWER_SECONDS = 5.0
# The maximum time for which `close` waits for the last notifications.
CLOSE_SECONDS = 2.0
# The maximum number of remembered notification times before the notifier drops old times.
MANY = 10_000


class DoorbellNotifier:
    """Notifies the owners of one app's queues in the background.

    Any thread, greenlet or loop may use the notifier. The first notification creates its connection
    and its thread.
    """

    def __init__(
        self,
        url: str,
        layout: Layout,
        session_timeout_seconds: float = 10.0,
        *,
        access: Access = ANYBODY,
    ) -> None:
        self._url = url
        self._access = access
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
        """Notify the owners of these queues soon; return at once and raise no error."""
        with self._changed:
            if self._closed:
                return
            for queue in queues:
                if queue not in self._due:
                    self._due[queue] = self._rung.get(queue, float("-inf")) + PAUSE_SECONDS
            if self._thread is None and self._due:
                self._thread = threading.Thread(target=self._run, name="qdo-doorbell", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._changed.notify()

    def close(self) -> None:
        """Send pending notifications within `CLOSE_SECONDS`, and close the connection."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return  # a forked child has neither the parent's thread nor its connection
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
        """Wait for due queues; return an empty list if the notifier is closed."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = [queue for queue, since in self._due.items() if since <= now or self._closed]
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
        except Exception as error:  # noqa: BLE001 - from kazoo, its handler, or the file
            self._not_before = time.monotonic() + AGAIN_SECONDS
            self._complain(error)
        else:
            self._complained = False

    def _complain(self, error: BaseException) -> None:
        """Log only the first error, because each further message would repeat it."""
        if not self._complained:
            self._complained = True
            _log.warning(
                "cannot notify queue owners; they find new messages with their next poll: %s",
                describe(error),
            )

    def _connected(self) -> Client:
        if self._client is None:
            client = connect(
                self._url,
                access=self._access,
                handler=fitting_handler(),
                session_timeout_seconds=self._session_timeout_seconds,
                logger=_SILENT,
            )
            client.open(CONNECT_SECONDS)
            self._client = client
        return self._client

    def _touch(self, client: Client, queues: list[str]) -> None:
        """Write all doorbells at once, and create missing doorbells; log refused ones."""
        paths = [self._layout.doorbell(queue) for queue in queues]
        missing = []
        for path, answer in [(path, client.set_async(path, b"")) for path in paths]:
            try:
                answer.get(timeout=ANSWER_SECONDS)
            except NoNodeError:
                missing.append(path)
            except KazooException as error:
                self._refused(error)
        if missing:
            client.ensure_path(self._layout.doorbells)
        for answer in [client.create_async(path, b"") for path in missing]:
            try:
                answer.get(timeout=ANSWER_SECONDS)
            except NodeExistsError:
                pass  # another sender has created it
            except KazooException as error:
                self._refused(error)

    def _refused(self, error: KazooException) -> None:
        if not is_refusal(error):
            raise error
        self._complain(error)

    def _disconnect(self) -> None:
        client = self._client
        self._client = None
        if client is not None:
            client.stop()
            client.close()

"""Group commit: all writes of a process go through one connection, which a native thread uses.

The messages of a group are appended by one statement: one round trip, one transaction, one sync.
If PostgreSQL refuses a group, each of its calls is repeated by itself, so that each gets its own
error. If the connection is lost, nothing is repeated: the group may have been stored.

A notification takes a lock of the whole database until its transaction is committed. So it has a
transaction of its own, which writes nothing and need not wait for the disk, and a busy sender
notifies only every `NOTIFY_SECONDS`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from psycopg import errors

from qdo.brokers.base import Outgoing
from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.brokers.postgresql.schema import check_format, check_server
from qdo.brokers.postgresql.session import PostgresqlConnection, PostgresqlSession
from qdo.brokers.postgresql.url import SchemaAddress
from qdo.errors import QueueLimitError, UnreachableError
from qdo.postgresql_errors import PostgresqlBusyError, PostgresqlError

T = TypeVar("T")

Append: TypeAlias = Sequence[Outgoing]
"""Messages without options."""
Work: TypeAlias = "Append | Callable[[PostgresqlConnection], Any]"

NOTIFY_SECONDS = 0.002
LOCK_SECONDS = 10.0
"""How long a call waits for the lock of its queue."""
GROUP_LOCK_SECONDS = 0.5
"""How long a group waits for its locks before its calls are repeated one by one."""
TOO_MANY_QUEUES = "QD001"
"""SQLSTATE of the error that `lock_queues` raises."""


class PostgresqlWriter(GroupedCalls[Work]):
    """The writes of one process for one app.

    :param limit: returns the most queues that the app may have, None: any number.
    :ivar commits: number of committed groups.
    """

    def __init__(self, address: SchemaAddress, app: str, limit: Callable[[], int | None]) -> None:
        super().__init__("writer")
        self.commits = 0
        self._app = app
        self._limit = limit
        self._session = PostgresqlSession(address, self._prepare)
        self._address = address
        schema = address.schema
        self._append = f"SELECT {schema}.append(%s, %b::text[], %b::text[], %b::text[], %b, %s, %s)"  # nosec B608 # the address allows a-z, 0-9 and _
        self._notify = f"SELECT pg_notify({schema}.channel(%s), '')"  # nosec B608 # as above
        self._notified = 0.0
        self._unannounced = False
        self.start()

    def run(self, work: Callable[[PostgresqlConnection], T], size: int = 0) -> T:
        """Run `work` with the connection, in autocommit mode, and return its result."""
        result: T = self.call(work, size)
        return result

    # --- on the writing thread --------------------------------------------------------

    def _prepare(self, connection: PostgresqlConnection) -> None:
        check_server(connection, self._address)
        check_format(connection, self._address)

    def release(self) -> None:
        self._session.close()

    def handle(self, calls: list[GroupedCall[Work]]) -> None:
        appends = [call for call in calls if not callable(call.work)]
        error = self._append_all(appends, GROUP_LOCK_SECONDS) if len(appends) > 1 else None
        if error is not None or len(appends) == 1:
            unknown = isinstance(error, UnreachableError) and not isinstance(
                error, PostgresqlBusyError
            )
            for call in appends:
                failure = error if unknown else self._append_all([call], LOCK_SECONDS)
                if failure is not None:
                    call.fail(failure)
        for call in calls:
            if callable(call.work):
                self._run_one(call, call.work)
        self._announce()

    def _append_all(
        self, calls: list[GroupedCall[Work]], lock_seconds: float
    ) -> BaseException | None:
        """Append the messages of calls in one transaction; return the error, None on success."""
        messages = [message for call in calls for message in call.work]  # type: ignore[union-attr]
        try:
            first = self._session.run(
                lambda connection: self._appended(connection, messages, lock_seconds), writes=True
            )
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            return refusal(error, self._limit())
        self.commits += 1
        self._unannounced = True
        for call in calls:
            count = len(call.work)  # type: ignore[arg-type]
            call.finish(range(first, first + count))
            first += count
        return None

    def _appended(
        self, connection: PostgresqlConnection, messages: Sequence[Outgoing], lock_seconds: float
    ) -> int:
        query = (self._app, *columns(messages), self._limit(), round(lock_seconds * 1000))
        (first,) = connection.execute(self._append, query).fetchone() or (0,)
        return int(first)

    def _run_one(
        self, call: GroupedCall[Work], work: Callable[[PostgresqlConnection], Any]
    ) -> None:
        try:
            result = self._session.run(work, writes=True)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            call.fail(refusal(error, self._limit()))
            return
        self.commits += 1
        self._unannounced = True
        call.finish(result)

    def _announce(self) -> None:
        """Notify listeners, but not more often than `NOTIFY_SECONDS` while calls wait."""
        if not self._unannounced:
            return
        now = time.monotonic()
        if self._calls.qsize() and now - self._notified < NOTIFY_SECONDS:
            return
        self._notified = now
        self._unannounced = False
        # Listeners look by themselves, and the next call tells of a lost connection.
        with contextlib.suppress(PostgresqlError):
            self._session.run(lambda connection: connection.execute(self._notify, (self._app,)))


def refusal(error: BaseException, limit: int | None) -> BaseException:
    """Return an error as callers of `App.send` know it."""
    cause = error.__cause__
    if isinstance(cause, errors.Error) and cause.sqlstate == TOO_MANY_QUEUES:
        return QueueLimitError(queue=cause.diag.message_detail, limit=limit)
    return error


def columns(messages: Sequence[Outgoing]) -> tuple[Any, Any, Any, list[bytes]]:
    """Return names, keys, headers and bodies; None stands for an array of None."""
    keys = [message.key for message in messages]
    headers = [message.headers for message in messages]
    return (
        [message.queue for message in messages],
        keys if any(key is not None for key in keys) else None,
        headers if any(each is not None for each in headers) else None,
        [message.body for message in messages],
    )

"""Group commit: all writes of a process go through one connection, which a native thread uses.

The messages of a group are appended by one statement: one round trip, one transaction, one sync.
If PostgreSQL refuses a group, each of its calls is repeated by itself, so that each gets its own
error. If the connection is lost, nothing is repeated: the group may have been stored.

A transaction of another program may hold the lock of a queue. The calls for that queue are kept and
tried again for `LOCK_SECONDS`, with the calls for other queues between two attempts. Once one call
succeeds, those that waited with it follow as a group.

A notification takes a lock of the whole database until its transaction is committed. So it has a
transaction of its own, which writes nothing and need not wait for the disk, and a busy sender
notifies only every `NOTIFY_SECONDS`. It names the queues of the messages, so that listeners need
not ask the server for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from psycopg import errors

from qdo.brokers.base import Outgoing
from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.brokers.postgresql.schema import check_format, check_server
from qdo.brokers.postgresql.session import (
    PostgresqlConnection,
    PostgresqlSession,
    with_lock_timeout,
)
from qdo.brokers.postgresql.url import SchemaAddress
from qdo.errors import QdoError, QueueLimitError
from qdo.postgresql_errors import PostgresqlBusyError, PostgresqlError

T = TypeVar("T")
log = logging.getLogger(__name__)

Append: TypeAlias = Sequence[Outgoing]
"""Messages without options."""


@dataclass(frozen=True, slots=True)
class Change:
    """A transaction of its own.

    :ivar act: called with the connection, again after a rollback.
    :ivar queues: the queues that it locks; `UNKNOWN` when its caller does not say.
    """

    act: Callable[[PostgresqlConnection], Any]
    queues: frozenset[str]


Work: TypeAlias = "Append | Change"

NOTIFY_SECONDS = 0.002
PAYLOAD_BYTES = 7999
"""The longest payload of a notification."""
LOCK_SECONDS = 10.0
"""How long a call waits for the lock of its queue."""
GROUP_LOCK_SECONDS = 0.5
"""How long one attempt waits for a lock. Calls for other queues wait meanwhile."""
ALONE_LOCK_SECONDS = 0.02
"""The same when the calls of a group are tried one by one to find those that must wait."""
UNKNOWN = frozenset({""})
"""Stands for the queues of a change; it is not the name of a queue."""
TOO_MANY_QUEUES = "QD001"
"""SQLSTATE of the error that `lock_queues` raises."""


class _Held(NamedTuple):
    """A call that waits for the lock of a queue.

    :ivar deadline: when it fails with `error`, as time.monotonic().
    """

    call: GroupedCall[Work]
    queues: frozenset[str]
    deadline: float
    error: BaseException


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
        self._notify = f"SELECT pg_notify({schema}.channel(%s), %s)"  # nosec B608 # as above
        self._notified = 0.0
        self._unannounced: set[str] = set()
        self._warned = False
        self._held: list[_Held] = []
        self.start()

    def run(
        self,
        act: Callable[[PostgresqlConnection], T],
        size: int = 0,
        queues: frozenset[str] = UNKNOWN,
    ) -> T:
        """Run `act` with the connection, in autocommit mode, and return its result.

        :param queues: see `Change`.
        """
        result: T = self.call(Change(act, queues), size)
        return result

    # --- on the writing thread --------------------------------------------------------

    def _prepare(self, connection: PostgresqlConnection) -> None:
        check_server(connection, self._address)
        check_format(connection, self._address)
        if not self._address.pooled:
            connection.execute(f"SET lock_timeout = {round(GROUP_LOCK_SECONDS * 1000)}")

    def release(self) -> None:
        self._session.close()

    @property
    def kept(self) -> int:
        return len(self._held)

    def handle(self, calls: list[GroupedCall[Work]]) -> None:
        if self._held:
            calls = self._keep_held(calls)
        self._write(calls)
        if self._held:
            self._try_held()
        self._announce()

    def _write(self, calls: list[GroupedCall[Work]]) -> None:
        self._write_appends([call for call in calls if not isinstance(call.work, Change)])
        for call in calls:
            if isinstance(call.work, Change):
                self._keep_or_fail(call, self._changed(call))

    def _write_appends(self, calls: list[GroupedCall[Work]]) -> None:
        """Append the messages of all calls, if necessary one by one."""
        error = self._append_all(calls, GROUP_LOCK_SECONDS) if calls else None
        if error is None:
            return
        if len(calls) == 1 or not _is_of_one(error):
            for call in calls:
                self._keep_or_fail(call, error)
            return
        for number, call in enumerate(calls, 1):
            if self._is_held(call.work):
                self._keep(call, error)
                continue
            own = self._append_all([call], ALONE_LOCK_SECONDS)
            self._keep_or_fail(call, own)
            if own is not None and not _is_of_one(own):  # such as a lost connection
                self._write_appends(calls[number:])
                return

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
        self._unannounced.update(message.queue for message in messages)
        return int(first)

    def _changed(self, call: GroupedCall[Work]) -> BaseException | None:
        """Run the change of a call; return the error, None on success."""
        change: Change = call.work  # type: ignore[assignment]
        try:
            result = self._session.run(
                lambda connection: self._limited(connection, change), writes=True
            )
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            return refusal(error, self._limit())
        self.commits += 1
        self._unannounced |= UNKNOWN  # messages may be delayed, and queues deleted
        call.finish(result)
        return None

    def _limited(self, connection: PostgresqlConnection, change: Change) -> Any:
        if not self._address.pooled:
            return change.act(connection)  # the session has the lock timeout
        return with_lock_timeout(connection, change.act, GROUP_LOCK_SECONDS)

    # --- calls that wait for locks ----------------------------------------------------

    def _is_held(self, work: Work) -> bool:
        queues = _queues(work)
        return any(queues & held.queues for held in self._held)

    def _keep(self, call: GroupedCall[Work], error: BaseException) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        self._held.append(_Held(call, _queues(call.work), deadline, error))

    def _keep_or_fail(self, call: GroupedCall[Work], error: BaseException | None) -> None:
        """Deal with the error of a call, if any."""
        if isinstance(error, PostgresqlBusyError):
            self._keep(call, error)
        elif error is not None:
            call.fail(error)

    def _keep_held(self, calls: list[GroupedCall[Work]]) -> list[GroupedCall[Work]]:
        """Keep the calls whose queues are known to be locked; return the others."""
        locked = frozenset[str]().union(*(held.queues for held in self._held))
        error = self._held[0].error
        others = []
        for call in calls:
            if _queues(call.work) & locked:
                self._keep(call, error)
            else:
                others.append(call)
        return others

    def _try_held(self) -> None:
        """Try the first call that waits; if it need not wait anymore, then those like it."""
        first, *rest = self._held
        same = [held for held in rest if held.queues == first.queues]
        others = [held for held in rest if held.queues != first.queues]
        if isinstance(first.call.work, Change):
            error = self._changed(first.call)
        else:
            error = self._append_all([first.call], GROUP_LOCK_SECONDS)
        if isinstance(error, PostgresqlBusyError):
            self._held = [*others, first, *same]  # another queue is next
        else:
            self._held = others
            self._keep_or_fail(first.call, error)
            self._write([held.call for held in same])
        now = time.monotonic()
        for held in self._held:
            if held.deadline <= now:
                held.call.fail(held.error)
        self._held = [held for held in self._held if held.deadline > now]

    def _announce(self) -> None:
        """Notify listeners, but not more often than `NOTIFY_SECONDS` while calls wait."""
        if not self._unannounced:
            return
        now = time.monotonic()
        if self._calls.qsize() and now - self._notified < NOTIFY_SECONDS:
            return
        self._notified = now
        parameters = (self._app, notification(self._unannounced))
        self._unannounced = set()
        try:
            self._session.run(lambda connection: connection.execute(self._notify, parameters))
        except PostgresqlError:
            pass  # listeners look by themselves, and the next call tells of a lost connection
        except QdoError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s; until then, workers notice messages of this process late", error)


def notification(queues: Set[str]) -> str:
    """Return the payload that names queues, "" if it would be too long or they are not known."""
    if len(queues) > PAYLOAD_BYTES // 2 or not UNKNOWN.isdisjoint(queues):
        return ""
    payload = "".join(f"/{queue}" for queue in queues)
    return payload if len(payload.encode()) <= PAYLOAD_BYTES else ""


def _queues(work: Work) -> frozenset[str]:
    if isinstance(work, Change):
        return work.queues
    return frozenset(message.queue for message in work)


def _is_of_one(error: BaseException) -> bool:
    """Return whether another call of the same group may succeed."""
    refused = isinstance(error, PostgresqlBusyError | QueueLimitError)
    return refused or type(error) is PostgresqlError or not isinstance(error, QdoError)


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

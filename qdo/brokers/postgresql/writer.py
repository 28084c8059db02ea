"""Group commit. One native thread makes all writes of a process over one connection.

One statement appends the messages of a group, with one round trip, one transaction and one sync.
The thread groups new requests and the ends of requests in the same way. If PostgreSQL refuses a
group, the thread repeats each call separately, and each call gets its own error. If the connection
is lost, the thread repeats no call, because the server may have stored the group.

A transaction of another program may hold the lock of a queue. The thread then retries the calls for
that queue for `LOCK_SECONDS`, and makes calls for other queues between two attempts. Once one call
succeeds, the other waiting calls for the queue follow as a group.

A notification locks the whole database until its transaction commits. So the thread notifies
in a separate transaction, which writes no data and need not wait for the disk. A busy sender
notifies only every `NOTIFY_SECONDS`. The notification names the queues of the messages, so
listeners need not query the server for the names.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg import errors

from qdo.broker_errors import PostgresqlBusyError, PostgresqlError
from qdo.brokers.app_transactions import executor_of
from qdo.brokers.base import Outgoing
from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.brokers.streams import keyless_error, sealed_error, taken_error
from qdo.encoding import with_header
from qdo.encryption.marks import IdMarks
from qdo.errors import FailureKind, QdoError, QueueLimitError, RequestExistsError, UsageError
from qdo.positions import new_id, position_of_time
from qdo.postgresql.session import (
    PostgresqlConnection,
    PostgresqlSession,
    translated,
    with_lock_timeout,
)
from qdo.postgresql.url import SchemaAddress, connection_name
from qdo.refusals import failure_kind

T = TypeVar("T")
log = logging.getLogger(__name__)
# The work of a call: messages without options, or other work.
Work: TypeAlias = "Sequence[Outgoing] | Change | GroupedWork"
NOTIFY_SECONDS = 0.002
# The longest payload of a notification.
PAYLOAD_BYTES = 7999
# The time for which a call waits for the lock of its queue.
LOCK_SECONDS = 10.0
# The time for which one attempt waits for a lock. Meanwhile, calls for other queues wait.
GROUP_LOCK_SECONDS = 0.5
# The time for which each call waits for a lock if the thread makes the calls of a group separately.
ALONE_LOCK_SECONDS = 0.02
# The value of `queues` for unknown queues; no queue has this name.
UNKNOWN = frozenset({""})
# The name for an app's requests in a notification; no queue can have this name.
REQUESTS = "."
# The SQLSTATE of the error that `lock_queues` raises.
TOO_MANY_QUEUES = "QD001"
# The SQLSTATE of the error that `ask_requests` raises.
REQUEST_EXISTS = "QD004"
# The errors that `add_shards` and `route` raise for a queue, by SQLSTATE.
OF_SHARDS: dict[str, Callable[[str], QdoError]] = {
    "QD005": sealed_error,
    "QD006": keyless_error,
    "QD007": taken_error,
}
_SECOND = 10_000_000
# The arrays of names, keys, headers, bodies, ids, due times, deduplication keys and windows.
ARRAYS = (
    "%b::text[], %b::text[], %b::text[], %b::bytea[],"
    " %b::text[], %b::bigint[], %b::text[], %b::bigint[]"
)
# The SQLSTATE of the error that `stage` raises.
OTHER_SCHEMA = "QD002"
_NO_SCHEMA = (errors.UndefinedFunction, errors.InvalidSchemaName)
_STATES = (
    (errors.ReadOnlySqlTransaction, "is read-only; send in one that may write, on the primary"),
    (errors.InFailedSqlTransaction, "has failed; roll it back, and send in the next one"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """A call that needs a separate transaction."""

    # A function of the connection. After a rollback, the writer may call it again.
    act: Callable[[PostgresqlConnection], Any]
    # The queues that the transaction locks; `UNKNOWN` if the caller does not name the queues.
    queues: frozenset[str]
    # The queues to name in the notification; see `notification`.
    told: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupedWork:
    """The part of one call in a statement for several calls."""

    # A function of the connection, the parts of all calls, and the maximum wait for a lock in
    # milliseconds, which returns the results of the calls.
    act: Callable[[PostgresqlConnection, list[Any], int], list[Any]]
    part: Any
    # Parts with the same text do not share a statement; None: no limit.
    alone: str | None
    queues: frozenset[str]
    told: frozenset[str]


class _Held(NamedTuple):
    """A call that waits for the lock of a queue."""

    call: GroupedCall[Work]
    queues: frozenset[str]
    # The time at which the call fails with `error`, by time.monotonic().
    deadline: float
    error: BaseException


class PostgresqlWriter(GroupedCalls[Work]):
    """The writes of one process for one app; `limit` returns the limit of queues to set.

    :param check: a function of each new connection, which raises an error for an unusable schema.
    """

    def __init__(
        self,
        address: SchemaAddress,
        app: str,
        limit: Callable[[], int | None],
        check: Callable[[PostgresqlConnection], None],
    ) -> None:
        super().__init__("writer")
        self._app = app
        self._limit = limit
        self._check = check
        name = connection_name(app, "writer")
        self._session = PostgresqlSession(address, self._prepare, name=name)
        self._address = address
        schema = address.schema
        self._append = f"SELECT {schema}.append(%s, %b::text[], %b::text[], %b::text[], %b, %s)"
        self._set_limit = f"SELECT {schema}.limit_queues(%s, %s)"
        self._notify = f"SELECT pg_notify({schema}.channel(%s), %s)"
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
        told: frozenset[str] = UNKNOWN,  # `act` may delay messages, or delete queues
    ) -> T:
        """Run `act` with the connection in autocommit mode, and return its result."""
        result: T = self.call(Change(act, queues, told), size)
        return result

    # --- on the writing thread --------------------------------------------------------

    def _prepare(self, connection: PostgresqlConnection) -> None:
        self._check(connection)
        if not self._address.pooled:
            connection.execute(f"SET lock_timeout = {round(GROUP_LOCK_SECONDS * 1000)}")
        if (limit := self._limit()) is not None:
            with contextlib.suppress(errors.InsufficientPrivilege):  # a sender's role
                connection.execute(self._set_limit, (self._app, limit))

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
        for group in _groups(calls):
            self._write_together(group)
        for call in calls:
            if isinstance(call.work, Change):
                self._keep_or_fail(call, self._changed(call))

    def _write_together(self, calls: list[GroupedCall[Work]]) -> None:
        """Handle calls in one statement; if the statement fails, handle the calls one by one."""
        error = self._together(calls, GROUP_LOCK_SECONDS)
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
            own = self._together([call], ALONE_LOCK_SECONDS)
            self._keep_or_fail(call, own)
            if own is not None and not _is_of_one(own):  # for example, the connection is lost
                for group in _groups(calls[number:]):
                    self._write_together(group)
                return

    def _together(
        self, calls: list[GroupedCall[Work]], lock_seconds: float
    ) -> BaseException | None:
        """Handle calls in one transaction; return the error, or None on success."""
        works: list[Any] = [call.work for call in calls]
        act = self._shared if isinstance(works[0], GroupedWork) else self._appended
        lock_ms = round(lock_seconds * 1000)
        try:
            results = self._session.run(
                lambda connection: act(connection, works, lock_ms), writes=True
            )
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            return refusal(error)
        self.commits += 1
        for call, result in zip(calls, results, strict=True):
            call.finish(result)
        return None

    def _appended(
        self, connection: PostgresqlConnection, works: list[Sequence[Outgoing]], lock_ms: int
    ) -> list[Any]:
        """Append the messages of calls; return the positions of each call's messages."""
        messages = [message for work in works for message in work]
        query = (self._app, *columns(messages), lock_ms)
        (first,) = connection.execute(self._append, query).fetchone() or (0,)
        self._unannounced.update(message.queue for message in messages)
        ends = list(itertools.accumulate(map(len, works), initial=int(first)))
        return list(itertools.starmap(range, itertools.pairwise(ends)))

    def _shared(
        self, connection: PostgresqlConnection, works: list[GroupedWork], lock_ms: int
    ) -> list[Any]:
        results = works[0].act(connection, [work.part for work in works], lock_ms)
        self._unannounced.update(*(work.told for work in works))
        return results

    def _changed(self, call: GroupedCall[Work]) -> BaseException | None:
        change: Change = call.work  # type: ignore[assignment]
        try:
            result = self._session.run(
                lambda connection: self._limited(connection, change), writes=True
            )
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            return refusal(error)
        self.commits += 1
        self._unannounced |= change.told
        call.finish(result)
        return None

    def _limited(self, connection: PostgresqlConnection, change: Change) -> Any:
        if not self._address.pooled:
            return change.act(connection)  # the session sets the lock timeout
        return with_lock_timeout(connection, change.act, GROUP_LOCK_SECONDS)

    def _is_held(self, work: Work) -> bool:
        queues = _queues(work)
        return any(queues & held.queues for held in self._held)

    def _keep(self, call: GroupedCall[Work], error: BaseException) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        self._held.append(_Held(call, _queues(call.work), deadline, error))

    def _keep_or_fail(self, call: GroupedCall[Work], error: BaseException | None) -> None:
        if isinstance(error, PostgresqlBusyError):
            self._keep(call, error)
        elif error is not None:
            call.fail(error)

    def _keep_held(self, calls: list[GroupedCall[Work]]) -> list[GroupedCall[Work]]:
        """Keep the calls for locked queues; return all other calls."""
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
        """Try the first waiting call; unless it must wait again, try the calls for its queues."""
        first, *rest = self._held
        same = [held for held in rest if held.queues == first.queues]
        others = [held for held in rest if held.queues != first.queues]
        if isinstance(first.call.work, Change):
            error = self._changed(first.call)
        else:
            error = self._together([first.call], GROUP_LOCK_SECONDS)
        if isinstance(error, PostgresqlBusyError):
            self._held = [*others, first, *same]  # the next attempt is for another queue
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
        """Notify listeners; while calls wait, notify at most once every `NOTIFY_SECONDS`."""
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
            pass  # listeners look without it, and the next call reports a lost connection
        except QdoError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s; until then, workers notice messages of this process late", error)


def notification(queues: Set[str]) -> str:
    """Return a payload that names queues; "" if it is too long or the queues are unknown."""
    # A payload that begins with `REQUESTS` also reports requests.
    head = f"/{REQUESTS}" if REQUESTS in queues else ""
    rest = head and f"{head}/"
    if len(queues) > PAYLOAD_BYTES // 2 or not UNKNOWN.isdisjoint(queues):
        return rest
    payload = head + "".join(f"/{queue}" for queue in queues if queue != REQUESTS)
    return payload if len(payload.encode()) <= PAYLOAD_BYTES else rest


def _groups(calls: list[GroupedCall[Work]]) -> list[list[GroupedCall[Work]]]:
    """Return groups of calls that share a statement; omit calls of the class `Change`."""
    groups: dict[Any, list[GroupedCall[Work]]] = {}
    alone: Counter[tuple[Any, str]] = Counter()
    for call in calls:
        if isinstance(call.work, GroupedWork):
            own = call.work.act, call.work.alone or str(id(call))
            groups.setdefault((call.work.act, alone[own]), []).append(call)
            alone[own] += 1
        elif not isinstance(call.work, Change):
            groups.setdefault(None, []).append(call)
    return list(groups.values())


def _queues(work: Work) -> frozenset[str]:
    if isinstance(work, Change | GroupedWork):
        return work.queues
    return frozenset(message.queue for message in work)


def _is_of_one(error: BaseException) -> bool:
    """Return whether another call of the same group may succeed."""
    return failure_kind(error) is not FailureKind.UNREACHABLE


def refusal(error: BaseException) -> BaseException:
    """Translate an error into the documented error of `App.send`."""
    cause = error.__cause__
    if not isinstance(cause, errors.Error):
        return error
    if cause.sqlstate == TOO_MANY_QUEUES:
        limit = int(cause.diag.message_hint or 0)
        return QueueLimitError(queue=cause.diag.message_detail, limit=limit)
    if cause.sqlstate == REQUEST_EXISTS:
        return RequestExistsError(id=cause.diag.message_detail)
    if cause.sqlstate in OF_SHARDS:
        return OF_SHARDS[cause.sqlstate](str(cause.diag.message_detail))
    return error


def columns(messages: Sequence[Outgoing]) -> tuple[Any, Any, Any, list[bytes]]:
    """Return arrays of names, keys, headers and bodies; None for an array of only None."""
    keys = [message.key for message in messages]
    headers = [message.headers for message in messages]
    return (
        [message.queue for message in messages],
        keys if any(key is not None for key in keys) else None,
        headers if any(each is not None for each in headers) else None,
        [message.body for message in messages],
    )


def send_work(
    schema: str, app: str, messages: Sequence[Outgoing], marks: IdMarks | None
) -> Callable[[PostgresqlConnection], list[str]]:
    """Return work that sends messages with options in order and returns their ids."""
    statement = f"SELECT {schema}.send(%s, {ARRAYS}, %s)"
    parameters = (app, *arrays_of(messages, marks), None)

    def work(connection: PostgresqlConnection) -> list[str]:
        (ids,) = connection.execute(statement, parameters).fetchone() or ([],)
        return list(ids)

    return work


def execute_within(
    connection: Any, address: SchemaAddress, statement: str, parameters: Sequence[Any]
) -> Any:
    """Execute a statement in the transaction of an app's connection; return the cursor.

    :raises UsageError: the connection is not from psycopg, or is to another database.
    """
    execute, driver = executor_of(connection)
    if driver.info.encoding != "utf-8":
        raise UsageError(
            reason="the client_encoding of the connection must be UTF8, got "
            f"{driver.info.encoding}; set it when you connect"
        )
    try:
        return execute(statement, parameters)
    except Exception as error:
        found = getattr(error, "orig", error)  # SQLAlchemy wraps the errors of psycopg
        if not isinstance(found, psycopg.Error):
            raise
        if found.sqlstate == OTHER_SCHEMA or isinstance(found, _NO_SCHEMA):
            raise UsageError(
                reason="the connection must be to the database of the app's broker, "
                f"{address.server}, got another; use a qdo.outbox.Outbox there"
            ) from error
        for kind, state in _STATES:
            if isinstance(found, kind):
                raise UsageError(reason=f"the connection's transaction {state}") from error
        raise translated(address, found, driver.info.user) from found


def arrays_of(
    messages: Sequence[Outgoing], marks: IdMarks | None, *, with_ids: bool = False
) -> tuple[Any, ...]:
    """Return the arrays for `send` and `stage`; with `with_ids`, every message gets an id."""
    # A delayed message has no position yet, so it gets a random id in a header. Only the server
    # knows whether a message is due, because the clocks may differ.
    ids: list[str | None] = []
    dues: list[int | None] = []
    headers: list[str | None] = []
    for message in messages:
        due = None if message.terms is None else _ticks(message.terms.due)
        own = new_id() if due is not None or with_ids else None
        ids.append(own)
        dues.append(due)
        head = message.headers if own is None else with_header(message.headers, qdo_id=own)
        if own is not None and marks is not None:
            head = marks.marked(message.queue, head, message.body)
        headers.append(head)
    names, keys, _, bodies = columns(messages)
    terms = [message.terms for message in messages]
    dedup_keys = [None if each is None else each.dedup_key for each in terms]
    windows = [None if each is None else round(each.dedup_seconds * _SECOND) for each in terms]
    return (
        names, keys, _sparse(headers), bodies, _sparse(ids), _sparse(dues), _sparse(dedup_keys),
        _sparse(windows),
    )  # fmt: skip


def _ticks(due: float | None) -> int | None:
    """Return the position of a due time; a negative result is a delay in ticks."""
    if due is None or due >= 0:
        return None if due is None else position_of_time(due)
    return round(due * _SECOND)


def _sparse(values: list[Any]) -> list[Any] | None:
    """Return the array, or None if all its values are None."""
    return values if any(value is not None for value in values) else None

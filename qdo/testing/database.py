"""Uses the database of an app under test: holds sends in transactions, and finds old writes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

from qdo.brokers.base import Outgoing
from qdo.brokers.django_connections import django_connection
from qdo.brokers.requests import NewRequest
from qdo.errors import UsageError
from qdo.idempotency import FencedWrites, ProcessedMessages, SqlSession, Write
from qdo.message import Message
from qdo.state import KeyedState


class StagedMessages:
    """Holds messages and requests that an app sends in transactions until these commit.

    Each transaction sends a notification. PostgreSQL delivers the notification only if the
    transaction commits, and drops notifications after a rollback to a savepoint. A test does not
    need qdo's schema.

    Django calls a function at each commit, with every database. The transaction of a `TestCase`
    never commits. In it, the end of the outermost `atomic` of the app counts as the commit.
    """

    def __init__(self) -> None:
        self._channel = f"qdo_kit_{secrets.token_hex(8)}"
        self._count = 0
        self._staged: dict[str, Sequence[Outgoing | NewRequest]] = {}
        self._heard: list[str] = []
        self._listener: Any = None
        self._wrappers: dict[str, Any] = {}

    def stage(self, connection: Any, messages: Sequence[Outgoing | NewRequest]) -> None:
        """Hold messages or requests until the transaction of a connection commits."""
        self._count += 1
        number = str(self._count)
        wrapper = django_connection(connection)
        if wrapper is not None:
            self._staged[number] = messages
            self._wrappers[wrapper.alias] = wrapper
            wrapper.on_commit(partial(self._heard.append, number))
            return
        try:
            from qdo.brokers.app_transactions import executor_of
        except ImportError as error:
            raise UsageError(reason=f"connection= requires psycopg: {error}") from error
        execute, driver = executor_of(connection)
        if self._listener is None:
            self._listener = self._listen(driver.info)
        execute("SELECT pg_notify(%s, %s)", (self._channel, number))
        self._staged[number] = messages

    def committed(self) -> list[Outgoing | NewRequest]:
        """Return the messages and requests of new commits, in the order of the commits."""
        if self._listener is not None:
            # Notifications arrive in commit order, so notifications of earlier commits arrive
            # before this notification.
            self._listener.execute("SELECT pg_notify(%s, '')", (self._channel,))
            while "" not in self._heard:
                self._listener.execute("SELECT 1")
        self._end_transactions_of_tests()
        # Django's captureOnCommitCallbacks calls a function again.
        found = [self._staged.pop(each, ()) for each in self._heard]
        self._heard.clear()
        return [message for messages in found for message in messages]

    def _end_transactions_of_tests(self) -> None:
        for wrapper in self._wrappers.values():
            # Django marks the blocks of TestCase for `atomic(durable=True)`.
            if all(getattr(each, "_from_testcase", False) for each in wrapper.atomic_blocks):
                for _, call, _ in wrapper.run_on_commit:
                    if getattr(call, "func", None) == self._heard.append:
                        call()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self, info: Any) -> Any:
        import psycopg

        parameters = {**info.get_parameters(), "password": info.password}
        listener = psycopg.connect(autocommit=True, **parameters)
        listener.add_notify_handler(lambda notify: self._heard.append(notify.payload))
        listener.execute(f"LISTEN {self._channel}")
        return listener


Fail: TypeAlias = Callable[[Exception], NoReturn]
_admit = FencedWrites.admit
_record = ProcessedMessages.record
_decide = KeyedState._decide
_watches: list[WritesWatch] = []


class WritesWatch:
    """Ends a test if its database contains writes of an earlier test.

    Positions, fences and ids are the same in each test. Therefore `FencedWrites`, `KeyedState` and
    `ProcessedMessages` would mistake the first messages for repetitions, and the job would silently
    write nothing.

    :param running: a function that returns the function to end the run, or None while no job runs.
    """

    def __init__(self, running: Callable[[], Fail | None]) -> None:
        self._running = running
        self._admitted: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._recorded: set[tuple[str, str, str]] = set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        _watches.append(self)
        FencedWrites.admit = _watched_admit  # type: ignore[method-assign]
        ProcessedMessages.record = _watched_record  # type: ignore[method-assign]
        KeyedState._decide = _watched_decide  # type: ignore[method-assign]
        try:
            yield
        finally:
            _watches.remove(self)
            if not _watches:
                FencedWrites.admit = _admit  # type: ignore[method-assign]
                ProcessedMessages.record = _record  # type: ignore[method-assign]
                KeyedState._decide = _decide  # type: ignore[method-assign]

    def admitted(self, table: str, message: Message, part: str, write: Write) -> None:
        row = table, message.queue, part
        fence, position = self._admitted.get(row, (0, 0))
        own = fence > message.fence if write is Write.STALE else position >= message.position
        self._judge(own or bool(write), table, message)
        if write:
            position = max(position, message.position)
        self._admitted[row] = max(fence, message.fence), position

    def recorded(self, table: str, message: Message, new: bool) -> None:
        row = table, message.queue, message.id
        self._judge(new or row in self._recorded, table, message)
        self._recorded.add(row)

    def _judge(self, own: bool, table: str, message: Message) -> None:
        fail = self._running()
        if fail is not None and not own:
            fail(
                UsageError(
                    reason=f"table {table} must have no rows of an earlier test, got one of queue "
                    f"{message.queue!r}: positions, fences and ids are the same in each test; "
                    "delete its rows before each"
                )
            )


def _watched_admit(
    self: FencedWrites, session: SqlSession, message: Message, part: str = ""
) -> Write:
    write = _admit(self, session, message, part)
    for watch in _watches:
        watch.admitted(self.table, message, part, write)
    return write


def _watched_decide(
    self: KeyedState, session: SqlSession, message: Message, row: dict[str, str]
) -> Any:
    decided = _decide(self, session, message, row)
    for watch in _watches:
        watch.admitted(self.table, message, f"{row['name']}/{message.priority}", decided[0])
    return decided


def _watched_record(self: ProcessedMessages, session: SqlSession, message: Message) -> bool:
    new = _record(self, session, message)
    for watch in _watches:
        watch.recorded(self.table, message, new)
    return new

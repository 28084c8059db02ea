"""Sends messages if, and only if, the app's own SQL transaction commits.

A process may die between a commit and a `send`. Then an order is stored without its message, or a
message is sent without its order. With an outbox, the app writes the message as a row in its
transaction. After the commit, the leader among the workers sends the message and deletes the row.

=================================  ======================================================
the relay dies                     consequence
=================================  ======================================================
before it sends                    its successor sends
between sending and deleting       its successor sends again; the broker recognizes the row's
                                   id as the message's deduplication key and stores nothing
=================================  ======================================================

The same applies to two relays at the same time, for example when a frozen relay resumes after its
successor has started.

If the broker refuses a row, the row stays in the table with the reason, and the relay sends later
rows. Apps may share a table. Each app relays only its own rows.

An outbox needs SQLAlchemy (``pip install 'qdo-queues[sql]'``), and a broker that deduplicates.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    String,
    Table,
    Text,
    and_,
    case,
    delete,
    func,
    insert,
    inspect,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateColumn

from qdo.app import App
from qdo.brokers.base import LASTING_DEDUP_SECONDS, Broker, Outgoing, SendOptions
from qdo.brokers.outgoing import check_text
from qdo.brokers.registry import kind_of
from qdo.encoding import with_header
from qdo.encryption.marks import IdMarks
from qdo.errors import UsageError
from qdo.message import NORMAL
from qdo.positions import new_id, position_now, time_of_position
from qdo.refusals import send_each
from qdo.sending.messages import (
    Moment,
    NewMessage,
    build_outgoing,
    check_size,
    encrypted,
    time_text,
    with_defaults,
)
from qdo.settings.vaults import marks_of
from qdo.text import describe

__all__ = ["Outbox"]

_log = logging.getLogger(__name__)

BATCH = 500
# Maximum number of rows, and maximum size of their bodies, in one send. A single body may be
# larger.
BATCH_BYTES = 16 * 1024 * 1024


class Outbox:
    """A table of messages to send, in the database of an app.

    The constructor registers the outbox with the app, whose workers then relay its messages.

    :param engine: SQLAlchemy engine with which workers read the table.
    :param table: name of the table.
    :param metadata: the app's `MetaData`. The code that creates the app's tables then also creates
        this table.
    :param clock: a function that returns the Unix time in seconds.
    """

    def __init__(
        self,
        app: App,
        engine: Engine,
        *,
        table: str = "qdo_outbox",
        metadata: MetaData | None = None,
        clock: Callable[[], float] = lambda: time_of_position(position_now()),
    ) -> None:
        self._app = app
        self._engine = engine
        self._clock = clock
        self.table = _table(table, MetaData() if metadata is None else metadata)
        """SQLAlchemy's `Table`."""
        self._is_current = False
        self._changed = False
        app.outboxes.append(self)

    def create(self, session: Session | Connection) -> None:
        """Create the table unless it exists. Call this method where the app creates its own tables.

        The call adds missing columns to a table of an older version.
        """
        connection = session.connection() if isinstance(session, Session) else session
        self.table.create(connection, checkfirst=True)
        self._add_columns(connection)

    def _add_columns(self, connection: Connection) -> None:
        inspector = None if self._is_current else inspect(connection)
        if inspector is None or not inspector.has_table(self.table.name, self.table.schema):
            return
        stored = inspector.get_columns(self.table.name, self.table.schema)
        names = {each["name"] for each in stored}
        table = connection.dialect.identifier_preparer.format_table(self.table)
        for column in self.table.columns:
            if column.name not in names:
                self._changed = True
                new = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {new}"))
        self._is_current = not self._changed  # a rollback may undo a change

    def send(
        self,
        session: Session | Connection,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        delay_seconds: float | None = None,
        at: Moment | None = None,
        priority: int = NORMAL,
        kind: str | None = None,
    ) -> str:
        """Send a message after the transaction of the session commits; return the message's id.

        Parameters and errors are the same as for `App.send`. Messages of one transaction, and of
        consecutive transactions, keep their order.

        :raises UsageError: the session is not a SQLAlchemy session, or for a reason of `App.send`.
        """
        if not isinstance(session, Session | Connection):
            raise UsageError(
                reason="the session must be a Session or Connection of SQLAlchemy, got "
                f"{type(session).__name__}; for an AsyncSession use the session from run_sync"
            )
        new = NewMessage(queue, body, key, headers, delay_seconds, at, priority=priority, kind=kind)
        message = build_outgoing(new, self._app.type_of)
        (message,) = with_defaults([message], self._app.default_headers)
        app = self._app
        check_size(message, app.settings.max_body_bytes)
        check_text(message, kind_of(app.settings.broker).stores_nul)
        (message,) = encrypted([message], app.settings, app.name, app._stream_of)
        id = new_id()
        sent = time_text(time_of_position(position_now()))
        options = message.terms
        row = insert(self.table).values(
            app=self._scope,
            id=id,
            queue=message.queue,
            key=message.key,
            headers=with_header(message.headers, qdo_sent=sent),
            body=message.body,
            due=None if options is None else options.due_at(self._clock()),
        )
        self._add_columns(session.connection() if isinstance(session, Session) else session)
        session.execute(row)
        return id

    def relay(self, broker: Broker) -> int:
        """Send the oldest due rows and delete them; return the number of these rows.

        Set aside and count rows that the broker refuses. Raise errors of the database, and errors
        for which the broker accepts no row at all. The rows then stay.
        """
        count = 0
        held = set[str]()
        busy: Exception | None = None
        marks = marks_of(self._app.settings, self._app.name, broker.stream_of)
        while rows := self._oldest(list(held)):
            sent = send_each(
                rows,
                lambda some: broker.send_many([_outgoing(row, marks) for row in some]),
                lambda row: row.queue,
            )
            self._delete([row.place for row, _ in sent.done])
            self._set_aside(sent.refused)
            count += len(sent.done) + len(sent.refused)
            if sent.ended is not None:
                raise sent.ended
            if not sent.held:
                break
            held |= {row.queue for row, _ in sent.held}
            busy = sent.held[0][1]
        if busy is not None and not count:
            raise busy
        return count

    def refused(self) -> Sequence[Any]:
        """Return the rows that were set aside, the oldest first."""
        columns = self.table.c
        query = select(columns.id, columns.queue, columns.key, columns.refused)
        query = query.where(self._own, columns.refused.is_not(None)).order_by(columns.place)
        with self._engine.connect() as connection:
            self._add_columns(connection)
            return connection.execute(query).all()

    def counts(self, newest: int = 0) -> tuple[int, int, int]:
        """Return the number of waiting rows, the number of rows set aside, and the last place.

        :param newest: the last place from an earlier call. Only rows up to this place count as
            waiting, because later rows may be new.
        """
        columns = self.table.c
        is_due = or_(columns.due.is_(None), columns.due <= self._clock())
        waits = and_(columns.refused.is_(None), is_due, columns.place <= newest)
        query = select(
            func.count(case((waits, 1))),
            func.count(columns.refused),
            func.coalesce(func.max(columns.place), 0),
        ).where(self._own)
        with self._engine.connect() as connection:
            self._add_columns(connection)
            waiting, refused, last = connection.execute(query).one()
        return waiting, refused, last

    def retry(self, ids: Collection[str]) -> None:
        """Retry rows that were set aside."""
        rows = update(self.table).where(self._own, self.table.c.id.in_(ids))
        with self._engine.begin() as connection:
            connection.execute(rows.values(refused=None))

    def drop(self, ids: Collection[str]) -> None:
        """Delete rows that were set aside."""
        columns = self.table.c
        rows = delete(self.table).where(self._own, columns.id.in_(ids))
        with self._engine.begin() as connection:
            connection.execute(rows.where(columns.refused.is_not(None)))

    @property
    def _scope(self) -> str:
        return self._app.settings.scope(self._app.name)

    @property
    def _own(self) -> Any:
        """Condition for rows of the app. Old rows without an app belong to the first relay."""
        return or_(self.table.c.app == self._scope, self.table.c.app.is_(None))

    def next_due(self) -> float | None:
        """Return the Unix time at which the first delayed row is due, or None."""
        columns = self.table.c
        query = select(func.min(columns.due)).where(self._own, columns.refused.is_(None))
        with self._engine.connect() as connection:
            due: float | None = connection.execute(query).scalar()
        return due

    def _oldest(self, held: Collection[str] = ()) -> Sequence[Any]:
        """Return the oldest due rows, except for the rows of held queues."""
        columns = self.table.c
        is_due = or_(columns.due.is_(None), columns.due <= self._clock())
        sizes = select(columns.place, func.length(columns.body).label("size")).where(
            self._own, is_due, columns.refused.is_(None), columns.queue.not_in(held)
        )
        with self._engine.begin() as connection:
            self._add_columns(connection)
            oldest = connection.execute(sizes.order_by(columns.place).limit(BATCH)).all()
            chosen = _fitting((row.place, row.size) for row in oldest)
            if not chosen:
                return []
            rows = select(self.table).where(columns.place.in_(chosen)).order_by(columns.place)
            try:
                return connection.execute(rows).all()
            except OperationalError as error:
                if not _is_unreadable(error):
                    raise
        return [row for place in chosen for row in self._readable(place)]

    def _readable(self, place: int) -> Sequence[Any]:
        """Return a list with a row. Set an unreadable row aside, and return an empty list."""
        columns = self.table.c
        own = columns.place == place
        try:
            return self._read(select(self.table).where(own))
        except OperationalError as error:
            if not _is_unreadable(error):  # an outage: the row stays unchanged
                raise
            reason = f"the row cannot be read: {describe(error)}"
        changes: dict[str, str | None] = {"refused": reason}
        listed = {"id": f"place-{place}", "queue": "?", "key": None}
        for name, replacement in listed.items():
            try:
                self._read(select(columns[name]).where(own))
            except OperationalError as error:
                if not _is_unreadable(error):
                    raise
                changes[name] = replacement  # `refused` lists this column
        with self._engine.begin() as connection:
            connection.execute(update(self.table).where(own).values(**changes))
        self._log_refused(listed["id"], "?", reason)
        return []

    def _read(self, query: Select[Any]) -> Sequence[Any]:
        with self._engine.connect() as connection:
            return connection.execute(query).all()

    def _delete(self, places: Sequence[int]) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(self.table).where(self.table.c.place.in_(places)))

    def _set_aside(self, rows: Iterable[tuple[Any, Exception]]) -> None:
        for row, error in rows:
            reason = describe(error)
            with self._engine.begin() as connection:
                one = update(self.table).where(self.table.c.place == row.place)
                connection.execute(one.values(refused=reason))
            self._log_refused(row.id, row.queue, reason)

    def _log_refused(self, id: str | None, queue: str, reason: str) -> None:
        _log.error(
            "message %s of queue %s stays in %s, because it is refused; later messages are sent;"
            " `qdo admin outbox retry` or `qdo admin outbox drop` it: %s",
            id,
            queue,
            self.table.name,
            reason,
        )


def _table(name: str, metadata: MetaData) -> Table:
    # SQLite increments a primary key automatically only if its type is exactly INTEGER.
    number = BigInteger().with_variant(Integer, "sqlite")
    return Table(
        name,
        metadata,
        Column("place", number, primary_key=True, autoincrement=True),
        Column("id", String(36), nullable=False),
        Column("queue", String(200), nullable=False),
        Column("key", Text),
        Column("headers", Text),
        Column("body", LargeBinary, nullable=False),
        Column("due", Float(53)),
        Column("app", Text),
        Column("refused", Text),
        # Never reuse numbers, because a late delete must not remove a new row.
        sqlite_autoincrement=True,
    )


def _is_unreadable(error: OperationalError) -> bool:
    """Return whether SQLite has stored text that is not UTF-8, an error without its own code."""
    return isinstance(error.orig, sqlite3.OperationalError) and "decode" in str(error.orig)


def _fitting(sizes: Iterable[tuple[int, int]]) -> list[int]:
    """Return the first rows whose bodies together fit the limit, but at least one row."""
    chosen: list[int] = []
    total = 0
    for place, size in sizes:
        total += size
        if chosen and total > BATCH_BYTES:
            break
        chosen.append(place)
    return chosen


def _outgoing(row: Any, marks: IdMarks | None) -> Outgoing:
    headers = with_header(row.headers, qdo_id=row.id)
    body = bytes(memoryview(row.body))  # bytes(number) would return NULs
    if marks is not None:
        headers = marks.marked(row.queue, headers, body)
    options = SendOptions(dedup_key=row.id, dedup_seconds=LASTING_DEDUP_SECONDS)
    return Outgoing(row.queue, body, row.key, headers, options)

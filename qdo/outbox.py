"""Messages that are sent if, and only if, the app's own SQL transaction is committed.

Between a commit and a `send` a process may die: the order is stored and nobody is told, or the
other way round. With an outbox a message is a row that is written in the transaction of the app;
once it is committed a worker, the elected one, sends it and deletes the row.

=================================  ======================================================
the relay dies                     what follows
=================================  ======================================================
before it sends                    its successor sends
between sending and deleting       its successor sends again, and the broker knows the row's
                                   id as the message's deduplication key: nothing is stored
=================================  ======================================================

So do two relays at once, such as one that was frozen and does not know its successor yet.

Needs SQLAlchemy (``pip install 'qdo[sql]'``), and a broker that deduplicates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy.orm import Session

from qdo.app import App
from qdo.brokers.base import Broker, Outgoing, Terms
from qdo.brokers.embedded import EmbeddedBroker
from qdo.describe import describe
from qdo.errors import MessageTooLargeError, UnsupportedError, UsageError
from qdo.headers import with_header
from qdo.message import new_id
from qdo.sending import Moment, outgoing

_log = logging.getLogger(__name__)

DEDUP_SECONDS = 604_800.0
"""How long the broker knows a message again: that a relay may be away between two steps."""
BATCH = 500
BATCH_BYTES = 16 * 1024 * 1024
"""Rows, and bytes of bodies, that are sent at once; a single body may be larger."""

LOOK_SECONDS = 0.1
"""How often those who do not lead look whether they do now: a question to the own memory."""
POLL_SECONDS = 0.5
"""How often the leader looks for new rows."""
RETRY_SECONDS = 5.0
"""Pause after an error of the database or the broker."""


class Outbox:
    """A table of messages to be sent, in the database of an app.

    Making one registers it: the workers of the app relay what is in it.

    :param engine: SQLAlchemy's, with which workers read the table.
    :param table: its name.
    :param metadata: the app's `MetaData`, so that what makes its tables makes this one.
    :param clock: Unix time in seconds.
    """

    def __init__(
        self,
        app: App,
        engine: Engine,
        *,
        table: str = "qdo_outbox",
        metadata: MetaData | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self.table = _table(table, MetaData() if metadata is None else metadata)
        """SQLAlchemy's `Table`."""
        app.relay(self)

    def create(self, session: Session | Connection) -> None:
        """Make the table unless it exists; call it where the app makes its own."""
        connection = session.connection() if isinstance(session, Session) else session
        self.table.create(connection, checkfirst=True)

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
    ) -> str:
        """Send a message once the transaction of the session is committed; return its id.

        Parameters and errors are those of `App.send`. Messages of one transaction keep their
        order, and those of transactions that follow each other.

        :raises UsageError: the session is none of SQLAlchemy's; see also `App.send`.
        """
        if not isinstance(session, Session | Connection):
            raise UsageError(
                reason=f"{type(session).__name__} is no Session or Connection of SQLAlchemy; of "
                "an AsyncSession pass on what run_sync gives"
            )
        message = outgoing(queue, body, key, headers, delay_seconds=delay_seconds, at=at)
        limit = EmbeddedBroker.capabilities.max_body_bytes
        if len(message.body) > limit:
            raise MessageTooLargeError(queue=queue, size=len(message.body), limit=limit)
        id = new_id()
        row = {
            "id": id,
            "queue": message.queue,
            "key": message.key,
            "headers": message.headers,
            "body": message.body,
            "due": None if message.terms is None else message.terms.due,
        }
        session.execute(insert(self.table).values(**row))
        return id

    def relay(self, broker: Broker) -> int:
        """Send the oldest rows that are due, and delete them; return how many they were.

        :raises: what the database or the broker raises; the rows stay.
        """
        rows = self._oldest()
        if rows:
            broker.send_many([_outgoing(row) for row in rows])
            self._delete([row.place for row in rows])
        return len(rows)

    def _oldest(self) -> Sequence[Any]:
        columns = self.table.c
        due = or_(columns.due.is_(None), columns.due <= self._clock())
        sizes = select(columns.place, func.length(columns.body).label("size")).where(due)
        with self._engine.connect() as connection:
            found = connection.execute(sizes.order_by(columns.place).limit(BATCH)).all()
            chosen = _fitting((row.place, row.size) for row in found)
            if not chosen:
                return []
            wanted = select(self.table).where(columns.place.in_(chosen)).order_by(columns.place)
            return connection.execute(wanted).all()

    def _delete(self, places: Sequence[int]) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(self.table).where(self.table.c.place.in_(places)))


def _table(name: str, metadata: MetaData) -> Table:
    # SQLite counts up by itself only what is exactly an INTEGER.
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
        # Places are not given again: a late delete must not meet a new row.
        sqlite_autoincrement=True,
    )


def _fitting(sizes: Iterable[tuple[int, int]]) -> list[int]:
    """Return the first places whose bodies are small enough together, at least one."""
    chosen: list[int] = []
    total = 0
    for place, size in sizes:
        total += size
        if chosen and total > BATCH_BYTES:
            break
        chosen.append(place)
    return chosen


def _outgoing(row: Any) -> Outgoing:
    headers = with_header(row.headers, qdo_id=row.id)
    terms = Terms(dedup_key=row.id, dedup_seconds=DEDUP_SECONDS)
    return Outgoing(row.queue, bytes(row.body), row.key, headers, terms)


# --- the duty of the leader ---------------------------------------------------------


class Leader(Protocol):
    """What a relay needs of a member."""

    def is_leader(self) -> bool: ...


class Relay:
    """Empties the outboxes of an app while its member leads.

    :ivar quiet: whether the last look found every outbox empty, or is up to another worker.
    :raises UnsupportedError: the broker does not deduplicate, or not for long enough.
    """

    def __init__(self, outboxes: Sequence[Outbox], broker: Broker) -> None:
        can = broker.capabilities
        if not can.dedup or (can.dedup_seconds or DEDUP_SECONDS) < DEDUP_SECONDS:
            raise UnsupportedError(
                broker="this broker",
                what="relay an outbox: it does not deduplicate for "
                f"{DEDUP_SECONDS / 86_400:g} days",
                remedy="send with App.send after the commit",
            )
        self._outboxes = outboxes
        self._broker = broker
        self.quiet = False

    def step(self, member: Leader | None) -> float:
        """Relay what there is; return after how many seconds to look again."""
        if member is None or not member.is_leader():
            self.quiet = member is not None
            return LOOK_SECONDS
        results = [self._relayed(outbox) for outbox in self._outboxes]
        moved = sum(count for count in results if count is not None)
        self.quiet = not moved and None not in results
        if moved:
            _log.debug("%d messages relayed from the outbox", moved)
            return 0.0
        return RETRY_SECONDS if None in results else POLL_SECONDS

    def _relayed(self, outbox: Outbox) -> int | None:
        """Return how many rows were sent, None where that failed."""
        try:
            return outbox.relay(self._broker)
        except Exception as error:  # noqa: BLE001 - databases raise what their drivers raise
            _log.warning(
                "messages stay in %s, tried again in %g s: %s",
                outbox.table.name,
                RETRY_SECONDS,
                describe(error),
            )
            return None

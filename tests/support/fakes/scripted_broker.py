"""A broker in memory whose faults and delays the test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qdo.brokers.base import Broker, Capabilities, Outgoing
from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.dead_letters import DeadLetterRecord, DeadLetterStore

Rows = Sequence[tuple[int, bytes, "str | None", "str | None"]]


class ScriptedBroker(Broker):
    """Queues as lists; positions count up from 1 within each.

    :ivar fetches: (queue, limit) of every fetch.
    :ivar during_fetch: called within each fetch, before it looks.
    :ivar faults: raised by the next calls that read or bury, one each.
    """

    capabilities = Capabilities(
        ordered=True, seekable=True, countable=True, delay=False, peek=True, max_body_bytes=10**6
    )
    id_node = 1

    def __init__(self) -> None:
        self.stored: dict[str, list[tuple[int, bytes, str | None, str | None]]] = {}
        self.letters: list[DeadLetterRecord] = []
        self.fetches: list[tuple[str, int]] = []
        self.retired: list[tuple[str, int, float]] = []
        self.during_fetch: Callable[[], object] = lambda: None
        self.during_bury: Callable[[], object] = lambda: None
        self.faults: list[BaseException] = []
        self.catalog = ScriptedCatalog(self)
        self.dead_letters = ScriptedDeadLetters(self)

    def put(self, queue: str, *bodies: bytes, headers: str | None = None) -> None:
        rows = self.stored.setdefault(queue, [])
        for body in bodies:
            rows.append((len(rows) + 1, body, None, headers))

    def fail(self) -> None:
        if self.faults:
            raise self.faults.pop(0)

    def send(self, message: Outgoing) -> str:
        self.put(message.queue, message.body, headers=message.headers)
        return str(len(self.stored[message.queue]))

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        return [self.send(message) for message in messages]

    def reader(self, queue: str, after: int) -> _Reader:
        return _Reader(self, queue, after)

    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        return lambda: None

    def trim(self, queue: str, last: int, older_than: float) -> int:
        self.fail()
        self.retired.append((queue, last, older_than))
        return 0

    def close(self) -> None:
        """Nothing is held."""


class ScriptedCatalog(QueueCatalog):
    """The queues that have messages."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker

    def names(self) -> list[str]:
        self._broker.fail()
        return sorted(self._broker.stored)

    def backlog(self, queue: str, after: int) -> Backlog:
        rows = [row for row in self._broker.stored.get(queue, []) if row[0] > after]
        return Backlog(len(rows), rows[0][0] if rows else None, rows[-1][0] if rows else 0)


class ScriptedDeadLetters(DeadLetterStore):
    """The broker's list of dead letters."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker

    def store(self, record: DeadLetterRecord) -> None:
        self._broker.during_bury()
        self._broker.fail()
        self._broker.letters.append(record)

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        return [record for record in self._broker.letters if queue in (None, record.queue)]

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        raise NotImplementedError

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        raise NotImplementedError


class _Reader:
    def __init__(self, broker: ScriptedBroker, queue: str, after: int) -> None:
        self._broker = broker
        self._queue = queue
        self._after = after

    def fetch(self, limit: int) -> Rows:
        self._broker.fetches.append((self._queue, limit))
        self._broker.during_fetch()
        self._broker.fail()
        rows = [row for row in self._broker.stored.get(self._queue, []) if row[0] > self._after]
        rows = rows[:limit]
        if rows:
            self._after = rows[-1][0]
        return rows

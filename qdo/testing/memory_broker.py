"""An in-memory broker that passes the contract tests of brokers.

A `MemoryStore` replaces the file of the embedded broker: it outlives the processes that use it.
Several brokers on one store represent several processes that share one file.
"""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from qdo.broker_errors import UnusableBrokerError
from qdo.brokers.base import (
    Broker,
    DelayedMessage,
    DelayedMessages,
    Outgoing,
    Row,
    SendOptions,
)
from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.dead_letters import (
    DeadLetterRecord,
    DeadLetterStore,
    refused_when_due,
    retried_headers,
)
from qdo.brokers.grouped_calls import GroupCommitBroker
from qdo.brokers.outgoing import checked_size
from qdo.brokers.streams import StreamShard
from qdo.encoding import ID, parsed, utf8_text, with_header
from qdo.errors import QdoError
from qdo.positions import message_id, position_now, position_of_time, time_of_position
from qdo.queues import check_queue_name
from qdo.testing.memory_requests import MemoryRequests, RequestContents
from qdo.testing.memory_streams import MemoryStreams, dedup_place, routed

FETCH_BYTES = 16 * 1024 * 1024
"""A fetch ends at this total size of bodies, as in the embedded broker."""
_SECOND = 10_000_000
_SLACK = 10
"""Tolerance in units of 100 ns: a Unix time as a float has an error of a few units."""

ID_NODE = 0x02_00_00_00_00_01
"""A locally administered address, which no network card has."""

Wake = Callable[[Iterable[str]], None]


@dataclass(slots=True)
class _Queue:
    rows: list[Row] = field(default_factory=list)
    head: int = 0
    dead: dict[int, DeadLetterRecord] = field(default_factory=dict)
    sent: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Message id and end of the deduplication window, by deduplication key."""

    def behind(self, position: int) -> int:
        """Return the index of the first row after a position."""
        return bisect_right(self.rows, position, key=attrgetter("position"))


@dataclass(slots=True)
class _Delayed:
    number: int
    due: int
    id: str
    message: Outgoing


@dataclass(slots=True)
class Contents:
    """The queues, delayed messages, listeners and requests of an app."""

    queues: dict[str, _Queue] = field(default_factory=dict)
    delayed: list[_Delayed] = field(default_factory=list)
    listeners: list[Wake] = field(default_factory=list)
    requests: RequestContents = field(default_factory=RequestContents)
    shards: dict[str, StreamShard] = field(default_factory=dict)

    def queue(self, name: str) -> _Queue:
        return self.queues.setdefault(name, _Queue())

    def routed(self, message: Outgoing) -> Outgoing:
        return routed(self.shards, self.queues, message)


class MemoryStore:
    """Holds the messages of any number of apps, for any number of `MemoryBroker` objects.

    :param clock: returns the current time as a position.
    """

    def __init__(self, clock: Callable[[], int] = position_now) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.contents: defaultdict[str, Contents] = defaultdict(Contents)
        self._head = 0
        self.numbers = itertools.count(1)
        self._dice = random.Random(0)  # nosec B311 # tests repeat

    def new_id(self) -> str:
        """Return an id for a message without a position. Every store yields the same sequence."""
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    def append(self, contents: Contents, message: Outgoing, least: int = 0) -> int:
        """Add a message to its queue; return its position. Call it with the lock held."""
        self._head = position = max(self.clock(), least, self._head + 1)
        queue = contents.queue(message.queue)
        queue.rows.append(Row(position, message.body, message.key, message.headers))
        queue.head = position
        return position

    def next_due(self) -> float | None:
        """Return the Unix time of the next delayed message; None without any."""
        with self.lock:
            dues = [each.due for contents in self.contents.values() for each in contents.delayed]
        return time_of_position(min(dues)) if dues else None

    def tick(self) -> None:
        """Move due messages into the queues of the apps that have listeners."""
        with self.lock:
            moved = [
                (list(contents.listeners), self.move_due(contents))
                for contents in self.contents.values()
                if contents.listeners
            ]
        for listeners, names in moved:
            wake_all(listeners, names)

    def move_due(self, contents: Contents) -> list[str]:
        """Move the delayed messages that are due; return the names of their queues."""
        now = self.clock() + _SLACK
        due = sorted((each for each in contents.delayed if each.due <= now), key=attrgetter("due"))
        contents.delayed = [each for each in contents.delayed if each.due > now]
        moved = []
        for each in due:
            headers = with_header(each.message.headers, qdo_id=each.id)
            message = replace(each.message, headers=headers)
            try:
                message = contents.routed(message)
            except QdoError as error:
                self._head += 1
                letter = refused_when_due(message, self._head, error)
                letter = replace(letter, dead_at=time_of_position(self.clock()))
                contents.queue(message.queue).dead[self._head] = letter
                continue
            self.append(contents, message, least=each.due)
            moved.append(message.queue)
        return moved


class MemoryBroker(Broker):
    """The queues of one app in a `MemoryStore`. Safe to use from several threads."""

    capabilities = GroupCommitBroker.capabilities
    id_node = ID_NODE

    def __init__(self, store: MemoryStore, app: str) -> None:
        self._store = store
        self._contents = store.contents[app]
        self._closed = False
        self.catalog = MemoryCatalog(store, self._contents)
        self.dead_letters = MemoryDeadLetters(store, self._contents)
        self.delayed = MemoryDelayedMessages(store, self._contents)
        held = self._contents
        self.streams = MemoryStreams(held.shards, store.lock, held.queues, held.queue)
        self.stream_of = self.streams.stream_of
        self.requests = MemoryRequests(
            self._contents.requests, store.lock, store.clock, lambda some: self._add(some)[1]
        )

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        with self._store.lock:
            ids, wake = self._add(messages)
        wake()
        return ids

    def _add(self, messages: Sequence[Outgoing]) -> tuple[list[str], Callable[[], None]]:
        """Store messages; return their ids, and a function that wakes the listeners."""
        check_messages(messages)
        messages = [self._contents.routed(message) for message in messages]
        if self._closed:
            raise UnusableBrokerError(reason="this broker is closed; open a new one to send")
        stored: list[str] = []
        now = self._store.clock()
        ids = [self._send(message, now, stored) for message in messages]
        return ids, partial(wake_all, list(self._contents.listeners), stored)

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        return self.send_many(messages)  # there is nothing to wait for

    def _send(self, message: Outgoing, now: int, stored: list[str]) -> str:
        """Store one message; add the name of its queue to `stored` if it can be read now."""
        terms = message.terms
        if terms is None or terms.dedup_key is None:
            return self._place(message, terms, now, stored)
        place, prefix = dedup_place(self._contents.shards, message)
        sent, key = self._contents.queue(place).sent, prefix + terms.dedup_key
        known, until = sent.get(key, ("", 0))
        if until > now:
            return known
        made = self._place(message, terms, now, stored)
        sent[key] = made, now + round(terms.dedup_seconds * _SECOND)
        return made

    def _place(
        self, message: Outgoing, terms: SendOptions | None, now: int, stored: list[str]
    ) -> str:
        plain = replace(message, terms=None)
        if terms is not None and terms.due is not None:
            due = position_of_time(terms.due)
            if due > now + _SLACK:
                self._contents.queue(message.queue)
                made = (parsed(message.headers) or {}).get(ID) or self._store.new_id()
                number = next(self._store.numbers)
                self._contents.delayed.append(_Delayed(number, due, made, plain))
                return made
        stored.append(message.queue)
        return message_id(self._store.append(self._contents, plain), self.id_node)

    def reader(self, queue: str, after: int) -> MemoryReader:
        return MemoryReader(self._store, self._contents, check_queue_name(queue), after)

    def listen(self, wake: Wake) -> Callable[[], None]:
        with self._store.lock:
            self._store.move_due(self._contents)
            self._contents.listeners.append(wake)

        def stop() -> None:
            with self._store.lock:
                if wake in self._contents.listeners:
                    self._contents.listeners.remove(wake)

        return stop

    def trim(self, queue: str, last: int, older_than: float) -> int:
        upto = min(last, self._store.clock() - round(older_than * _SECOND))
        with self._store.lock:
            found = self._contents.queues.get(queue, _Queue())
            count = found.behind(upto)
            del found.rows[:count]
            return count

    def close(self) -> None:
        with self._store.lock:
            self._closed = True


class MemoryCatalog(QueueCatalog):
    def __init__(self, store: MemoryStore, contents: Contents) -> None:
        self._store = store
        self._contents = contents

    def names(self) -> list[str]:
        with self._store.lock:
            hidden = {each.queue for each in self._contents.shards.values() if each.hidden}
            return sorted(self._contents.queues.keys() - hidden)

    def names_to_show(self) -> list[str]:
        with self._store.lock:
            return sorted(self._contents.queues)

    def backlog(self, queue: str, after: int) -> Backlog:
        with self._store.lock:
            found = self._contents.queues.get(queue, _Queue())
            waiting = found.rows[found.behind(after) :]
            delayed = sum(each.message.queue == queue for each in self._contents.delayed)
            oldest = waiting[0].position if waiting else None
            return Backlog(len(waiting), oldest, found.head, delayed)


class MemoryDelayedMessages(DelayedMessages):
    def __init__(self, store: MemoryStore, contents: Contents) -> None:
        self._store = store
        self._contents = contents

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        with self._store.lock:
            found = sorted(self._of(queue), key=attrgetter("due"))
        found = [each for each in found if ids is None or each.id in ids]
        return [
            DelayedMessage(
                each.number,
                each.id,
                each.due,
                each.message.key,
                each.message.headers,
                each.message.body,
            )
            for each in found[:limit]
        ]

    def numbers(self, queue: str) -> list[int]:
        with self._store.lock:
            return [each.number for each in self._of(queue)]

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        with self._store.lock:
            gone = {each.number for each in self._of(queue)} & {*numbers}
            self._contents.delayed = [
                each for each in self._contents.delayed if each.number not in gone
            ]
        return gone

    def _of(self, queue: str) -> list[_Delayed]:
        return [each for each in self._contents.delayed if each.message.queue == queue]


class MemoryDeadLetters(DeadLetterStore):
    def __init__(self, store: MemoryStore, contents: Contents) -> None:
        self._store = store
        self._contents = contents

    def store(self, record: DeadLetterRecord) -> None:
        check_queue_name(record.queue)
        stored = replace(
            record,
            error=utf8_text(record.error),
            traceback=utf8_text(record.traceback),
            dead_at=record.dead_at or time_of_position(self._store.clock()),
        )
        with self._store.lock:
            self._contents.queue(record.queue).dead.setdefault(record.position, stored)

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        with self._store.lock:
            found = [
                record
                for name, each in self._contents.queues.items()
                for record in each.dead.values()
                if queue in (None, name)
            ]
        return sorted(found, key=lambda record: (record.dead_at, record.position))

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        with self._store.lock:
            names: list[str] = []
            moved = [self._retry(*key, names) for key in keys]
            listeners = list(self._contents.listeners)
        wake_all(listeners, names)
        return moved

    def _retry(self, queue: str, position: int, names: list[str]) -> int | None:
        record = self._contents.queues.get(queue, _Queue()).dead.get(position)
        if record is None:
            return None
        headers = retried_headers(record.headers, message_id(position, ID_NODE))
        message = Outgoing(queue, record.body, record.key, headers)
        message = self._contents.routed(message)
        self._take(queue, position)
        names.append(message.queue)
        return self._store.append(self._contents, message)

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        with self._store.lock:
            return [self._take(*key) is not None for key in keys]

    def _take(self, queue: str, position: int) -> DeadLetterRecord | None:
        return self._contents.queues.get(queue, _Queue()).dead.pop(position, None)


class MemoryReader:
    def __init__(self, store: MemoryStore, contents: Contents, queue: str, after: int) -> None:
        self._store = store
        self._contents = contents
        self._queue = queue
        self._after = after

    def fetch(self, limit: int) -> list[Row]:
        rows: list[Row] = []
        size = 0
        with self._store.lock:
            found = self._contents.queues.get(self._queue)
            start = 0 if found is None else found.behind(self._after)
            for row in [] if found is None else found.rows[start : start + limit]:
                rows.append(row)
                size += len(row.body)
                if size > FETCH_BYTES:
                    break
        if rows:
            self._after = rows[-1].position
        return rows


def wake_all(listeners: Iterable[Wake], names: Sequence[str]) -> None:
    """Wake listeners for queues, each once; call it without the lock."""
    distinct = list(dict.fromkeys(names))
    if distinct:
        for wake in listeners:
            wake(distinct)


def check_messages(messages: Iterable[Outgoing]) -> None:
    """Raise the error of the first message that a broker refuses."""
    for message in messages:
        checked_size(set(), message)

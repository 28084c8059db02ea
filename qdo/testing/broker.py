"""A broker in memory, which passes the contract tests of brokers.

`MemoryStore` is what a file is to the embedded broker: it outlives the processes that use it.
Several brokers on one store are what several processes with one file are.
"""

from __future__ import annotations

import random
import threading
import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from qdo.brokers.base import Backlog, Broker, Capabilities, DeadLetterRecord, Outgoing, Row, Terms
from qdo.brokers.embedded import MAX_BODY_BYTES
from qdo.brokers.embedded_letters import retried_headers
from qdo.errors import MessageTooLargeError, UsageError
from qdo.headers import with_header
from qdo.message import (
    message_id,
    position_now,
    position_of_time,
    time_of_position,
)
from qdo.names import check_queue_name

FETCH_BYTES = 16 * 1024 * 1024
"""A fetch of large bodies ends there, as the embedded broker's does."""
_SECOND = 10_000_000
_SLACK = 10
"""Unix times as floats are exact to a few of the 100 ns that positions count."""

Wake = Callable[[Iterable[str]], None]


@dataclass(slots=True)
class _Queue:
    rows: list[Row] = field(default_factory=list)
    head: int = 0
    letters: dict[int, DeadLetterRecord] = field(default_factory=dict)
    sent: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Id, and end of the window, by deduplication key."""

    def behind(self, position: int) -> int:
        """Return the index of the first row behind a position."""
        return bisect_right(self.rows, position, key=_position)


@dataclass(slots=True)
class _Delayed:
    due: int
    id: str
    message: Outgoing


@dataclass(slots=True)
class _Contents:
    """What an app has in a store."""

    queues: dict[str, _Queue] = field(default_factory=dict)
    delayed: list[_Delayed] = field(default_factory=list)
    listeners: list[Wake] = field(default_factory=list)

    def queue(self, name: str) -> _Queue:
        return self.queues.setdefault(name, _Queue())


class MemoryStore:
    """The messages of any number of apps, for any number of `MemoryBroker`.

    :param clock: gives the present as a position.
    """

    def __init__(self, clock: Callable[[], int] = position_now) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.contents: defaultdict[str, _Contents] = defaultdict(_Contents)
        self._head = 0
        self._dice = random.Random(0)

    def new_id(self) -> str:
        """Return an id for a message without a position: the same ones for every store."""
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    def append(self, contents: _Contents, message: Outgoing, least: int = 0) -> int:
        """Add a message to its queue; return its position. Call it with the lock held."""
        self._head = position = max(self.clock(), least, self._head + 1)
        queue = contents.queue(message.queue)
        queue.rows.append(Row(position, message.body, message.key, message.headers))
        queue.head = position
        return position

    def next_due(self) -> float | None:
        """Return the Unix time at which a delayed message is due next; None: there is none."""
        with self.lock:
            dues = [each.due for contents in self.contents.values() for each in contents.delayed]
        return time_of_position(min(dues)) if dues else None

    def tick(self) -> None:
        """Move what is due into the queues of the apps that somebody listens to."""
        with self.lock:
            moved = [
                (list(contents.listeners), self.move_due(contents))
                for contents in self.contents.values()
                if contents.listeners
            ]
        for listeners, names in moved:
            ring(listeners, names)

    def move_due(self, contents: _Contents) -> list[str]:
        """Move the delayed messages that are due; return the names of their queues."""
        now = self.clock() + _SLACK
        due = sorted((each for each in contents.delayed if each.due <= now), key=_due)
        contents.delayed = [each for each in contents.delayed if each.due > now]
        for each in due:
            headers = with_header(each.message.headers, qdo_id=each.id)
            self.append(contents, replace(each.message, headers=headers), least=each.due)
        return [each.message.queue for each in due]


class MemoryBroker(Broker):
    """The queues of one app in a `MemoryStore`. Safe to use from several threads."""

    capabilities = Capabilities(
        ordered=True,
        seekable=True,
        countable=True,
        delay=True,
        peek=True,
        max_body_bytes=MAX_BODY_BYTES,
        dedup=True,
    )
    id_node = 0x02_00_00_00_00_01
    """Locally administered, so that no network card has it."""

    def __init__(self, store: MemoryStore, app: str) -> None:
        self._store = store
        self._contents = store.contents[app]
        self._closed = False

    def queues(self) -> list[str]:
        with self._store.lock:
            return sorted(self._contents.queues)

    def send(self, message: Outgoing) -> str:
        return self.send_many((message,))[0]

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        for message in messages:
            _check(message)
        with self._store.lock:
            if self._closed:
                raise UsageError(reason="this broker is closed: open it anew to send")
            stored: list[str] = []
            ids = [self._send(message, stored) for message in messages]
            listeners = list(self._contents.listeners)
        ring(listeners, stored)
        return ids

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        return self.send_many(messages)  # there is nothing to wait for

    def _send(self, message: Outgoing, stored: list[str]) -> str:
        """Store one message; add the name of its queue to `stored` if it can be read now."""
        terms = message.terms
        if terms is None or terms.dedup_key is None:
            return self._place(message, terms, stored)
        sent = self._contents.queue(message.queue).sent
        now = self._store.clock()
        known, until = sent.get(terms.dedup_key, ("", 0))
        if until > now:
            return known
        made = self._place(message, terms, stored)
        sent[terms.dedup_key] = made, now + round(terms.dedup_seconds * _SECOND)
        return made

    def _place(self, message: Outgoing, terms: Terms | None, stored: list[str]) -> str:
        plain = replace(message, terms=None)
        if terms is not None and terms.due is not None:
            due = position_of_time(terms.due)
            if due > self._store.clock() + _SLACK:
                self._contents.queue(message.queue)
                made = self._store.new_id()
                self._contents.delayed.append(_Delayed(due, made, plain))
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

    def backlog(self, queue: str, after: int) -> Backlog:
        with self._store.lock:
            found = self._contents.queues.get(queue)
            if found is None:
                return Backlog(count=0, oldest=None, head=0)
            waiting = found.rows[found.behind(after) :]
            delayed = sum(each.message.queue == queue for each in self._contents.delayed)
            oldest = waiting[0].position if waiting else None
            return Backlog(len(waiting), oldest, found.head, delayed)

    def bury(self, letter: DeadLetterRecord) -> None:
        check_queue_name(letter.queue)
        stored = replace(
            letter,
            error=_storable(letter.error),
            traceback=_storable(letter.traceback),
            dead_at=letter.dead_at or time_of_position(self._store.clock()),
        )
        with self._store.lock:
            self._contents.queue(letter.queue).letters.setdefault(letter.position, stored)

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        with self._store.lock:
            letters = [
                letter
                for name, found in self._contents.queues.items()
                for letter in found.letters.values()
                if queue in (None, name)
            ]
        return sorted(letters, key=lambda letter: (letter.dead_at, letter.position))

    def retry_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[int | None]:
        with self._store.lock:
            moved = [self._retry(*each) for each in letters]
            listeners = list(self._contents.listeners)
        names = [name for (name, _), each in zip(letters, moved, strict=True) if each is not None]
        ring(listeners, names)
        return moved

    def _retry(self, queue: str, position: int) -> int | None:
        letter = self._take(queue, position)
        if letter is None:
            return None
        headers = retried_headers(letter.headers, message_id(position, self.id_node))
        message = Outgoing(queue, letter.body, letter.key, headers)
        return self._store.append(self._contents, message)

    def discard_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        with self._store.lock:
            return [self._take(*each) is not None for each in letters]

    def _take(self, queue: str, position: int) -> DeadLetterRecord | None:
        found = self._contents.queues.get(queue)
        return None if found is None else found.letters.pop(position, None)

    def retire(self, queue: str, last: int, older_than: float) -> int:
        upto = min(last, self._store.clock() - round(older_than * _SECOND))
        with self._store.lock:
            found = self._contents.queues.get(queue)
            if found is None:
                return 0
            count = found.behind(upto)
            del found.rows[:count]
            return count

    def close(self) -> None:
        with self._store.lock:
            self._closed = True


class MemoryReader:
    """Reads one queue from a position on."""

    def __init__(self, store: MemoryStore, contents: _Contents, queue: str, after: int) -> None:
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

    def close(self) -> None:
        """Do nothing: a reader holds nothing."""


def ring(listeners: Iterable[Wake], names: Sequence[str]) -> None:
    """Wake listeners for queues, each once; call it without the lock."""
    distinct = list(dict.fromkeys(names))
    if distinct:
        for wake in listeners:
            wake(distinct)


def _check(message: Outgoing) -> None:
    """Raise for what cannot be stored."""
    check_queue_name(message.queue)
    for word, text in (("key", message.key), ("headers", message.headers)):
        if text is not None and text != _storable(text):
            raise UsageError(
                reason=f"the {word} of a message for queue {message.queue!r} cannot be"
                f" encoded in UTF-8: {text!r}"
            )
    size = len(message.body)
    if size > MAX_BODY_BYTES:
        raise MessageTooLargeError(queue=message.queue, size=size, limit=MAX_BODY_BYTES)


def _storable(text: str) -> str:
    """Return text with stray surrogates, which have no UTF-8, spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _position(row: Row) -> int:
    return row.position


def _due(delayed: _Delayed) -> int:
    return delayed.due

"""The embedded broker: a SQLite file that the processes of one machine share.

What `send()` returns the id of is on disk. Positions are the UUIDv1 times of the commits:
unique, and growing in the order of the commits over the whole file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from qdo.brokers import embedded_letters
from qdo.brokers.base import (
    Backlog,
    Broker,
    Capabilities,
    DeadLetterEntry,
    DeadLetterRecord,
    Outgoing,
)
from qdo.brokers.embedded_fork import unforked
from qdo.brokers.embedded_listener import LOOK_SECONDS, Listener
from qdo.brokers.embedded_reader import EmbeddedReader
from qdo.brokers.embedded_schema import MESSAGES
from qdo.brokers.embedded_terms import Delays, send_on_terms
from qdo.brokers.embedded_writer import Transaction, Writer
from qdo.errors import MessageTooLargeError, UsageError
from qdo.message import format_position, message_id, position_now, position_of_time
from qdo.names import check_queue_name
from qdo.storage import FileWatch, open_database, translated

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
RETIRE_CHUNK = 1000
"""Messages that one transaction deletes: a few milliseconds for a writer that waits."""
AHEAD_SECONDS = 3600.0
"""Done messages that are dated so far ahead are mentioned: they cannot be deleted for long."""

_BACKLOG = """
SELECT queues.head, queues.sent, queues.delayed, first.position, first.number FROM queues
LEFT JOIN messages AS first ON first.queue = queues.id AND first.position = (
    SELECT position FROM messages
    WHERE queue = queues.id AND position > :after ORDER BY position LIMIT 1)
WHERE queues.app = :app AND queues.name = :queue
"""
_RETIRE = """
DELETE FROM messages WHERE queue = :queue AND position IN (
    SELECT position FROM messages WHERE queue = :queue AND position <= :upto
    ORDER BY position LIMIT :chunk)
"""


class EmbeddedBroker(Broker):
    """Queues of one app in a SQLite file.

    Safe to use from several threads, or from greenlets once gevent has patched the process.

    :raises DatabaseError: the file cannot be used; see its subclasses.
    """

    capabilities = Capabilities(
        ordered=True,
        seekable=True,
        countable=True,
        delay=True,
        peek=True,
        max_body_bytes=MAX_BODY_BYTES,
        dedup=True,
    )

    def __init__(self, path: str, app: str, clock: Callable[[], int] = position_now) -> None:
        self._path = path
        self._app = app
        self._bells = f"{path}.bells"
        self._clock = clock
        self._known_names: set[str] = set()
        self._told_ahead = False
        self._listeners: list[Listener] = []
        with unforked:  # the file has no guard until there is a writer
            self._reading = open_database(path, MESSAGES)
            try:
                with translated(path):
                    (self.id_node,) = self._reading.execute("SELECT node FROM file").fetchone()
                self._watch = FileWatch(path)
                self._writer = Writer(path, app, self._bells, clock)
            except BaseException:
                self._reading.close()
                raise

    @property
    def commits(self) -> int:
        """How many transactions this broker object has committed."""
        return self._writer.commits

    @property
    def waiting(self) -> int:
        """How many calls of this process wait for their commit."""
        return self._writer.waiting

    def queues(self) -> list[str]:
        with unforked, translated(self._path):
            found = self._reading.execute(
                "SELECT name FROM queues WHERE app = ? ORDER BY name", (self._app,)
            )
            return [name for (name,) in found.fetchall()]

    def send(self, message: Outgoing) -> str:
        return self.send_many((message,))[0]

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        size = sum(map(self._checked_size, messages))
        if not messages:
            return []
        if _plain(messages):
            positions = self._writer.run(lambda transaction: transaction.append(messages), size)
            return self._ids(positions)
        return self._writer.run(self._on_terms(messages), size)

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        size = sum(map(self._checked_size, messages))
        if not messages:
            return []
        if _plain(messages):
            append = self._writer.arun(lambda transaction: transaction.append(messages), size)
            return self._ids(await append)
        return await self._writer.arun(self._on_terms(messages), size)

    def _on_terms(self, messages: Sequence[Outgoing]) -> Callable[[Transaction], list[str]]:
        return lambda transaction: send_on_terms(transaction, messages, self.id_node)

    def _ids(self, positions: Iterable[int]) -> list[str]:
        return [message_id(position, self.id_node) for position in positions]

    def reader(self, queue: str, after: int) -> EmbeddedReader:
        return EmbeddedReader(
            self._reading, self._path, self._watch, self._app, check_queue_name(queue), after
        )

    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        delays = Delays(self._reading, self._path, self._app, self._writer, self._clock)
        while delays.step() == 0:
            pass  # what is due by now can be read when this returns, also by a worker in burst
        with translated(self._path):
            listener = Listener(
                self._reading, self._path, self._app, self._bells, wake, LOOK_SECONDS, delays.step
            )
        self._listeners.append(listener)
        return listener.stop

    def backlog(self, queue: str, after: int) -> Backlog:
        with unforked, translated(self._path):
            found = self._reading.execute(
                _BACKLOG, {"app": self._app, "queue": queue, "after": after}
            ).fetchone()
        if found is None:
            return Backlog(count=0, oldest=None, head=0)
        head, sent, delayed, oldest, number = found
        count = 0 if oldest is None else sent - number + 1
        return Backlog(count=count, oldest=oldest, head=head, delayed=delayed)

    def bury(self, letter: DeadLetterRecord) -> None:
        check_queue_name(letter.queue)
        self._writer.run(
            lambda transaction: embedded_letters.bury(transaction, letter), len(letter.body)
        )

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        with unforked, translated(self._path):
            return embedded_letters.read(self._reading, self._app, queue)

    def dead_letter(self, queue: str, position: int) -> DeadLetterRecord | None:
        with unforked, translated(self._path):
            found = embedded_letters.read(self._reading, self._app, queue, position)
        return found[0] if found else None

    def dead_letter_counts(self) -> dict[str, int]:
        with unforked, translated(self._path):
            return embedded_letters.count(self._reading, self._app)

    def find_dead_letters(
        self,
        queue: str | None = None,
        *,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[DeadLetterEntry]:
        with unforked, translated(self._path):
            return embedded_letters.read_entries(
                self._reading, self._app, queue, error, since, until
            )

    def retry_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[int | None]:
        return self._writer.run(
            lambda transaction: embedded_letters.retry(transaction, letters, self.id_node)
        )

    def discard_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        return self._writer.run(
            lambda transaction: embedded_letters.discard(transaction, letters)
        )

    def retire(self, queue: str, last: int, older_than: float) -> int:
        now = time.time()
        upto = min(last, position_of_time(now - older_than))
        oldest = self.backlog(queue, 0).oldest
        if oldest is None or oldest > upto:
            if oldest is not None and position_of_time(now + AHEAD_SECONDS) < oldest <= last:
                self._tell_ahead(oldest)
            return 0  # without taking the write lock: most calls find nothing
        total = 0
        while True:
            deleted = self._writer.run(lambda transaction: _retire(transaction, queue, upto))
            total += deleted
            if deleted < RETIRE_CHUNK:
                return total

    def _tell_ahead(self, position: int) -> None:
        """Say once that messages are dated ahead; positions never go back, so all new ones are."""
        if not self._told_ahead:
            self._told_ahead = True
            log.warning(
                "%s: messages are dated %s and later, for the clock of this machine was ahead when"
                " some were sent, or is behind now; they are not deleted before that time, although"
                " they are done",
                self._path,
                format_position(position),
            )

    def close(self) -> None:
        for listener in self._listeners:
            listener.stop()
        with unforked:
            self._reading.close()
        self._writer.close()  # last: the file's guard goes with it

    def _checked_size(self, message: Outgoing) -> int:
        """Return the size of a body; raise for what cannot be stored."""
        if message.queue not in self._known_names:
            self._known_names.add(check_queue_name(message.queue))
        for word, text in (("key", message.key), ("headers", message.headers)):
            if text is not None and not _is_storable(text):
                raise UsageError(
                    reason=f"the {word} of a message for queue {message.queue!r} cannot be"
                    f" encoded in UTF-8: {text!r}"
                )
        size = len(message.body)
        if size > MAX_BODY_BYTES:
            raise MessageTooLargeError(queue=message.queue, size=size, limit=MAX_BODY_BYTES)
        return size


def _plain(messages: Sequence[Outgoing]) -> bool:
    """Return whether none has terms; a loop, because a generator takes twice as long."""
    for message in messages:  # noqa: SIM110
        if message.terms is not None:
            return False
    return True


def _retire(transaction: Transaction, queue: str, upto: int) -> int:
    parameters = {"queue": transaction.queue_id(queue), "upto": upto, "chunk": RETIRE_CHUNK}
    return transaction.connection.execute(_RETIRE, parameters).rowcount


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a stray surrogate
        return False
    return True

"""What every broker offers, and what it must declare.

Two families stand behind this interface: logs (resume at a position) and mailboxes
(acknowledge by deleting).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a broker can do; whatever it cannot is refused at start."""

    ordered: bool
    seekable: bool
    countable: bool
    delay: bool
    peek: bool
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a broker; `body` is what will be stored."""

    queue: str
    body: bytes
    key: str | None = None
    headers: str | None = None
    """JSON object of str to str, or None."""


class Row(NamedTuple):
    """One fetched message.

    Brokers return plain tuples of this shape where that is faster (a named tuple costs
    more to make than the message is to fetch).
    """

    position: int
    body: bytes
    key: str | None
    headers: str | None


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """A message set aside with its error after its last attempt."""

    queue: str
    position: int
    body: bytes
    key: str | None
    headers: str | None
    error: str
    traceback: str
    attempts: int
    worker: str
    fence: int
    dead_at: float = field(default=0.0)
    """Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a queue after a position."""

    count: int
    oldest: int | None
    """Position of the first waiting message, None when there is none."""
    head: int
    """Position of the newest message ever sent, 0 when there was none."""


class Reader(Protocol):
    """Reads one queue on behalf of its owner, in order, from a position on."""

    def fetch(self, limit: int) -> Sequence[tuple[int, bytes, str | None, str | None]]:
        """Return the next rows, at most `limit`, none when the queue is at its tip."""

    def close(self) -> None:
        """Give up what the reader holds."""


class Broker(abc.ABC):
    """Where messages live."""

    capabilities: Capabilities
    id_node: int
    """48-bit node of the UUIDs made from positions (`message.message_id`)."""

    @abc.abstractmethod
    def queues(self) -> list[str]:
        """Return the names of all queues."""

    @abc.abstractmethod
    def send(self, message: Outgoing) -> str:
        """Store one message durably and return its id."""

    @abc.abstractmethod
    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages durably, all or none, in the given order; return their ids."""

    @abc.abstractmethod
    def reader(self, queue: str, after: int) -> Reader:
        """Return a reader of the messages behind position `after` (0: all)."""

    @abc.abstractmethod
    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        """Call `wake(queues)` soon after messages for them become readable.

        Called from a greenlet or thread of the broker; `wake` must not block. A name may
        come without need, never the other way round. Returns a function that stops it.
        """

    @abc.abstractmethod
    def backlog(self, queue: str, after: int) -> Backlog:
        """Return what waits behind position `after`."""

    @abc.abstractmethod
    def bury(self, letter: DeadLetterRecord) -> None:
        """Store a dead letter durably; doing it twice for one position stores one."""

    @abc.abstractmethod
    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the dead letters of a queue, or of all, oldest first."""

    @abc.abstractmethod
    def retire(self, queue: str, last: int, older_than: float) -> int:
        """Delete messages up to `last` that were sent more than `older_than` seconds ago.

        Returns how many. Messages behind `last` are never deleted.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what was begun and let go of files and connections."""

"""The interface to a broker's queues: their names, order, parents, ends and backlogs."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdo.jobs.options import Order

if TYPE_CHECKING:
    from qdo.jobs.retry import PolicyInForce


@dataclass(frozen=True, slots=True)
class Backlog:
    """The messages that wait in a queue after a position."""

    count: int
    # The position of the first waiting message, or None.
    oldest: int | None
    # The position of the newest message ever sent; 0 if no message was ever sent.
    head: int
    # The number of messages that are not due yet; `count` excludes them.
    delayed: int = 0
    # Whether `count` is an estimate. If the broker is not `countable`, a count of 1 means 1 or
    # more.
    approximate: bool = False
    # The number of messages in `count` that consumers hold; 0 if the broker never hides messages.
    in_flight: int = 0
    # The age of the next message to read; 0 at the tip, None if the broker does not report it.
    behind_seconds: float | None = None
    # The reason why a worker cannot read after the position, with the remedy.
    fault: str | None = None
    # Whether the broker deleted messages after the position before a worker read them; see `fault`.
    lost: bool = False
    # The age at which the broker deletes messages, even unread messages. None: the broker never
    # deletes messages, or the next message is so new that qdo did not ask the broker.
    retention_seconds: float | None = None


# The backlog of a queue that does not exist.
NO_BACKLOG = Backlog(count=0, oldest=None, head=0)


class QueueCatalog(abc.ABC):
    """The queues of a broker, and the broker's data about each queue.

    Every method raises a `QdoError` if the broker does not respond or denies the call.
    """

    # The interval in which the leader compares the broker's queues with the queue nodes.
    list_seconds: float = 10.0
    # The initial `last` of a new queue with parents, if the app already had queues.
    child_start: int = 0

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the names of all queues."""

    def names_to_show(self) -> list[str]:
        """Return the names of all queues for display, even if calls about some queues fail."""
        return self.names()

    @abc.abstractmethod
    def backlog(self, queue: str, after: int) -> Backlog:
        """Return the backlog of a queue: its messages after position `after`."""

    def backlogs(self, after: Mapping[str, int]) -> dict[str, Backlog]:
        """Return the backlogs of many queues, each after its position.

        Callers use this only if `Capabilities.backlog_budget` is None, because such a broker reads
        many backlogs in one query.
        """
        return {queue: self.backlog(queue, position) for queue, position in after.items()}

    def head(self, queue: str) -> int:
        """Return the position of the newest message ever sent; 0 if no message was ever sent."""
        return self.backlog(queue, 0).head

    def order(self, queue: str) -> Order:
        """Return the strictest order in which workers can process a queue.

        Callers use this only if the broker has `Capabilities.mixed_order`.
        """
        return "queue"

    def parents(self, queue: str) -> Sequence[str]:
        """Return the queues that workers must finish before they may begin this queue."""
        return ()

    def is_reopened(self, queue: str) -> bool:
        """Return whether a listed queue still receives messages, and so has no end.

        If so, a queue node with the state "finished" belongs to an earlier queue of this name.
        """
        return False

    def has_position(self, queue: str, position: int) -> bool:
        """Return whether a queue has, or had, a message at a broker-specific position."""
        return True

    def claim_app(self, fleet: str, root: str) -> str:
        """Record the fleet that processes the app, unless another one is recorded.

        :param fleet: the id of the fleet, a space, and its coordinator, see `check_fleet`.
        :param root: the path of the app's node in the coordinator.
        :return: the recorded fleet; `fleet` from brokers that record none.
        """
        return fleet

    def request_rows(self) -> tuple[int, int]:
        """Return the approximate numbers of live and dead request rows; 0 if rows do not die."""
        return 0, 0

    def config_warnings(self, policies: Mapping[str, PolicyInForce]) -> Sequence[str]:
        """Return warnings about the configuration of queues at the broker, each with its remedy.

        Callers use this only if the broker has `Capabilities.checks_config`.
        """
        return ()

    def connection_warnings(self, concurrency: Sequence[int]) -> Sequence[str]:
        """Return warnings if jobs may need more connections than the broker's server has.

        :param concurrency: the concurrency of each worker process.
        """
        return ()

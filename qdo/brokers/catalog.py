"""The queues of a broker: their names, order, parents, ends and backlogs."""

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
    # Position of the first waiting message, None when there is none.
    oldest: int | None
    # Position of the newest message ever sent, 0 when there was none.
    head: int
    # Messages that are not due yet; they are not in `count`.
    delayed: int = 0
    # The count is an estimate; where the broker is not `countable`, 1 stands for any number.
    approximate: bool = False
    # Messages of `count` that a consumer has received; 0 where the broker hides no message.
    in_flight: int = 0
    # Age of the next message to read, 0 at the tip; None where the broker does not report it.
    behind_seconds: float | None = None
    # Why a worker cannot read on from the position, with the remedy.
    fault: str | None = None
    # Whether messages behind the position were deleted before they were read; see `fault`.
    lost: bool = False
    # Age at which the broker deletes messages, also unread ones; None if it does not, or if it was
    # not asked because the next message is far from it.
    retention_seconds: float | None = None


# The backlog of a queue that does not exist.
NO_BACKLOG = Backlog(count=0, oldest=None, head=0)


class QueueCatalog(abc.ABC):
    """The queues of a broker, and its data about each.

    Every method raises a `QdoError` if the broker does not answer or denies the call.
    """

    # How often the leading worker compares the broker's queues with the queue nodes.
    list_seconds: float = 10.0
    # `last` of a new queue that has parents, when the app already had queues.
    child_start: int = 0

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the names of all queues."""

    def names_to_show(self) -> list[str]:
        """Return the names of all queues for display, even if calls about some of them fail."""
        return self.names()

    @abc.abstractmethod
    def backlog(self, queue: str, after: int) -> Backlog:
        """Return the backlog of a queue: its messages behind position `after`."""

    def backlogs(self, after: Mapping[str, int]) -> dict[str, Backlog]:
        """Return the backlogs of many queues, each behind its position.

        Called only where `Capabilities.backlog_budget` is None: there one query answers for many.
        """
        return {queue: self.backlog(queue, position) for queue, position in after.items()}

    def head(self, queue: str) -> int:
        """Return the position of the newest message ever sent, 0 when there was none."""
        return self.backlog(queue, 0).head

    def order(self, queue: str) -> Order:
        """Return the strictest order in which a queue can be processed.

        Called only where the broker has `Capabilities.mixed_order`.
        """
        return "queue"

    def parents(self, queue: str) -> Sequence[str]:
        """Return the queues that must be finished before this one may begin."""
        return ()

    def is_reopened(self, queue: str) -> bool:
        """Return whether a listed queue still receives messages, so that it has no end.

        A queue node that says finished then belongs to an earlier queue of the same name.
        """
        return False

    def has_position(self, queue: str, position: int) -> bool:
        """Return whether a queue has, or had, a message at a position of the broker's own form."""
        return True

    def request_rows(self) -> tuple[int, int]:
        """Return about how many live and dead rows requests have; 0 where none stays dead."""
        return 0, 0

    def config_warnings(self, policies: Mapping[str, PolicyInForce]) -> Sequence[str]:
        """Return necessary changes to queues at the broker: sentences with the remedy.

        Called only where the broker has `Capabilities.checks_config`.
        """
        return ()

    def connection_warnings(self, concurrency: Sequence[int]) -> Sequence[str]:
        """Warn if jobs may need more connections than the broker's server has, as above.

        :param concurrency: of each worker process.
        """
        return ()

"""Figures of consumers from a server's request log. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SENDING = frozenset({"SendMessage", "SendMessageBatch"})
RECEIVING = frozenset({"ReceiveMessage"})
DELETING = frozenset({"DeleteMessage", "DeleteMessageBatch"})
HOLDING = frozenset({"ChangeMessageVisibility", "ChangeMessageVisibilityBatch"})
HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ActionCount:
    """Requests, the messages in them or in their responses, and receives without messages."""

    requests: int = 0
    entries: int = 0
    empty: int = 0

    def plus(self, other: ActionCount, sign: int = 1) -> ActionCount:
        return ActionCount(
            self.requests + sign * other.requests,
            self.entries + sign * other.entries,
            self.empty + sign * other.empty,
        )


@dataclass(frozen=True, slots=True)
class SqsTraffic:
    """Counts by action and queue."""

    counts: Mapping[tuple[str, str], ActionCount]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> SqsTraffic:
        """Parse the server's log (``requests`` of ``GET /_log``)."""
        return cls(
            {
                (row["action"], row["queue"]): ActionCount(
                    row["requests"], row["entries"], row["empty"]
                )
                for row in rows
            }
        )

    def since(self, earlier: SqsTraffic) -> SqsTraffic:
        """Return the difference to an earlier log of the same server."""
        return SqsTraffic(
            {
                key: count.plus(earlier.counts.get(key, ActionCount()), -1)
                for key, count in self.counts.items()
            }
        )

    def queues(self, prefix: str) -> SqsTraffic:
        """Return only the requests to queues with a prefix."""
        return SqsTraffic(
            {key: each for key, each in self.counts.items() if key[1].startswith(prefix)}
        )

    def total(self, actions: Iterable[str]) -> ActionCount:
        """Return the sum over all queues."""
        wanted, found = set(actions), ActionCount()
        for (action, _), count in self.counts.items():
            if action in wanted:
                found = found.plus(count)
        return found

    def consuming(self) -> ActionCount:
        """Return the sum of all actions except sending."""
        return self.total({action for action, _ in self.counts} - SENDING)

    def busy_queues(self) -> int:
        """Return how many queues were polled, with or without a message."""
        return len({queue for action, queue in self.counts if action in RECEIVING})


@dataclass(frozen=True, slots=True)
class PerMessage:
    """Requests of a consumer per deleted message.

    :ivar other: everything except receives, deletes and changes of visibility.
    """

    receives: float
    deletes: float
    holds: float
    other: float
    empty_receives: int

    @property
    def requests(self) -> float:
        return self.receives + self.deletes + self.holds + self.other

    @classmethod
    def of(cls, traffic: SqsTraffic) -> PerMessage:
        """Return the figures of a run."""
        deleted = traffic.total(DELETING).entries
        if not deleted:
            raise ValueError("the run deleted no messages")
        shares = [traffic.total(each).requests for each in (RECEIVING, DELETING, HOLDING)]
        receives, deletes, holds = (share / deleted for share in shares)
        other = (traffic.consuming().requests - sum(shares)) / deleted
        return cls(receives, deletes, holds, other, traffic.total(RECEIVING).empty)


def per_queue_hour(traffic: SqsTraffic, queues: int, seconds: float) -> float:
    """Extrapolate a consumer's requests to requests per queue and hour."""
    return traffic.consuming().requests / queues * HOUR_SECONDS / seconds

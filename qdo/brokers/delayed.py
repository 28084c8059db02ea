"""Delayed messages as operators see them: a message that is not due yet is in no queue."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that is not due yet, or that no listener has moved into its queue.

    :ivar number: names it within its broker.
    :ivar due: UUIDv1 time.
    :ivar headers: JSON object of str to str, or None.
    """

    number: int
    id: str
    due: int
    key: str | None
    headers: str | None
    body: bytes


class DelayedMessages:
    """The delayed messages of a broker that cannot delay any."""

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        """Return delayed messages of a queue, the next due first.

        :param ids: only messages with one of these ids, if given.
        """
        return []

    def numbers(self, queue: str) -> list[int]:
        """Return the numbers of all delayed messages of a queue."""
        return []

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        """Delete delayed messages; return the numbers of those that were still delayed.

        A message is either moved into its queue or deleted, never both.
        """
        return set()

"""Compare plans of the rebalancer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def moves(before: Mapping[str, Iterable[str]], after: Mapping[str, Iterable[str]]) -> int:
    """Return how many queues have a different worker than before; new queues count as moved."""
    owner = {queue: worker for worker, queues in before.items() for queue in queues}
    return sum(owner.get(queue) != worker for worker, queues in after.items() for queue in queues)

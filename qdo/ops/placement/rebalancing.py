"""What the leader would assign differently now, and why: its own plan on the same nodes."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.protocol.rebalancing.filtered_planner import plan_filtered
from qdo.ops.placement.reading import PlanInput
from qdo.text import pluralize


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A queue that the leader would assign to another worker.

    :ivar before: the worker that it is assigned to, None for none.
    :ivar after: the next one, None if no worker takes it.
    """

    queue: str
    before: str | None
    after: str | None
    why: str


def planned_changes(found: PlanInput) -> list[Reassignment]:
    """Return the queues that a plan made now would assign differently, by name. Reads nothing."""
    able = {name: node.filter for name, node in found.workers.items() if name not in found.unable}
    if not able:
        return []  # the leader leaves everything as it is
    wanted, _ = plan_filtered(found.queues, able, found.current, found.moves)
    # As in the plan, a queue of several workers counts for the first of them by name.
    before = {
        queue: name for name in sorted(found.current, reverse=True) for queue in found.current[name]
    }
    after = {queue: name for name, share in wanted.items() for queue in share}
    return [
        Reassignment(
            queue,
            before.get(queue) or found.left.get(queue),
            after.get(queue),
            _why(found, queue, before.get(queue), after.get(queue)),
        )
        for queue in sorted(found.queues)
        if before.get(queue) != after.get(queue)
    ]


def _why(found: PlanInput, queue: str, before: str | None, after: str | None) -> str:
    if after is None:
        return "no worker takes it: no job, --queues or --exclude"
    if before is None:
        gone = found.left.get(queue)
        return f"{gone} is gone" if gone is not None else "it is new"
    if before in found.unable:
        return f"{before} gets no queues: {found.unable[before]}"
    if not found.workers[before].filter.takes(queue):
        return f"{before} does not take it: its jobs, --queues or --exclude have changed"
    if found.moves.get(queue) == after:
        return "an operator moved it"
    loads = [len(found.current.get(name, ())) for name in (before, after)]
    return f"balance: {before} has {pluralize(loads[0], 'queue')}, {after} has {loads[1]}"

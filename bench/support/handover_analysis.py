"""The effect of a change of members on each queue, from the events of all members.

An event is ``(nanoseconds, what, member, queue)`` with `what` one of ``claimed`` and
``stopped``. The member starts messages of the queue from ``claimed`` until ``stopped``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.support.statistics import fewest_moves, percentile


class OwnershipEvent(NamedTuple):
    """One member claimed or released one queue."""

    at_ns: int
    what: str
    member: str
    queue: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The effect of one change of members.

    :ivar moved: queues whose owner changed; `fewest` is how many had to.
    :ivar settled_seconds: from the cause until the last queue had its final owner.
    :ivar gap_seconds: longest time in which a moved queue had no owner, and its 99 %.
    :ivar paused: queues that kept their owner but stopped.
    :ivar pause_seconds: the longest of these pauses.
    :ivar unowned: queues without an owner at the end; not 0 only if the run was cut off.
    """

    moved: int
    fewest: int
    settled_seconds: float
    gap_seconds: float
    gap_p99_seconds: float
    paused: int
    pause_seconds: float
    unowned: int
    balance: tuple[int, int]


def owners_at(events: Iterable[OwnershipEvent], moment_ns: int) -> dict[str, str]:
    """Return the owner of each queue at a time."""
    owners: dict[str, str] = {}
    for event in sorted(events):
        if event.at_ns >= moment_ns:
            break
        if event.what == "claimed":
            owners[event.queue] = event.member
        elif owners.get(event.queue) == event.member:
            del owners[event.queue]
    return owners


def handover(events: Sequence[OwnershipEvent], cause_ns: int, members: Sequence[str]) -> Handover:
    """Return the effect of a change at `cause_ns`.

    :param members: the members after the change.
    """
    before = owners_at(events, cause_ns)
    after = owners_at(events, max(event.at_ns for event in events) + 1)
    later = sorted(event for event in events if event.at_ns >= cause_ns)
    stopped: dict[str, int] = {}
    gaps: dict[str, int] = {}
    for event in later:
        if event.what == "stopped":
            stopped.setdefault(event.queue, event.at_ns)
        elif event.queue in stopped:
            gap = event.at_ns - stopped.pop(event.queue)
            gaps[event.queue] = max(gap, gaps.get(event.queue, 0))
    moved = {queue for queue, owner in before.items() if after.get(queue) != owner}
    claims = [event.at_ns for event in later if event.what == "claimed"]
    moved_gaps = [gap / 1e9 for queue, gap in gaps.items() if queue in moved]
    pauses = [gap / 1e9 for queue, gap in gaps.items() if queue not in moved]
    held = dict.fromkeys(members, 0)
    for owner in after.values():
        held[owner] = held.get(owner, 0) + 1
    return Handover(
        moved=len(moved),
        fewest=fewest_moves(before, members),
        settled_seconds=(max(claims) - cause_ns) / 1e9 if claims else 0.0,
        gap_seconds=max(moved_gaps, default=0.0),
        gap_p99_seconds=percentile(moved_gaps, 99) if moved_gaps else 0.0,
        paused=len(pauses),
        pause_seconds=max(pauses, default=0.0),
        unowned=len(before) - len(after),
        balance=(min(held.values()), max(held.values())),
    )

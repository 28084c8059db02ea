"""The differences between two looks at an app, as changes. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from qdo.fleet.protocol.audit_entries import AuditEntry
from qdo.ops.overview import Judged


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that has changed.

    :ivar kind: "worker", "queue", "owner" or "state"; for a command of an operator, its name.
    :ivar subject: the name of the worker or the queue.
    :ivar before: what it was, "" for nothing.
    :ivar after: what it is, "" for nothing.
    """

    kind: str
    subject: str
    before: str
    after: str
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one time.

    :ivar judged: the queues with the verdicts on them.
    :ivar workers: the registered workers.
    :ivar entries: the newest entries of the action log, the newest first.
    """

    judged: Judged
    workers: Sequence[str]
    entries: Sequence[AuditEntry]


def changes(before: Look, after: Look) -> Iterator[Difference]:
    """Yield what has changed: commands first, because they are often why the rest has."""
    seen = {entry.id for entry in before.entries}
    for entry in reversed(after.entries):
        if entry.id not in seen:
            yield Difference(entry.command, entry.target, "", "", entry.reason, entry.by)
    yield from _came_and_went("worker", before.workers, after.workers)
    old = {status.queue: (status, verdict) for status, verdict in before.judged}
    yield from _came_and_went("queue", old, [status.queue for status, _ in after.judged])
    for status, verdict in after.judged:
        if status.queue not in old:
            continue
        was, judged = old[status.queue]
        if was.owner != status.owner:
            yield Difference("owner", status.queue, was.owner or "", status.owner or "")
        if judged.state is not verdict.state:
            words = judged.state.value, verdict.state.value
            yield Difference("state", status.queue, *words, verdict.reason)


def _came_and_went(
    kind: str,
    before: Iterable[str],
    after: Iterable[str],
) -> Iterator[Difference]:
    known, found = set(before), set(after)
    for name in sorted(known - found):
        yield Difference(kind, name, "there", "gone")
    for name in sorted(found - known):
        yield Difference(kind, name, "", "new")

"""Pure functions that find the changes of an app between two readings, and the past changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qdo.fleet.audit_entries import AuditEntry
from qdo.history.reports import RecordedOwner
from qdo.ops.items import Judged
from qdo.ops.worker_status import WorkerStatus, deaths, lost_workers
from qdo.text import iso_time, pluralize, shorten

# Kinds of changes that are not commands.
KINDS = ("state", "owner", "queue", "worker")
# Maximum number of individual changes of one kind in a list.
MOST_OF_A_KIND = 20
_NAMES = 3
_NAME_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """A change. `before` and `after` are "" if a value is missing."""

    # "worker", "queue", "owner" or "state"; for a command of an operator, its name.
    kind: str
    subject: str
    before: str
    after: str
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class ChangeSum(Difference):
    """A group of changes. The subject contains the number of changes and the first names."""


@dataclass(frozen=True, slots=True)
class Look:
    """The app at one time."""

    judged: Judged
    workers: Sequence[str]
    # The newest entries of the action log, the newest first.
    entries: Sequence[AuditEntry]
    # See `ends_of`.
    ends: Sequence[tuple[float, Difference]] = ()


def ends_of(
    workers: Sequence[WorkerStatus], since: float = 0.0
) -> Iterator[tuple[float, Difference]]:
    """Yield the processes that ended without a shutdown, with the Unix times of their ends.

    :param workers: the registered workers. The leader reports the lost workers. Each worker reports
        the dead processes that it replaced.
    """
    for lost in lost_workers(workers, since):
        reason = f"it released none of its queues: {lost.process or 'host unknown'}"
        yield lost.at, Difference("worker", lost.name, "there", "gone", reason)
    for worker, death in deaths(workers, since):
        reason = f"it {death.how}, and {worker.worker} replaces it"
        subject = f"{worker.report.host or 'host unknown'} process {death.pid}"
        yield death.at, Difference("worker", subject, "there", "gone", reason)


def changes(before: Look, after: Look) -> Iterator[Difference]:
    """Yield the changes: commands first, because they often cause the other changes."""
    seen = {entry.id for entry in before.entries}
    for entry in reversed(after.entries):
        if entry.id not in seen:
            yield _command(entry)
    ends = [end for at, end in after.ends if (at, end) not in before.ends]
    yield from ends
    ended = {end.subject for end in ends}
    yield from (
        each
        for each in _came_and_went("worker", before.workers, after.workers)
        if each.after != "gone" or each.subject not in ended
    )
    old = {status.queue: (status, verdict) for status, verdict in before.judged}
    yield from _came_and_went("queue", old, [status.queue for status, _ in after.judged])
    for status, verdict in after.judged:
        if status.queue not in old:
            continue
        was, judged = old[status.queue]
        if was.owner != status.owner:
            yield Difference("owner", status.queue, was.owner or "", status.owner or "")
        if judged.state is not verdict.state:
            before_state = judged.state.value
            after_state = verdict.state.value
            yield Difference("state", status.queue, before_state, after_state, verdict.reason)


def past_changes(
    entries: Iterable[AuditEntry],
    workers: Sequence[WorkerStatus],
    claims: Iterable[tuple[str, RecordedOwner]],
    since: float,
) -> list[tuple[float, Difference]]:
    """Return the recorded changes, with Unix times, oldest first.

    :param workers: the registered workers.
    :param since: Unix time. The result omits earlier changes.
    """
    found = [(entry.at, _command(entry)) for entry in entries]
    found += [
        (each.report.started, Difference("worker", each.worker, "", "new"))
        for each in workers
        if each.report.started is not None
    ]
    found += ends_of(workers, since)
    for queue, claim in claims:
        found.append((claim.claimed, Difference("owner", queue, "", claim.owner)))
        if claim.ended is not None:
            change = Difference("owner", queue, claim.owner, "", claim.why or "")
            found.append((claim.ended, change))
    return sorted((each for each in found if each[0] >= since), key=lambda each: each[0])


def _command(entry: AuditEntry) -> Difference:
    return Difference(entry.command, entry.target, "", "", entry.reason, entry.by)


def _came_and_went(kind: str, before: Iterable[str], after: Iterable[str]) -> Iterator[Difference]:
    known = set(before)
    found = set(after)
    for name in sorted(known - found):
        yield Difference(kind, name, "there", "gone")
    for name in sorted(found - known):
        yield Difference(kind, name, "", "new")


def summed_up(found: Iterable[Difference], most: int = MOST_OF_A_KIND) -> list[Difference]:
    """Return a limited number of changes of each kind. If a kind has more changes, group them.

    All changes of a group have the same values. If a worker with 30,000 queues dies, 60,000 changes
    become a few groups.
    """
    kinds: dict[str, list[Difference]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    result: list[Difference] = []
    for kind, changed in kinds.items():
        result += changed if len(changed) <= most else _groups(kind, changed, most)
    return result


def _groups(kind: str, changed: Sequence[Difference], most: int) -> Iterator[Difference]:
    groups: dict[tuple[str, str], list[Difference]] = {}
    for each in changed:
        groups.setdefault((each.before, each.after), []).append(each)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))
    kept = most if len(largest) <= most else most - 1
    for values, group in largest[:kept]:
        yield group[0] if len(group) == 1 else _sum(kind, group, *values)
    rest = [each for _, group in largest[kept:] for each in group]
    if rest:
        yield _sum(kind, rest, "", "", ", with different values")


def _sum(
    kind: str, group: Sequence[Difference], before: str, after: str, more: str = ""
) -> Difference:
    noun = kind if kind == "worker" else "queue" if kind in KINDS else "target"
    names = ", ".join(shorten(each.subject, _NAME_CHARACTERS) for each in group[:_NAMES])
    others = f" and {len(group) - _NAMES:,} more" if len(group) > _NAMES else ""
    subject = f"{pluralize(len(group), noun)}: {names}{others}"
    return ChangeSum(kind, subject, before, after, f"summed up: many changes at once{more}")


def event_item(at: float, change: Difference) -> dict[str, Any]:
    """Return the item for a line of ``qdo events -o jsonl``."""
    return {"time": iso_time(at), **asdict(change)}

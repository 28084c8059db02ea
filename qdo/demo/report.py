"""The end of the demo: the work of each worker, and whether every guarantee held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdo.demo.display import Display, TableRow
from qdo.demo.ledger import Audit, Record, audit
from qdo.ops.status import QueueStatus

_ERRORS_SHOWN = 10


@dataclass(slots=True)
class KilledWorker:
    """The worker that was killed.

    :ivar queues: queues that it owned.
    :ivar at: time (CLOCK_MONOTONIC) of the kill.
    :ivar owned_seconds: from the kill until every queue had a new owner.
    """

    worker: str
    pid: int
    queues: frozenset[str]
    at: float
    owned_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The results of the demo.

    :ivar sent: number of messages by queue.
    :ivar workers: all workers, with their queues before the drain.
    :ivar moves: how many queues moved from one worker to another before the drain.
    :ivar required_moves: how many had to move.
    :ivar statuses: recorded state of each queue.
    """

    records: Sequence[Record]
    sent: Mapping[str, int]
    kill: KilledWorker | None
    workers: Sequence[TableRow]
    moves: int
    required_moves: int
    statuses: Sequence[QueueStatus]


def print_report(display: Display, report: DemoReport) -> bool:
    """Print the table, the figures and the checks; return whether all checks passed."""
    killed = frozenset({report.kill.pid}) if report.kill else frozenset[int]()
    found = audit(report.records, report.sent, killed)
    display.table(
        ("worker", "end", "pid", "messages", "queues before the drain"),
        [
            (
                row.name,
                row.state,
                str(row.pid),
                f"{row.messages:,}",
                "-" if row.state == "killed" else str(row.queues),
            )
            for row in report.workers
        ],
    )
    display.act(
        6, "Check", "Each worker logged the queue, number, fence and times of every message."
    )
    _print_figures(display, report, found)
    checks = [
        _check_complete(display, report, found),
        _check_order(display, found),
        _check_recorded(display, report),
    ]
    for error in found.faults[:_ERRORS_SHOWN]:
        display.tell(error, good=False)
    return all(checks)


def _print_figures(display: Display, report: DemoReport, found: Audit) -> None:
    kill = report.kill
    if kill is not None:
        running_seconds = running_again(report.records, kill) - kill.at
        display.tell(
            f"kill -9: {len(kill.queues)} queues owned again after {_ms(kill.owned_seconds)}, "
            f"all with new messages after {_ms(running_seconds)}"
        )
    display.tell(
        f"longest pause of a queue: {_ms(found.pauses['handed over'])} during a handover, "
        f"{_ms(found.pauses['stayed'])} without one"
    )
    fewest = report.moves == report.required_moves
    words = "the minimum" if fewest else f"the minimum is {report.required_moves}"
    display.tell(f"{report.moves} moves of queues, {words}")
    display.tell(f"{found.repeats} messages repeated: processed, but not yet recorded at the kill")


def running_again(records: Sequence[Record], kill: KilledWorker) -> float:
    """Return when the last queue of the killed worker, of those with work left, resumed.

    A queue resumes with its first new message, not with a repetition.
    """
    done = {(record.queue, record.number) for record in records if record.pid == kill.pid}
    first: dict[str, float] = {}
    for record in records:
        if record.queue not in kill.queues or record.started <= kill.at:
            continue
        if (record.queue, record.number) not in done:
            first[record.queue] = min(record.started, first.get(record.queue, record.started))
    return max(first.values(), default=kill.at)


def _check_complete(display: Display, report: DemoReport, found: Audit) -> bool:
    total = sum(report.sent.values())
    good = found.processed == total
    display.tell(f"{found.processed:,} of {total:,} messages processed", good)
    return good


def _check_order(display: Display, found: Audit) -> bool:
    good = not found.faults
    if good:
        words = "in order, no gaps, one worker at a time, increasing fences"
    else:
        words = f"{len(found.faults)} errors in order, gaps, owners or fences"
    display.tell(f"{found.claims} claims: {words}", good)
    return good


def _check_recorded(display: Display, report: DemoReport) -> bool:
    done = sum(each.backlog == 0 and each.owner is None for each in report.statuses)
    good = done == len(report.statuses) == len(report.sent)
    display.tell(f"{done} of {len(report.sent)} queues recorded as processed and released", good)
    return good


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"

"""The end of the demo: who did what, and whether every promise was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdo.demo.ledger import Audit, Record, audit
from qdo.demo.show import Row, Show
from qdo.ops.status import QueueStatus

_FAULTS_SHOWN = 10


@dataclass(slots=True)
class Kill:
    """What happened around kill -9.

    :ivar queues: what the victim handled.
    :ivar at: time (CLOCK_MONOTONIC) of the kill.
    :ivar owned_seconds: from then until every queue had a new owner.
    """

    worker: str
    pid: int
    queues: frozenset[str]
    at: float
    owned_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Books:
    """Everything that is known at the end.

    :ivar sent: messages by queue.
    :ivar workers: every worker there was, with its queues at the end.
    :ivar moves: how many queues went from one worker to another, before the drain.
    :ivar fewest_moves: how many had to.
    :ivar statuses: what the coordinator has recorded of each queue.
    """

    records: Sequence[Record]
    sent: Mapping[str, int]
    kill: Kill | None
    workers: Sequence[Row]
    moves: int
    fewest_moves: int
    statuses: Sequence[QueueStatus]


def close_books(show: Show, books: Books) -> bool:
    """Print the table, the figures and the verdicts; return whether all are good."""
    killed = frozenset({books.kill.pid}) if books.kill else frozenset[int]()
    found = audit(books.records, books.sent, killed)
    show.table(
        ("worker", "end", "pid", "messages", "queues at the end"),
        [
            (
                row.name,
                row.state,
                str(row.pid),
                f"{row.messages:,}",
                "-" if row.state == "killed" else str(row.queues),
            )
            for row in books.workers
        ],
    )
    show.act(6, "Check", "Every worker noted queue, number, fence and time of each message.")
    _print_figures(show, books, found)
    verdicts = [_complete(show, books, found), _in_order(show, found), _recorded(show, books)]
    for fault in found.faults[:_FAULTS_SHOWN]:
        show.tell(fault, good=False)
    return all(verdicts)


def _print_figures(show: Show, books: Books, found: Audit) -> None:
    kill = books.kill
    if kill is not None:
        running_seconds = running_again(books.records, kill) - kill.at
        show.tell(
            f"kill -9: {len(kill.queues)} queues owned again after {_ms(kill.owned_seconds)}, "
            f"all at work after {_ms(running_seconds)}"
        )
    show.tell(
        f"longest pause of a queue: {_ms(found.pauses['handed over'])} when handed over, "
        f"{_ms(found.pauses['stayed'])} when it stayed"
    )
    fewest = books.moves == books.fewest_moves
    words = "fewer are not possible" if fewest else f"{books.fewest_moves} were needed"
    show.tell(f"{books.moves} moves of queues, {words}")
    show.tell(f"{found.repeats} messages repeated: done when their worker died, not yet recorded")


def running_again(records: Sequence[Record], kill: Kill) -> float:
    """Return when the last of the victim's queues, of those with work left, was worked on."""
    first: dict[str, float] = {}
    for record in records:
        if record.queue in kill.queues and record.started > kill.at:
            first[record.queue] = min(record.started, first.get(record.queue, record.started))
    return max(first.values(), default=kill.at)


def _complete(show: Show, books: Books, found: Audit) -> bool:
    total = sum(books.sent.values())
    good = found.processed == total
    show.tell(f"{found.processed:,} of {total:,} messages processed", good)
    return good


def _in_order(show: Show, found: Audit) -> bool:
    good = not found.faults
    words = f"{found.claims} claims: in order, without gaps, by one worker at a time, fences grow"
    show.tell(words if good else f"NOT {words}", good)
    return good


def _recorded(show: Show, books: Books) -> bool:
    done = sum(each.backlog == 0 and each.owner is None for each in books.statuses)
    good = done == len(books.statuses) == len(books.sent)
    show.tell(f"{done} of {len(books.sent)} queues recorded as done, and given back", good)
    return good


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"

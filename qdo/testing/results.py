"""The results of a run, for a test to check."""

from __future__ import annotations

from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination.znodes.progress import FailureRecord
from qdo.events import OutcomeName
from qdo.testing.fault_points import Step
from qdo.testing.state import Attempt, State
from qdo.text import join_some, pluralize


class Results:
    """Messages, attempts and progress of an app under test.

    :ivar broker: stores the messages and dead letters; `app.broker` while the kit is open.
    """

    def __init__(self, world: State, broker: Broker) -> None:
        self.broker = broker
        self._world = world

    @property
    def steps(self) -> list[Step]:
        """Every fault point that was reached, in order."""
        return list(self._world.faults.steps)

    @property
    def faults_left(self) -> int:
        """The number of requested faults that have not happened: 0 at the end of a valid test."""
        return self._world.faults.pending()

    @property
    def stops(self) -> list[str]:
        """The reasons of every `qdo.Stop`."""
        return list(self._world.stops)

    def attempts(
        self, queue: str | None = None, outcome: OutcomeName | None = None
    ) -> list[Attempt]:
        """Return the attempts that ended, in order, of one queue or outcome or of all.

        An attempt that a crash interrupted has not ended and is not included.
        """
        return [
            each
            for each in self._world.attempts
            if queue in (None, each.queue) and outcome in (None, each.outcome)
        ]

    def done(self, queue: str | None = None) -> list[Any]:
        """Return the bodies of the messages that were done, in order, including repetitions."""
        return [each.body for each in self.attempts(queue, "done")]

    def skipped(self, queue: str | None = None) -> list[Any]:
        """Return the bodies of the messages that were skipped, in order."""
        return [each.body for each in self.attempts(queue, "skip")]

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the dead letters of a queue, or of all, oldest first, as they are stored."""
        return self.broker.dead_letters.records(queue)

    def blocked(self) -> dict[str, FailureRecord]:
        """Return the failure records of messages that block their queue, by queue."""
        return {queue: marks for queue, marks in self._marks().items() if marks.blocked}

    def failing(self) -> dict[str, FailureRecord]:
        """Return the failure records of messages that wait for a retry, by queue."""
        return {queue: marks for queue, marks in self._marks().items() if not marks.blocked}

    def last(self, queue: str) -> int:
        """Return the recorded `last` of a queue: everything up to it is done; 0: nothing is."""
        return self._world.record.node(queue).last

    def waiting(self, queue: str) -> list[Any]:
        """Return the bodies of the messages after `last`, in order."""
        return [
            self._world.body_of(queue, row) for row in self._world.rows(queue, self.last(queue))
        ]

    def backlog(self, queue: str) -> Backlog:
        """Return the backlog after `last`, and the number of delayed messages."""
        return self.broker.catalog.backlog(queue, self.last(queue))

    def _without_job(self) -> dict[str, int]:
        """Return the number of messages by queue, delayed ones too, of queues without a job."""
        found = {}
        for queue in self.broker.catalog.names():
            if self._world.app.job_for(queue) is None:
                backlog = self.backlog(queue)
                found[queue] = backlog.count + backlog.delayed
        return {queue: count for queue, count in found.items() if count}

    def _describe_waiting(self) -> str:
        """Return what waits for a time, for an error."""
        retries = [
            f"a message of queue {queue!r} after {pluralize(failure.attempts, 'attempt')} "
            f"({failure.error or 'crashed'})"
            for queue, failure in self.failing().items()
        ]
        delayed = [
            f"{pluralize(count, 'delayed message')} of queue {queue!r}"
            for queue in self.broker.catalog.names()
            if (count := self.backlog(queue).delayed)
        ]
        return join_some([*retries, *delayed] or ["a message in an outbox, or an incomplete batch"])

    def _marks(self) -> dict[str, FailureRecord]:
        record = self._world.record
        found = {queue: record.node(queue).failure for queue in record.queues()}
        return {queue: marks for queue, marks in found.items() if marks is not None}

"""What a test can look at after a run."""

from __future__ import annotations

from typing import Any

from qdo.brokers.base import Backlog, Broker, DeadLetterRecord
from qdo.coordination.layout import Marks
from qdo.events import OutcomeName
from qdo.testing.faults import Step
from qdo.testing.world import Attempt, World, body_of


class Results:
    """Messages, attempts and progress of an app under test.

    :ivar broker: where messages and dead letters are, as `app.broker` while the kit is open.
    """

    def __init__(self, world: World, broker: Broker) -> None:
        self.broker = broker
        self._world = world

    @property
    def steps(self) -> list[Step]:
        """Every fault point that was reached, in order."""
        return list(self._world.faults.steps)

    @property
    def faults_left(self) -> int:
        """How many of the faults asked for have not happened: 0 at the end of a good test."""
        return self._world.faults.pending()

    @property
    def stops(self) -> list[str]:
        """The reasons of every `qdo.Stop`."""
        return list(self._world.stops)

    def attempts(
        self, queue: str | None = None, outcome: OutcomeName | None = None
    ) -> list[Attempt]:
        """Return the attempts that ended, in order, of one queue or outcome or of all.

        What was under way in a crash never ended and is not among them.
        """
        return [
            each
            for each in self._world.attempts
            if queue in (None, each.queue) and outcome in (None, each.outcome)
        ]

    def done(self, queue: str | None = None) -> list[Any]:
        """Return the bodies of the messages that were done, in order; repeated ones repeat."""
        return [each.body for each in self.attempts(queue, "done")]

    def skipped(self, queue: str | None = None) -> list[Any]:
        """Return the bodies of the messages that were skipped, in order."""
        return [each.body for each in self.attempts(queue, "skip")]

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the dead letters of a queue, or of all, oldest first, as they are stored."""
        return self.broker.dead_letters(queue)

    def blocked(self) -> dict[str, Marks]:
        """Return what is known of the message that blocks its queue, by queue."""
        return {queue: marks for queue, marks in self._marks().items() if marks.blocked}

    def failing(self) -> dict[str, Marks]:
        """Return what is known of the message that waits for its next attempt, by queue."""
        return {queue: marks for queue, marks in self._marks().items() if not marks.blocked}

    def last(self, queue: str) -> int:
        """Return the recorded `last` of a queue: up to here everything is done; 0: nothing is."""
        return self._world.record.node(queue).last

    def waiting(self, queue: str) -> list[Any]:
        """Return the bodies of the messages behind `last`, in order."""
        return [body_of(row) for row in self._world.rows(queue, self.last(queue))]

    def backlog(self, queue: str) -> Backlog:
        """Return what waits behind `last`, and how many messages are delayed."""
        return self.broker.backlog(queue, self.last(queue))

    def _marks(self) -> dict[str, Marks]:
        record = self._world.record
        found = {queue: record.node(queue).marks for queue in record.queues()}
        return {queue: marks for queue, marks in found.items() if marks is not None}

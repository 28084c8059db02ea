"""Estimate how long the messages of a queue usually take, from the durations of turns.

A turn reads the clock only at its start and its end. A turn with one message gives the duration of
the message. A turn with more messages gives their mean, or the overrun of the last message past the
planned end if that is longer. A turn ends after the first message that takes longer than
`turn_seconds`. A turn whose last attempt failed does not count, because the attempt may have failed
fast or at its time limit.

The estimate is a maximum that fades. A longer turn raises the estimate to its own duration. Every
other turn lowers the estimate by a hundredth of the difference. So a slow message raises no alarm
if one of the last 230 turns had a similar message (1.01 ** 230 is 10). If the estimate were a mean,
each slow message would raise an alarm when fewer than a tenth are slow.

The estimate never rises above the duration at which the log names a message. In a queue of short
messages, the log names the first hung message after 10 s. The log names the next hung message after
at most 100 s, even if the first message hung for an hour.
"""

from __future__ import annotations

from typing import NamedTuple

# Multiple of the usual duration after which the log names a message. Durations often vary by a
# factor of 2 or 3 with the load and the size of the message. A hang takes longer.
FACTOR = 10.0
# Minimum run time of a named message. On a slow disk or a busy machine, a job of 1 ms can take
# seconds. Workers look at their messages in flight only every few seconds.
LEAST_SECONDS = 10.0
# Number of messages that must end before the log names a message.
ENOUGH = 20
FADING = 0.01


# A pace covers at least these seconds, except at the beginning, and at most twice as many.
PACE_SECONDS = 60.0


class _Mark(NamedTuple):
    at: float
    done: int
    spent: float


class Durations:
    """The durations of the messages of one queue since this process claimed the queue.

    The messages of a batch end together, so a batch counts as one message.

    :ivar usual_seconds: the estimate; see the module's docstring.
    """

    __slots__ = ("_done", "_marks", "_missing", "_spent", "usual_seconds")

    def __init__(self) -> None:
        self.usual_seconds = 0.0
        self._missing = ENOUGH
        self._done = 0
        self._spent = 0.0
        self._marks: tuple[_Mark, _Mark] | None = None

    def pace(self, now: float) -> tuple[float, float] | None:
        """Return the recent number of messages per second, and the seconds per message.

        Return None at the first call, and if no message has ended since the older mark. The worker
        does not ask for the pace of idle queues, so idle queues have no marks in memory.
        """
        mark = _Mark(now, self._done, self._spent)
        # Keep two marks. With a single mark, a pace just after a new mark would cover no time.
        older, newer = self._marks or (mark, mark)
        if now - newer.at >= PACE_SECONDS:
            older = newer
            newer = mark
        self._marks = older, newer
        done = self._done - older.done
        seconds = now - older.at
        if done <= 0 or seconds <= 0.0:
            return None
        return done / seconds, (self._spent - older.spent) / done

    def learn(
        self, messages: int, seconds: float, late_seconds: float = 0.0, batch: int = 1
    ) -> None:
        """Update the estimate after a turn in which the job returned for all messages.

        :param seconds: the duration of the turn.
        :param late_seconds: seconds from the planned end of the turn to its end.
        :param batch: number of messages that count as one.
        """
        if messages <= 0:
            return
        self._done += messages * batch
        self._spent += seconds
        self._missing -= messages
        longest = max(seconds / messages, late_seconds)
        usual = self.usual_seconds
        if longest <= usual:
            self.usual_seconds = usual + (longest - usual) * FADING
        else:
            self.usual_seconds = min(longest, self.limit_seconds)

    @property
    def limit_seconds(self) -> float:
        """The seconds after which the log names a running message."""
        return max(LEAST_SECONDS, FACTOR * self.usual_seconds)

    def are_exceeded(self, seconds: float) -> bool:
        """Return whether a run of this length is much longer than usual."""
        return self._missing <= 0 and seconds >= self.limit_seconds

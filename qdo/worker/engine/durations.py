"""Learn how long the messages of a queue usually take, from times that turns measure anyway.

A turn reads the clock at its start and its end, not for each message. Of a turn with one message,
that is the duration of the message. Of one with more, it is their mean, or how long the last one
ran past the end of the turn, if that is more: a turn ends after the first message that takes
longer than `turn_seconds`. A turn whose last attempt failed teaches nothing: it may have failed
fast, or at its time limit.

The estimate is a maximum that fades. A turn that took longer raises it to its own duration. Every
other turn lowers it by a hundredth of the difference. So a kind of message that takes long raises
no alarm if there was one like it in the last 230 turns (1.01 ** 230 is 10). A mean would alarm for
each of them if they are fewer than a tenth.

The estimate never rises above the duration at which a message is named. In a queue of short
messages, the first one that hangs is named after 10 s, the next one after 100 s at the latest, even
if the first one hung for an hour.
"""

from __future__ import annotations

from typing import NamedTuple

# A message that runs for this many times the usual duration is named. Durations often vary by 2 or
# 3 with the load and with the size of the message; a hang is longer than any of that.
FACTOR = 10.0
# No message is named before. A slow disk or a busy machine takes a job of 1 ms to seconds, and
# workers look at their messages in flight only every few seconds.
LEAST_SECONDS = 10.0
# Messages that must have ended before any is named.
ENOUGH = 20
FADING = 0.01


# A pace is that of this time at least, as far as it is known, and of twice this time at most.
PACE_SECONDS = 60.0


class _Mark(NamedTuple):
    at: float
    done: int
    spent: float


class Durations:
    """The durations of the messages of one queue, since this process claimed it.

    The messages of a batch end together, so a batch counts as one message.

    :ivar usual_seconds: a bounded estimate of the longest recent duration, which fades.
    """

    __slots__ = ("_done", "_marks", "_missing", "_spent", "usual_seconds")

    def __init__(self) -> None:
        self.usual_seconds = 0.0
        self._missing = ENOUGH
        self._done = 0
        self._spent = 0.0
        self._marks: tuple[_Mark, _Mark] | None = None

    def pace(self, now: float) -> tuple[float, float] | None:
        """Return how many messages a second have ended lately, and how many seconds one took.

        None at the first call, and if none has ended since. An idle queue is not asked, so it
        costs no memory.
        """
        mark = _Mark(now, self._done, self._spent)
        # Two marks: with one, the pace would be that of no time at all just after it was set.
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
        """Learn from a turn, whose messages all returned.

        :param seconds: how long it lasted.
        :param late_seconds: how long it lasted after the time at which it was to end.
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
        """Return how long a message must run to be named."""
        return max(LEAST_SECONDS, FACTOR * self.usual_seconds)

    def are_exceeded(self, seconds: float) -> bool:
        """Return whether a message that has run for so long runs for much longer than usual."""
        return self._missing <= 0 and seconds >= self.limit_seconds

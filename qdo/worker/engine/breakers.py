"""Circuit breakers: a job pauses when all that it does fails, instead of using up attempts.

If the database of a job is away, each of its messages fails. Attempts would end within seconds, and
with them thousands of messages that nothing is wrong with. Only failures count here that
`qdo.refusals` takes for one of a server or a connection: another one may be a bug, and a message
with a bug should not wait for others to succeed.

========  ==================================================  =====================================
a job is  meaning                                             next
========  ==================================================  =====================================
closed    attempts count                                      open: `FAILURES` in a row with one
                                                              error class, in `LINES` queues or
                                                              keys, with no success between
open      one attempt for each pause, which grows from        closed: an attempt succeeds;
          `PAUSE`'s first to its longest; a failed one does   spent: it was open for `OPEN_SECONDS`
          not count
spent     attempts count, however many fail                   closed: an attempt succeeds
========  ==================================================  =====================================

The third state is for a fault that stays, such as one in the job: its messages end by their policy.
An error that a rule of the policy names is not counted here: the app has decided what it means.
See Nygard, Release It!, 2nd edition, "Circuit Breaker".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from qdo.backoff import Backoff
from qdo.text import describe

FAILURES = 20
LINES = 5
PAUSE = Backoff(0.5, 10.0)
OPEN_SECONDS = 900.0
# How soon all messages continue after a success: each queue or key that waits looks so often.
LOOK_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Breaker:
    """The circuit breaker of one job in one worker process.

    :ivar paused: whether the job is open: attempts do not count.
    :ivar why: the error that it was paused for.
    """

    def __init__(self, job: str, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        self.paused = False
        self.why = ""
        self._job = job
        self._clock = clock
        self._jitter = jitter
        self._kind = ""
        self._failures = 0
        self._lines: set[tuple[str, object]] = set()
        self._spent = False
        self._opened_at = self._next_at = 0.0
        self._pauses = 0

    def left_seconds(self) -> float:
        """Return how long an attempt must wait before it asks again; 0 if one may begin."""
        if not self.paused:
            return 0.0
        return min(LOOK_SECONDS, max(0.0, self._next_at - self._clock()))

    def admit(self) -> float:
        """Let one attempt begin and return 0, or return how long it must wait."""
        seconds = self.left_seconds()
        # Planned before the attempt ends: only one is tried after each pause.
        if self.paused and not seconds:
            self._plan(self._clock())
        return seconds

    def failed(self, line: tuple[str, object], error: BaseException) -> bool:
        """Count a failed attempt; return whether it is excused, because the job is paused.

        :param line: a queue, and the key or position of the message if others need not wait for it.
        """
        now = self._clock()
        if self.paused and now - self._opened_at >= OPEN_SECONDS:
            self.paused = False
            self._spent = True
            _log.error(
                "job %s: attempts count again, because it has failed for %d minutes; its messages"
                " end by their policies: %s",
                self._job,
                OPEN_SECONDS // 60,
                describe(error),
            )
        if self.paused or self._spent:
            return self.paused
        # By name: each error from the process of a job has a class of its own.
        kind = f"{type(error).__module__}:{type(error).__qualname__}"
        if kind != self._kind:
            self._kind = kind
            self._failures = 0
            self._lines.clear()
        self._failures += 1
        # More than `LINES` would only take memory.
        if len(self._lines) < LINES:
            self._lines.add(line)
        if self._failures >= FAILURES and len(self._lines) >= LINES:
            self._open(now, error)
        return self.paused

    def succeeded(self) -> None:
        """Take note of an attempt that succeeded."""
        if self.paused:
            seconds = self._clock() - self._opened_at
            _log.warning("job %s: continues after a pause of %.1f s", self._job, seconds)
        self.paused = self._spent = False
        self._kind = ""

    def _open(self, now: float, error: BaseException) -> None:
        self.paused = True
        self.why = describe(error)
        self._opened_at = now
        self._pauses = 0
        self._plan(now)
        _log.error(
            "job %s: paused in this process, because its last %d attempts failed, in different"
            " queues or keys; one message at a time is tried after %.1f s and more, and no attempt"
            " counts: %s",
            self._job,
            self._failures,
            self._next_at - now,
            self.why,
        )

    def _plan(self, now: float) -> None:
        self._pauses += 1
        self._next_at = now + PAUSE.delay(self._pauses, self._jitter())

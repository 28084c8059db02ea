"""Circuit breakers pause a job when all its attempts fail, to save the messages' attempts.

If the database of a job is unavailable, each message of the job fails. Within seconds, thousands of
good messages would use up their attempts. A breaker counts only failures that `qdo.refusals`
attributes to a server or a connection. Other failures may be bugs, and a message with a bug should
not pause its job.

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

The state "spent" is for a lasting fault, such as a bug in the job. The policy then decides the end
of each message. The breaker ignores errors that a rule of the policy names, because the app has
decided their meaning. See Nygard, Release It!, 2nd edition, "Circuit Breaker".
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
# Seconds between two checks of a waiting queue or key for the end of the pause.
LOOK_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Breaker:
    """The circuit breaker of one job in one worker process.

    :ivar paused: whether the breaker is open. Attempts do not count while the breaker is open.
    :ivar why: the error that paused the job.
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
        """Return the seconds until an attempt should ask again; 0 if it may begin."""
        if not self.paused:
            return 0.0
        return min(LOOK_SECONDS, max(0.0, self._next_at - self._clock()))

    def admit(self) -> float:
        """Let an attempt begin and return 0, or return the seconds that it must wait."""
        seconds = self.left_seconds()
        # Plan the next pause now, so that only one attempt begins after each pause.
        if self.paused and not seconds:
            self._plan(self._clock())
        return seconds

    def failed(self, line: tuple[str, object], error: BaseException) -> bool:
        """Count a failed attempt; return True if it does not count because the job is paused.

        :param line: a queue, and the message's key or position if other messages need not wait for
          it.
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
        # Compare names, because each error from a job's process has its own class.
        kind = f"{type(error).__module__}:{type(error).__qualname__}"
        if kind != self._kind:
            self._kind = kind
            self._failures = 0
            self._lines.clear()
        self._failures += 1
        # More than `LINES` entries would waste memory.
        if len(self._lines) < LINES:
            self._lines.add(line)
        if self._failures >= FAILURES and len(self._lines) >= LINES:
            self._open(now, error)
        return self.paused

    def succeeded(self) -> None:
        """Record a successful attempt."""
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
            " queues or keys; the process tries one message at a time, first in %.1f s, and counts"
            " no attempt: %s",
            self._job,
            self._failures,
            self._next_at - now,
            self.why,
        )

    def _plan(self, now: float) -> None:
        self._pauses += 1
        self._next_at = now + PAUSE.delay(self._pauses, self._jitter())

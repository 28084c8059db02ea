"""Count the attempts of a worker process's jobs, for `/metrics`.

Reading the clock for each message would cost a no-op job more than 2 % of its rate. So a meter
measures the whole turn of a queue. A turn lasts `turn_seconds`, or as long as one longer message.
The sum of the durations is exact. In a turn of many messages, each message counts with the mean. A
last message that ran past the planned end counts separately.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from qdo.message import Batch, Message
from qdo.outcomes import FailedAt
from qdo.system.clock import Histogram
from qdo.worker.executors.base import JobCall, NotStarted

if TYPE_CHECKING:
    from qdo.jobs.job import Job
    from qdo.worker.engine.slot import Slot

JOB_BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
# Upper bounds of the histogram buckets, in seconds.
DWELL_BOUNDS = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 86_400.0)


# Maximum number of globs with their own meters. All others share a meter, because each meter adds
# about thirty time series.
MOST_GLOBS = 100
OTHERS = "(others)"


class JobMeter:
    """Counts the attempts of one glob of queues in this process.

    :ivar done: number of messages for which the job returned.
    :ivar outcomes: number of other attempts, by outcome.
    :ivar dwell: seconds from the sending (or due time) of a message to its start, for one message a
      turn.
    """

    __slots__ = ("_clock", "_now", "done", "durations", "dwell", "outcomes")

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock = clock
        self._now = now
        self.done = 0
        self.outcomes: Counter[str] = Counter()
        self.durations = Histogram(JOB_BOUNDS)
        self.dwell = Histogram(DWELL_BOUNDS)

    def turn(self, slot: Slot, taken: int, began: float, until: float) -> None:
        """Count a turn that has just ended.

        :param taken: number of messages that the turn took.
        :param began: clock time of the turn's start.
        """
        started = taken - slot.unstarted
        if started <= 0:
            return
        self.done += started - slot.unreturned
        ended = self._clock()
        seconds = ended - began
        late = ended - until
        observe = self.durations.observe
        if started == 1:
            observe(seconds)
        elif late * started > seconds:  # the last message ran longer than the mean
            observe(late)
            observe((seconds - late) / (started - 1), started - 1)
        else:
            observe(seconds / started, started)
        last = slot.message
        if last is not None and last.attempt == 1:
            # The last of several messages started before the planned end of the turn.
            ran = seconds if started == 1 else max(0.0, late)
            self.dwell.observe(max(0.0, self._now() - ran - (last.due or last.time)))

    def bind_batch(self, call: JobCall) -> JobCall:
        """Return a call that counts batches, with an equal share of the time for each message."""
        clock = self._clock

        def measured(batch: Batch, context: Any) -> None:
            began = clock()
            done = 0
            size = len(batch)
            self.dwell.observe(max(0.0, self._now() - (batch[0].due or batch[0].time)))
            try:
                call(batch, context)  # type: ignore[arg-type]
                done = size
            except NotStarted:
                size = 0  # the job did not run
                raise
            except FailedAt as error:
                done = error.index if 0 <= error.index < size else 0
                raise
            finally:
                self.done += done
                if size:
                    self.durations.observe((clock() - began) / size, size)

        return measured  # type: ignore[return-value]


class JobMeters:
    """The meters of a process's jobs, by the glob of their queues.

    :param globs: the globs that show zeros from the start.
    """

    def __init__(
        self,
        job_for: Callable[[str], Job | None],
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
        globs: Iterable[str] = (),
    ) -> None:
        self.by_glob: dict[str, JobMeter] = {}
        self._job_for = job_for
        self._clock = clock
        self._now = now
        for glob in globs:
            self.of(glob)

    def of(self, glob: str) -> JobMeter:
        """Return the meter of a glob of queues."""
        meter = self.by_glob.get(glob)
        if meter is None:
            if len(self.by_glob) >= MOST_GLOBS:
                glob = OTHERS
            meter = self.by_glob.setdefault(glob, JobMeter(self._clock, self._now))
        return meter

    def ended(self, message: Message, outcome: str) -> None:
        """Count an attempt that did not return."""
        job = self._job_for(message.queue)
        if job is not None:
            self.of(job.queues).outcomes[outcome] += 1

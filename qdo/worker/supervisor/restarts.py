"""Decide, without I/O, which worker processes a parent runs and how it reacts to exits.

A parent has one place for each worker process. Each event is a method call with the time as an
argument. The methods return a list of actions.

=========  =====================================================  =======================
from       cause                                                  to
=========  =====================================================  =======================
(new)      `start`                                                running
running    exit code 0: it finished on purpose                    ended
running    exit code of a worker that cannot start (2, 3, 5, 6),  ended; the others drain
           and no worker of any place has ever registered
running    with `burst`: any error before it has registered       ended; the others drain
running    any other exit, and no stop was requested              waiting (backoff)
running    any exit after a stop was requested                    ended
waiting    its delay is over                                      running
waiting    a stop is requested                                    ended
running    `reload`, `restart`: its worker drains; then any exit  running
running    `retire`: its worker drains; then any exit             ended, until `reload`
running    with `watching`: its worker cannot start               waiting (for `reload`)
waiting    `reload`                                               running
=========  =====================================================  =======================

The first stop signal drains the workers, the second aborts their jobs, and the third kills the
workers. The parent kills a worker that does not exit within its time limit, and logs its death.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

from qdo.backoff import Backoff

# Exit codes for faults that a restart would not fix: usage, unreachable, denied, not found.
CANNOT_START = frozenset({2, 3, 5, 6})
# Exit codes for faults that a change of the app may fix, if the worker did not start.
FIXABLE = frozenset({1, 2})
NEVER = float("inf")
# Delays before restarts. The first delay is short, so a single SIGKILL costs almost no time.
RESTART_BACKOFF = Backoff(0.1, 30.0, jitter=0.0)
# Seconds of running after which the backoff of a worker starts again at its first delay.
RAN_WELL_SECONDS = 30.0
# Seconds that a draining worker may take beyond its own limit. The worker must abort jobs, tear
# down its context, and close its session with a slow coordinator.
DRAIN_MARGIN_SECONDS = 10.0
# Seconds that a worker may take to exit after the second stop signal.
ABORT_SECONDS = 10.0
# The code in `exit_code` for a worker that died of a signal.
KILLED_CODE = 1


class Phase(enum.Enum):
    """The state of a place."""

    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


class StopLevel(enum.IntEnum):
    """The urgency of a requested stop of the workers."""

    NO = 0
    DRAIN = 1
    ABORT = 2
    KILL = 3


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker process for a place."""

    place: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to the process of a place. The first signal drains, the second aborts."""

    place: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process group of a place, and log the `reason`."""

    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Log that the process of a place restarts in `after_seconds`, by a later `Spawn`."""

    place: int
    after_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Log that all workers stop, because the worker of a place cannot start."""

    place: int
    code: int


@dataclass(frozen=True, slots=True)
class WaitForReload:
    """Log that the worker of a place cannot start before the app's files change."""

    place: int


Action = Spawn | Terminate | Kill | Restart | GiveUp | WaitForReload


@dataclass(slots=True)
class ProcessPlace:
    """A place, which has one process at a time."""

    phase: Phase = Phase.ENDED
    started_at: float = 0.0
    due_at: float = 0.0
    # Number of consecutive failures; 0 after a worker has run well.
    failures: int = 0
    # Whether the process now has a coordinator session.
    registered: bool = False
    # Whether the process has or had a coordinator session.
    was_registered: bool = False
    # Whether any process of this place has or had a coordinator session.
    ever_registered: bool = False
    code: int = 0
    # The time at which the parent kills a process that drains for a reload, a restart or a
    # retirement; otherwise None.
    kill_at: float | None = None
    # Whether the place stays empty until a reload.
    retired: bool = False


@dataclass(slots=True)
class RestartPolicy:
    """The places of one parent, and the decisions about them."""

    # Initial number of worker processes.
    size: int
    # Maximum seconds for a worker to drain and to close its broker.
    drain_seconds: float
    # Whether a worker that cannot start waits for `reload` if its app may be the cause.
    watching: bool = False
    # Whether all workers stop if a worker fails before it registers.
    burst: bool = False
    stop: StopLevel = StopLevel.NO
    places: list[ProcessPlace] = field(default_factory=list)
    _start_failure: int | None = None
    _deadline: float | None = None

    def start(self, now: float) -> list[Action]:
        return self.grow(self.size, now)

    def grow(self, size: int, now: float) -> list[Action]:
        """Add places and start their processes until there are `size` places."""
        if self.stop:
            return []
        first = len(self.places)
        self.places += [ProcessPlace() for _ in range(first, size)]
        return [self._spawn(place, now) for place in range(first, len(self.places))]

    def registered(self, place: int, open_session: bool) -> None:
        """Record that the process of a place opened or closed a coordinator session."""
        entry = self.places[place]
        entry.registered = open_session
        entry.was_registered = entry.was_registered or open_session
        entry.ever_registered = entry.ever_registered or open_session

    def exited(self, place: int, code: int, now: float) -> list[Action]:
        """Return the actions after the exit of a process; `code` is negative for a signal."""
        entry = self.places[place]
        entry.code = self._rate(entry, code)
        if self.stop or entry.retired or (code == 0 and entry.kill_at is None):
            entry.phase = Phase.ENDED
            return []
        if entry.kill_at is not None:
            entry.failures = 0
            return [self._spawn(place, now)]
        if self.watching and code in FIXABLE and not entry.was_registered:
            entry.phase = Phase.WAITING
            entry.due_at = NEVER
            entry.failures = 0
            return [WaitForReload(place)]
        if self._cannot_start(entry, code):
            entry.phase = Phase.ENDED
            self._start_failure = code
            return [GiveUp(place, code), *self.drain(now)]
        if now - entry.started_at >= RAN_WELL_SECONDS:
            entry.failures = 0
        entry.failures += 1
        delay = RESTART_BACKOFF.delay(entry.failures, 0.0)
        entry.due_at = now + delay
        entry.phase = Phase.WAITING
        return [Restart(place, delay)]

    def reload(self, now: float) -> list[Action]:
        """Replace every worker. Running workers drain first, and the others start at once."""
        if self.stop:
            return []
        actions: list[Action] = []
        for place, entry in enumerate(self.places):
            if entry.phase is Phase.WAITING:
                entry.due_at = now
                entry.failures = 0
            elif entry.phase is Phase.ENDED and entry.retired:
                entry.retired = False
                actions.append(self._spawn(place, now))
            else:
                actions += self.restart(place, now)
        return actions

    def restart(self, place: int, now: float) -> list[Action]:
        """Drain the worker of a place and start a replacement, even for a retired worker."""
        self.places[place].retired = False
        return self._drain_one(place, now)

    def retire(self, place: int, now: float) -> list[Action]:
        """Drain the worker of a place, without a replacement before a reload."""
        self.places[place].retired = True
        return self._drain_one(place, now)

    def _drain_one(self, place: int, now: float) -> list[Action]:
        entry = self.places[place]
        # A second SIGTERM would make a draining worker abort its jobs.
        if self.stop or entry.phase is not Phase.RUNNING or entry.kill_at is not None:
            return []
        entry.kill_at = now + self.drain_seconds + DRAIN_MARGIN_SECONDS
        return [Terminate(place)]

    def is_stopping(self, place: int) -> bool:
        """Return whether the parent has asked the process of a place to exit."""
        return self.stop is not StopLevel.NO or self.places[place].kill_at is not None

    def drain(self, now: float, code: int | None = None) -> list[Action]:
        """Drain every worker once; `code` is the exit code if the parent itself cannot run."""
        if self.stop:
            return []
        self._start_failure = code if self._start_failure is None else self._start_failure
        self.stop = StopLevel.DRAIN
        self._deadline = now + self.drain_seconds + DRAIN_MARGIN_SECONDS
        for entry in self.places:
            if entry.phase is Phase.WAITING:
                entry.phase = Phase.ENDED
        # A second SIGTERM would make a worker that drains for a reload abort its jobs.
        return [Terminate(place) for place in self._running() if self.places[place].kill_at is None]

    def stop_signal(self, now: float) -> list[Action]:
        """Raise the urgency of the stop by one step: drain, abort, kill."""
        if self.stop is StopLevel.NO:
            return self.drain(now)
        if self.stop is StopLevel.DRAIN:
            self.stop = StopLevel.ABORT
            soon = now + ABORT_SECONDS
            self._deadline = soon if self._deadline is None else min(self._deadline, soon)
            return [Terminate(place) for place in self._running()]
        self.stop = StopLevel.KILL
        return self._kill_all("third stop signal")

    def tick(self, now: float) -> list[Action]:
        """Return the due restarts, and the kills of workers that hang."""
        actions: list[Action] = [
            self._spawn(place, now)
            for place, entry in enumerate(self.places)
            if entry.phase is Phase.WAITING and entry.due_at <= now
        ]
        for place in self._running():
            entry = self.places[place]
            if entry.kill_at is not None and entry.kill_at <= now:
                entry.kill_at = NEVER
                actions.append(Kill(place, "it did not exit in time"))
        if self._deadline is not None and self._deadline <= now:
            self._deadline = None
            actions += self._kill_all("it did not exit in time")
        return actions

    @property
    def next_at(self) -> float | None:
        """The time of the next `tick`; None if no action is planned."""
        times = [entry.due_at for entry in self.places if entry.phase is Phase.WAITING]
        kills = [self.places[place].kill_at for place in self._running()]
        times += [kill_at for kill_at in kills if kill_at is not None]
        times = [at for at in times if at < NEVER]
        if self._deadline is not None and self._running():
            times.append(self._deadline)
        return min(times, default=None)

    @property
    def done(self) -> bool:
        """Whether every place has ended."""
        return all(entry.phase is Phase.ENDED for entry in self.places)

    @property
    def exit_code(self) -> int:
        """The code of the worker that could not start, otherwise the highest last code."""
        if self._start_failure is not None:
            return self._start_failure
        return max((entry.code for entry in self.places), default=0)

    def _spawn(self, place: int, now: float) -> Spawn:
        entry = self.places[place]
        entry.phase = Phase.RUNNING
        entry.started_at = now
        entry.registered = entry.was_registered = False
        entry.kill_at = None
        return Spawn(place)

    def _cannot_start(self, entry: ProcessPlace, code: int) -> bool:
        # Restart a worker that died of a signal, for example when memory is short.
        if self.burst and code > 0 and not entry.was_registered:
            return True
        # If any process could start earlier, the fault is an outage, so restart the worker.
        return code in CANNOT_START and not any(each.ever_registered for each in self.places)

    def _rate(self, entry: ProcessPlace, code: int) -> int:
        # SIGTERM kills a process that has not set its handlers yet, and that owns no queue.
        if code == -signal.SIGTERM and self.stop and not entry.registered:
            return 0
        return code if code >= 0 else KILLED_CODE

    def _running(self) -> list[int]:
        return [n for n, entry in enumerate(self.places) if entry.phase is Phase.RUNNING]

    def _kill_all(self, reason: str) -> list[Action]:
        return [Kill(place, reason) for place in self._running()]

"""Which worker processes a parent keeps, and what it does as they come and go; no I/O.

A roster has one place per worker process. Events go in as method calls, with the time as an
argument; what is to be done comes out as a list of actions.

=========  =====================================================  =======================
from       cause                                                  to
=========  =====================================================  =======================
(new)      `begin`                                                running
running    exit with 0: it finished on purpose                    ended
running    exit that says it cannot begin (2, 3, 5, 6), before    ended; the others are
           a worker of this place ever registered                 drained
running    any other exit, while nobody asked to stop             waiting (back-off)
running    any exit after somebody asked to stop                  ended
waiting    its time came                                          running
waiting    somebody asked to stop                                 ended
running    `reload`: asked to drain; then any exit                running
running    with `watching`: it cannot begin                       waiting (for `reload`)
waiting    `reload`                                               running
=========  =====================================================  =======================

Asked to stop once, the roster drains; asked again it aborts; asked a third time it kills.
Whoever has not ended when the time for it is over is killed, and named.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

CANNOT_BEGIN = frozenset({2, 3, 5, 6})
"""Exit codes that say trying again changes nothing: usage, out of reach, refused, not found."""
MENDABLE = frozenset({1, 2})
"""Exit codes of a worker that did not begin for which its app may be the reason."""
NEVER = float("inf")
FIRST_DELAY_SECONDS = 0.1
"""A single kill -9 is healed at once."""
LONGEST_DELAY_SECONDS = 30.0
RAN_WELL_SECONDS = 30.0
"""Whoever ran for so long starts its back-off anew when it dies."""
DRAIN_MARGIN_SECONDS = 10.0
"""What a draining worker may take beyond its own budget: to abort what did not finish, to tear
down its context, and to close its session with a slow coordinator."""
ABORT_SECONDS = 10.0
"""The same for a worker that was told to abort."""
KILLED_CODE = 1
"""What a worker that died of a signal counts for in the parent's exit code."""


class Phase(enum.Enum):
    """Where a place stands."""

    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


class Stop(enum.IntEnum):
    """How urgently the roster was asked to stop."""

    NO = 0
    DRAIN = 1
    ABORT = 2
    KILL = 3


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker process for a place."""

    place: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the process of a place SIGTERM: the first drains it, the second aborts its jobs."""

    place: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process group of a place; `reason` is for the log."""

    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Tell that a place will be filled again in `after_seconds`; nothing to do now."""

    place: int
    after_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell that a place cannot begin and that therefore all of them stop."""

    place: int
    code: int


@dataclass(frozen=True, slots=True)
class Await:
    """Tell that a place cannot begin and waits until its files change."""

    place: int


Action = Spawn | Ask | Kill | Restart | GiveUp | Await


@dataclass(slots=True)
class _Place:
    phase: Phase = Phase.ENDED
    started_at: float = 0.0
    due_at: float = 0.0
    delay: float = 0.0
    """The back-off used last, 0 when its worker ran well."""
    registered: bool = False
    """Its process has a coordinator session now."""
    ever_registered: bool = False
    began: bool = False
    """Its process has, or had, a coordinator session."""
    code: int = 0
    leave_by: float | None = None
    """When a process that was asked to make room for its successor is killed; None: not asked."""


@dataclass(slots=True)
class Roster:
    """The places of one parent.

    :ivar size: how many worker processes to keep.
    :ivar drain_seconds: how long a worker may take to drain and to close its broker.
    :ivar watching: a worker whose app may be why it cannot begin waits for `reload`.
    """

    size: int
    drain_seconds: float
    watching: bool = False
    stop: Stop = Stop.NO
    _places: list[_Place] = field(default_factory=list)
    _refusal: int | None = None
    _deadline: float | None = None

    def begin(self, now: float) -> list[Action]:
        """Fill every place."""
        self._places = [_Place() for _ in range(self.size)]
        return [self._spawn(place, now) for place in range(self.size)]

    def registered(self, place: int, open_session: bool) -> None:
        """Note that the process of a place opened a coordinator session, or closed its own."""
        entry = self._places[place]
        entry.registered = open_session
        entry.began = entry.began or open_session
        entry.ever_registered = entry.ever_registered or open_session

    def ran(self, place: int) -> bool:
        """Return whether a process of a place ever had a coordinator session."""
        return self._places[place].ever_registered

    def exited(self, place: int, code: int, now: float) -> list[Action]:
        """Decide what follows from the end of a process; `code` is negative for a signal."""
        entry = self._places[place]
        entry.code = self._rate(entry, code)
        if self.stop or (code == 0 and entry.leave_by is None):
            entry.phase = Phase.ENDED
            return []
        if entry.leave_by is not None:
            entry.delay = 0.0
            return [self._spawn(place, now)]
        if self.watching and code in MENDABLE and not entry.began:
            entry.phase, entry.due_at, entry.delay = Phase.WAITING, NEVER, 0.0
            return [Await(place)]
        if code in CANNOT_BEGIN and not entry.ever_registered:
            entry.phase = Phase.ENDED
            self._refusal = code
            return [GiveUp(place, code), *self.drain(now)]
        if now - entry.started_at >= RAN_WELL_SECONDS:
            entry.delay = 0.0
        entry.delay = min(entry.delay * 2 or FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS)
        entry.due_at = now + entry.delay
        entry.phase = Phase.WAITING
        return [Restart(place, entry.delay)]

    def reload(self, now: float) -> list[Action]:
        """Replace every worker: those that run drain first, those that wait begin at once."""
        if self.stop:
            return []
        asked: list[Action] = []
        for place, entry in enumerate(self._places):
            if entry.phase is Phase.WAITING:
                entry.due_at, entry.delay = now, 0.0
            elif entry.phase is Phase.RUNNING and entry.leave_by is None:
                entry.leave_by = now + self.drain_seconds + DRAIN_MARGIN_SECONDS
                asked.append(Ask(place))
        return asked

    def asked(self, place: int) -> bool:
        """Return whether the process of a place was asked to end."""
        return self.stop is not Stop.NO or self._places[place].leave_by is not None

    def drain(self, now: float) -> list[Action]:
        """Ask every worker to drain; asking again changes nothing."""
        if self.stop:
            return []
        self.stop = Stop.DRAIN
        self._deadline = now + self.drain_seconds + DRAIN_MARGIN_SECONDS
        for entry in self._places:
            if entry.phase is Phase.WAITING:
                entry.phase = Phase.ENDED
        # Whoever makes room for a successor drains already; asked again it would abort.
        return [Ask(place) for place in self._running() if self._places[place].leave_by is None]

    def press(self, now: float) -> list[Action]:
        """Ask to stop, each time more urgently: drain, abort, kill."""
        if self.stop is Stop.NO:
            return self.drain(now)
        if self.stop is Stop.DRAIN:
            self.stop = Stop.ABORT
            soon = now + ABORT_SECONDS
            self._deadline = soon if self._deadline is None else min(self._deadline, soon)
            return self._ask_all()
        self.stop = Stop.KILL
        return self._kill_all("it was asked to stop for the third time")

    def tick(self, now: float) -> list[Action]:
        """Return what is due by now: restarts, and an end for those that hang."""
        actions: list[Action] = [
            self._spawn(place, now)
            for place, entry in enumerate(self._places)
            if entry.phase is Phase.WAITING and entry.due_at <= now
        ]
        for place in self._running():
            entry = self._places[place]
            if entry.leave_by is not None and entry.leave_by <= now:
                entry.leave_by = NEVER
                actions.append(Kill(place, "it did not make room in the time it had"))
        if self._deadline is not None and self._deadline <= now:
            self._deadline = None
            actions += self._kill_all("it did not end in the time it had")
        return actions

    @property
    def next_at(self) -> float | None:
        """The time at which `tick` has something to do, None while there is nothing."""
        times = [entry.due_at for entry in self._places if entry.phase is Phase.WAITING]
        leaving = [self._places[place].leave_by for place in self._running()]
        times += [leave_by for leave_by in leaving if leave_by is not None]
        times = [at for at in times if at < NEVER]
        if self._deadline is not None and self._running():
            times.append(self._deadline)
        return min(times, default=None)

    @property
    def done(self) -> bool:
        """True when every place has ended for good."""
        return all(entry.phase is Phase.ENDED for entry in self._places)

    @property
    def exit_code(self) -> int:
        """The code of the worker that could not begin, else the worst of the last codes."""
        if self._refusal is not None:
            return self._refusal
        return max((entry.code for entry in self._places), default=0)

    def _spawn(self, place: int, now: float) -> Spawn:
        entry = self._places[place]
        entry.phase = Phase.RUNNING
        entry.started_at = now
        entry.registered = entry.began = False
        entry.leave_by = None
        return Spawn(place)

    def _rate(self, entry: _Place, code: int) -> int:
        # A process asked to drain before it could listen dies of the signal and leaves nothing.
        if code == -signal.SIGTERM and self.stop and not entry.registered:
            return 0
        return code if code >= 0 else KILLED_CODE

    def _running(self) -> list[int]:
        return [n for n, entry in enumerate(self._places) if entry.phase is Phase.RUNNING]

    def _ask_all(self) -> list[Action]:
        return [Ask(place) for place in self._running()]

    def _kill_all(self, reason: str) -> list[Action]:
        return [Kill(place, reason) for place in self._running()]

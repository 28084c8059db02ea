"""A worker process: the real member and its machines, a modelled engine, a modelled client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from kazoo.protocol.states import EventType, KazooState, KeeperState, WatchedEvent

from qdo.coordination.client import Client
from qdo.coordination.layout import Layout, WorkerNode
from qdo.coordination.lease import Lease
from qdo.coordination.machine import Answer, Children, Commit, Create, Get, Node, NoNode, Then
from qdo.coordination.member import WORKER_STEM, Member
from qdo.coordination.membership import Registration
from qdo.coordination.performer import Performer, Watcher
from tests.simulation.checks import Broker, Checks
from tests.simulation.engine import Engine
from tests.simulation.link import Link
from tests.simulation.model import Coordinator
from tests.simulation.schedule import Schedule
from tests.simulation.server import Exists
from tests.simulation.switches import Switches


class _Empty(Exception):
    """There is no event."""


class _Events:
    """The queue of a member's loop: never waits, and wakes the loop for every event."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: deque[Any] = deque()

    def put(self, event: Any) -> None:
        self._events.append(event)
        self._wake()

    def get(self, timeout: float | None = None) -> Any:
        if not self._events:
            raise _Empty
        return self._events.popleft()

    get_nowait = get


class _Flag:
    """An event object on which nobody waits."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


class _Handler:
    """What a member uses of kazoo's handler."""

    queue_empty = _Empty
    event_object = _Flag

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def queue_impl(self) -> _Events:
        return _Events(self._wake)


class _Client:
    """What a member uses of its client."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.handler = _Handler(wake)
        self.client_id = (0, b"")
        self.negotiated_timeout_seconds: float | None = None
        self.heard_at: float | None = None


class _Performer:
    """Sends a member's requests over a link; the answers come as events of its loop."""

    def __init__(self, link: Link, put: Callable[[Callable[[], object]], None]) -> None:
        self._link = link
        self._put = put
        self._watchers: dict[Watcher, Callable[[str], None]] = {}

    def read(self, request: Get | Children | Create, then: Then, watcher: Watcher) -> None:
        fired = self._watchers.get(watcher)
        if fired is None:
            fired = self._watchers[watcher] = partial(_fire, watcher)
        if isinstance(request, Get) and request.watch:
            self._get_watched(request, then, fired)
        else:
            self._link.submit(request, partial(self._answer, then), fired)

    def read_many(self, requests: list[tuple[Get, Then]]) -> None:
        for request, then in requests:
            self._link.submit(request, partial(self._answer, then))

    def _get_watched(self, request: Get, then: Then, fired: Callable[[str], None]) -> None:
        """Read and watch in two steps if the node is missing, as a client must."""

        def got(answer: Answer) -> None:
            if isinstance(answer, NoNode):
                self._link.submit(Exists(request.path), partial(self._answer, looked), fired)
            else:
                then(answer)

        def looked(answer: Answer) -> None:
            if isinstance(answer, Node):
                self._get_watched(request, then, fired)
            else:
                then(answer)

        self._link.submit(request, partial(self._answer, got), fired)

    def commit(self, request: Commit, then: Then) -> None:
        self._link.submit(request, partial(self._answer, then))

    def _answer(self, then: Then, answer: Any) -> None:
        self._put(partial(then, answer))


def _fire(watcher: Watcher, path: str) -> None:
    watcher(WatchedEvent(EventType.CHANGED, KeeperState.CONNECTED, path))


class SimulatedMember(Member):
    """The real member on a link; it registers without waiting."""

    def __init__(self, process: Process) -> None:
        self.schedule = process.schedule
        self.engine = Engine(
            process.schedule,
            process.broker,
            process.checks,
            process.run,
            process.switches,
            lambda: process.member.lease if process.member.is_running else self.lease,
        )
        self.engine.on_expired = process.renew
        self.wake = process.wake
        self.client = _Client(process.wake)
        super().__init__(
            cast(Client, self.client),
            process.layout,
            self.engine,
            component={},
            checkpoint_seconds=process.checkpoint_seconds,
        )
        self.link = Link(
            process.coordinator,
            process.name,
            process.timeout,
            process.receive,
            on_connected=self._on_connected,
            on_suspended=partial(self._state_changed, KazooState.SUSPENDED),
            on_expired=partial(self._state_changed, KazooState.LOST),
        )
        self._performer = cast(Performer, _Performer(self.link, self._put))
        self.link.connect()

    def _on_connected(self, session: int, new: bool, heard_at: float) -> None:
        self.client.client_id = (session, b"")
        self.client.negotiated_timeout_seconds = self.link.timeout
        self.client.heard_at = heard_at
        if new and not self._machines and not self._ended.is_set():
            self._begin(session, heard_at)
        self._state_changed(KazooState.CONNECTED)

    def _begin(self, session: int, heard_at: float) -> None:
        self._lease = Lease(self.link.timeout, heard_at)
        registration = Registration(
            self._layout.workers,
            WORKER_STEM,
            WorkerNode().encode(),
            session,
            self._worker_registered,
        )
        self._machines = [registration]
        self._running = True

    def _worker_registered(self, path: str) -> None:
        self.engine.worker = path.rpartition("/")[2]
        self.engine.member = self
        super()._worker_registered(path)

    def stop(self) -> None:
        """End the session."""
        self._leaving = True
        self._end()
        self.link.close()

    @property
    def is_running(self) -> bool:
        return self._running

    @property
    def is_released(self) -> bool:
        return not self._running or self._released.is_set()

    def drain(self) -> None:
        self.engine.draining = True
        super().drain()

    def wanted_at(self) -> float:
        """Return when the loop wants to run again without any event."""
        wait = self._wait_seconds() if self._running else None
        return float("inf") if wait is None else self.schedule.now + wait


class Process:
    """One operating system process; it can be stopped, killed, and be slow to hear.

    :ivar deafness: how many seconds its coordination loop may be late.
    """

    def __init__(
        self,
        schedule: Schedule,
        coordinator: Coordinator,
        layout: Layout,
        broker: Broker,
        checks: Checks,
        name: str,
        *,
        timeout: float,
        checkpoint_seconds: float,
        switches: Switches,
    ) -> None:
        self.schedule = schedule
        self.coordinator = coordinator
        self.layout = layout
        self.broker = broker
        self.checks = checks
        self.name = name
        self.timeout = timeout
        self.checkpoint_seconds = checkpoint_seconds
        self.switches = switches
        self.dead = False
        self.stopped = False
        self.draining = False
        self.deafness = 0.0
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake_at = float("inf")
        self.members: list[SimulatedMember] = []
        self.member = self._new_member()

    def _new_member(self) -> SimulatedMember:
        member = SimulatedMember(self)
        self.members.append(member)
        return member

    @property
    def alive(self) -> bool:
        return not self.dead

    @property
    def link(self) -> Link:
        return self.member.link

    # --- running ------------------------------------------------------------------------

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run something of the process's own; when stopped, after it goes on."""
        if self.stopped:
            self._held.append((function, arguments))
        elif not self.dead:
            function(*arguments)

    def receive(self, function: Callable[..., None], *arguments: Any) -> None:
        """Take what the client hands over; it is handled in this order, whatever comes between."""
        if self.stopped or self._inbox:
            self._inbox.append((function, arguments))
        elif not self.dead:
            function(*arguments)

    def _hear(self) -> None:
        if self.stopped or self.dead or not self._inbox:
            return
        function, arguments = self._inbox.popleft()
        function(*arguments)
        self.schedule.after(0.002 * self.schedule.chance(), self._hear)

    def wake(self) -> None:
        """Let the coordination loop run soon."""
        delay = 0.001
        if self.deafness:
            delay += self.deafness * self.schedule.chance()
        self._wake(self.schedule.now + delay)

    def _wake(self, when: float) -> None:
        if when < self._wake_at:
            self._wake_at = when
            self.schedule.at(when, self._step, when)

    def _step(self, when: float) -> None:
        """Run the coordination loop once, unless an earlier wake-up has done it."""
        if when != self._wake_at or self.dead:
            return
        self._wake_at = float("inf")
        if self.stopped:
            self._held.append((self.wake, ()))
            return
        self.member.step(0.0)
        wanted = self.member.wanted_at()
        if wanted != float("inf"):
            self._wake(max(wanted, self.schedule.now + 0.005))

    def renew(self) -> None:
        """The registration is over: make another, with a client of its own."""
        if self.dead:
            return
        self.schedule.note("%s registers anew", self.name)
        old = self.member
        self.member = self._new_member()
        self.schedule.after(0.05 * self.schedule.chance(), self.run, old.stop)
        if self.draining:
            self.member.drain()

    # --- what befalls it ----------------------------------------------------------------

    def kill(self) -> None:
        """kill -9: nothing of it runs any more, what it has sent may arrive."""
        self.schedule.note("%s is killed", self.name)
        self._die()
        for member in self.members:
            member.link.die()

    def _die(self) -> None:
        self.dead = True
        for member in self.members:
            for work in member.engine.work.values():
                if work.position is not None:
                    self.checks.dropped(work.claim)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.schedule.note("%s is stopped", self.name)
            self.stopped = True
            for member in self.members:
                member.link.pause()

    def resume(self) -> None:
        """SIGCONT: it goes on with what it knew, in no certain order."""
        if self.dead or not self.stopped:
            return
        self.schedule.note("%s goes on", self.name)
        self.stopped = False
        held, self._held = self._held, deque()
        for member in self.members:
            member.link.resume()
        gap = 0.0
        for function, arguments in held:
            gap += 0.002 * self.schedule.chance()
            self.schedule.after(gap, self.run, function, *arguments)
        self.schedule.after(0.01 * self.schedule.chance(), self._hear)
        self.wake()

    def drain(self) -> None:
        """Leave in good order."""
        if self.alive and not self.draining:
            self.schedule.note("%s drains", self.name)
            self.draining = True
            self.run(self.member.drain)
            self._leave()

    def _leave(self) -> None:
        if self.dead:
            return
        if self.stopped or not self.member.is_released:
            self.schedule.after(0.2, self._leave)
            return
        self.schedule.note("%s leaves", self.name)
        self._die()
        for member in self.members:
            member.link.close()

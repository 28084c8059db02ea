"""One worker's registration at the coordinator: runs the state machines on a client.

A member has one client, one session and one worker node, for its whole life. When the session
is gone the member is over; whoever still holds it can change nothing any more, and the worker
engine makes a new one with a new client. One loop, a greenlet or a thread of the client's
handler, passes on answers, watches and the engine's words to the machines and performs what
they ask; callbacks of kazoo only put events into its queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from kazoo.exceptions import KazooException
from kazoo.protocol.states import EventType, KazooState, WatchedEvent
from kazoo.retry import KazooRetry

from qdo.coordination.bells import Bells
from qdo.coordination.client import Client
from qdo.coordination.election import Election
from qdo.coordination.layout import WORKER_STEM, Layout, QueueNode, WorkerNode
from qdo.coordination.lease import GAP, Lease, Renewal, clock
from qdo.coordination.machine import Answer, Commit, Get, Machine, Then, Unanswered
from qdo.coordination.membership import Component, Registration
from qdo.coordination.ownership import Ownership
from qdo.coordination.performer import Performer
from qdo.coordination.reads import read_nodes
from qdo.coordination.rebalancer import Rebalancer
from qdo.coordination.slots import Claim
from qdo.coordination.slots import Listener as ClaimListener
from qdo.errors import CoordinatorUnreachableError
from qdo.filters import EVERYTHING, QueueFilter
from qdo.positions import TIMES, Positions

log = logging.getLogger(__name__)


class Listener(ClaimListener, Protocol):
    """What the worker engine is told, on the member's own loop."""

    def expired(self) -> None:
        """The registration is over; every claim was reported lost before."""


class Member:
    """A registered worker.

    :ivar name: name of the worker node, such as ``worker-0000000101``; "" before `start`.
    :ivar failure: the error that ended the loop, if one did: a bug, not an outage.
    :param takes: which queues it may be granted.
    :param told_aside: see `rebalancer.Rebalancer`.
    :param on_ring: told which queue has been sent to, for those of `attend_bells`; None: no bell
        is heard.
    :param positions: what the positions of the broker mean.
    """

    def __init__(
        self,
        client: Client,
        layout: Layout,
        listener: Listener,
        *,
        component: Mapping[str, Any],
        checkpoint_seconds: float = 0.2,
        takes: QueueFilter = EVERYTHING,
        told_aside: bool = False,
        on_ring: Callable[[str], None] | None = None,
        positions: Positions = TIMES,
    ) -> None:
        self.name = ""
        self.failure: BaseException | None = None
        self._client = client
        self._layout = layout
        self._listener = listener
        self._component_value = dict(component)
        self._checkpoint_seconds = checkpoint_seconds
        self._takes = takes
        self._told_aside = told_aside
        self._bells = Bells(layout, on_ring) if on_ring is not None else None
        self._positions = positions
        self._handler = client.handler
        self._events: Any = self._handler.queue_impl()
        self._progressed: deque[Claim] = deque()
        self._performer = Performer(client, self._put)
        self._machines: list[Machine] = []
        self._watchers: dict[int, Callable[[WatchedEvent], None]] = {}
        self._registered = self._handler.event_object()
        self._ended = self._handler.event_object()
        self._released = self._handler.event_object()
        self._recording: list[tuple[Claim, Any]] = []
        self._unanswered: dict[int, Then] = {}
        self._asked = 0
        self._up = False
        self._running = False
        self._leaving = False
        self._lease: Lease | None = None
        self._ownership: Ownership | None = None
        self._election: Election | None = None
        self._rebalancer: Rebalancer | None = None
        self._component: Component | None = None

    # --- life -------------------------------------------------------------------------

    def start(self, timeout_seconds: float = 15.0) -> None:
        """Open the session, register, and begin.

        :raises CoordinatorUnreachableError: no session, or no registration, in this time.
        """
        began = clock()
        if not self._client.connected:
            self._client.open(timeout_seconds)
        self._client.add_listener(self._state_changed)
        try:
            self._patient(timeout_seconds)(self._prepare)
        except KazooException as error:
            self.stop()
            raise CoordinatorUnreachableError(
                url=self._layout.root, reason=f"{type(error).__name__} {error}".strip()
            ) from error
        session = self._client.client_id[0]
        registration = Registration(
            self._layout.workers,
            WORKER_STEM,
            WorkerNode(takes=self._takes).encode(),
            session,
            self._worker_registered,
        )
        self._component = Component(
            f"{self._layout.components}/worker",
            str(self._component_value.get("host", "localhost")),
            self._component_value,
            session,
        )
        self._machines = [registration, self._component]
        self._running = True
        self._put(partial(self._connected, self._client.heard_at))
        self._handler.spawn(self._run)
        self._registered.wait(max(1.0, timeout_seconds - (clock() - began)))
        if not self.name:
            self.stop()
            raise CoordinatorUnreachableError(
                url=self._layout.root, reason="the worker could not be registered in time"
            )

    def _patient(self, seconds: float) -> KazooRetry:
        """Return what calls a function again if the connection was lost, not if the session was."""
        return KazooRetry(
            max_tries=-1,
            delay=0.05,
            max_delay=0.5,
            ignore_expire=False,
            sleep_func=self._handler.sleep_func,
            deadline=seconds,
        )

    def _prepare(self) -> None:
        """Make the persistent nodes, and count the lease from the start of the session."""
        for path in (*self._layout.persistent, f"{self._layout.components}/worker"):
            self._client.ensure_path(path)
        sent_at = clock()
        transaction = self._client.transaction()
        transaction.check(self._layout.workers, -1)
        transaction.commit()
        timeout = self._client.negotiated_timeout_seconds
        self._lease = Lease(timeout or 0.0, self._client.heard_at or sent_at)

    def stop(self) -> None:
        """Leave: end the session, and with it the worker node; idempotent."""
        self._leaving = True
        if self._running:
            self._put(self._end)
            self._ended.wait(5.0)
        self._client.stop()
        self._client.close()

    @property
    def lease(self) -> Lease:
        """The lease of this registration."""
        if self._lease is None:
            raise RuntimeError("a member has a lease only after start()")
        return self._lease

    # --- what the engine says ---------------------------------------------------------

    def progress(self, claim: Claim) -> None:
        """Record ``claim.done`` with the next checkpoint."""
        waiting = self._progressed
        waiting.append(claim)
        if len(waiting) == 1:
            self._put(None)

    def flush(self) -> None:
        """Send the next checkpoint at once."""
        self._put(self._hurry)

    def _hurry(self) -> None:
        if self._ownership is not None:
            self._ownership.hurry()

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool:
        """Checkpoint at once and wait until ``claim.done`` is recorded.

        :returns: False when the time was over first. True also when the claim has ended, for
            then waiting longer would not help.
        """
        done = self._handler.event_object()

        def begin() -> None:
            if self._ownership is not None:
                self._ownership.progress(claim)
            self._hurry()
            self._recording.append((claim, done))

        self._put(begin)
        done.wait(timeout_seconds)
        return bool(done.is_set())

    def finished(self, claim: Claim) -> None:
        """Take note that nothing of a claim that is being released runs any more."""
        self._put(partial(self._finished, claim))

    def _finished(self, claim: Claim) -> None:
        if self._ownership is not None:
            self._ownership.finished(claim)

    def drain(self) -> None:
        """Give everything back and take nothing new; also never lead again."""
        self._put(self._drain)

    def _drain(self) -> None:
        if self._election is not None:
            self._election.resign("it is draining", for_good=True)
        if self._ownership is not None:
            self._ownership.drain()

    def settled(self) -> bool:
        """Return whether exactly the assigned queues are claimed and nothing is under way."""
        return self._ownership is not None and self._ownership.settled()

    def wait_released(self, timeout_seconds: float) -> bool:
        """Wait until everything is released, or lost; return whether it is."""
        self._released.wait(timeout_seconds)
        return bool(self._released.is_set())

    def unreleased(self) -> list[str]:
        """Return the names of the queues that are still owned."""
        return self._ownership.unreleased() if self._ownership is not None else []

    def refresh_component(self, component: Mapping[str, Any]) -> None:
        """Describe this process anew in its component node."""
        if self._component is not None:
            self._put(partial(self._component.refresh, dict(component)))

    def is_leader(self) -> bool:
        """Return whether this worker is the rebalancer, as far as it knows."""
        return self._election is not None and self._election.leading

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        """Create nodes for queues that have none yet, as leader; others pass it over.

        :param last: where they begin.
        """
        if self._rebalancer is not None:
            self._put(partial(self._rebalancer.create_queues, list(names), last))

    def queue_names(self) -> tuple[str, ...] | None:
        """Return the names of all queue nodes, as leader; None where they are not known now."""
        return self._rebalancer.queues if self._rebalancer is not None else None

    def set_aside(self, names: frozenset[str]) -> None:
        """Grant these queues to nobody, as leader: their nodes are marked as deleted."""
        if self._rebalancer is not None:
            self._put(partial(self._rebalancer.set_aside, names))

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        """Return the nodes of queues, without those that have none; waits for the coordinator.

        :raises CoordinatorUnreachableError: the connection is lost.
        """
        reads = read_nodes(self._client, [self._layout.queue(name) for name in names])
        return {read.path.rpartition("/")[2]: QueueNode.parse(read.data) for read in reads}

    def change_queue(
        self, change: Callable[[Client, Layout, str], QueueNode], name: str
    ) -> QueueNode:
        """Do what a function of `operator` does to the node of a queue; waits for the coordinator.

        :raises CoordinatorUnreachableError: the connection is lost; it may be done.
        """
        try:
            return change(self._client, self._layout, name)
        except KazooException as error:
            raise CoordinatorUnreachableError(
                url=self._layout.root, reason=f"{type(error).__name__} {error}".strip()
            ) from error

    def attend_bells(self, queues: Sequence[str]) -> None:
        """Listen for one ring of each of these queues from now on."""
        if self._bells is not None:
            self._put(partial(self._bells.attend, queues))

    def leave_bells(self, queues: Sequence[str]) -> None:
        """Listen no more to the bells of these queues, and forget them."""
        if self._bells is not None:
            self._put(partial(self._bells.leave, queues))

    # --- the loop ---------------------------------------------------------------------

    def _put(self, event: Callable[[], object] | None) -> None:
        self._events.put(event)

    def _run(self) -> None:
        try:
            while self._running:
                self.step(self._wait_seconds())
        except BaseException as error:
            self.failure = error
            log.exception("%s: the coordination loop failed; its worker stops", self.name)
            self._end()
            raise

    def _wait_seconds(self) -> float | None:
        due = min((machine.due() for machine in self._machines), default=float("inf"))
        return None if due == float("inf") else max(0.0, due - clock())

    def step(self, wait_seconds: float | None) -> None:
        """Wait for an event, handle all there are, and perform what the machines ask."""
        try:
            event = self._events.get(timeout=wait_seconds)
            while True:
                if event is not None:
                    event()
                event = self._events.get_nowait()
        except self._handler.queue_empty:
            pass
        if self._ownership is not None:
            while self._progressed:
                self._ownership.progress(self._progressed.popleft())
        now = clock()
        for machine in self._machines:
            if machine.due() <= now:
                machine.tick()
            machine.flush()
        for machine in self._machines:
            self._perform(machine)
        self._notify()

    def _perform(self, machine: Machine) -> None:
        if not self._up:
            return  # left unanswered as soon as the connection is back
        outbox = machine.outbox
        reads: list[tuple[Get, Then]] = []
        while outbox:
            request, then = outbox.popleft()
            self._asked += 1
            self._unanswered[self._asked] = then
            answered = partial(self._answered, self._asked)
            if isinstance(request, Get) and not request.watch:
                reads.append((request, answered))
                continue
            if reads:
                self._performer.read_many(reads)
                reads = []
            if isinstance(request, Commit):
                self._performer.commit(request, partial(self._committed, self._asked, clock()))
            else:
                self._performer.read(request, answered, self._watcher(machine))
        if reads:
            self._performer.read_many(reads)

    def _answered(self, number: int, answer: Answer) -> None:
        """Pass on an answer, unless the connection was lost before it was taken in."""
        then = self._unanswered.pop(number, None)
        if then is not None:
            then(answer)
        if not self._unanswered:
            self._unanswered.clear()  # a dict does not become smaller by itself

    def _committed(self, number: int, sent_at: float, answer: Answer) -> None:
        """Pass on an answer; an acknowledged transaction renews the lease."""
        if not isinstance(answer, Unanswered) and self._lease is not None:
            self._lease.renew(sent_at, clock())
        self._answered(number, answer)

    def _watcher(self, machine: Machine) -> Callable[[WatchedEvent], None]:
        """Return the machine's one watcher: kazoo calls an equal one only once per event."""
        watcher = self._watchers.get(id(machine))
        if watcher is None:
            watcher = self._watchers[id(machine)] = partial(self._watch_fired, machine)
        return watcher

    def _watch_fired(self, machine: Machine, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:  # NONE: dropped with the connection
            self._put(partial(machine.changed, event.path))

    def _notify(self) -> None:
        """Wake those who wait for something that has come true."""
        ownership = self._ownership
        if ownership is None:
            return
        if ownership.draining and ownership.empty():
            self._released.set()
        if self._recording:
            done = [item for item in self._recording if ownership.recorded(item[0])]
            for item in done:
                self._recording.remove(item)
                item[1].set()

    # --- the session ------------------------------------------------------------------

    def _state_changed(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            # Taken here: by the time the event is handled the client may have a later session.
            self._put(partial(self._connected, self._client.heard_at))
        elif state == KazooState.SUSPENDED:
            self._put(self._suspended)
        else:
            self._put(self._end)

    def _connected(self, heard_at: float | None) -> None:
        if not self._running:
            return
        self._suspended()
        self._leave_unanswered()
        self._up = True
        lease, timeout = self._lease, self._client.negotiated_timeout_seconds
        if lease is not None and timeout:
            lease.timeout_seconds = timeout
            if heard_at is not None:
                lease.heard(heard_at)
        for machine in list(self._machines):
            machine.connected()

    def _suspended(self) -> None:
        """Count everything asked as unanswered: what kazoo sends later, or answers late, is
        before the barrier that the machines write first after the reconnection."""
        if not self._up:
            return
        self._up = False
        log.warning(
            "%s: connection to the coordinator lost; messages go on while the lease runs",
            self.name or "worker",
        )
        self._leave_unanswered()
        for machine in self._machines:
            machine.suspended()

    def _leave_unanswered(self) -> None:
        """Answer what was asked, and what was not even sent: machines begin anew when connected,
        and must not take an old answer for a new one."""
        unanswered, self._unanswered = self._unanswered, {}
        waiting = list(unanswered.values())
        for machine in self._machines:
            waiting.extend(then for _, then in machine.outbox)
            machine.outbox.clear()
        for then in waiting:
            then(Unanswered())

    def _worker_registered(self, path: str) -> None:
        self.name = name = path.rpartition("/")[2]
        lease = self.lease
        self._ownership = Ownership(
            self._layout,
            name,
            lease,
            self._listener,
            clock=clock,
            checkpoint_seconds=self._checkpoint_seconds,
            on_gone=self._evicted,
            takes=self._takes,
            positions=self._positions,
        )
        self._rebalancer = rebalancer = Rebalancer(
            self._layout, clock=clock, resign=self._resign, told_aside=self._told_aside
        )
        self._election = Election(
            self._layout,
            name,
            self._client.client_id[0],
            clock=clock,
            on_elected=rebalancer.elected,
            on_deposed=rebalancer.deposed,
        )
        renewal = Renewal(path, lease, clock=clock, on_gone=self._evicted)
        started: list[Machine] = [self._ownership, rebalancer, self._election, renewal]
        if self._bells is not None:
            started.append(self._bells)
        self._machines.extend(started)
        for machine in started:
            machine.connected()
        log.info(
            "%s: registered; session time-out %.1f s, lease %.1f s, contact every %.1f s",
            name,
            lease.timeout_seconds,
            lease.until - lease.contact,
            GAP * lease.timeout_seconds,
        )
        self._registered.set()

    def _resign(self, reason: str) -> None:
        if self._election is not None:
            self._election.resign(reason)

    def _evicted(self) -> None:
        """The worker node is gone though the session answers: leave, and register anew."""
        self._put(self._end)

    def _end(self) -> None:
        """Be over for good: the session is lost, or the member was stopped."""
        if not self._running:
            return
        self._running = False
        self._up = False
        if self._lease is not None:
            self._lease.end()
        if self._ownership is not None:
            self._ownership.expire()
        self._machines.clear()
        self._released.set()
        for _, done in self._recording:
            done.set()
        self._recording.clear()
        self._ended.set()
        self._registered.set()
        if not self._leaving:
            self._listener.expired()

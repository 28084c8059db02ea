"""The loop that runs the state machines of one session on a client.

The loop is a greenlet or a thread of the client's handler. It passes answers, watch events and
calls of the worker engine to the machines, one at a time, and performs the requests that the
machines make. kazoo's callbacks only put events into the loop's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.protocol.states import EventType, WatchedEvent

from qdo.coordination.client import Client
from qdo.coordination.kazoo_driver import KazooDriver
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.machine import Callback, Commit, Get, Machine, NoResponse, Response
from qdo.system.clock import clock


class MachineLoop:
    """Deliver events to state machines, and perform their requests.

    :ivar machines: the machines, in the order in which their requests are performed.
    :ivar lease: renewed by every acknowledged transaction; None before the session starts.
    :ivar running: False once the session is over.
    :ivar up: whether the session is connected.
    :param before_flush: called in each step after all events were delivered.
    :param after_step: called in each step after all requests were performed.
    """

    def __init__(
        self,
        client: Client,
        *,
        before_flush: Callable[[], None],
        after_step: Callable[[], None],
    ) -> None:
        self.machines: list[Machine] = []
        self.lease: Lease | None = None
        self.running = False
        self.up = False
        self.driver = KazooDriver(client, self.put)
        self._handler = client.handler
        self._before_flush = before_flush
        self._after_step = after_step
        self._events: Any = self._handler.queue_impl()
        self._watchers: dict[int, Callable[[WatchedEvent], None]] = {}
        self._unanswered: dict[int, Callback] = {}
        self._requests = 0

    def put(self, event: Callable[[], object] | None) -> None:
        """Call a function on the loop; None only wakes the loop."""
        self._events.put(event)

    def run(self) -> None:
        """Run until `end` is called."""
        while self.running:
            self.step(self.wait_seconds())

    def end(self) -> None:
        """Stop for good, and drop all machines."""
        self.running = False
        self.up = False
        self.machines.clear()

    def wait_seconds(self) -> float | None:
        """Return how long the next step may wait for an event, None for no limit."""
        due = min((machine.due() for machine in self.machines), default=float("inf"))
        return None if due == float("inf") else max(0.0, due - clock())

    def step(self, wait_seconds: float | None) -> None:
        """Wait for an event, handle all pending events, and perform the machines' requests."""
        try:
            event = self._events.get(timeout=wait_seconds)
            while True:
                if event is not None:
                    event()
                event = self._events.get_nowait()
        except self._handler.queue_empty:
            pass
        self._before_flush()
        now = clock()
        for machine in self.machines:
            if machine.due() <= now:
                machine.tick()
            machine.flush()
        for machine in self.machines:
            self._perform(machine)
        self._after_step()

    # --- requests and answers ---------------------------------------------------------

    def _perform(self, machine: Machine) -> None:
        if not self.up:
            return  # answered `NoResponse` when the session reconnects
        outbox = machine.outbox
        reads: list[tuple[Get, Callback]] = []
        while outbox:
            request, then = outbox.popleft()
            self._requests += 1
            number = self._requests
            self._unanswered[number] = then
            answered = partial(self._answered, number)
            if isinstance(request, Get) and not request.watch:
                reads.append((request, answered))
                continue
            if reads:
                self.driver.read_many(reads)
                reads = []
            if isinstance(request, Commit):
                self.driver.commit(request, partial(self._committed, number, clock()))
            else:
                self.driver.read(request, answered, self._watcher(machine))
        if reads:
            self.driver.read_many(reads)

    def _answered(self, number: int, answer: Response) -> None:
        """Pass on an answer, unless the connection was lost before it was delivered."""
        then = self._unanswered.pop(number, None)
        if then is not None:
            then(answer)
        if not self._unanswered:
            self._unanswered.clear()  # releases memory: a dict never shrinks by itself

    def _committed(self, number: int, sent_at: float, answer: Response) -> None:
        """Pass on an answer; an acknowledged transaction renews the lease."""
        if not isinstance(answer, NoResponse) and self.lease is not None:
            self.lease.renew(sent_at, clock())
        self._answered(number, answer)

    def _watcher(self, machine: Machine) -> Callable[[WatchedEvent], None]:
        """Return the machine's only watcher: kazoo calls equal watchers once per event."""
        watcher = self._watchers.get(id(machine))
        if watcher is None:
            watcher = self._watchers[id(machine)] = partial(self._watch_fired, machine)
        return watcher

    def _watch_fired(self, machine: Machine, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:  # NONE: dropped with the connection
            self.put(partial(machine.changed, event.path))

    # --- the connection ---------------------------------------------------------------

    def connected(self) -> None:
        """Tell the machines that the session is connected."""
        self._leave_unanswered()
        self.up = True
        for machine in list(self.machines):
            machine.connected()

    def suspended(self) -> None:
        """Count all requests as unanswered, and tell the machines that the connection is lost.

        Requests that kazoo sends later, and answers that arrive later, precede the barrier that
        the machines write first after the reconnection.
        """
        self.up = False
        self._leave_unanswered()
        for machine in self.machines:
            machine.suspended()

    def _leave_unanswered(self) -> None:
        """Answer `NoResponse` to all requests, sent or not.

        Machines start again in `connected` and must not take an old answer for a new one.
        """
        unanswered, self._unanswered = self._unanswered, {}
        waiting = list(unanswered.values())
        for machine in self.machines:
            waiting.extend(then for _, then in machine.outbox)
            machine.outbox.clear()
        for then in waiting:
            then(NoResponse())

"""The loop that runs the state machines of one session on a client.

The loop is a greenlet or a thread of the client's handler. The loop passes answers, watch events
and calls of the worker engine to the machines, one at a time. Then the loop performs the machines'
requests. kazoo's callbacks only put events into the loop's queue.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.protocol.states import EventType, WatchedEvent

from qdo.backoff import Backoff
from qdo.coordination.client import Client
from qdo.coordination.kazoo_driver import KazooDriver
from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.silence import SILENCE, SilenceDetector
from qdo.system.clock import clock
from qdo.text import describe

# After consecutive refused requests, the loop waits this long before it drops the connection.
REFUSAL_BACKOFF = Backoff(0.1, 5.0)


class MachineLoop:
    """Delivers events to state machines, and performs their requests.

    :param before_flush: a function that each step calls after it has delivered all events.
    :param after_step: a function that each step calls at its end.
    """

    def __init__(
        self, client: Client, *, before_flush: Callable[[], None], after_step: Callable[[], None]
    ) -> None:
        # The loop performs the machines' requests in this order.
        self.machines: list[m.Machine] = []
        # Every acknowledged transaction renews the lease; None before the session starts.
        self.lease: Lease | None = None
        self.running = False
        self.up = False
        self.driver = KazooDriver(client, self.put, self._refused)
        self._handler = client.handler
        self._before_flush = before_flush
        self._after_step = after_step
        self._events: Any = self._handler.queue_impl()
        self._watchers: dict[int, Callable[[WatchedEvent], None]] = {}
        self._unanswered: dict[int, m.Callback] = {}
        self._client = client
        self._silence = SilenceDetector(float("inf"))
        self._may_fall_silent = client.address.has_servers
        self._refusals = 0
        self._drop_at = float("inf")
        self._drop_reason = ""
        self._requests = 0

    def put(self, event: Callable[[], object] | None) -> None:
        """Call a function on the loop; with None, only wake the loop."""
        self._events.put(event)

    def run(self) -> None:
        while self.running:
            self.step(self.wait_seconds())

    def end(self) -> None:
        """Stop the loop permanently, and drop all machines."""
        self.running = False
        self.up = False
        self.machines.clear()

    def remove(self, machine: m.Machine) -> None:
        if machine in self.machines:
            self.machines.remove(machine)
        self._watchers.pop(id(machine), None)  # kazoo keeps the watcher while a watch is armed

    def wait_seconds(self) -> float | None:
        """Return the maximum time that the next step may wait for an event; None for no limit."""
        due = min((machine.due() for machine in self.machines), default=float("inf"))
        due = min(due, self._silence.due(), self._drop_at)
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
        self._drop_if_due(clock())
        self._after_step()

    # --- connections that must be given up --------------------------------------------

    def _drop_if_due(self, now: float) -> None:
        if now >= self._drop_at:
            self._drop(self._drop_reason)
        elif self._silence.is_silent(now):
            self._drop(f"no answer for {SILENCE * self._silence.timeout_seconds:.1f} s")

    def _drop(self, reason: str) -> None:
        self._drop_at = float("inf")
        self._silence.reset()
        self._client.drop_connection(reason)

    def _refused(self, error: Exception) -> None:
        """Leave a refused request unanswered, and drop the connection after a delay."""
        # The drop answers the request with `NoResponse`, so the machine repeats it. The lease may
        # expire before the coordinator accepts the request. Then no message starts, but the session
        # continues.
        if self._drop_at == float("inf"):
            self._refusals += 1
            spread = random.random()  # random, so workers do not drop together
            self._drop_at = clock() + REFUSAL_BACKOFF.delay(self._refusals, spread)
            self._drop_reason = f"the coordinator refused a request: {describe(error)}"

    # --- requests and answers ---------------------------------------------------------

    def _perform(self, machine: m.Machine) -> None:
        if not self.up:
            return  # on reconnecting, these requests get `NoResponse`
        outbox = machine.outbox
        reads: list[tuple[m.Get, m.Callback]] = []
        while outbox:
            request, then = outbox.popleft()
            self._requests += 1
            number = self._requests
            self._unanswered[number] = then
            if self._may_fall_silent:
                self._silence.sent(clock())
            answered = partial(self._answered, number)
            if isinstance(request, m.Get) and not request.watch:
                reads.append((request, answered))
                continue
            if reads:
                self.driver.read_many(reads)
                reads = []
            if isinstance(request, m.Commit):
                self.driver.commit(request, partial(self._committed, number, clock()))
            else:
                self.driver.read(request, answered, self._watcher(machine))
        if reads:
            self.driver.read_many(reads)

    def _answered(self, number: int, answer: m.Response) -> None:
        """Pass on an answer, unless the connection was lost before the loop got it."""
        then = self._unanswered.pop(number, None)
        if then is not None:
            self._silence.answered(clock(), len(self._unanswered))
            then(answer)
        if not self._unanswered:
            self._unanswered.clear()  # releases memory, because a dict never shrinks by itself

    def _committed(self, number: int, sent_at: float, answer: m.Response) -> None:
        """Pass on an answer; an acknowledged transaction renews the lease."""
        if not isinstance(answer, m.NoResponse) and self.lease is not None:
            self.lease.renew(sent_at, clock())
            self._refusals = 0
        self._answered(number, answer)

    def _watcher(self, machine: m.Machine) -> Callable[[WatchedEvent], None]:
        """Return the machine's single watcher; kazoo calls equal watchers once per event."""
        watcher = self._watchers.get(id(machine))
        if watcher is None:
            watcher = self._watchers[id(machine)] = partial(self._watch_fired, machine)
        return watcher

    def _watch_fired(self, machine: m.Machine, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:  # NONE means a lost connection
            self.put(partial(machine.changed, event.path))

    # --- the connection ---------------------------------------------------------------

    def connected(self) -> None:
        self._leave_unanswered()
        self.up = True
        if self.lease is not None:
            self._silence.timeout_seconds = self.lease.timeout_seconds
        for machine in list(self.machines):
            machine.connected()

    def suspended(self) -> None:
        """Treat all requests as unanswered, and tell the machines that the connection is lost."""
        # After reconnecting, the machines first write a barrier. Late requests of kazoo and late
        # answers precede this barrier.
        self.up = False
        self._leave_unanswered()
        for machine in self.machines:
            machine.suspended()

    def _leave_unanswered(self) -> None:
        """Answer all requests, sent or not, with `NoResponse`."""
        # Machines start again in `connected`, and must not take an old answer for a new answer.
        unanswered = self._unanswered
        self._unanswered = {}
        self._silence.reset()
        self._drop_at = float("inf")
        waiting = list(unanswered.values())
        for machine in self.machines:
            waiting.extend(then for _, then in machine.outbox)
            machine.outbox.clear()
        for then in waiting:
            then(m.NoResponse())

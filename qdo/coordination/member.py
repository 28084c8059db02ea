"""A worker's registration at the coordinator, and the state machines of its session.

A member has one client, one session and one worker node for its whole life. When the session is
lost, the member ends, and all later writes fail. The worker engine then makes a new member with a
new client. See `machine_loop` for the loop that runs the machines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kazoo.protocol.states import KazooState

from qdo.coordination.client import Client
from qdo.coordination.leader_queues import LeaderQueues
from qdo.coordination.machine_loop import MachineLoop
from qdo.coordination.progress_reports import ProgressReports
from qdo.coordination.protocol.acquisition import faults
from qdo.coordination.protocol.claims import Claim, ClaimListener
from qdo.coordination.protocol.doorbells import DoorbellWatches
from qdo.coordination.protocol.election import Election
from qdo.coordination.protocol.lease import GAP, Lease, Renewal
from qdo.coordination.protocol.machine import Machine
from qdo.coordination.protocol.ownership import MemberOptions, Ownership
from qdo.coordination.protocol.rebalancer import Rebalancer
from qdo.coordination.protocol.registration import Component, Registration
from qdo.coordination.session_setup import prepare_session
from qdo.coordination.znodes.layout import WORKER_STEM, Layout
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import CoordinatorUnreachableError, NodeRefusedError, QdoError
from qdo.system.clock import clock

log = logging.getLogger(__name__)


class Member:
    """A registered worker.

    :ivar name: the name of the worker node, such as ``worker-0000000101``; "" before `start`.
    :param make_machines: a function that returns further machines for the registered member.
    :param on_doorbell: a function of the name of a watched queue, called when a sender notifies it.
        With None, the member watches no doorbell.
    """

    # A member claims queues, not pools. Queue nodes record how messages end.
    is_pool = False

    def __init__(
        self,
        client: Client,
        layout: Layout,
        listener: ClaimListener,
        *,
        component: Mapping[str, Any],
        make_machines: Callable[[Member], Sequence[Machine]] = lambda member: (),
        on_doorbell: Callable[[str], None] | None = None,
        options: MemberOptions = MemberOptions(),  # noqa: B008 -- frozen
    ) -> None:
        self.name = ""
        self.failure: BaseException | None = None  # the error of a bug that has ended the loop
        self._client = client
        self._layout = layout
        self._listener = listener
        self._component_value = dict(component)
        self._make_machines = make_machines
        self._options = options
        self._handler = client.handler
        reports = ProgressReports(self.call, self._handler.event_object)
        self._reports = reports
        # Bind these methods directly, because the engine calls them for each message, and a wrapper
        # would cost a frame.
        self.progress = reports.progress
        self.record = reports.record
        self._loop = MachineLoop(client, before_flush=reports.pass_on, after_step=self._notify)
        self._watches = DoorbellWatches(layout, on_doorbell) if on_doorbell is not None else None
        self._registered = self._handler.event_object()
        self._ended = self._handler.event_object()
        self._released = self._handler.event_object()
        self._leaving = False
        self._lost_queues = False
        self._component: Component | None = None
        self._ownership: Ownership | None = None
        self._leader: LeaderQueues | None = None

    # --- life -------------------------------------------------------------------------

    def start(self, timeout_seconds: float = 15.0) -> None:
        """Open the session, register, and start the loop.

        :raises CoordinatorUnreachableError: the member has no session or registration in this time.
        """
        if not self._client.connected:
            self._client.open(timeout_seconds)
        began = clock()
        self._client.add_listener(self._state_changed)
        try:
            self._loop.lease = prepare_session(self._client, self._layout, timeout_seconds)
        except QdoError:
            self.stop()
            raise
        session = self._client.client_id[0]
        self._component = Component(
            f"{self._layout.components}/worker",
            str(self._component_value.get("host", "localhost")),
            self._component_value,
            session,
        )
        registration = self._registration(session)
        self._loop.machines = [registration, self._component]
        self._loop.running = True
        self._loop.put(partial(self._connected, self._client.heard_at))
        self._handler.spawn(self._run)
        self._registered.wait(max(1.0, timeout_seconds - (clock() - began)))
        if not self.name:
            self.stop()
            if registration.refusal:
                account = self._client.access.account_name()
                raise NodeRefusedError(path=self._layout.workers, account=account)
            reason = f"the worker was not registered within {timeout_seconds:g} s"
            raise CoordinatorUnreachableError(url=self._client.address.url, reason=reason)

    def _registration(self, session: int) -> Registration:
        return Registration(
            self._layout.workers,
            WORKER_STEM,
            WorkerNode(filter=self._options.filter, **self._options.about).encode(),
            session,
            self._worker_registered,
            self._registered.set,
        )

    def stop(self) -> None:
        """End the session, which removes the worker node; idempotent."""
        self._leaving = True
        if self._loop.running:
            self._loop.put(self._end)
            self._ended.wait(5.0)
        self._client.stop()
        self._client.close()

    @property
    def lease(self) -> Lease:
        if self._loop.lease is None:
            raise RuntimeError("a member has a lease only after start()")
        return self._loop.lease

    @property
    def leader(self) -> LeaderQueues:
        """The leader's duties, for use if this worker leads."""
        if self._leader is None:
            raise RuntimeError("a member can lead only after start()")
        return self._leader

    # --- called by the engine ---------------------------------------------------------

    def call(self, event: Callable[[], object] | None) -> None:
        """Call a function on the loop that runs the machines; with None, only wake the loop."""
        self._loop.put(event)

    def finished(self, claim: Claim) -> None:
        """Report that the last running message of a claim in release has ended."""
        self._loop.put(partial(self._finished, claim))

    def _finished(self, claim: Claim) -> None:
        if self._ownership is not None:
            self._ownership.finished(claim)

    def drain(self) -> None:
        """Release all queues, take no new queues, and never lead again."""
        self._loop.put(self._drain)

    def _drain(self) -> None:
        if self._leader is not None:
            self._leader.election.resign("it is draining", for_good=True)
        if self._ownership is not None:
            self._ownership.drain()

    def settled(self) -> bool:
        """Return whether the worker owns exactly its assigned queues and no request is open."""
        return self._ownership is not None and self._ownership.settled()

    def wait_released(self, timeout_seconds: float) -> bool:
        """Wait until the worker has no queues; return False if a queue was lost, not released."""
        return bool(self._released.wait(timeout_seconds)) and not self._lost_queues

    def unreleased(self) -> list[str]:
        return self._ownership.unreleased() if self._ownership is not None else []

    def refresh_component(self, component: Mapping[str, Any]) -> None:
        """Update this process's description in its component node."""
        if self._component is not None:
            self._loop.put(partial(self._component.refresh, dict(component)))

    def obey(self, zxid: int) -> None:
        """Confirm that this worker obeys a version of the pauses, given its `zxid`.

        Confirm in an event of the loop, because the current step may already have written the node.
        """
        if self._ownership is not None:
            self._loop.put(partial(self._ownership.obey, zxid))

    def watch_doorbells(self, queues: Sequence[str], gone: Sequence[str] = ()) -> None:
        """Report the next notification of each of `queues`; stop watching the queues in `gone`."""
        if self._watches is not None and gone:
            self._loop.put(partial(self._watches.unwatch, gone))
        if self._watches is not None and queues:
            self._loop.put(partial(self._watches.watch, queues))

    # --- the loop ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.failure = error
            log.exception("%s: the coordination loop failed; stopping its worker", self.name)
            self._end()
            raise

    def _notify(self) -> None:
        """Wake the callers that wait for a condition which is now true."""
        if (ownership := self._ownership) is None:
            return
        if ownership.draining and ownership.empty():
            self._released.set()
        self._reports.notify(ownership)

    # --- the session ------------------------------------------------------------------

    def _state_changed(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            # Read the value now, because the client may have a later session when the loop runs.
            self._loop.put(partial(self._connected, self._client.heard_at))
        elif state == KazooState.SUSPENDED:
            self._loop.put(self._suspended)
        else:
            self._loop.put(self._end)

    def _connected(self, heard_at: float | None) -> None:
        if not self._loop.running:
            return
        self._suspended()
        lease = self._loop.lease
        timeout = self._client.negotiated_timeout_seconds
        if lease is not None and timeout:
            lease.timeout_seconds = timeout
            if heard_at is not None:
                lease.heard(heard_at)
        self._loop.connected()

    def _suspended(self) -> None:
        if not self._loop.up:
            return
        leased = self._loop.lease is not None and clock() < self._loop.lease.until
        text = "processing until the lease expires" if leased else "no message starts"
        place = self._client.lost_server()
        log.warning("%s: lost the connection to %s; %s", self.name or "worker", place, text)
        self._loop.suspended()

    def _worker_registered(self, path: str) -> None:
        self.name = name = path.rpartition("/")[2]
        lease = self.lease
        options = self._options
        self._ownership = ownership = Ownership(
            self._layout,
            name,
            lease,
            self._listener,
            clock=clock,
            on_gone=self._evicted,
            options=options,
        )
        self._reports.ownership = ownership
        if self._component is not None:
            self._component.faults = partial(faults, ownership.slots)
        rebalancer = Rebalancer(
            self._layout,
            clock=clock,
            resign=lambda reason: self.leader.election.resign(reason),
            wait_for_deleted=options.wait_for_deleted,
        )
        election = Election(
            self._layout,
            name,
            self._client.client_id[0],
            process=options.process,
            clock=clock,
            on_elected=rebalancer.leadership_acquired,
            on_deposed=rebalancer.leadership_lost,
        )
        self._leader = LeaderQueues(
            self._client, self._layout, self._loop.put, election, rebalancer
        )
        renewal = Renewal(path, lease, clock=clock, on_gone=self._evicted)
        started: list[Machine] = [ownership, rebalancer, election, renewal]
        started += [*self._make_machines(self), *filter(None, [self._watches])]
        self._loop.machines.extend(started)
        for machine in started:
            machine.connected()
        log.info(
            "%s: registered; session timeout %.1f s, lease %.1f s, contact every %.1f s",
            name,
            lease.timeout_seconds,
            lease.until - lease.contact,
            GAP * lease.timeout_seconds,
        )
        self._registered.set()

    def _evicted(self) -> None:
        self._loop.put(self._end)  # the worker node is gone, but the session exists

    def _end(self) -> None:
        """End the member permanently, after the loss of the session or a call of `stop`."""
        if not self._loop.running:
            return
        self._loop.end()
        if self._loop.lease is not None:
            self._loop.lease.end()
        if self._ownership is not None:
            self._lost_queues = not self._ownership.empty()
            self._ownership.expire()
        self._released.set()
        self._reports.end()
        self._ended.set()
        self._registered.set()
        if not self._leaving:
            self._listener.expired()

"""The duty "registration": keeps a worker process registered at the coordinator.

When a registration is over, the process registers again as a new worker.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gevent
from gevent.event import Event

from qdo.backoff import Backoff
from qdo.brokers.registry import positions_of
from qdo.coordination.client import Client, connect
from qdo.coordination.member import Member, MemberListener
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.options import MemberOptions
from qdo.coordination.session_setup import check_broker
from qdo.coordination.znodes.broker_node import BrokerNode
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import QdoError, UnreachableError
from qdo.queues import EVERYTHING
from qdo.settings.settings import Settings
from qdo.system.sqlite import absolute
from qdo.text import describe
from qdo.worker.duties.burst import FleetSurvey, fleet_survey
from qdo.worker.duties.runner import Duty
from qdo.worker.engine.counters import Counters
from qdo.worker.engine.dispatcher import Dispatcher

_log = logging.getLogger(__name__)

REGISTER_BACKOFF = Backoff(0.1, 5.0)
"""Delays between attempts to register again; the worker never gives up."""

Change = Callable[[Client, Layout, str], QueueNode]
OnSession = Callable[["tuple[int, bytes] | None"], None]


class LeaderApi(Protocol):
    """The part of a member that the leader's duties use."""

    def is_leader(self) -> bool: ...
    def create_queues(self, names: Iterable[str], last: int = 0) -> None: ...
    def queue_names(self) -> Sequence[str] | None: ...
    def exclude_deleted(self, names: frozenset[str]) -> None: ...
    def read_queues(self, names: Sequence[str]) -> Mapping[str, QueueNode]: ...
    def change_queue(self, change: Change, name: str) -> QueueNode: ...


class DoorbellApi(Protocol):
    """The doorbells of a member."""

    def watch(self, queues: Sequence[str]) -> None: ...

    def unwatch(self, queues: Sequence[str]) -> None: ...


class MemberApi(Protocol):
    """A registration as the worker uses it: `coordination.member.Member`, or a fake of it."""

    name: str
    failure: BaseException | None

    def start(self, timeout_seconds: float) -> None: ...
    def progress(self, claim: Claim) -> None: ...
    def record(self, claim: Claim) -> bool: ...
    def finished(self, claim: Claim) -> None: ...
    def drain(self) -> None: ...
    def settled(self) -> bool: ...
    def wait_released(self, timeout_seconds: float) -> bool: ...
    def unreleased(self) -> list[str]: ...
    def refresh_component(self, component: Mapping[str, Any]) -> None: ...
    def is_leader(self) -> bool: ...
    @property
    def leader(self) -> LeaderApi: ...
    @property
    def doorbells(self) -> DoorbellApi: ...
    def stop(self) -> None: ...


@dataclass(slots=True)
class CurrentMember:
    """The registration in force, shared by the duties of a worker.

    :ivar member: None while the worker is not registered.
    """

    member: MemberApi | None = None


class ClaimEvents:
    """Passes the events of one registration to the dispatcher, and counts them.

    Each registration has its own: events of an older one never reach the newer one.

    :ivar over: set when the registration has ended for good.
    """

    def __init__(self, dispatcher: Dispatcher, counters: Counters) -> None:
        self.member: MemberApi | None = None
        self.over = Event()
        self._dispatcher = dispatcher
        self._counters = counters

    def _sender(self) -> MemberApi:
        if self.member is None:
            raise RuntimeError("the member sent an event before it was assigned")
        return self.member

    def claimed(self, claim: Claim) -> None:
        self._counters.claimed += 1
        self._dispatcher.claimed(self._sender(), claim)

    def releasing(self, claim: Claim) -> None:
        self._counters.released += 1
        self._dispatcher.releasing(self._sender(), claim)

    def lost(self, claim: Claim) -> None:
        self._counters.lost += 1
        self._dispatcher.lost(claim)

    def repositioned(self, old: Claim, new: Claim) -> None:
        self._dispatcher.repositioned(self._sender(), old, new)

    def expired(self) -> None:
        self.over.set()


class MemberFactory:
    """Opens sessions and makes the member of each.

    :ivar connect_seconds: how long one attempt to connect or register may take.
    :ivar awaits_exclusions: this worker reads which queues are marked as deleted. As leader it
        assigns no queue before it has read them; see `coordination.protocol.rebalancer`.
    :ivar filter: the queues that this worker takes.
    :ivar broker_identity: the `Broker.identity` of this worker's broker.
    :ivar on_doorbell: called with each watched queue that was sent to; None: no doorbells.
    :param on_session: called with id and password of every session before anything is written
        in it, and with None after the worker closed it.
    """

    def __init__(self, settings: Settings, on_session: OnSession = lambda session: None) -> None:
        self.connect_seconds = settings.connect_seconds
        self.awaits_exclusions = False
        self.filter = EVERYTHING
        self.broker_identity = ""
        self.on_doorbell: Callable[[str], None] | None = None
        self._settings = settings
        self._layout = Layout.of(settings.app, settings.namespace)
        self._positions = positions_of(settings.broker)
        self._on_session = on_session
        self._client: Client | None = None
        self._member: MemberApi | None = None

    def make(self, listener: MemberListener, component: Mapping[str, Any]) -> MemberApi:
        """Return a member with a session of its own, not registered yet.

        :raises UnreachableError: the coordinator does not respond in time.
        :raises BrokerMismatchError: the workers of the app use another broker file.
        """
        settings = self._settings
        client = connect(
            settings.coordinator,
            handler="gevent",
            session_timeout_seconds=settings.session_timeout_seconds,
        )
        try:
            client.open(settings.connect_seconds)
        except gevent.GreenletExit:  # the worker drains
            client.stop()
            raise
        try:
            # Before the parent learns of the session: it would restart a worker that had one.
            self._check_broker(client)
        except BaseException:
            client.stop()
            client.close()
            raise
        self._client = client
        if client.client_id is not None:
            self._on_session(client.client_id)
        self._member = member = Member(
            client,
            self._layout,
            listener,
            component=component,
            on_doorbell=self.on_doorbell,
            options=MemberOptions(
                checkpoint_seconds=settings.checkpoint_seconds,
                filter=self.filter,
                wait_for_deleted=self.awaits_exclusions,
                positions=self._positions,
            ),
        )
        return member

    def _check_broker(self, client: Client) -> None:
        if self.broker_identity:
            address = absolute(self._settings.broker)
            node = BrokerNode(self.broker_identity, address, socket.gethostname())
            check_broker(client, self._layout, node, self.connect_seconds)

    def close(self, member: MemberApi) -> bool:
        """Stop a member and close its session; return whether its session is over.

        If the coordinator does not confirm that, the parent closes the session after this process.
        """
        member.stop()
        over = self._client is None or self._client.session_over
        self._client = self._member = None
        if over:
            self._on_session(None)
        return over

    def survey(self, queues: Iterable[str]) -> FleetSurvey:
        """Return who has these queues, see `fleet_survey`; without a session, no worker."""
        if self._client is None or self._member is None:
            return FleetSurvey(sorted(queues), {})
        return fleet_survey(self._client, self._layout, self._positions, self._member.name, queues)


class MembershipLoop(Duty):
    """Registers a worker process, and registers it again whenever its session is over.

    :ivar start_error: why the first registration failed.
    :param current: holds the registration in force for the other duties.
    :param make_events: makes the receiver of the events of one registration.
    :param describe_worker: returns the component node of a worker with this name.
    :param on_registered: called after each registration.
    :param on_start_error: called when `start_error` was set.
    """

    name = "registration"

    def __init__(
        self,
        members: MemberFactory,
        current: CurrentMember,
        make_events: Callable[[], ClaimEvents],
        describe_worker: Callable[[str], Mapping[str, Any]],
        *,
        on_registered: Callable[[], None],
        on_start_error: Callable[[], None],
    ) -> None:
        self.start_error: QdoError | None = None
        self._failed: MemberApi | None = None
        self._members = members
        self._current = current
        self._make_events = make_events
        self._describe_worker = describe_worker
        self._on_registered = on_registered
        self._on_start_error = on_start_error

    def run(self) -> None:
        """Register, and register again as a new worker whenever the session is over.

        If the first attempt fails, the worker stops. Later attempts are retried forever.
        """
        events = self._make_events()
        try:
            self._register(events)
        except QdoError as error:
            self.start_error = error
            self._on_start_error()
            return
        while True:
            self._wait_for_end(events)
            events = self._register_again()

    def close(self) -> None:
        """End the registration in force, if there is one."""
        member = self._current.member or self._failed
        self._current.member = self._failed = None
        if member is None:
            return
        if self._members.close(member):
            _log.info("step 5: %s has left, its session is closed", member.name)
        else:
            _log.warning(
                "step 5: %s has left; the coordinator did not confirm the end of its session. Its"
                " queues are free once the parent process has closed it, or it has expired",
                member.name,
            )

    def _register(self, events: ClaimEvents) -> None:
        member = self._members.make(events, self._describe_worker(""))
        events.member = member
        try:
            member.start(self._members.connect_seconds)
        except BaseException:
            self._members.close(member)
            raise
        self._current.member = member
        self._on_registered()

    def _register_again(self) -> ClaimEvents:
        attempt = 0
        while True:
            attempt += 1
            events = self._make_events()
            try:
                self._register(events)
                return events
            except UnreachableError as error:
                pause = REGISTER_BACKOFF.delay(attempt, random.random())
                _log.warning("cannot register: %s; retrying in %.1f s", describe(error), pause)
                gevent.sleep(pause)

    def _wait_for_end(self, events: ClaimEvents) -> None:
        """Wait for the end of the registration in force, and close its session."""
        events.over.wait()
        member, self._current.member = events.member, None
        if member is None:
            return
        if member.failure is not None:
            # Its jobs still run: `close` ends the session after the drain.
            self._failed = member
            raise RuntimeError(f"the coordination of {member.name} failed") from member.failure
        self._members.close(member)
        _log.warning(
            "%s: session expired, all its queues are lost; registering as a new worker",
            member.name,
        )

"""Open sessions at the coordinator, and make a member for each session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Any

import gevent

from qdo.brokers.base import Broker
from qdo.brokers.registry import kind_of
from qdo.coordination.client import Client, connect
from qdo.coordination.interrupted_attempts import InFlight, count_interrupted
from qdo.coordination.member import Member
from qdo.coordination.protocol.checkpoints import CheckpointTotals
from qdo.coordination.protocol.claims import ClaimListener
from qdo.coordination.protocol.machine import Machine
from qdo.coordination.protocol.ownership import MemberOptions
from qdo.coordination.session_setup import (
    BrokerNode,
    check_broker,
    check_fleet,
    check_rights,
    warn_of_server,
)
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.action_machine import ActionsWatch, Perform
from qdo.fleet.components import check_format_level
from qdo.fleet.pause_machine import PauseWatch
from qdo.fleet.settings_machine import SettingsWatch
from qdo.queues import QueueFilter
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.hosts import host_shown
from qdo.settings.live import LiveSettings
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.worker.duties.burst import FleetSurvey, fleet_survey
from qdo.worker.duties.queues import has_dynamic_queues
from qdo.worker.engine.pauses import PauseGate

MakeMachines = Callable[[Layout, Member], Sequence[Machine]]
OnSession = Callable[["tuple[int, bytes] | None", "float | None"], None]


@dataclass(frozen=True, slots=True)
class MemberParts:
    """The parts of a worker process that all of its members use."""

    broker: Broker
    filter: QueueFilter
    # Returns additional machines for a registered member.
    make_machines: MakeMachines
    actions: Mapping[str, Perform]
    gate: PauseGate
    live: LiveSettings
    # Called with a watched queue when its doorbell rings; None without doorbells.
    on_doorbell: Callable[[str], None] | None
    totals: CheckpointTotals


class MemberFactory:
    """Opens sessions, and makes a member for each session.

    :ivar connect_seconds: time limit of one attempt to connect or to register.
    :param on_session: called with the id, password and timeout of every session before its first
      write. Called with None after the worker has closed the session.
    """

    def __init__(
        self,
        settings: Settings,
        on_session: OnSession = lambda session, timeout: None,
        name: str = "",
    ) -> None:
        self.connect_seconds = settings.connect_seconds
        self._settings = settings
        self._name = name
        self._layout = Layout.of(settings.app, settings.namespace)
        self._positions = kind_of(settings.broker).positions
        self._on_session = on_session
        self._client: Client | None = None
        self._member: Member | None = None

    def make(
        self, parts: MemberParts, listener: ClaimListener, component: Mapping[str, Any]
    ) -> Member:
        """Return an unregistered member with a new session.

        :raises UnreachableError: the coordinator does not respond within `connect_seconds`.
        :raises UsageError: the workers of the app use another broker file, or another coordinator.
        :raises NodeRefusedError: the account lacks a right that workers need.
        :raises OpenTreeError: accounts without a role can change the nodes.
        :raises RejectedError: the fleet of the app requires a newer version of qdo.
        """
        settings = self._settings
        of_parent = f"{self._name} of parent process" if self._name else "parent process"
        self._client = client = self._open(parts.broker)
        if client.client_id is not None:
            self._on_session(client.client_id, client.negotiated_timeout_seconds)
        self._member = member = Member(
            client,
            self._layout,
            listener,
            component=component,
            make_machines=partial(self._machines, parts),
            on_doorbell=parts.on_doorbell,
            options=MemberOptions(
                checkpoint_seconds=settings.checkpoint_seconds,
                filter=parts.filter,
                process=f"host {component['host']}, {of_parent} {component['parent']}",
                zone=settings.zone,
                address=settings.address,
                # A leader assigns queues only after it knows the deleted queues.
                wait_for_deleted=has_dynamic_queues(parts.broker),
                positions=self._positions,
                totals=parts.totals,
            ),
        )
        return member

    def _open(self, broker: Broker) -> Client:
        """Return a client with an open session; raise an error if a check refuses this worker."""
        settings = self._settings
        client = connect(
            settings.coordinator,
            access=coordinator_access(settings, self._layout),
            handler="gevent",
            session_timeout_seconds=settings.session_timeout_seconds,
        )
        try:
            client.open(settings.connect_seconds)
        except gevent.GreenletExit:  # the worker drains
            client.stop()
            raise
        try:
            # Check before reporting the session, because the parent restarts a worker that had a
            # session.
            check_rights(client, self._layout, self.connect_seconds)
            check_format_level(client, self._layout)
            self._check_broker(client, broker)
        except BaseException:
            client.stop()
            client.close()
            raise
        return client

    def _machines(self, parts: MemberParts, member: Member) -> Sequence[Machine]:
        """Return the additional machines of a registered member."""
        fleet = self._layout.fleet
        parts.gate.shut()
        return [
            *parts.make_machines(self._layout, member),
            ActionsWatch(fleet, member.name, parts.actions, wall=time, call=member.call),
            # Watch settings before pauses. The node of the pauses opens the gate, so jobs start
            # with current settings.
            SettingsWatch(fleet.settings, parts.live),
            PauseWatch(
                fleet.holds,
                parts.gate,
                acknowledge=member.obey,
                is_leader=member.leader.is_leader,
                clock=clock,
                wall=time,
            ),
        ]

    def _check_broker(self, client: Client, broker: Broker) -> None:
        if broker.identity:
            address = self._settings.broker
            node = BrokerNode(broker.identity, address, host_shown(self._settings))
            check_broker(client, self._layout, node, self.connect_seconds)
        coordinator = self._settings.coordinator
        host = host_shown(self._settings)
        claim = broker.catalog.claim_app
        check_fleet(client, self._layout, claim, coordinator, host, self.connect_seconds)

    def check_format_level(self) -> None:
        """Raise RejectedError if the fleet now requires a newer version of qdo."""
        if self._client is not None:
            check_format_level(self._client, self._layout)

    def close(self, member: Member) -> bool:
        """Stop a member and close its session; return whether the session has ended."""
        member.stop()
        over = self._client is None or self._client.session_over
        self._client = self._member = None
        if over:  # otherwise the parent closes the session after the death of this process
            self._on_session(None, None)
        return over

    def count_interrupted(self, in_flight: Sequence[InFlight], reason: str) -> int:
        """Record the attempts that the end of an earlier session interrupted; return the count."""
        if self._client is None or not in_flight:
            return 0
        counted = count_interrupted(self._client, self._layout, in_flight, reason, self._positions)
        return len(counted)

    def warn_of_server(self) -> None:
        """Log a warning if the servers may lose acknowledged writes."""
        if self._client is not None:
            warn_of_server(self._client)

    def survey(self, queues: Iterable[str]) -> FleetSurvey:
        """Return the survey of these queues; without a session, all are unattended."""
        if self._client is None or self._member is None:
            return FleetSurvey(sorted(queues), {})
        return fleet_survey(self._client, self._layout, self._positions, self._member.name, queues)

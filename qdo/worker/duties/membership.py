"""The duty "registration" keeps a worker process registered at the coordinator.

After the end of a registration, the process registers again as a new worker.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping

import gevent
from gevent.event import Event

from qdo.backoff import Backoff
from qdo.broker_errors import SchemaNewerError
from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import NodeRefusedError, QdoError, UnreachableError, UsageError
from qdo.history.recorder import Recorder
from qdo.system.logs import name_worker
from qdo.system.processes import SIGN
from qdo.text import describe, pluralize
from qdo.worker.duties.duty import CurrentMember, Duty
from qdo.worker.duties.member_factory import MemberFactory, MemberParts
from qdo.worker.duties.status_report import StatusReport
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.pauses import PauseGate
from qdo.worker.engine.slot import Counters, apply_decisions
from qdo.worker.shared_memory import InFlightTable

_log = logging.getLogger(__name__)

# Delays between attempts to register again. The worker never gives up.
REGISTER_BACKOFF = Backoff(0.1, 5.0)


class ClaimEvents:
    """Passes the events of one registration to the dispatcher, and counts them.

    Each registration has its own object, so events of an old registration never reach the new
    member.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        counters: Counters,
        gate: PauseGate,
        history: Recorder | None,
    ) -> None:
        self.member: Member | None = None
        # Set when the registration has ended.
        self.over = Event()
        self._dispatcher = dispatcher
        self._counters = counters
        self._gate = gate
        self._history = history

    def _sender(self) -> Member:
        if self.member is None:
            raise RuntimeError("the member sent an event before it was assigned")
        return self.member

    def claimed(self, claim: Claim) -> None:
        self._counters.claimed += 1
        self._gate.admit(claim)
        sender = self._sender()
        if self._history is not None:
            self._history.owners.claimed(claim.queue, claim.fence, sender.name)
        self._dispatcher.claimed(sender, claim)

    def releasing(self, claim: Claim) -> None:
        self._dispatcher.releasing(self._sender(), claim)

    def released(self, claim: Claim) -> None:
        self._counters.released += 1
        if self._history is not None:
            self._history.owners.ended(claim.queue, claim.fence, claim.ending)

    def undone(self, claim: Claim) -> None:
        self._counters.undone += 1

    def lost(self, claim: Claim) -> None:
        self._counters.lost += 1
        if self._history is not None:
            self._history.owners.ended(claim.queue, claim.fence, claim.ending)
        self._dispatcher.lost(claim)

    def decided(self, claim: Claim, decisions: Mapping[int, FailureRecord | None]) -> bool:
        return apply_decisions(self._dispatcher.slots.get(claim.queue), claim, decisions)

    def repositioned(self, old: Claim, new: Claim) -> None:
        self._gate.admit(new)
        self._dispatcher.repositioned(self._sender(), old, new)

    def expired(self) -> None:
        self._counters.sessions_lost += 1
        self.over.set()


class MembershipLoop(Duty):
    """Registers a worker process, and registers it again after each end of its session.

    :param make_events: makes the object that receives the events of a registration.
    :param in_flight: the messages in flight. When a session ends, the loop counts their attempts.
    """

    name = "registration"

    def __init__(
        self,
        members: MemberFactory,
        parts: MemberParts,
        current: CurrentMember,
        make_events: Callable[[], ClaimEvents],
        status: StatusReport,
        in_flight: InFlightTable,
        *,
        on_start_error: Callable[[], None],
    ) -> None:
        self._members = members
        self._parts = parts
        self._current = current
        self._make_events = make_events
        self._status = status
        self._in_flight = in_flight
        self._on_start_error = on_start_error

    def run(self) -> None:
        """Register now and after each end of a session; stop the worker if the first try fails."""
        events = self._make_events()
        try:
            self._register(events)
        except QdoError as error:
            self._current.start_error = error
            self._on_start_error()
            return
        gevent.spawn(self._members.warn_of_server)
        while True:
            self._wait_for_end(events)
            lost = events.member
            events = self._register_again()
            if lost is not None:
                self._count_interrupted(lost.name)

    def _register(self, events: ClaimEvents) -> None:
        member = self._members.make(self._parts, events, self._status.component(""))
        events.member = member
        try:
            member.start(self._members.connect_seconds)
            self._members.check_format_level()
        except BaseException:
            self._members.close(member)
            raise
        name_worker(member.name)
        SIGN.begin_lease()
        member.lease.on_moved = SIGN.move_lease
        SIGN.move_lease(member.lease.until)
        self._current.member = member
        self._current.state = "running"
        self._status.refresh()

    def _register_again(self) -> ClaimEvents:
        attempt = 0
        while True:
            attempt += 1
            events = self._make_events()
            try:
                self._register(events)
                return events
            except SchemaNewerError:
                raise  # no retry helps, and this worker has no queues
            except (UnreachableError, NodeRefusedError, UsageError) as error:  # retry even these
                pause = REGISTER_BACKOFF.delay(attempt, random.random())  # spread the pauses
                _log.warning("cannot register: %s; retrying in %.1f s", describe(error), pause)
                gevent.sleep(pause)

    def _count_interrupted(self, worker: str) -> None:
        """Record the attempts that the loss of a worker's session interrupted."""
        # The jobs of these messages may still run. The next owners repeat the messages, and know of
        # these attempts only from the recorded counts.
        in_flight = self._in_flight.of_worker(worker)
        reason = f"{worker}: its session expired while the job ran"
        try:
            counted = self._members.count_interrupted(in_flight, reason)
        except (UnreachableError, UsageError) as error:
            _log.warning(
                "%s: cannot count its interrupted attempts; these messages may get one more: %s",
                worker,
                describe(error),
            )
            counted = 0
        self._in_flight.forget_worker(worker)
        if counted:
            _log.warning(
                "the session of this process as %s expired with %s in flight; one attempt is"
                " counted for each",
                worker,
                pluralize(counted, "message"),
            )

    def _wait_for_end(self, events: ClaimEvents) -> None:
        """Wait for the end of the current registration, and close its session."""
        events.over.wait()
        member = events.member
        self._current.member = None
        if member is None:
            return
        if member.failure is not None:
            # The jobs of this member still run. `close` ends the session after the drain.
            self._current.failed = member
            raise RuntimeError(f"the coordination of {member.name} failed") from member.failure
        self._members.close(member)
        _log.warning(
            "%s: session expired, all its queues are lost; registering as a new worker", member.name
        )
        name_worker("")


def leave(members: MemberFactory, current: CurrentMember) -> None:
    """End the current registration, if any, as step 5 of the shutdown."""
    member = current.member or current.failed
    current.member = current.failed = None
    if member is None:
        return
    if members.close(member):
        _log.info("step 5: %s has left, its session is closed", member.name)
    else:
        _log.warning(
            "step 5: %s has left; the coordinator did not confirm the end of its session. Its"
            " queues are free once the parent process has closed it, or it has expired",
            member.name,
        )
    name_worker("")

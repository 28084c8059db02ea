"""A coordination member in memory: the worker engine's tests play the coordinator with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gevent.event import Event

from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.worker.duties.burst import FleetSurvey
from qdo.worker.duties.member_factory import MemberFactory, MemberParts


class FakeMember(Member):
    """Sends a listener the events that the test wants, and records its reports.

    :ivar recorded: `last` of each queue as the coordinator would have it.
    :ivar events: ("progress" | "finished" | "record" | ..., queue), in order.
    """

    def __init__(
        self,
        listener: Any,
        recorded: dict[str, int] | None = None,
        *,
        lease_seconds: float = 3600.0,
        name: str = "worker-0000000000",
        now: Callable[[], float] = clock,
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.listener = listener
        self.recorded = {} if recorded is None else recorded
        self._lease = Lease(lease_seconds / 0.75, now())
        self.claims: dict[str, Claim] = {}
        self.events: list[tuple[str, str]] = []
        self.components: list[dict[str, Any]] = []
        self.created: list[str] = []
        self.bells: set[str] = set()
        self.leading = False
        self.is_settled = True
        self.draining = False
        self.started = Event()
        self.stopped = Event()
        self.released = Event()
        self.changed = Event()
        self.fence = 0
        self.marks: dict[str, FailureRecord] = {}
        self.nodes: dict[str, QueueNode] = {}

    # --- calls of the test ---

    def grant(self, *queues: str) -> list[Claim]:
        """Claim queues for the engine, from their recorded positions."""
        claims = []
        for queue in queues:
            self.fence += 1
            node = self.nodes.get(queue, QueueNode())
            marks = self.marks.pop(queue, node.failure)
            last = self.recorded.get(queue, 0)
            claim = Claim(queue, self.fence, last, self.lease, marks, node.out_of_order)
            self.claims[queue] = claim
            claims.append(claim)
            self.listener.claimed(claim)
        return claims

    def take_back(self, queue: str) -> Claim:
        """Ask for a queue back, as after a rebalance."""
        claim = self.claims[queue]
        claim.open = False
        self.listener.releasing(claim)
        return claim

    def lose(self, queue: str) -> Claim:
        """Lose one queue."""
        claim = self.claims.pop(queue)
        claim.open = False
        self.listener.lost(claim)
        self._look()
        return claim

    def seek(self, queue: str, last: int) -> Claim:
        """Move `last` of a queue that is owned."""
        old = self.claims[queue]
        old.open = False
        new = self.claims[queue] = Claim(queue, old.fence, last, self.lease)
        self.recorded[queue] = last
        self.listener.repositioned(old, new)
        return new

    def decide(self, queue: str, marks: FailureRecord | None) -> Claim:
        """Decide as an operator on the message at the head of a queue."""
        old = self.claims[queue]
        old.open = False
        new = self.claims[queue] = Claim(
            queue, old.fence, old.done, self.lease, marks, old.out_of_order
        )
        self.listener.repositioned(old, new)
        return new

    def expire(self) -> None:
        """Lose the session."""
        self.lease.end()
        for queue in list(self.claims):
            self.lose(queue)
        self.released.set()
        self.listener.expired()

    # --- reports of the engine ---

    @property
    def lease(self) -> Lease:
        return self._lease

    def start(self, timeout_seconds: float = 15.0) -> None:
        self.started.set()

    def progress(self, claim: Claim) -> None:
        self._record("progress", claim)

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool:
        self._record("record", claim)
        return True

    def finished(self, claim: Claim) -> None:
        self._record("finished", claim)
        if self.claims.get(claim.queue) is claim:
            del self.claims[claim.queue]
        self._look()

    def drain(self) -> None:
        self.draining = True
        for queue in list(self.claims):
            self.take_back(queue)
        self._look()

    def settled(self) -> bool:
        return self.is_settled

    def wait_released(self, timeout_seconds: float) -> bool:
        return bool(self.released.wait(timeout_seconds))

    def unreleased(self) -> list[str]:
        return sorted(self.claims)

    def refresh_component(self, component: Mapping[str, Any]) -> None:
        self.components.append(dict(component))

    def is_leader(self) -> bool:
        return self.leading

    @property
    def leader(self) -> Any:
        return self

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        self.created += names
        self._look()

    def queue_names(self) -> tuple[str, ...]:
        """Return no name: whatever is listed is created once more."""
        return ()

    def facts(self) -> dict[str, Any]:
        return {}

    def exclude_deleted(self, names: frozenset[str]) -> None:
        raise AssertionError("the brokers of these tests keep their queues")

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        raise AssertionError("the brokers of these tests keep their queues")

    def change_queue(self, change: object, name: str) -> QueueNode:
        raise AssertionError("the brokers of these tests keep their queues")

    def with_fence(self, act: object) -> int:
        return 0

    def watch_doorbells(self, queues: Sequence[str], gone: Sequence[str] = ()) -> None:
        self.bells.difference_update(gone)
        self.bells.update(queues)

    def stop(self) -> None:
        self.stopped.set()

    def _record(self, what: str, claim: Claim) -> None:
        self.events.append((what, claim.queue))
        if claim.refresh is not None:
            claim.refresh()
        if self.claims.get(claim.queue) is claim:
            self.recorded[claim.queue] = claim.done
            if claim.out_of_order is not None or claim.queue in self.nodes:
                # As it is written and read, not as it stands in memory.
                node = QueueNode(claim.done, failure=claim.failure, out_of_order=claim.out_of_order)
                self.nodes[claim.queue] = QueueNode.parse(node.encode())
        self._look()

    def _look(self) -> None:
        if self.draining and not self.claims:
            self.released.set()
        self.changed.set()


class FakeRegistrar(MemberFactory):
    """Makes fake members that share recorded positions.

    :ivar members: every member made, the newest last.
    :ivar parts: of the members.
    :ivar elsewhere: `last` of the queues that other workers have.
    :ivar refusals: raised by the next calls of `make`, one each.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.members: list[FakeMember] = []
        self.parts: MemberParts | None = None
        self.recorded: dict[str, int] = {}
        self.marks: dict[str, FailureRecord] = {}
        self.nodes: dict[str, QueueNode] = {}
        self.refusals: list[Exception] = []
        self.elsewhere: dict[str, int] = {}
        self.made = Event()

    def make(self, parts: MemberParts, listener: Any, component: Mapping[str, Any]) -> FakeMember:
        self.parts = parts
        if self.refusals:
            raise self.refusals.pop(0)
        name = f"worker-{len(self.members):010d}"
        member = FakeMember(listener, self.recorded, name=name)
        member.marks = self.marks
        member.nodes = self.nodes
        self.members.append(member)
        self.made.set()
        return member

    def close(self, member: Any) -> bool:
        member.stop()
        return True

    def survey(self, queues: Iterable[str]) -> FleetSurvey:
        rest = set(queues) - set(self.members[-1].claims)
        return FleetSurvey(
            unattended=sorted(rest - set(self.elsewhere)),
            elsewhere={name: self.elsewhere[name] for name in rest & set(self.elsewhere)},
        )

"""Members with a trivial engine, for tests of coordination on a real coordinator."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kazoo.protocol.connection import _CONNECTION_DROP

from qdo.coordination.client import connect
from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.ownership import MemberOptions
from qdo.coordination.znodes.layout import Layout
from qdo.errors import CoordinatorUnreachableError
from qdo.system.clock import clock
from tests.support.processes import wait_until

LAYOUT = Layout.of("fleet")


class CountingEngine:
    """Counts `done` up by one per step for every claim that is open and leased.

    :ivar ledger: every start of a message as (queue, number, fence).
    """

    def __init__(self, ledger: list[tuple[str, int, int]]) -> None:
        self.member: Member | None = None
        self.claims: dict[str, Claim] = {}
        self.expirations = 0
        self.undone_writes = 0
        self._ledger = ledger
        self._lock = threading.Lock()

    def claimed(self, claim: Claim) -> None:
        with self._lock:
            self.claims[claim.queue] = claim

    def releasing(self, claim: Claim) -> None:
        with self._lock:
            self.claims.pop(claim.queue, None)
        if self.member is not None:
            self.member.finished(claim)

    def released(self, claim: Claim) -> None:
        """Do nothing: `releasing` forgot the claim."""

    def undone(self, claim: Claim) -> None:
        self.undone_writes += 1

    def lost(self, claim: Claim) -> None:
        with self._lock:
            self.claims.pop(claim.queue, None)

    def decided(self, claim: Claim, decisions: object) -> bool:
        return False

    def repositioned(self, old: Claim, new: Claim) -> None:
        with self._lock:
            self.claims[new.queue] = new

    def expired(self) -> None:
        self.expirations += 1

    def step(self) -> None:
        """Process one message of every queue."""
        member = self.member
        if member is None:
            return
        with self._lock:
            for claim in self.claims.values():
                if claim.open and clock() < claim.lease.until:
                    self._ledger.append((claim.queue, claim.done + 1, claim.fence))
                    claim.done += 1
                    member.progress(claim)


class MemberFleet:
    """Several members of one app, each with a client and an engine of its own.

    :ivar rounds: how often every engine has made its step.
    """

    def __init__(
        self, url: str, session_timeout_seconds: float = 4.0, told_aside: bool = False
    ) -> None:
        self.url = url
        self._told_aside = told_aside
        self.ledger: list[tuple[str, int, int]] = []
        self.members: list[tuple[Member, CountingEngine]] = []
        self.rounds = 0
        self._timeout = session_timeout_seconds
        self._stop = threading.Event()
        self._stepper = threading.Thread(target=self._step, daemon=True)
        self._stepper.start()

    def _step(self) -> None:
        while not self._stop.wait(0.005):
            for _, engine in list(self.members):
                engine.step()
            self.rounds += 1

    def join(self) -> tuple[Member, CountingEngine]:
        """Start one more member."""
        engine = CountingEngine(self.ledger)
        client = connect(self.url, session_timeout_seconds=self._timeout)
        member = Member(
            client,
            LAYOUT,
            engine,
            component={"host": "test"},
            options=MemberOptions(
                checkpoint_seconds=0.02, process="test pid 7", wait_for_deleted=self._told_aside
            ),
        )
        engine.member = member
        member.start()
        self.members.append((member, engine))
        return member, engine

    def leave(self, index: int) -> None:
        """Let a member release everything and go."""
        member, _ = self.members[index]
        member.drain()
        assert member.wait_released(20.0), member.unreleased()
        member.stop()
        del self.members[index]

    def end_session(self, index: int) -> None:
        """End a member's session behind its back, as an expiry would, and replace it."""
        member, engine = self.members[index]
        client = member._client
        # kazoo reports it only while it is connected.
        wait_until(lambda: client.client_id is not None, "the member is connected")
        session = client.client_id
        while not engine.expirations:
            # The member may take its session back before the thief has closed it: again, then.
            thief = connect(self.url, client_id=session)
            with contextlib.suppress(CoordinatorUnreachableError):
                thief.open(10.0)  # a client that cannot connect closes itself
                thief.stop()
                thief.close()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: engine.expirations > 0, "the member notices", 2.0)
        assert not engine.claims
        member.stop()
        del self.members[index]
        self.join()

    def drop_connection(self, index: int) -> None:
        """Cut a member's connection; its session lives on."""
        client = self.members[index][0]._client
        client._call(_CONNECTION_DROP, client.handler.async_result())

    def create_queues(self, names: list[str]) -> None:
        """Create queues through the current leader."""
        self.wait(lambda: any(member.leader.is_leader() for member, _ in self.members), "a leader")
        for member, _ in self.members:
            member.leader.create_queues(names)

    def owned(self) -> dict[str, int]:
        """Return the index of the member that has each queue; fail if two have one."""
        owners: dict[str, int] = {}
        for index, (_, engine) in enumerate(self.members):
            for queue in list(engine.claims):
                assert queue not in owners, f"{queue} has two owners"
                owners[queue] = index
        return owners

    def balanced(self, queues: int) -> bool:
        """Return whether all queues are owned, by everyone within one of each other."""
        loads = [len(engine.claims) for _, engine in self.members]
        settled = all(member.settled() for member, _ in self.members)
        return settled and sum(loads) == queues and max(loads) - min(loads) <= 1

    def wait(self, condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
        """Wait for a condition with a deadline."""
        wait_until(condition, lambda: f"{what}; found {self.found()}", timeout_seconds)

    def found(self) -> list[Any]:
        """Return the queues of each member, and the number of its queues in each other state."""
        return [
            (
                member.name,
                len(engine.claims),
                Counter(
                    slot.state.value
                    for slot in (member._ownership.slots.values() if member._ownership else ())
                ),
                member.settled(),
                member.leader.is_leader(),
            )
            for member, engine in self.members
        ]

    def close(self) -> None:
        self._stop.set()
        self._stepper.join()
        for member, _ in self.members:
            member.stop()
        for member, _ in self.members:
            assert member.failure is None

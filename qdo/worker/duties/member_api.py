"""A registration as the duties of a worker see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qdo.coordination.client import Client
from qdo.coordination.leader_queues import Chore
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.rebalancing.lost_workers import LostWorker
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.system.clock import clock

Change = Callable[[Client, Layout, str], QueueNode]


class LeaderApi(Protocol):
    """The part of a member that the leader's duties use."""

    def is_leader(self) -> bool: ...
    def create_queues(self, names: Iterable[str], last: int = 0) -> None: ...
    def queue_names(self) -> Sequence[str] | None: ...
    def lost_workers(self) -> Sequence[LostWorker]: ...
    def exclude_deleted(self, names: frozenset[str]) -> None: ...
    def read_queues(self, names: Sequence[str]) -> Mapping[str, QueueNode]: ...
    def change_queue(self, change: Change, name: str) -> QueueNode: ...
    def do_chore(self, chore: Chore) -> int: ...


class DoorbellApi(Protocol):
    """The doorbells of a member."""

    def watch(self, queues: Sequence[str]) -> None: ...

    def unwatch(self, queues: Sequence[str]) -> None: ...


class MemberApi(Protocol):
    """A registration as the worker uses it: `coordination.member.Member`, or a fake of it."""

    name: str
    failure: BaseException | None

    @property
    def lease(self) -> Lease: ...

    def start(self, timeout_seconds: float) -> None: ...
    def progress(self, claim: Claim) -> None: ...
    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool: ...
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

    def contact(self) -> float:
        """Return when the coordinator last answered; the present time without a registration."""
        return clock() if self.member is None else self.member.lease.contact

    def settled(self) -> bool:
        """Return whether the worker is registered, and has claimed all of its queues."""
        return self.member is not None and self.member.settled()

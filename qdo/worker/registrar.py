"""Makes the registrations of a worker process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gevent

from qdo.brokers import positions_of
from qdo.coordination.client import Client, connect
from qdo.coordination.layout import Layout, QueueNode, WorkerNode
from qdo.coordination.member import Listener, Member
from qdo.coordination.reads import read_children, read_nodes
from qdo.coordination.slots import Claim
from qdo.filters import QueueFilter
from qdo.settings import Settings

Change = Callable[[Client, Layout, str], QueueNode]
OnSession = Callable[["tuple[int, bytes] | None"], None]


class Enrolled(Protocol):
    """A registration as the worker uses it: `coordination.member.Member`, or a test's."""

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
    def create_queues(self, names: Iterable[str], last: int = 0) -> None: ...
    def queue_names(self) -> Sequence[str] | None: ...
    def set_aside(self, names: frozenset[str]) -> None: ...
    def read_queues(self, names: Sequence[str]) -> Mapping[str, QueueNode]: ...
    def change_queue(self, change: Change, name: str) -> QueueNode: ...
    def attend_bells(self, queues: Sequence[str]) -> None: ...
    def leave_bells(self, queues: Sequence[str]) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Survey:
    """Where queues are that this worker does not have.

    :ivar unattended: those that no live worker lists.
    :ivar elsewhere: the recorded position of those that another one lists.
    """

    unattended: list[str]
    elsewhere: dict[str, int]


class Registrar:
    """Opens sessions and registers in them.

    :ivar told_aside: see `coordination.rebalancer.Rebalancer`.
    :ivar on_ring: see `coordination.member.Member`.
    :param on_session: told id and password of every session before anything is written in it,
        and None when it was closed in good order.
    """

    def __init__(self, settings: Settings, on_session: OnSession = lambda session: None) -> None:
        self._settings = settings
        self._layout = Layout.of(settings.app, settings.namespace)
        self._positions = positions_of(settings.broker)
        self._on_session = on_session
        self.told_aside = False
        self.on_ring: Callable[[str], None] | None = None
        self._client: Client | None = None
        self._member: Enrolled | None = None

    def make(self, listener: Listener, component: Mapping[str, Any]) -> Enrolled:
        """Return a member with a session of its own, not registered yet.

        :raises UnreachableError: the coordinator does not answer in time.
        """
        settings = self._settings
        client = connect(
            settings.coordinator,
            handler="gevent",
            session_timeout_seconds=settings.session_timeout_seconds,
        )
        try:
            client.open(settings.connect_seconds)
        except gevent.GreenletExit:  # told to stop meanwhile
            client.stop()
            raise
        self._client = client
        if client.client_id is not None:
            self._on_session(client.client_id)
        self._member = member = Member(
            client,
            self._layout,
            listener,
            component=component,
            checkpoint_seconds=settings.checkpoint_seconds,
            takes=QueueFilter(settings.queues, settings.exclude),
            told_aside=self.told_aside,
            on_ring=self.on_ring,
            positions=self._positions,
        )
        return member

    def close(self, member: Enrolled) -> None:
        """End the session in good order."""
        member.stop()
        self._client = self._member = None
        self._on_session(None)

    def survey(self, queues: Iterable[str]) -> Survey:
        """Return where queues are, leaving out those that nobody may process.

        :raises CoordinatorUnreachableError: the connection is lost.
        """
        client, member, layout = self._client, self._member, self._layout
        if client is None or member is None:
            return Survey(sorted(queues), {})
        workers = read_children(client, [layout.workers]).get(layout.workers, [])
        owned: set[str] = set()
        mine: frozenset[str] = frozenset()
        for read in read_nodes(client, [layout.worker(name) for name in workers]):
            listed = frozenset(WorkerNode.parse(read.data).queues)
            owned |= listed
            if read.path == layout.worker(member.name):
                mine = listed
        wanted = sorted(set(queues) - mine)
        nodes = read_nodes(client, [layout.queue(name) for name in wanted])
        found = {
            read.path.rpartition("/")[2]: QueueNode.parse(read.data).checked(self._positions)
            for read in nodes
        }
        usable = {
            name: node
            for name in wanted
            if _is_usable(node := found.get(name, QueueNode()))
        }
        return Survey(
            unattended=[name for name in usable if name not in owned],
            elsewhere={
                name: self._positions.begin(node.last, node.position)
                for name, node in usable.items()
                if name in owned
            },
        )


def _is_usable(node: QueueNode) -> bool:
    """Return whether its messages may be processed now; a blocked queue waits for an operator."""
    return not (node.fault or node.deleted or (node.marks is not None and node.marks.blocked))

"""Makes the registrations of a worker process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import gevent

from qdo.coordination.client import Client, connect
from qdo.coordination.layout import Layout, QueueNode, WorkerNode
from qdo.coordination.member import Listener, Member
from qdo.coordination.reads import read_children, read_nodes
from qdo.coordination.slots import Claim
from qdo.settings import Settings

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
    def create_queues(self, names: Iterable[str]) -> None: ...
    def stop(self) -> None: ...


class Registrar:
    """Opens sessions and registers in them.

    :param on_session: told id and password of every session before anything is written in it,
        and None when it was closed in good order.
    """

    def __init__(self, settings: Settings, on_session: OnSession = lambda session: None) -> None:
        self._settings = settings
        self._layout = Layout.of(settings.app, settings.namespace)
        self._on_session = on_session
        self._client: Client | None = None

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
        return Member(
            client,
            self._layout,
            listener,
            component=component,
            checkpoint_seconds=settings.checkpoint_seconds,
        )

    def close(self, member: Enrolled) -> None:
        """End the session in good order."""
        member.stop()
        self._client = None
        self._on_session(None)

    def unattended(self, queues: Iterable[str]) -> list[str]:
        """Return which queues no live worker has, leaving out those that nobody may have.

        :raises CoordinatorUnreachableError: the connection is lost.
        """
        client, layout = self._client, self._layout
        names = set(queues)
        if client is None:
            return sorted(names)
        workers = read_children(client, [layout.workers]).get(layout.workers, [])
        for read in read_nodes(client, [layout.worker(name) for name in workers]):
            names.difference_update(WorkerNode.parse(read.data).queues)
        for read in read_nodes(client, [layout.queue(name) for name in sorted(names)]):
            node = QueueNode.parse(read.data)
            if node.fault or node.deleted:
                names.discard(read.path.rpartition("/")[2])
        return sorted(names)

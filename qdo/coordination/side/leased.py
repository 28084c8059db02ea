"""A connection whose session owns nodes: locks of a process that is not a worker.

The process has a node below ``components``. It exists as long as the session, so other processes
see that this one lives. Regular contact keeps a lease, by the same rule as a worker's: while it is
valid, the coordinator has not ended the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kazoo.protocol.states import KazooState

from qdo.coordination.client import Client
from qdo.coordination.protocol.lease import Lease, Renewal
from qdo.coordination.protocol.registration import Component
from qdo.coordination.side.connection import SideConnection
from qdo.coordination.transactions import settle
from qdo.coordination.znodes.layout import Layout, clients_of
from qdo.errors import CoordinatorUnreachableError
from qdo.system.clock import clock


class LeasedConnection(SideConnection):
    """A side connection for one session: once that is over, make a new one.

    :ivar lease: valid while the session certainly lives.
    :ivar path: path of the node of this process, "" before it is registered.
    :ivar over: whether the session has ended.
    :ivar waiters: events that are set once it has ended.
    :param component: the description of this process; `host` is part of its node's name.
    :raises CoordinatorUnreachableError: the coordinator does not respond.
    """

    def __init__(
        self,
        client: Client,
        layout: Layout,
        component: Mapping[str, Any],
    ) -> None:
        # This transaction proves that the session lives.
        sent_at = clock()
        settle(client, layout.root)
        timeout = client.negotiated_timeout_seconds or 0.0
        self.lease = Lease(timeout, client.heard_at or sent_at)
        self.over = False
        self.waiters: set[Any] = set()
        self.path = ""
        self._named: Any = client.handler.event_object()
        folder = clients_of(layout.root)
        host = str(component.get("host", "localhost"))
        node = Component(folder, host, dict(component), self.session(client), self._registered)
        super().__init__(client, self.lease)
        self.add(node)

    @staticmethod
    def session(client: Client) -> int:
        """Return the id of a client's session."""
        return int(client.client_id[0]) if client.client_id is not None else 0

    def wait_registered(self, timeout_seconds: float) -> str:
        """Return the path of this process's node, once it has one.

        :raises CoordinatorUnreachableError: it has none in time.
        """
        self._named.wait(timeout_seconds)
        if not self.path or self.over:
            raise CoordinatorUnreachableError(
                url=self.client.address.url,
                reason=f"this process was not registered within {timeout_seconds:g} s",
            )
        return self.path

    @property
    def valid(self) -> bool:
        """Whether the session certainly lives."""
        return clock() < self.lease.until

    def close(self) -> None:
        """End the session, and with it its nodes."""
        self.over = True
        self.lease.end()
        for waiter in list(self.waiters):
            waiter.set()
        super().close()

    def _registered(self, path: str) -> None:
        self.path = path
        self._named.set()
        self._add(Renewal(path, self.lease, clock=clock, on_gone=self._end))

    def _state_changed(self, state: str) -> None:
        if state == KazooState.LOST:
            self.lease.end()  # at once, on whatever thread
            self.call(self._end)
        else:
            super()._state_changed(state)

    def _connected(self) -> None:
        if not self.over:
            if self.client.heard_at is not None:
                self.lease.heard(self.client.heard_at)
            super()._connected()

    def _end(self) -> None:
        if not self.over:
            self.close()

"""A second connection to the coordinator, for all purposes except the ownership of queues.

A worker's lease needs regular contact over its session. An app may share many large values, which
must not delay this contact, so they have a separate connection. Processes that are not workers,
such as web servers and scripts, have only this connection. The connection opens at the first use.
The session has no ephemeral nodes, so the end of the session has no consequences, and kazoo begins
a new session.

`LeasedConnection` is a side connection with ephemeral nodes, for a process that is not a worker.
These nodes are the process's locks, and a node below ``components`` that shows that the process
lives. Regular contact keeps its lease valid, by the same rule as for a worker's lease.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kazoo.exceptions import KazooException
from kazoo.protocol.states import KazooState

from qdo.coordination.bulk_reads import connection_lost, names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.machine_loop import MachineLoop
from qdo.coordination.protocol.lease import Lease, Renewal
from qdo.coordination.protocol.machine import Machine
from qdo.coordination.protocol.registration import Component
from qdo.coordination.transactions import settle
from qdo.coordination.znodes.layout import Layout, clients_of
from qdo.coordination.znodes.values import encode, load
from qdo.errors import CoordinatorUnreachableError
from qdo.system.clock import clock

_log = logging.getLogger(__name__)


class SideConnection:
    """A client with a loop for its machines. Safe to use from any thread.

    :param client: a connected client, which `close` closes.
    :param lease: the lease of the session, if it owns ephemeral nodes.
    """

    def __init__(self, client: Client, lease: Lease | None = None) -> None:
        self.client = client
        self.pid = os.getpid()  # a forked child must not close the connection
        self._unclosed = threading.Lock()
        self._loop = MachineLoop(client, before_flush=_nothing, after_step=_nothing)
        self._loop.lease = lease
        self._loop.running = True
        client.add_listener(self._state_changed)
        if client.connected:
            self._loop.put(self._connected)
        client.handler.spawn(self._run)
        atexit.register(self.close)

    def add(self, machine: Machine) -> None:
        self._loop.put(partial(self._add, machine))

    def remove(self, machine: Machine) -> None:
        self._loop.put(partial(self._loop.remove, machine))

    def call(self, event: Callable[[], object]) -> None:
        """Call a function on the loop that runs the machines."""
        self._loop.put(event)

    def wait(self, begin: Callable[[Callable[[], None]], object], timeout_seconds: float) -> bool:
        """Call `begin` on the loop with a callback; return False if nothing calls it in time."""
        done = self.client.handler.event_object()
        self._loop.put(partial(begin, done.set))
        return bool(done.wait(timeout_seconds))

    def close(self) -> None:
        """End the loop and the session; idempotent."""
        atexit.unregister(self.close)
        # When the session has expired, the loop and the user may both call this at the same time.
        if self.pid != os.getpid() or not self._unclosed.acquire(blocking=False):
            return
        self._loop.put(self._loop.end)
        self.client.stop()
        self.client.close()

    # --- the loop -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException:
            _log.exception("a side connection failed; its copies are no longer updated")
            self._loop.end()
            raise

    def _add(self, machine: Machine) -> None:
        self._loop.machines.append(machine)
        if self._loop.up:
            machine.connected()

    def _state_changed(self, state: str) -> None:
        self._loop.put(self._connected if state == KazooState.CONNECTED else self._suspended)

    def _connected(self) -> None:
        if self._loop.running:
            self._suspended()
            self._loop.connected()

    def _suspended(self) -> None:
        if self._loop.up:
            self._loop.suspended()


def fitting_handler() -> str:
    """Return the name of the handler that fits the threads of this process."""
    monkey = sys.modules.get("gevent.monkey")
    patched: Callable[[str], bool] = getattr(monkey, "is_module_patched", lambda name: False)
    return "gevent" if patched("threading") else "threading"


def _nothing() -> None:
    return None


class LeasedConnection(SideConnection):
    """A side connection for one session; after the session's end, make a new connection.

    :ivar lease: the lease, which is valid while the session certainly exists.
    :ivar path: the path of this process's node; "" before the registration.
    :param component: the description of this process; its `host` is part of the node's name.
    """

    def __init__(self, client: Client, layout: Layout, component: Mapping[str, Any]) -> None:
        # This transaction proves that the session exists.
        sent_at = clock()
        settle(client, layout.root)
        timeout = client.negotiated_timeout_seconds or 0.0
        self.lease = Lease(timeout, client.heard_at or sent_at)
        self.over = False
        # The events that this connection sets after the end of its session.
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
        return int(client.client_id[0]) if client.client_id is not None else 0

    def wait_registered(self, timeout_seconds: float) -> str:
        """Wait for the node of this process, and return its path."""
        self._named.wait(timeout_seconds)
        if not self.path or self.over:
            raise CoordinatorUnreachableError(
                url=self.client.address.url,
                reason=f"this process was not registered within {timeout_seconds:g} s",
            )
        return self.path

    @property
    def valid(self) -> bool:
        return clock() < self.lease.until

    def close(self) -> None:
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
            self.lease.end()  # end it at once, on any thread
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


def note_in_component(client: Client, layout: Layout, note: Mapping[str, Any]) -> None:
    """Add keys to the component node of the client's session; the worker's next write drops them.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    folder = f"{layout.components}/worker"
    names = names_below(client, folder)
    session = client.client_id[0] if client.client_id is not None else 0
    for read in read_nodes(client, [f"{folder}/{name}" for name in names]):
        if read.session != session:
            continue
        value, fault = load(read.data)
        if fault is not None:
            continue
        try:
            client.set(read.path, encode({**value, **note}))
        except KazooException as error:
            raise connection_lost(client, error) from error

"""A second connection to the coordinator, for what is not about owning queues.

A worker's session carries its lease. Values that all processes of an app share may be large and
many, and must not hold up the contact that keeps the lease; so they have a connection of their own.
Processes without a lease, such as web servers and scripts, have only this one. It opens at its
first use. Its session has no ephemeral nodes, so nothing is lost with it: kazoo begins another one.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from kazoo.protocol.states import KazooState

from qdo.coordination.client import Client
from qdo.coordination.machine_loop import MachineLoop
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.machine import Machine

_log = logging.getLogger(__name__)


class SideConnection:
    """A client, and a loop for its machines. Any thread may use it.

    A forked child opens its own: it makes a new object.

    :ivar client: its client.
    :ivar pid: the process that opened it.
    :param client: open and connected; closed by `close`.
    :param lease: renewed by every transaction, for a session that owns nodes.
    """

    def __init__(self, client: Client, lease: Lease | None = None) -> None:
        self.client = client
        self.pid = os.getpid()
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
        """Run a further machine."""
        self._loop.put(partial(self._add, machine))

    def remove(self, machine: Machine) -> None:
        """Stop running a machine."""
        self._loop.put(partial(self._loop.remove, machine))

    def call(self, event: Callable[[], object]) -> None:
        """Call a function on the loop that runs the machines."""
        self._loop.put(event)

    def wait(self, begin: Callable[[Callable[[], None]], object], timeout_seconds: float) -> bool:
        """Call `begin` on the loop with a function, and wait until that function is called.

        :returns: False if it was not called in time.
        """
        done = self.client.handler.event_object()
        self._loop.put(partial(begin, done.set))
        return bool(done.wait(timeout_seconds))

    def close(self) -> None:
        """End the loop and the session; idempotent."""
        atexit.unregister(self.close)
        # The loop closes it when the session has expired, perhaps while its user does.
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
    """Return the kind of handler that fits the threads of this process."""
    monkey = sys.modules.get("gevent.monkey")
    patched: Callable[[str], bool] = getattr(monkey, "is_module_patched", lambda name: False)
    return "gevent" if patched("threading") else "threading"


def _nothing() -> None:
    return None

"""The leader's tasks other than rebalancing, mostly on queue nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from kazoo.exceptions import KazooException

from qdo.coordination.bulk_reads import connection_lost, names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.election import Election
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.protocol.rebalancer import Rebalancer
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.system.clock import clock

Put = Callable[[Callable[[], object]], None]
# A function that writes nodes with the leader's fence. A chore returns the number of deleted nodes.
Act: TypeAlias = Callable[[Client, Layout, CheckOp], int]
# A function of `queue_admin` that changes a queue node.
Change: TypeAlias = Callable[[Client, Layout, str], QueueNode]


class LeaderQueues:
    """Gives a worker access to the queue nodes, and to the leader's duties if it leads.

    Methods that wait for the coordinator raise NodeRefusedError if this worker may not list, read
    or write the nodes. After a CoordinatorUnreachableError, the change may still have taken effect.
    """

    def __init__(
        self, client: Client, layout: Layout, put: Put, election: Election, rebalancer: Rebalancer
    ) -> None:
        self.election = election
        self._rebalancer = rebalancer
        self._client = client
        self._layout = layout
        self._put = put
        # The number of outbox rows that the broker refused, by table.
        self.refused_rows: dict[str, int] = {}
        # The number of outbox rows that are due but not sent, by table.
        self.waiting_rows: dict[str, int] = {}

    def is_leader(self) -> bool:
        return self.election.leading

    def worker_names(self) -> frozenset[str]:
        """Return the names of the workers that the leader knows; empty on other workers."""
        return self._rebalancer.workers

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        """Create missing queue nodes that start after `last`; only the leader does this."""
        self._put(partial(self._rebalancer.create_queues, list(names), last))

    def queue_names(self) -> tuple[str, ...] | None:
        """Return the names of all queue nodes; None while the names are unknown."""
        return self._rebalancer.queues

    def facts(self) -> dict[str, Any]:
        """Return the fields of `WorkerReport` that only a leader reports."""
        ahead = time.time() - clock()
        lost = [replace(each, at=each.at + ahead) for each in self._rebalancer.lost.found]
        refused = self.refused_rows if self.is_leader() else {}
        return {"lost_workers": tuple(lost) or None, "refused_rows": refused or None}

    def exclude_deleted(self, names: frozenset[str]) -> None:
        """Assign all queues except these; do nothing if this worker is not the leader."""
        self._put(partial(self._rebalancer.exclude_deleted, names))

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        """Return the existing queue nodes by name; a refused node has a fault."""
        reads = read_nodes(self._client, [self._layout.queue(name) for name in names])
        return {
            read.path.rpartition("/")[2]: QueueNode.parse(read.data, read.refused) for read in reads
        }

    def change_queue(self, change: Change, name: str) -> QueueNode:
        try:
            return change(self._client, self._layout, name)
        except KazooException as error:
            raise connection_lost(self._client, error) from error

    def with_fence(self, act: Act) -> int:
        """Call a function with the leader's fence, and return its result; 0 on other workers.

        The function must put the fence first into each of its transactions. Then the transactions
        of a worker that has lost leadership have no effect. The function may wait for the
        coordinator.
        """
        if not self.election.leading:
            return 0
        fence = CheckOp(self._layout.rebalancer, self.election.fence)
        return act(self._client, self._layout, fence)


def current_names(client: Client, path: str) -> set[str]:
    """Return the names below a node, with every name that existed when the call began."""
    try:  # without the sync, a lagging server would omit new names
        client.sync(path)
    except KazooException as error:
        raise connection_lost(client, error) from error
    return set(names_below(client, path))

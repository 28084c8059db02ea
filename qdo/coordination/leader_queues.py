"""The leader's tasks other than rebalancing, mostly with the nodes of queues."""

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
# Writes nodes with the leader's fence. A chore returns the number of nodes that it deleted.
Act: TypeAlias = Callable[[Client, Layout, CheckOp], int]
# A function of `queue_admin` that changes the node of a queue.
Change: TypeAlias = Callable[[Client, Layout, str], QueueNode]


class LeaderQueues:
    """Access to the queue nodes for a worker that may be the leader.

    Methods that wait for the coordinator raise CoordinatorUnreachableError, although the change may
    have been made, and NodeRefusedError if this worker may not list, read or write the nodes.
    """

    def __init__(
        self, client: Client, layout: Layout, put: Put, election: Election, rebalancer: Rebalancer
    ) -> None:
        self.election = election
        self._rebalancer = rebalancer
        self._client = client
        self._layout = layout
        self._put = put
        # The outbox rows that the broker refused, by table.
        self.refused_rows: dict[str, int] = {}
        # The outbox rows that are due and not sent, by table.
        self.waiting_rows: dict[str, int] = {}

    def is_leader(self) -> bool:
        return self.election.leading

    def worker_names(self) -> frozenset[str]:
        """Return the names of the workers that the leader knows; none on other workers."""
        return self._rebalancer.workers

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        """Create missing queue nodes that start after `last`; do nothing unless this one leads."""
        self._put(partial(self._rebalancer.create_queues, list(names), last))

    def queue_names(self) -> tuple[str, ...] | None:
        """Return the names of all queue nodes; None while they are unknown."""
        return self._rebalancer.queues

    def facts(self) -> dict[str, Any]:
        """Return the facts that only a leader reports, as fields of `WorkerReport`."""
        ahead = time.time() - clock()
        lost = [replace(each, at=each.at + ahead) for each in self._rebalancer.lost.found]
        refused = self.refused_rows if self.is_leader() else {}
        return {"lost_workers": tuple(lost) or None, "refused_rows": refused or None}

    def exclude_deleted(self, names: frozenset[str]) -> None:
        """Assign no queues marked as deleted; do nothing unless this worker leads."""
        self._put(partial(self._rebalancer.exclude_deleted, names))

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        """Return the existing nodes of queues; a node that the coordinator refuses has a fault."""
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
        """Call a function with the leader's fence and return its result; return 0 on other workers.

        The function must put the fence first into each of its transactions. A worker that lost
        leadership then changes nothing. The function may wait for the coordinator.
        """
        if not self.election.leading:
            return 0
        fence = CheckOp(self._layout.rebalancer, self.election.fence)
        return act(self._client, self._layout, fence)


def current_names(client: Client, path: str) -> set[str]:
    """Return the names below a node, including all that existed when the call began."""
    try:  # without the sync, a server that lags would leave out new names
        client.sync(path)
    except KazooException as error:
        raise connection_lost(client, error) from error
    return set(names_below(client, path))

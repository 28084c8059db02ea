"""Reads the nodes in which an app's workers and their processes describe themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from qdo.coordination.bulk_reads import NodeValue, read_nodes, read_permitted_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import WorkerNode, parse_assignment
from qdo.errors import NodeRefusedError
from qdo.queues import QueueFilter


@dataclass(frozen=True, slots=True)
class FleetNodes:
    """What the account may read of an app's nodes.

    :ivar queues: names of the queue nodes; None if they cannot be listed.
    :ivar workers: the nodes of the registered workers, by name; None if they cannot be listed.
    :ivar components: the nodes of the worker processes; None if they cannot be listed.
    :ivar unread: what cannot be listed, with the reason.
    """

    queues: Collection[str] | None
    workers: Mapping[str, NodeValue] | None
    components: Sequence[NodeValue] | None
    unread: Mapping[str, str]

    def filters(self) -> set[QueueFilter]:
        """Return the different filters of the workers that stay."""
        parsed = [WorkerNode.parse(node.data) for node in (self.workers or {}).values()]
        return {node.filter for node in parsed if not node.draining}


NO_NODES = FleetNodes((), {}, (), {})
"""Without a coordinator."""


def read_fleet_nodes(client: Client, layout: Layout) -> FleetNodes:
    """Read the nodes of an app. A folder that cannot be listed hides no other.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    unread: dict[str, str] = {}

    def below(folder: str, content: str) -> list[str] | None:
        names = read_permitted_children(client, [folder]).get(folder, [])
        if names is None:
            error = NodeRefusedError(path=folder, account=client.access.account_name())
            unread[content] = str(error)
            return None
        return [f"{folder}/{name}" for name in names]

    queues = below(layout.queues, "the list of queues in the coordinator")
    workers = below(layout.workers, "the list of workers")
    components = below(f"{layout.components}/worker", "the reports of workers")
    return FleetNodes(
        queues=None if queues is None else [_name(path) for path in queues],
        workers=None if workers is None else _by_name(client, workers),
        components=None if components is None else read_nodes(client, components),
        unread=unread,
    )


def unclaimed_queues(
    client: Client, layout: Layout, fleet: FleetNodes, free: Set[str]
) -> dict[str, str]:
    """Return why queues without an owner are not processed although a worker should.

    A worker claims a queue within milliseconds. Another program that registers as a worker gets
    queues, too, until the rebalancer notices that it claims none.

    :param free: the queues without an owner; if there are none, nothing is read.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    workers = fleet.workers or {}
    if not free or not workers:
        return {}
    components = fleet.components
    reporting = None if components is None else {read.session for read in components}
    found: dict[str, str] = {}
    for name, read in _by_name(client, [layout.assignment(name) for name in workers]).items():
        foreign = reporting is not None and workers[name].session not in reporting
        which = "which no process of qdo reports for" if foreign else "not claimed yet"
        reason = f"assigned to {name}, {which}"
        found.update(dict.fromkeys((parse_assignment(read.data) or frozenset()) & free, reason))
    return found


def _by_name(client: Client, paths: Sequence[str]) -> dict[str, NodeValue]:
    return {_name(read.path): read for read in read_nodes(client, paths)}


def _name(path: str) -> str:
    return path.rpartition("/")[2]

"""The broker file that the workers of an app share."""

from __future__ import annotations

from qdo.coordination.bulk_reads import names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import DeleteOp, NodeRead, Op
from qdo.coordination.session_setup import BrokerNode
from qdo.coordination.transactions import Node, change
from qdo.coordination.znodes.layout import Layout
from qdo.errors import RejectedError
from qdo.fleet.audit import AuditTrail
from qdo.text import join_some


def broker_node(client: Client, layout: Layout) -> BrokerNode | None:
    found = [BrokerNode.parse(read.data) for read in read_nodes(client, [layout.broker])]
    return found[0] if found else None


def check_reset(client: Client, layout: Layout) -> None:
    """Raise RejectedError if workers are registered, because they would not notice a reset."""
    workers = names_below(client, layout.workers)
    if workers:
        app = layout.root.rpartition("/")[2]
        raise RejectedError(
            reason=f"workers of app {app!r} are registered and use the present broker file: "
            f"{join_some(sorted(workers))}; stop them, then repeat the command",
            app=app,
        )


def reset_broker(client: Client, layout: Layout, reason: str = "") -> None:
    """Forget the broker file if `check_reset` allows a reset.

    The next worker to register sets the file.
    """
    check_reset(client, layout)
    with AuditTrail(client, layout, "admin broker file --reset", reason).change("broker") as entry:

        def decide(node: Node) -> list[Op] | None:
            if not isinstance(node, NodeRead):
                return None
            file = BrokerNode.parse(node.data)
            before = {"address": file.address, "host": file.host, "id": file.id}
            return [DeleteOp(layout.broker, node.version), entry(before, {"address": None})]

        change(client, layout.broker, decide, root=layout.root)

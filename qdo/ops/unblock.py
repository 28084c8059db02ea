"""Resumes a queue that failing messages block, or that waits for their next attempt."""

from __future__ import annotations

from typing import Literal, TypeAlias

from qdo.brokers.base import Broker
from qdo.brokers.registry import keeps_dead_letters
from qdo.coordination import queue_admin as operator
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.queue_admin import Which
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.progress import MAX_LAST, FailureRecord
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.encoding import ID, parsed
from qdo.errors import UnsupportedError
from qdo.fleet.audit import AuditTrail
from qdo.positions import TIME_POSITIONS, Positions
from qdo.queues import check_path_part
from qdo.text import join_some

Decision: TypeAlias = Literal["retry", "skip", "dead-letter"]


def unblock(
    client: Client,
    layout: Layout,
    queue: str,
    decision: Decision,
    which: Which = "first",
    reason: str = "",
    by: str = "",
) -> tuple[FailureRecord, ...]:
    """Decide about messages that block a queue; return their failure records.

    The queue's present or next owner executes the decision. "retry" runs a message again, with
    its attempts counted from 1, also one that waits for its next attempt; "skip" skips it;
    "dead-letter" stores it as a dead letter with its error.

    :param which: position of the message, "first" or "all".
    :param reason: for the action log, as is `by`: who decides, if that is not the user of this
        process.
    :raises NotFoundError: there is no such queue.
    :raises NotBlockedError: the queue, or this message, is not blocked.
    :raises AuditRefusedError: this account may not write to the action log.
    """
    with AuditTrail(client, layout, "unblock", reason, by).change(queue) as entry:

        def record(before: QueueNode, after: QueueNode) -> CreateOp:
            decided = operator.chosen(before, queue, decision, which)
            messages = join_some([str(each.position) for each in decided])
            attempts = max(each.attempts for each in decided)
            return entry({"messages": messages, "attempts": attempts}, {"decision": decision})

        return operator.unblock(client, layout, queue, decision, which, record=record)


def check_store(broker: str) -> None:
    """Raise UnsupportedError if the broker at an address cannot keep dead letters."""
    if not keeps_dead_letters(broker):
        # The owner could not execute the decision, and it cannot be revoked.
        raise UnsupportedError(
            broker="Kinesis",
            what="store dead letters",
            remedy="add dead_letters=s3://BUCKET/PREFIX to the broker's address, also for workers, "
            "or use --retry or --skip",
        )


def failing(client: Client, layout: Layout, queue: str) -> tuple[FailureRecord, ...]:
    """Return the failure records of a queue, those that block it first; none without a node."""
    found = read_nodes(client, [layout.queue(check_path_part(queue))])
    node = QueueNode.parse(found[0].data) if found else QueueNode()
    return (*node.blocking, *node.retrying)


def id_of(broker: Broker | None, positions: Positions, queue: str, position: int) -> str | None:
    """Return the id of a message; None if it is unknown.

    :param broker: only needed where positions are times: a delayed message has its id in a header.
    """
    if positions is not TIME_POSITIONS:
        return positions.message_id(position, 0)
    if broker is None or position > MAX_LAST:
        return None
    reader = broker.reader(queue, position - 1)
    try:
        rows = [row for row in reader.fetch(1) if row[0] == position]
    finally:
        reader.close()
    known = (parsed(rows[0][3]) or {}).get(ID) if rows else None
    return known or positions.message_id(position, broker.id_node)

"""Finds the messages of a queue by id or position, without receiving them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qdo.brokers.base import Broker, Row
from qdo.brokers.delayed import DelayedMessage
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.progress import MAX_LAST, MAX_POSITION
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.encoding import ID, parsed
from qdo.errors import CorruptNodeError, UsageError
from qdo.positions import TIME_POSITIONS
from qdo.queues import check_path_part

SEARCHED = 10_000
"""Waiting messages that are searched for an id that is not made of a position."""
_BATCH = 500
_NAME = re.compile(
    r"[0-9]{1,100}(:[0-9]{1,10})?|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
_OF_POSITION = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-1([0-9a-f]{3})-8000-([0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class Found:
    """A message that was found.

    :ivar position: None for a delayed message, which has none yet.
    :ivar row: the message in its queue, None for a delayed one.
    """

    id: str
    position: int | None = None
    row: Row | None = None
    delayed: DelayedMessage | None = None


def read_queue_node(client: Client | None, layout: Layout, queue: str) -> QueueNode | None:
    """Return the node of a queue, None without one.

    :raises CorruptNodeError: it cannot be read.
    """
    if client is None:
        return None
    found = read_nodes(client, [layout.queue(check_path_part(queue))])
    if not found:
        return None
    node = QueueNode.parse(found[0].data, found[0].refused)
    if node.fault is not None:
        raise CorruptNodeError(queue=queue, reason=node.fault)
    return node


def done_of(broker: Broker, node: QueueNode | None) -> int:
    """Return the position up to which all messages of a queue are recorded as done."""
    return 0 if node is None else broker.positions.resume_after(node.last, node.position)


def check_names(names: Sequence[str]) -> list[str]:
    """Return the distinct names of messages as ids are spelled.

    :raises UsageError: one is neither an id nor a position.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            reason = f"a message must be named by its id or its position, got {name[:100]!r}"
            raise UsageError(reason=reason)
    return list(dict.fromkeys(name.lower() for name in names))


def find_messages(broker: Broker, queue: str, done: int, names: Sequence[str]) -> dict[str, Found]:
    """Return the messages of a queue with these names, by name.

    A message that is moved into its queue meanwhile is found: delayed messages are read first.
    The id of a message that was delayed or sent again is in a header. Only the first `SEARCHED`
    waiting messages are searched for it.

    :param names: from `check_names`.
    :param done: messages up to here are done; they may be missing.
    """
    found = {
        each.id: Found(each.id, delayed=each)
        for each in broker.delayed.find(queue, len(names), names)
    }
    passed: dict[str, Found] = {}
    for name in names:
        row = None if name in found else _row_named(broker, queue, name)
        if row is not None:
            (found if row.position > done else passed)[name] = _found(broker, row)
    left = {name for name in names if name not in found}
    if left:
        for row in waiting_rows(broker, queue, done, SEARCHED):
            own = _found(broker, row)
            named = left & {own.id, id_by_position(broker, row), str(row.position)}
            found.update(dict.fromkeys(named, own))
            left -= named
            if not left:
                break
    return {**passed, **found}


def waiting_rows(broker: Broker, queue: str, after: int, most: int) -> Iterator[Row]:
    """Yield the messages of a queue after a position, in order."""
    reader = broker.reader(queue, after)
    try:
        while most > 0 and (rows := reader.fetch(min(most, _BATCH))):
            most -= len(rows)
            yield from map(Row._make, rows)
    finally:
        reader.close()


def row_at(broker: Broker, queue: str, position: int) -> Row | None:
    """Return the message at a position of a broker whose positions are times."""
    if not 0 < position <= MAX_LAST:
        return None
    found = next(waiting_rows(broker, queue, position - 1, 1), None)
    return found if found is not None and found.position == position else None


def id_of_row(broker: Broker, row: Row) -> str:
    """Return the id of a message."""
    known = (parsed(row.headers) or {}).get(ID)
    return known if isinstance(known, str) and known else id_by_position(broker, row)


def id_by_position(broker: Broker, row: Row) -> str:
    """Return the id that a message gets from its position; log lines may contain it."""
    return broker.positions.message_id(row.position, broker.id_node)


def _found(broker: Broker, row: Row) -> Found:
    return Found(id_of_row(broker, row), row.position, row)


def _row_named(broker: Broker, queue: str, name: str) -> Row | None:
    """Return the message whose position is the name, or part of it."""
    if broker.positions is not TIME_POSITIONS:
        return None
    if name.isdecimal():
        return row_at(broker, queue, min(int(name), MAX_POSITION))
    match = _OF_POSITION.fullmatch(name)
    if match is None or int(match[4], 16) != broker.id_node:
        return None
    return row_at(broker, queue, int(match[3] + match[2] + match[1], 16))

"""Shows and finds unfinished messages of a queue without receiving them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from qdo.brokers.base import Broker, DelayedMessage, Row
from qdo.coordination.znodes.queue_node import (
    MAX_LAST,
    MAX_POSITION,
    FailureRecord,
    OutOfOrderProgress,
    QueueNode,
)
from qdo.encoding import DUE, SENT, parsed, stored_time
from qdo.errors import NotFoundError, UnsupportedError, UsageError
from qdo.message import priority_of
from qdo.ops.dead_letters import body_value, decrypted, exact_time, message_id
from qdo.ops.fleet import Fleet
from qdo.positions import TIME_POSITIONS, format_position
from qdo.text import iso_time

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

# Maximum number of waiting messages that a search for an id without a position reads.
SEARCHED = 10_000
_BATCH = 500
_NAME = re.compile(
    r"[0-9]{1,100}(:[0-9]{1,10})?|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
_OF_POSITION = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-1([0-9a-f]{3})-8000-([0-9a-f]{12})")
KINDS: tuple[Kind, ...] = ("waiting", "delayed", "failing", "blocking")
# The kinds of messages that the coordinator records for every broker.
RECORDED: frozenset[Kind] = frozenset({"failing", "blocking"})
# Maximum number of messages that one call returns.
MOST = 1000
# Maximum number of done or cancelled messages that one call reads and skips.
PASSED = 100_000
# Total size of bodies at which a call ends.
BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A message that has one of the names."""

    id: str
    # None for a delayed message, which does not have a position yet.
    position: int | None = None
    # The message in its queue; None for a delayed message.
    row: Row | None = None
    delayed: DelayedMessage | None = None


def done_of(broker: Broker, node: QueueNode | None) -> int:
    """Return the recorded position up to which all messages of a queue are done."""
    return 0 if node is None else broker.positions.resume_after(node.last, node.position)


def check_names(names: Sequence[str]) -> list[str]:
    """Return distinct names as ids; raise UsageError unless each is an id or a position."""
    for name in names:
        if not _NAME.fullmatch(name):
            reason = f"a message must be named by its id or its position, got {name[:100]!r}"
            raise UsageError(reason=reason)
    return list(dict.fromkeys(name.lower() for name in names))


def find_messages(broker: Broker, queue: str, done: int, names: Sequence[str]) -> dict[str, Found]:
    """Return the messages of a queue that have these names, with the names as keys.

    :param names: from `check_names`.
    :param done: position up to which all messages are done. The broker may have deleted these
        messages.
    """
    # Read delayed messages first. If a message then moves into its queue, the next read finds the
    # message.
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
    # If a message was delayed or sent again, its id is in a header.
    if left:
        for row in waiting_rows(broker, queue, done, SEARCHED):
            own = _found(broker, row)
            # Log lines may contain the id of the position.
            by_position = message_id(broker, row.position)
            named = left & {own.id, by_position, str(row.position)}
            found.update(dict.fromkeys(named, own))
            left -= named
            if not left:
                break
    return {**passed, **found}


def waiting_rows(broker: Broker, queue: str, after: int, most: int) -> Iterator[Row]:
    reader = broker.reader(queue, after)
    while most > 0 and (rows := reader.fetch(min(most, _BATCH))):
        most -= len(rows)
        yield from map(Row._make, rows)


def row_at(broker: Broker, queue: str, position: int) -> Row | None:
    if not 0 < position <= MAX_LAST:
        return None
    found = next(waiting_rows(broker, queue, position - 1, 1), None)
    return found if found is not None and found.position == position else None


def _found(broker: Broker, row: Row) -> Found:
    return Found(message_id(broker, row.position, row.headers), row.position, row)


def _row_named(broker: Broker, queue: str, name: str) -> Row | None:
    """Return the message whose position is the name or a part of the name."""
    if broker.positions is not TIME_POSITIONS:
        return None
    if name.isdecimal():
        return row_at(broker, queue, min(int(name), MAX_POSITION))
    match = _OF_POSITION.fullmatch(name)
    if match is None or int(match[4], 16) != broker.id_node:
        return None
    return row_at(broker, queue, int(match[3] + match[2] + match[1], 16))


Kind: TypeAlias = Literal["waiting", "delayed", "failing", "blocking"]


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message that its queue's node does not record as done.

    :ivar id: the message's id; None if only the position is known.
    :ivar position: None for a delayed message.
    :ivar sent: time at which the message was sent. `due` is the time at which it is due. Both are
        in ISO 8601, or None if unknown.
    :ivar failure: the record of the message's failed attempts, or None.
    :ivar body: None unless requested. If the message could not be read, `body_bytes`, `key` and
        `headers` are also None.
    """

    kind: Kind
    id: str | None
    position: int | None
    sent: str | None
    due: str | None = None
    failure: FailureRecord | None = None
    key: str | None = None
    headers: str | None = None
    body_bytes: int | None = None
    body: bytes | None = None


def check_kinds(broker: Broker, kinds: Collection[Kind]) -> None:
    """Raise UnsupportedError for kinds of messages that only a worker can see."""
    if not broker.capabilities.peek and not RECORDED.issuperset(kinds):
        raise UnsupportedError(
            broker="SQS",
            what="show messages without taking them from the workers: a message that is received"
            " is hidden from them for its visibility timeout, and may be moved to a dead-letter"
            " queue",
            remedy="use --kind failing or --kind blocking, which the coordinator records, or"
            " `qdo queues` for the number of messages",
        )


def peek(
    fleet: Fleet, queue: str, kinds: Collection[Kind] = KINDS, limit: int = 10
) -> Iterator[PeekedMessage]:
    """Yield messages of a queue in processing order, delayed messages last.

    A message in flight counts as waiting, because the queue's owner records only done messages.
    """
    check_kinds(fleet.broker, kinds)
    yield from peek_behind(fleet.broker, queue, fleet.known_node(queue), kinds, limit)


def peek_behind(
    broker: Broker, queue: str, node: QueueNode, kinds: Collection[Kind], limit: int
) -> Iterator[PeekedMessage]:
    """Yield messages like `peek`, for a queue whose node the caller has read."""
    found = _in_queue(broker, queue, node, kinds)
    shown = 0
    size = 0
    for message in islice(found, limit):
        shown += 1
        size += message.body_bytes or 0
        yield message
        if size > BODY_BYTES:
            return
    if "delayed" in kinds and shown < limit:
        for delayed in broker.delayed.find(queue, limit - shown):
            yield _of_delayed(delayed)


def peek_named(fleet: Fleet, queue: str, name: str) -> PeekedMessage:
    """Return a message that is not recorded as done; raise NotFoundError without a match."""
    broker = fleet.broker
    check_kinds(broker, KINDS)
    (wanted,) = check_names([name])
    node = fleet.known_node(queue)
    found = find_messages(broker, queue, done_of(broker, node), [wanted]).get(wanted)
    if found is not None and found.delayed is not None:
        return _of_delayed(found.delayed)
    failures = {each.position: each for each in node.failures}
    if found is None or found.row is None or _is_over(broker, node, found.row.position):
        raise NotFoundError(what=f"message in queue {queue!r}", name=name)
    return _of_row(broker, found.row, failures)


def _is_over(broker: Broker, node: QueueNode, position: int) -> bool:
    progress = node.out_of_order or OutOfOrderProgress()
    over = progress.is_done(position) or position in progress.cancelled
    return over or position <= done_of(broker, node)


def _in_queue(
    broker: Broker, queue: str, node: QueueNode, kinds: Collection[Kind]
) -> Iterator[PeekedMessage]:
    failures = {each.position: each for each in node.failures}
    if "waiting" not in kinds:
        for position, failure in sorted(failures.items()):
            if _kind(failure) in kinds:
                yield _recorded(broker, queue, position, failure)
        return
    for row in _rows(broker, queue, node):
        if _kind(failures.get(row.position)) in kinds:
            yield _of_row(broker, row, failures)


def _rows(broker: Broker, queue: str, node: QueueNode) -> Iterator[Row]:
    """Yield the messages that are neither done nor cancelled, in order."""
    progress = node.out_of_order or OutOfOrderProgress()
    cancelled = frozenset(progress.cancelled)
    after = done_of(broker, node)
    for first, newest in (*progress.done_ranges, (None, None)):
        for row in waiting_rows(broker, queue, after, PASSED):
            if first is not None and row.position >= first:
                break
            if row.position not in cancelled:
                yield row
        if newest is not None:
            after = newest


def _kind(failure: FailureRecord | None) -> Kind:
    if failure is None:
        return "waiting"
    return "blocking" if failure.blocked else "failing"


def _recorded(broker: Broker, queue: str, position: int, failure: FailureRecord) -> PeekedMessage:
    """Return a failing message, even from a broker whose messages only workers can see."""
    row = row_at(broker, queue, position) if broker.positions is TIME_POSITIONS else None
    if row is not None:
        return _of_row(broker, row, {position: failure})
    id = None if broker.positions is TIME_POSITIONS else message_id(broker, position)
    return PeekedMessage(_kind(failure), id, position, _sent(broker, position), failure=failure)


def _sent(broker: Broker, position: int) -> str | None:
    time = broker.positions.to_time(position)
    return format_position(time) if time <= MAX_LAST else None


def _of_row(broker: Broker, row: Row, failures: Mapping[int, FailureRecord]) -> PeekedMessage:
    failure = failures.get(row.position)
    headers = parsed(row.headers) or {}
    return PeekedMessage(
        kind=_kind(failure),
        id=message_id(broker, row.position, row.headers),
        position=row.position,
        sent=exact_time(stored_time(headers, SENT)) or _sent(broker, row.position),
        due=exact_time(stored_time(headers, DUE)),
        failure=failure,
        key=row.key,
        headers=row.headers,
        body_bytes=len(row.body),
        body=row.body,
    )


def _of_delayed(delayed: DelayedMessage) -> PeekedMessage:
    return PeekedMessage(
        kind="delayed",
        id=delayed.id,
        position=None,
        sent=exact_time(stored_time(parsed(delayed.headers) or {}, SENT)),
        due=format_position(delayed.due),
        key=delayed.key,
        headers=delayed.headers,
        body_bytes=len(delayed.body),
        body=delayed.body,
    )


def peek_item(
    queue: str, message: PeekedMessage, vault: BodyVault | None, with_body: bool
) -> dict[str, Any]:
    """Return a message as an item of qdo.peek/1, which includes the body if `with_body` is True."""
    failure = message.failure
    item = {
        "queue": queue,
        "id": message.id,
        "kind": message.kind,
        "position": None if message.position is None else str(message.position),
        "key": message.key,
        "priority": priority_of(parsed(message.headers) or {}),
        "sent": message.sent,
        "due": message.due,
        "attempts": 0 if failure is None else failure.attempts,
        "error": None if failure is None else failure.error,
        "next_attempt": _next_attempt(failure),
        "decision": failure.decision or None if failure else None,
        "body_bytes": message.body_bytes,
        "headers": None if message.body_bytes is None else _headers(message.headers),
    }
    if not with_body or message.body is None:
        return item
    body, headers, fault = decrypted(queue, message.body, message.headers, vault)
    if fault is not None:
        return {**item, "body_error": fault}
    return {**item, "headers": _headers(headers), **body_value(body, headers)}


def _next_attempt(failure: FailureRecord | None) -> str | None:
    if failure is None or not failure.retry_at or failure.decision:
        return None
    return iso_time(failure.retry_at)


def _headers(stored: str | None) -> Any:
    found = parsed(stored)
    return stored if found is None else found

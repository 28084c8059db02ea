"""Change a queue node while workers run.

Operators seek, decide, delete and reset. The leader retires, restores and marks as finished.

Each change reads the node and writes it at the same version, and keeps all other keys. An
operator's change increments ``seek``, so the owner follows the node instead of its own later
progress. A change that does not move the queue back also increments ``onward``, so the owner keeps
its progress. The same transaction adds the queue to ``reread`` in the owner's worker node. Every
worker watches its own node, so even an idle owner notices the change.

The leader deletes a queue node only if it is marked as deleted and has no owner. The same
transaction writes the folder of queue nodes; see `protocol.rebalancer`.

In the same transaction, an operator's change writes an entry in the action log. `record` makes the
operation for this entry from the node before and after the change. All calls of `record` return the
same path. So if the answer is lost, the entry shows whether the change was made.

A change raises NotFoundError for a queue without a node. It raises NodeRefusedError if this client
may not read, write or delete the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal, TypeAlias

from qdo.coordination import transactions
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol import machine as m
from qdo.coordination.transactions import Node, change, commit, make_folder, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import (
    AlreadyDecidedError,
    CorruptNodeError,
    MessageNotFailingError,
    NodeRefusedError,
    NotFailingError,
    NotFoundError,
)

Change = Callable[[QueueNode], QueueNode]
# A function that makes the entry for the action log from the node before and after a change.
Record: TypeAlias = Callable[[QueueNode, QueueNode], m.CreateOp]
# The choice of failing messages in a queue: positions, the first message, or all messages.
Which: TypeAlias = tuple[int, ...] | Literal["first", "all"]
# The key of a queue node that the leader marked as deleted because the broker no longer has the
# queue. A queue that an operator marked lacks this key, and stays deleted even if the broker lists
# the queue.
RETIRED = "retired"
# The maximum number of queues that one transaction moves.
AT_ONCE = 100
# The key of a queue node for the id of the imported file that last moved the queue. Owners keep
# this key, so the same file moves a queue only once.
KEY = "imported"


def seek(
    client: Client,
    layout: Layout,
    queue: str,
    last: int,
    position: str | None = None,
    finished: str | None = None,
    *,
    onward: bool = False,
    record: Record | None = None,
) -> QueueNode:
    """Continue a queue after `last`; return the node before the change.

    The owner finishes the message in flight, and continues after `last`. The change also repairs a
    corrupt node.

    :param position: the broker-specific position, which overrides `last`; None if the broker has
        only times.
    :param finished: the position of a finished queue. If the queue has this position, restore it.
    :param onward: whether the owner keeps its own progress if the progress is beyond `last`. If the
        queue is already at `last` or beyond, change nothing. `last` must be comparable to
        positions.
    """

    change = _sought(last, position, finished, onward)
    return change_node(client, layout, queue, change, onward=onward, record=record)


def _sought(last: int, position: str | None, finished: str | None, onward: bool) -> Change:
    def change(node: QueueNode) -> QueueNode:
        if onward and node.fault is None and node.last >= last:
            return node
        if finished is not None and node.position == finished:
            node = without_marks(node)
        return with_seek(node, last, position)

    return change


def seek_many(
    client: Client,
    layout: Layout,
    places: Mapping[str, tuple[int, str | None]],
    finished: str | None,
    *,
    onward: bool,
) -> None:
    """Continue each of at most `AT_ONCE` queues after its place, like `seek`.

    Skip queues without a node. The caller has written one action log entry for all queues.
    """
    changes = {queue: _sought(*place, finished, onward) for queue, place in places.items()}
    ops: list[m.Op] = []
    owned: dict[str, list[str]] = {}
    for found in read_nodes(client, [layout.queue(queue) for queue in places]):
        queue = found.path.rpartition("/")[2]
        before = QueueNode.parse(found.data, found.refused)
        after = changes[queue](before)
        if after is not before:
            written = replace(after, seek=before.seek + 1, onward=before.onward + onward)
            ops.append(m.SetOp(found.path, written.encode(), found.version))
            owned.setdefault(before.owner, []).append(queue)
    for owner, queues in owned.items():
        ops += _notice(client, layout, owner, *queues) if owner else []
    if not ops or isinstance(commit(client, ops), m.Committed):
        return
    # A queue node has changed meanwhile, so move each queue in a separate transaction.
    for queue in changes:
        with suppress(NotFoundError):
            change_node(client, layout, queue, changes[queue], onward=onward)


def with_seek(node: QueueNode, last: int, position: str | None = None) -> QueueNode:
    """Return a node with the changes of `seek`; cancelled messages after `last` stay cancelled."""
    cancelled = () if node.out_of_order is None else node.out_of_order.cancelled
    left = OutOfOrderProgress(cancelled=tuple(each for each in cancelled if each > last))
    return replace(
        node, last=last, position=position, fault=None, failure=None, out_of_order=left or None
    )


def decide(
    client: Client,
    layout: Layout,
    queue: str,
    decision: str,
    which: Which,
    *,
    running: Iterable[FailureRecord] = (),
    record: Record | None = None,
) -> tuple[FailureRecord, ...]:
    """Decide about messages that fail, run or block a queue; return the failure records.

    If a running message succeeds, the decision about the message has no effect.

    :param decision: "retry" runs the message again, and counts its attempts from 1. With "skip" or
        "dead-letter", the present or next owner ends the message and its running attempt.
    :param running: the records of running messages that have not failed, which `which` may name.
    :raises NotFailingError: no message fails, a named message does not fail, or an operator has
        already decided about a message. The node does not change.
    """

    def change(node: QueueNode) -> QueueNode:
        return with_decision(with_running(node, running), queue, decision, which)

    node = change_node(client, layout, queue, change, onward=True, record=record)
    return chosen(with_running(node, running), queue, which)


def with_running(node: QueueNode, running: Iterable[FailureRecord]) -> QueueNode:
    """Return a node in which running messages without a failure count as failing messages."""
    above = node.out_of_order or OutOfOrderProgress()
    known = {each.position for each in node.failures}
    new = tuple(
        each
        for each in running
        if each.position not in known
        and each.position > node.last
        and not above.is_done(each.position)
    )
    return replace(
        node, out_of_order=replace(above, other_failures=above.other_failures + new) or None
    )


def with_decision(node: QueueNode, queue: str, decision: str, which: Which) -> QueueNode:
    """Return a node with the changes of `decide`; the first record is the next blocking message."""
    decided = chosen(node, queue, which)

    def decide_one(failure: FailureRecord) -> FailureRecord | None:
        if failure not in decided:
            return failure
        if decision == "retry":
            return None
        return replace(failure, blocked_since=0.0, decision=decision)

    left = tuple(each for failure in node.failures if (each := decide_one(failure)) is not None)
    first = next((each for each in left if each.blocked), left[0] if left else None)
    progress = replace(
        node.out_of_order or OutOfOrderProgress(),
        other_failures=tuple(each for each in left if each is not first),
    )
    return replace(node, failure=first, out_of_order=progress or None)


def chosen(node: QueueNode, queue: str, which: Which) -> tuple[FailureRecord, ...]:
    """Return the failure records that `decide` changes; raise the errors of `decide`."""
    open_ones = (*node.blocking, *node.retrying)
    if isinstance(which, tuple):
        return tuple(_named(node, queue, position) for position in dict.fromkeys(which))
    if not open_ones:
        for each in node.failures[:1]:
            raise AlreadyDecidedError(queue=queue, message=each.position, decision=each.decision)
        raise NotFailingError(queue=queue)
    return open_ones if which == "all" else open_ones[:1]


def _named(node: QueueNode, queue: str, position: int) -> FailureRecord:
    found = next((each for each in node.failures if each.position == position), None)
    if found is None:
        raise MessageNotFailingError(queue=queue, message=position)
    if found.decision:
        raise AlreadyDecidedError(queue=queue, message=position, decision=found.decision)
    return found


def reset(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Restore a queue that is marked as deleted, and start the queue from its beginning."""
    return change_node(
        client,
        layout,
        queue,
        lambda node: replace(
            without_marks(node), last=0, position=None, fault=None, failure=None, out_of_order=None
        ),
    )


def mark_deleted(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Mark a queue as deleted, so that its owner releases it and no worker claims it.

    :raises CorruptNodeError: the node is corrupt, and a write would lose its content.
    """

    def change(node: QueueNode) -> QueueNode:
        if node.fault is not None:
            raise CorruptNodeError(queue=queue, reason=node.fault)
        return replace(node, deleted=True)

    return change_node(client, layout, queue, change)


def retire(
    client: Client, layout: Layout, queue: str, *, record: Record | None = None
) -> QueueNode:
    """Mark a queue that the broker no longer has as deleted; return the former node.

    The owner releases the queue with all progress. Raises the same errors as `mark_deleted`.
    """

    def change(node: QueueNode) -> QueueNode:
        return node if node.deleted else _marked(queue, node, ((RETIRED, True),))

    return change_node(client, layout, queue, change, sought=0, record=record)


def mark_finished(client: Client, layout: Layout, queue: str, finished: str) -> QueueNode:
    """Mark a queue as deleted if its position is still `finished`; return the former node."""

    def change(node: QueueNode) -> QueueNode:
        over = node.position == finished and not node.deleted
        return _marked(queue, node, ()) if over else node

    return change_node(client, layout, queue, change, sought=0)


def restore(
    client: Client, layout: Layout, queue: str, *, record: Record | None = None
) -> QueueNode:
    """Undo a call of `retire`; return the node before the change."""

    def change(node: QueueNode) -> QueueNode:
        return without_marks(node) if is_deleted(node) else node

    return change_node(client, layout, queue, change, sought=0, record=record)


def remove(
    client: Client, layout: Layout, queue: str, *, entry: Callable[[], m.CreateOp] | None = None
) -> str:
    """Delete the node of a queue that is marked as deleted, unless it has an owner.

    :returns: the owner, if the queue has one; "" if the node was deleted, missing, or not marked.
    """
    path = layout.queue(queue)
    owner = ""

    def decide(folder: Node) -> list[m.Op] | None:
        nonlocal owner
        found = read(client, path)
        owner = ""
        if not isinstance(folder, m.NodeRead) or not isinstance(found, m.NodeRead):
            return None
        node = QueueNode.parse(found.data)
        if node.owner and isinstance(read(client, layout.worker(node.owner)), m.NodeRead):
            owner = node.owner
            return None
        if not node.deleted:  # another client restored the queue
            return None
        written = m.SetOp(layout.queues, folder.data, folder.version)
        ops: list[m.Op] = [written, m.DeleteOp(path, found.version)]
        return [*ops, entry()] if entry is not None else ops

    transactions.change(client, layout.queues, decide, root=layout.root)
    return owner


def is_deleted(node: QueueNode) -> bool:
    return node.deleted and any(name == RETIRED for name, _ in node.extra)


def without_marks(node: QueueNode) -> QueueNode:
    extra = tuple(each for each in node.extra if each[0] != RETIRED)
    return replace(node, deleted=False, extra=extra)


def _marked(queue: str, node: QueueNode, extra: tuple[tuple[str, bool], ...]) -> QueueNode:
    if node.fault is not None:
        raise CorruptNodeError(queue=queue, reason=node.fault)
    return replace(node, deleted=True, extra=(*without_marks(node).extra, *extra))


def change_node(
    client: Client,
    layout: Layout,
    queue: str,
    change: Change,
    *,
    sought: int = 1,
    onward: bool = False,
    record: Record | None = None,
) -> QueueNode:
    """Change a node and notify its owner; return the node before the change.

    :param sought: 1 if the owner must follow the node; 0 if the owner's later progress counts.
    :param onward: whether the owner keeps its progress, because the queue does not move back.
    """
    refusing = ""
    before = NEW
    written = (b"", 0)
    entry: m.CreateOp | None = None

    def decide(node: Node) -> list[m.Op] | None:
        nonlocal before, entry, written
        if not isinstance(node, m.NodeRead):
            raise NotFoundError(what="queue", name=queue)
        before = QueueNode.parse(node.data)
        after = change(before)
        if after is before:
            return None
        marked = replace(after, seek=before.seek + sought, onward=before.onward + sought * onward)
        written = marked.encode(), node.version + 1
        ops: list[m.Op] = [m.SetOp(layout.queue(queue), written[0], node.version)]
        if record is not None:
            entry = record(before, after)
            ops.append(entry)
        notified = before.owner not in ("", refusing)
        return [*ops, *_notice(client, layout, before.owner, queue)] if notified else ops

    def is_mine(node: m.NodeRead) -> bool:
        return _is_there(client, entry) if entry else (node.data, node.version) == written

    while True:
        try:
            path = layout.queue(queue)
            transactions.change(client, path, decide, root=layout.root, is_mine=is_mine)
            return before
        except NodeRefusedError as error:
            owner = before.owner
            if owner in ("", refusing) or error.details["path"] != layout.worker(owner):
                raise
            refusing = owner  # the owner notices at its next write


def _is_there(client: Client, entry: m.CreateOp) -> bool:
    return isinstance(read(client, entry.path), m.NodeRead)


def _notice(client: Client, layout: Layout, owner: str, *queues: str) -> list[m.Op]:
    """Return the operation that asks an owner to read queues again."""
    path = layout.worker(owner)
    try:
        node = read(client, path)
    except NodeRefusedError:
        return []
    if not isinstance(node, m.NodeRead):
        return []  # the owner is gone, and the next owner reads the queue node
    own = WorkerNode.parse(node.data)
    reread = tuple(dict.fromkeys((*own.reread, *queues)))
    return [m.SetOp(path, replace(own, reread=reread).encode(), node.version)]


def is_imported(node: QueueNode, id: str) -> bool:
    return (KEY, id) in node.extra


def place(
    client: Client,
    layout: Layout,
    queue: str,
    wanted: QueueNode,
    id: str,
    finished: str | None,
    record: Record,
) -> None:
    """Continue a queue after `wanted`, but only once for each file; create a missing node."""
    if create(client, layout, queue, _with_mark(wanted, id), record):
        return
    follow = _sought(wanted.last, wanted.position, finished, onward=False)

    def move(node: QueueNode) -> QueueNode:
        return node if is_imported(node, id) else _with_mark(follow(node), id)

    change_node(client, layout, queue, move, record=record)


def mark(client: Client, layout: Layout, queue: str, id: str, record: Record) -> None:
    """Mark a queue that is at the position from a file; keep its owner and progress."""

    def unmoved(node: QueueNode) -> QueueNode:
        return node if is_imported(node, id) else _with_mark(node, id)

    change_node(client, layout, queue, unmoved, sought=0, record=record)


def _with_mark(node: QueueNode, id: str) -> QueueNode:
    others = tuple(each for each in node.extra if each[0] != KEY)
    return replace(node, extra=(*others, (KEY, id)))


def create(
    client: Client,
    layout: Layout,
    queue: str,
    node: QueueNode = NEW,
    record: Record | None = None,
) -> bool:
    """Create a queue node; return False if the node exists."""
    make_folder(client, layout.queues)
    path = layout.queue(queue)
    entry: m.CreateOp | None = None

    def decide(found: Node) -> list[m.Op] | None:
        nonlocal entry
        if isinstance(found, m.NodeRead):
            return None
        ops: list[m.Op] = [m.CreateOp(path, node.encode())]
        if record is not None:
            entry = record(NEW, node)
            ops.append(entry)
        return ops

    def is_mine(found: m.NodeRead) -> bool:
        return entry is not None and _is_there(client, entry)

    return change(client, path, decide, root=layout.root, is_mine=is_mine) is not None

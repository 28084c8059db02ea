"""Change a queue node while workers run.

Operators seek, decide, delete and reset. The leader retires, restores and marks as finished.

Each change is a read-modify-write at the version read, and keeps all other keys. An operator's
change increments ``seek``. The owner then follows the node instead of its own later progress. A
change that does not move the queue back also increments ``onward``. The owner then keeps its
progress. The same transaction adds the queue to ``reread`` in its owner's worker node. Every worker
watches its own node, so even an idle owner notices the change.

The leader deletes a queue node only if it is marked as deleted and has no owner. The same
transaction writes the folder of queue nodes; see `protocol.rebalancer`.

An operator's change also writes an entry in the action log, in the same transaction. `record` makes
this operation from the node before and after the change. All calls of `record` return the same
path, so the entry identifies a change whose answer was lost.

A change raises NotFoundError for a queue without a node, and NodeRefusedError if the coordinator
does not let this client read, write or delete the node.
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
# Makes the entry for the action log, from the node before and after a change.
Record: TypeAlias = Callable[[QueueNode, QueueNode], m.CreateOp]
# Failing messages of a queue: their positions, or the first message, or all messages.
Which: TypeAlias = tuple[int, ...] | Literal["first", "all"]
# Key of a queue node that is marked as deleted because the broker no longer has the queue.
#
# A queue that an operator marked lacks this key, and stays deleted even if the broker lists it.
RETIRED = "retired"
# Most queues that one transaction moves.
AT_ONCE = 100
# Key of a queue node for the id of the file that moved the queue last. Owners keep the key, so the
# same file moves a queue only once.
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

    The owner finishes the message in flight and continues from there. The change also repairs a
    corrupt node.

    :param position: the broker's own position, which overrides `last`; None for brokers without
        own positions.
    :param finished: the position of a finished queue; a queue with this position is restored.
    :param onward: whether the owner continues from its own progress if that is beyond `last`. The
        change skips a queue that is already there. Only for a `last` that positions compare with.
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
    """Continue each queue after its place as `seek` does, for at most `AT_ONCE` queues.

    Queues without a node are skipped. The caller has written one action log entry for all queues.
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
    # One of the queue nodes has changed meanwhile, so move each queue in its own transaction.
    for queue in changes:
        with suppress(NotFoundError):
            change_node(client, layout, queue, changes[queue], onward=onward)


def with_seek(node: QueueNode, last: int, position: str | None = None) -> QueueNode:
    """Return a node as changed by `seek`; cancelled messages after `last` stay cancelled."""
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
    """Decide about messages that fail, run or block a queue; return their failure records.

    If a message is running and then succeeds, the decision has no effect.

    :param decision: "retry" runs the message again, and counts its attempts from 1. With "skip" or
        "dead-letter", the present or next owner ends a running attempt, and the message.
    :param running: records of running messages that have not failed, as further choices.
    :raises NotFailingError: no message fails, or some of these do not fail, or an operator has
        already decided about one of them; the node does not change.
    """

    def change(node: QueueNode) -> QueueNode:
        return with_decision(with_running(node, running), queue, decision, which)

    node = change_node(client, layout, queue, change, onward=True, record=record)
    return chosen(with_running(node, running), queue, which)


def with_running(node: QueueNode, running: Iterable[FailureRecord]) -> QueueNode:
    """Return a node that treats running messages without a failure as failing messages."""
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
    """Return a node as changed by `decide`; its first record is the next blocking message."""
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
    """Return the failure records that `decide` changes; raise NotFailingError as `decide` does."""
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
    """Restore a queue that is marked as deleted, and start it from its beginning."""
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

    :raises CorruptNodeError: the node cannot be read; a write would lose its content.
    """

    def change(node: QueueNode) -> QueueNode:
        if node.fault is not None:
            raise CorruptNodeError(queue=queue, reason=node.fault)
        return replace(node, deleted=True)

    return change_node(client, layout, queue, change)


def retire(
    client: Client, layout: Layout, queue: str, *, record: Record | None = None
) -> QueueNode:
    """Mark a queue as deleted that its broker no longer has; return the node before the change.

    The owner releases the queue with all progress. Raises the errors of `mark_deleted`.
    """

    def change(node: QueueNode) -> QueueNode:
        return node if node.deleted else _marked(queue, node, ((RETIRED, True),))

    return change_node(client, layout, queue, change, sought=0, record=record)


def mark_finished(client: Client, layout: Layout, queue: str, finished: str) -> QueueNode:
    """Mark a processed queue as deleted if it is still at `finished`; return the former node."""

    def change(node: QueueNode) -> QueueNode:
        over = node.position == finished and not node.deleted
        return _marked(queue, node, ()) if over else node

    return change_node(client, layout, queue, change, sought=0)


def restore(
    client: Client, layout: Layout, queue: str, *, record: Record | None = None
) -> QueueNode:
    """Undo `retire`; return the node before the change."""

    def change(node: QueueNode) -> QueueNode:
        return without_marks(node) if is_deleted(node) else node

    return change_node(client, layout, queue, change, sought=0, record=record)


def remove(
    client: Client, layout: Layout, queue: str, *, entry: Callable[[], m.CreateOp] | None = None
) -> str:
    """Delete the node of a queue that is marked as deleted, unless it has an owner.

    :returns: the owner; "" if the node is deleted, does not exist, or is not marked.
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
        if not node.deleted:  # restored meanwhile, with progress of newer messages
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

    :param sought: 1 if the owner must follow the node, 0 if the owner's later progress counts.
    :param onward: the change does not move the queue back, so the owner keeps its progress.
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
            refusing = owner  # it will notice at its next write of the queue node


def _is_there(client: Client, entry: m.CreateOp) -> bool:
    return isinstance(read(client, entry.path), m.NodeRead)


def _notice(client: Client, layout: Layout, owner: str, *queues: str) -> list[m.Op]:
    """Return the operation that asks the owner of queues to read them again."""
    path = layout.worker(owner)
    try:
        node = read(client, path)
    except NodeRefusedError:
        return []
    if not isinstance(node, m.NodeRead):
        return []  # the owner is gone, and the next one reads the queue node
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
    """Continue a queue after `wanted`, once for each file; create a missing node."""
    if create(client, layout, queue, _with_mark(wanted, id), record):
        return
    follow = _sought(wanted.last, wanted.position, finished, onward=False)

    def move(node: QueueNode) -> QueueNode:
        return node if is_imported(node, id) else _with_mark(follow(node), id)

    change_node(client, layout, queue, move, record=record)


def mark(client: Client, layout: Layout, queue: str, id: str, record: Record) -> None:
    """Mark a queue that is at the position of a file, and keep its owner and progress."""

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
    """Create the node of a queue; return False if the node exists."""
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

"""Changes of a queue node while workers run.

Operators seek, unblock, mark as deleted and reset. The leader retires, restores and marks finished.

Each change is a read-modify-write at the version read, and keeps all other keys. An operator's
change increments ``seek``: the owner then follows the node, and not its own later progress. The
same transaction adds the queue to ``reread`` in its owner's worker node. Every worker watches its
own node, so an idle owner notices too.

A queue node is deleted only while it is marked as deleted and has no owner, and together with a
write of its folder: see `protocol.queue_nodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError, RolledBackError

from qdo.coordination.client import Client
from qdo.coordination.refusals import is_refusal
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.progress import FailureRecord, OutOfOrderProgress
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import (
    CorruptNodeError,
    NodeRefusedError,
    NotBlockedError,
    NotBlockingError,
    NotFoundError,
)

Change = Callable[[QueueNode], QueueNode]
Which: TypeAlias = int | Literal["first", "all"]
"""A message that blocks a queue, by its position; or the first, or all of them."""

RETIRED = "retired"
"""Key of a queue node that was marked as deleted because the broker no longer has the queue.

A queue that an operator marked lacks this key, and stays deleted when the broker lists it."""


def seek(
    client: Client,
    layout: Layout,
    queue: str,
    last: int,
    position: str | None = None,
    finished: str | None = None,
) -> QueueNode:
    """Continue a queue after `last`; return the node before the change.

    The owner finishes the message in flight and continues from there. A corrupt node is repaired.

    :param position: the broker's own position, which overrides `last`; None if it has none.
    :param finished: the position of a finished queue; a queue with this position is restored.
    :raises NotFoundError: the queue has no node.
    :raises NodeRefusedError: the coordinator does not let this client read or write the node.
    """

    def change(node: QueueNode) -> QueueNode:
        if finished is not None and node.position == finished:
            node = _unmarked(node)
        return with_seek(node, last, position)

    return _change(client, layout, queue, change)


def with_seek(node: QueueNode, last: int, position: str | None = None) -> QueueNode:
    """Return a node as changed by `seek`."""
    return replace(node, last=last, position=position, fault=None, failure=None, out_of_order=None)


def unblock(
    client: Client,
    layout: Layout,
    queue: str,
    verdict: str,
    which: Which = "first",
) -> tuple[FailureRecord, ...]:
    """Decide on messages that block a queue; return their failure records.

    :param verdict: "retry": the message runs again, and its attempts count from 1; if nothing is
        blocked, this also applies to a message that waits for its next attempt. "skip" or
        "dead-letter": the owner, or the next one, ends the message in this way before other work.
    :param which: position of the message, or "first" or "all".
    :raises NotFoundError: the queue has no node.
    :raises NotBlockedError: it is not blocked, or not by this message.
    """
    node = _change(client, layout, queue, lambda node: with_unblock(node, queue, verdict, which))
    return _chosen(node, queue, verdict, which)


def with_unblock(node: QueueNode, queue: str, verdict: str, which: Which = "first") -> QueueNode:
    """Return a node as changed by `unblock`: the next blocking message comes first."""
    chosen = _chosen(node, queue, verdict, which)

    def decide(failure: FailureRecord) -> FailureRecord | None:
        if failure not in chosen:
            return failure
        if verdict == "retry":
            return None
        return replace(failure, blocked_since=0.0, decision=verdict)

    progress = node.out_of_order or OutOfOrderProgress()
    first = None if node.failure is None else decide(node.failure)
    rest = tuple(after for each in progress.other_failures if (after := decide(each)) is not None)
    following = next((each for each in rest if each.blocked), None)
    if following is not None and (first is None or not first.blocked):
        rest = tuple(each for each in rest if each is not following)
        rest += () if first is None else (first,)
        first = following
    ranges = progress.done_ranges
    left = OutOfOrderProgress(ranges, rest) if ranges or rest else None
    return replace(node, failure=first, out_of_order=left)


def _chosen(node: QueueNode, queue: str, verdict: str, which: Which) -> tuple[FailureRecord, ...]:
    """Return the failure records of the chosen messages."""
    blocked = node.blocking
    waiting = node.retrying if verdict == "retry" else ()
    if not blocked and not waiting:
        raise NotBlockedError(queue=queue)
    if which == "all":
        return blocked or waiting
    if which == "first":
        return (blocked or waiting)[:1]
    chosen = tuple(each for each in (*blocked, *waiting) if each.position == which)
    if not chosen:
        raise NotBlockingError(queue=queue, message=which)
    return chosen


def mark_deleted(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Mark a queue as deleted: its owner releases it, and no worker claims it.

    :raises CorruptNodeError: the node cannot be read; writing it would lose its content.
    """
    return _change(client, layout, queue, _deleted(queue))


def reset(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Restore a queue that was marked as deleted, from its beginning."""
    return _change(
        client,
        layout,
        queue,
        lambda node: replace(
            _unmarked(node), last=0, position=None, fault=None, failure=None, out_of_order=None
        ),
    )


def retire(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Mark a queue as deleted that its broker no longer has; return the node before the change.

    Its owner releases it with all its progress.

    :raises CorruptNodeError: see `mark_deleted`.
    """

    def change(node: QueueNode) -> QueueNode:
        return node if node.deleted else _marked(queue, node, ((RETIRED, True),))

    return _change(client, layout, queue, change, sought=0)


def mark_finished(client: Client, layout: Layout, queue: str, finished: str) -> QueueNode:
    """Mark a completely processed queue as deleted; return the node before the change.

    :param finished: its final position; a node with another position is not changed.
    """

    def change(node: QueueNode) -> QueueNode:
        over = node.position == finished and not node.deleted
        return _marked(queue, node, ()) if over else node

    return _change(client, layout, queue, change, sought=0)


def restore(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Undo `retire`; return the node before the change."""

    def change(node: QueueNode) -> QueueNode:
        return _unmarked(node) if is_deleted(node) else node

    return _change(client, layout, queue, change, sought=0)


def remove(client: Client, layout: Layout, queue: str) -> str:
    """Delete the node of a queue that is marked as deleted, unless it has an owner.

    :returns: the owner, "" if the node is deleted or does not exist.
    :raises NodeRefusedError: the coordinator does not let this client delete the node.
    """
    path = layout.queue(queue)
    while True:
        try:
            folder, folder_stat = client.get(layout.queues)
            data, stat = client.get(path)
            node = QueueNode.parse(data)
            if node.owner and client.exists(layout.worker(node.owner)) is not None:
                return node.owner
        except NoNodeError:
            return ""
        except KazooException as error:
            if is_refusal(error):
                raise NodeRefusedError(path=path, account=client.access.account_name()) from error
            raise
        transaction = client.transaction()
        transaction.set_data(layout.queues, folder or b"", folder_stat.version)
        transaction.delete(path, stat.version)
        if _has_succeeded(client, transaction.commit(), path):
            return ""


def is_deleted(node: QueueNode) -> bool:
    """Return whether a queue was marked as deleted by `retire`."""
    return node.deleted and any(name == RETIRED for name, _ in node.extra)


def _unmarked(node: QueueNode) -> QueueNode:
    extra = tuple(each for each in node.extra if each[0] != RETIRED)
    return replace(node, deleted=False, extra=extra)


def _marked(queue: str, node: QueueNode, extra: tuple[tuple[str, bool], ...]) -> QueueNode:
    deleted = _deleted(queue)(node)
    return replace(deleted, extra=(*_unmarked(deleted).extra, *extra))


def _deleted(queue: str) -> Change:
    def change(node: QueueNode) -> QueueNode:
        if node.fault is not None:
            raise CorruptNodeError(queue=queue, reason=node.fault)
        return replace(node, deleted=True)

    return change


def _change(
    client: Client, layout: Layout, queue: str, change: Change, sought: int = 1
) -> QueueNode:
    while True:
        path = layout.queue(queue)
        try:
            data, stat = client.get(path)
        except NoNodeError as error:
            raise NotFoundError(what="queue", name=queue) from error
        except KazooException as error:
            if is_refusal(error):
                raise NodeRefusedError(path=path, account=client.access.account_name()) from error
            raise
        node = QueueNode.parse(data)
        after = change(node)
        if after is node:
            return node
        after = replace(after, seek=node.seek + sought)
        if _commit(client, layout, queue, after, stat.version):
            return node


def _commit(client: Client, layout: Layout, queue: str, node: QueueNode, version: int) -> bool:
    """Write a changed node and notify its owner; return False if either changed since."""
    path = layout.queue(queue)
    transaction = client.transaction()
    transaction.set_data(path, node.encode(), version)
    owner = _notified(client, layout, node.owner, queue) if node.owner else None
    if owner is not None:
        transaction.set_data(layout.worker(node.owner), *owner)
    results = transaction.commit()
    if owner is not None and is_refusal(results[1]):
        # The owner finds out with its next write of the queue node.
        transaction = client.transaction()
        transaction.set_data(path, node.encode(), version)
        results = transaction.commit()
    return _has_succeeded(client, results, path)


def _has_succeeded(client: Client, results: Iterable[Any], path: str) -> bool:
    """Return whether a transaction took effect, False if a node changed since it was read."""
    for result in results:
        if isinstance(result, (BadVersionError, NoNodeError)):
            return False
        if is_refusal(result):
            raise NodeRefusedError(path=path, account=client.access.account_name()) from result
        if isinstance(result, KazooException) and not isinstance(result, RolledBackError):
            raise result
    return True


def _notified(client: Client, layout: Layout, owner: str, queue: str) -> tuple[bytes, int] | None:
    """Return the owner's node with a request to read a queue again, and the version to replace."""
    try:
        data, stat = client.get(layout.worker(owner))
    except NoNodeError:
        return None  # gone forever: the next owner reads the queue node
    except KazooException as error:
        if is_refusal(error):
            return None
        raise
    own = WorkerNode.parse(data)
    reread = tuple(dict.fromkeys((*own.reread, queue)))
    return replace(own, reread=reread).encode(), stat.version

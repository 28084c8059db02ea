"""What operators may do to a queue node while workers run: seek, unblock, mark deleted, reset;
and what the leader does there: retire, bring back, lay to rest.

Each is a read-modify-write at the version read and keeps every key it does not mean to change.
What operators do counts ``seek`` up: the owner goes by the node then, and not by what it has done
since. The same transaction adds the queue to ``reread`` in its owner's worker node, which every
worker watches, so that an idle owner notices too. Queue nodes are not deleted while workers
run: versions would start again at 0, and a late write of the former owner could match.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError, RolledBackError

from qdo.coordination.client import Client
from qdo.coordination.layout import Above, Layout, Marks, QueueNode, WorkerNode
from qdo.errors import NotBlockedError, NotBlockingError, NotFoundError, SpoiltNodeError

Change = Callable[[QueueNode], QueueNode]
Which: TypeAlias = int | Literal["first", "all"]
"""One of the messages that block a queue by its position, the foremost, or all of them."""

RETIRED = "retired"
"""Key of a queue node that was marked as deleted because its queue vanished from the broker. What
an operator marked has it not, and stays as it is when the broker lists the queue."""


def seek(
    client: Client,
    layout: Layout,
    queue: str,
    last: int,
    position: str | None = None,
    finished: str | None = None,
) -> QueueNode:
    """Let a queue go on after `last`; return the node as it was.

    An owner finishes the message in hand and goes on from there; a node that held garbage is
    whole again.

    :param position: the broker's own position, which wins over `last`; None for none.
    :param finished: what stands there of a queue that was done to its end: it is brought back.
    :raises NotFoundError: the queue has no node.
    """

    def change(node: QueueNode) -> QueueNode:
        if finished is not None and node.position == finished:
            node = _unmarked(node)
        return sought(node, last, position)

    return _change(client, layout, queue, change)


def sought(node: QueueNode, last: int, position: str | None = None) -> QueueNode:
    """Return a node as `seek` leaves it."""
    return replace(node, last=last, position=position, fault=None, marks=None, above=None)


def unblock(
    client: Client,
    layout: Layout,
    queue: str,
    verdict: str,
    which: Which = "first",
) -> tuple[Marks, ...]:
    """Let a blocked queue go on; return what stood in its node of the messages decided on.

    :param verdict: "retry": the message runs again, its attempts count from 1; "skip" or
        "dead-letter": the owner, or the next one, ends the message so before all else.
    :param which: position of the message, or "first" or "all".
    :raises NotFoundError: the queue has no node.
    :raises NotBlockedError: it is not blocked, or by no such message.
    """
    node = _change(client, layout, queue, lambda node: unblocked(node, queue, verdict, which))
    return _chosen(node, queue, which)


def unblocked(node: QueueNode, queue: str, verdict: str, which: Which = "first") -> QueueNode:
    """Return a node as `unblock` leaves it: the next message that is blocked comes foremost."""
    chosen = _chosen(node, queue, which)

    def decide(marks: Marks) -> Marks | None:
        if marks not in chosen:
            return marks
        return None if verdict == "retry" else replace(marks, since=0.0, verdict=verdict)

    above = node.above or Above()
    first = None if node.marks is None else decide(node.marks)
    rest = tuple(after for each in above.marks if (after := decide(each)) is not None)
    following = next((each for each in rest if each.blocked), None)
    if following is not None and (first is None or not first.blocked):
        rest = tuple(each for each in rest if each is not following)
        rest += () if first is None else (first,)
        first = following
    left = Above(above.runs, rest) if above.runs or rest else None
    return replace(node, marks=first, above=left)


def _chosen(node: QueueNode, queue: str, which: Which) -> tuple[Marks, ...]:
    """Return the marks of the messages that are decided on."""
    blocked = node.blocking
    if not blocked:
        raise NotBlockedError(queue=queue)
    if which == "all":
        return blocked
    if which == "first":
        return blocked[:1]
    chosen = tuple(each for each in blocked if each.position == which)
    if not chosen:
        raise NotBlockingError(queue=queue, position=which)
    return chosen


def mark_deleted(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Mark a queue as deleted: its owner gives it back, and nobody claims it.

    :raises SpoiltNodeError: the node cannot be read, and writing it would lose what it holds.
    """
    return _change(client, layout, queue, _deleted(queue))


def reset(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Bring a queue that was marked as deleted back, from its beginning."""
    return _change(
        client,
        layout,
        queue,
        lambda node: replace(
            _unmarked(node), last=0, position=None, fault=None, marks=None, above=None
        ),
    )


def retire(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Mark a queue as deleted that its broker has no more; return the node as it was.

    Its owner gives it back with all the progress it has made.

    :raises SpoiltNodeError: see `mark_deleted`.
    """

    def change(node: QueueNode) -> QueueNode:
        return node if node.deleted else _marked(queue, node, ((RETIRED, True),))

    return _change(client, layout, queue, change, sought=0)


def lay_to_rest(client: Client, layout: Layout, queue: str, finished: str) -> QueueNode:
    """Mark a queue as deleted that is done to its end, for good; return the node as it was.

    :param finished: its position then; a node with another one is left as it is.
    """

    def change(node: QueueNode) -> QueueNode:
        over = node.position == finished and not node.deleted
        return _marked(queue, node, ()) if over else node

    return _change(client, layout, queue, change, sought=0)


def bring_back(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Take the mark off that `retire` has set; return the node as it was."""

    def change(node: QueueNode) -> QueueNode:
        return _unmarked(node) if is_retired(node) else node

    return _change(client, layout, queue, change, sought=0)


def is_retired(node: QueueNode) -> bool:
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
            raise SpoiltNodeError(queue=queue, reason=node.fault)
        return replace(node, deleted=True)

    return change


def _change(
    client: Client, layout: Layout, queue: str, change: Change, sought: int = 1
) -> QueueNode:
    while True:
        try:
            data, stat = client.get(layout.queue(queue))
        except NoNodeError as error:
            raise NotFoundError(what="queue", name=queue) from error
        node = QueueNode.parse(data)
        after = change(node)
        if after is node:
            return node
        after = replace(after, seek=node.seek + sought)
        if _commit(client, layout, queue, after, stat.version):
            return node


def _commit(client: Client, layout: Layout, queue: str, node: QueueNode, version: int) -> bool:
    """Write a changed node and tell its owner; False if either changed meanwhile."""
    transaction = client.transaction()
    transaction.set_data(layout.queue(queue), node.encode(), version)
    if node.owner:
        try:
            data, stat = client.get(layout.worker(node.owner))
        except NoNodeError:
            pass  # gone for ever: the next owner reads the queue node
        else:
            own = WorkerNode.parse(data)
            reread = tuple(dict.fromkeys((*own.reread, queue)))
            told = replace(own, reread=reread)
            transaction.set_data(layout.worker(node.owner), told.encode(), stat.version)
    for result in transaction.commit():
        if isinstance(result, (BadVersionError, NoNodeError)):
            return False
        if isinstance(result, KazooException) and not isinstance(result, RolledBackError):
            raise result
    return True

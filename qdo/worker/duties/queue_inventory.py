"""The leader's knowledge of queues that come and go, and its decisions about them. No I/O.

=========  ============================================================  =======================
queue      meaning                                                       next
=========  ============================================================  =======================
waiting    listed, without a node: a parent is not finished              in use
in use     it has a node                                                 retired, finished
retired    it vanished from the broker: its node is marked as deleted    in use (listed again)
finished   completely processed: its node is a tombstone, marked as      in use (an operator
           deleted, and it is never started again                        resets or seeks it)
=========  ============================================================  =======================

A queue starts after all its parents are over, in whatever order the leader discovers them. A
parent is over in one of three cases:

- its node is marked as finished, and the queue was not recreated since;
- it has no node and the broker does not list it: it was finished long ago;
- it vanished unfinished and was retired: its remaining messages cannot be read any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from qdo.coordination.queue_admin import is_deleted
from qdo.coordination.znodes.queue_node import NEW, QueueNode


class QueueInventory:
    """The queues of one broker and their nodes, in one term of the leader.

    :ivar complete: every node that existed at the beginning of the term has been read.
    :ivar deleted: queues whose nodes are marked as deleted, by the leader or an operator.
    :ivar finished: queues whose nodes are at the end position.
    :ivar reopened: finished queues that were listed again later and receive messages: they were
        recreated under the same name.
    :ivar nodes: names of all queue nodes, as last listed.
    :param end_position_text: see `Capabilities.end_position_text`.
    :param missing_lists_before_retire: see `Capabilities.missing_lists_before_retire`.
    """

    def __init__(
        self, end_position_text: str | None, missing_lists_before_retire: int | None
    ) -> None:
        self.complete = False
        self.deleted: set[str] = set()
        self.finished: set[str] = set()
        self.reopened: AbstractSet[str] = frozenset()
        self.nodes: AbstractSet[str] = frozenset()
        self._end_position_text = end_position_text
        self._misses_before_retire = missing_lists_before_retire
        self._listed: AbstractSet[str] = frozenset()
        self._retired: set[str] = set()
        self._misses: dict[str, int] = {}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, tuple[str, ...]] = {}

    # --- observations -----------------------------------------------------------------

    def read(self, names: Iterable[str], nodes: Mapping[str, QueueNode]) -> None:
        """Record the nodes of these names; `nodes` holds those that exist."""
        for name in names:
            node = nodes.get(name, NEW)
            _put(self.deleted, name, node.deleted)
            _put(self._retired, name, is_deleted(node))
            over = self._end_position_text is not None and node.position == self._end_position_text
            _put(self.finished, name, over)

    def listed(self, names: Collection[str], parents: Mapping[str, tuple[str, ...]]) -> None:
        """Record a list of the broker. The nodes must have been looked at before the request.

        :param parents: of the listed queues that have any.
        """
        self._listed = frozenset(names)
        self._parents = dict(parents)
        for name, awaited in list(self._waiting.items()):
            if name not in self._listed or self._parents.get(name) != awaited:
                del self._waiting[name]  # vanished or recreated
        if self._misses_before_retire is not None:
            missing = (self.nodes - self._listed) - self.deleted
            self._misses = {name: self._misses.get(name, 0) + 1 for name in missing}

    # --- decisions --------------------------------------------------------------------

    def vanished(self) -> list[str]:
        """Return the queues to retire."""
        limit = self._misses_before_retire
        if limit is None:
            return []
        return sorted(name for name, count in self._misses.items() if count >= limit)

    def settled(self, name: str) -> None:
        """Record that the node of a queue was changed, or cannot be changed for now."""
        self._misses.pop(name, None)
        if name not in self.deleted:
            self.finished.discard(name)  # until its node is read again

    def returned(self) -> list[str]:
        """Return the retired queues that the broker lists again."""
        return sorted((self._retired & self._listed) - self.finished)

    def over(self, parent: str) -> bool:
        """Return whether a queue no longer keeps its children waiting."""
        if parent in self.nodes:
            vanished = parent in self._retired and parent not in self._listed
            return (parent in self.finished and parent not in self.reopened) or vanished
        return parent not in self._listed

    def wait(self, name: str, parents: Sequence[str]) -> bool:
        """Let a queue wait for its parents; return whether it was not waiting before."""
        new = name not in self._waiting
        self._waiting[name] = tuple(parents)
        return new

    @property
    def waiting(self) -> AbstractSet[str]:
        """The queues that wait for their parents."""
        return self._waiting.keys()

    def awaited(self) -> list[str]:
        """Return the parents to read again: unfinished, and queues wait for them."""
        wanted = {parent for parents in self._waiting.values() for parent in parents}
        return sorted((wanted & self.nodes) - self.finished)

    def take_ready(self) -> list[str]:
        """Return the queues whose parents are all over now; they no longer wait."""
        ready = [name for name, parents in self._waiting.items() if all(map(self.over, parents))]
        for name in ready:
            del self._waiting[name]
        return sorted(ready)

    def to_mark_finished(self) -> list[str]:
        """Return the finished queues to be marked so: all their children have nodes."""
        over = self.finished - self.deleted
        if not over:
            return []
        needed = {
            parent
            for name, parents in self._parents.items()
            if name not in self.nodes
            for parent in parents
        }
        return sorted(over - needed)


def _put(names: set[str], name: str, among: bool) -> None:
    if among:
        names.add(name)
    else:
        names.discard(name)

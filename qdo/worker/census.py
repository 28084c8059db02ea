"""What the leader knows of the queues that come and go, and what follows from it. No I/O.

=========  ============================================================  =======================
queue      meaning                                                       next
=========  ============================================================  =======================
waiting    listed, without a node: a parent is not finished              in use
in use     it has a node                                                 retired, at rest
retired    it vanished from the broker: its node is marked as deleted    in use (listed again)
at rest    done to its end, and so is nothing but a tombstone: marked    in use (an operator
           as deleted, and never begun again                             resets or seeks it)
=========  ============================================================  =======================

A parent is over when its node says that it is finished, unless it was made anew since, or when it
is neither listed nor has a node (it was finished long ago, and the broker has forgotten it), or
when it vanished unfinished and was retired: nothing of it can be had any more. So children begin
after their parents in whatever order they become known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from qdo.coordination.layout import QueueNode
from qdo.coordination.operator import is_retired


class Census:
    """The queues of one broker and their nodes, in one term of the leader.

    :ivar complete: every node there was at the beginning of the term has been read.
    :ivar aside: queues whose nodes are marked as deleted.
    :ivar finished: queues whose nodes say that they are done to their end.
    :ivar again: those of them that were listed later and get messages: others of the same names.
    :ivar nodes: names of all queue nodes, as last listed.
    :param finished_text: see `Broker.finished_text`.
    :param vanish_misses: see `Broker.vanish_misses`.
    """

    def __init__(self, finished_text: str | None, vanish_misses: int | None) -> None:
        self.complete = False
        self.aside: set[str] = set()
        self.finished: set[str] = set()
        self.again: AbstractSet[str] = frozenset()
        self.nodes: AbstractSet[str] = frozenset()
        self._finished_text = finished_text
        self._vanish_misses = vanish_misses
        self._listed: AbstractSet[str] = frozenset()
        self._retired: set[str] = set()
        self._misses: dict[str, int] = {}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, tuple[str, ...]] = {}

    # --- what was seen ----------------------------------------------------------------

    def read(self, names: Iterable[str], nodes: Mapping[str, QueueNode]) -> None:
        """Take note of nodes as they were read, of those of `names` that exist."""
        for name in names:
            node = nodes.get(name, QueueNode())
            _keep(self.aside, name, node.deleted)
            _keep(self._retired, name, is_retired(node))
            over = self._finished_text is not None and node.position == self._finished_text
            _keep(self.finished, name, over)

    def listed(self, names: Collection[str], parents: Mapping[str, tuple[str, ...]]) -> None:
        """Take note of a list of the broker; the nodes were looked at before it was asked.

        :param parents: of the listed queues that have any.
        """
        self._listed = frozenset(names)
        self._parents = dict(parents)
        for name, awaited in list(self._waiting.items()):
            if name not in self._listed or self._parents.get(name) != awaited:
                del self._waiting[name]  # gone, or made anew
        if self._vanish_misses is not None:
            missing = (self.nodes - self._listed) - self.aside
            self._misses = {name: self._misses.get(name, 0) + 1 for name in missing}

    # --- what follows -----------------------------------------------------------------

    def vanished(self) -> list[str]:
        """Return the queues to be retired."""
        if self._vanish_misses is None:
            return []
        return sorted(
            name for name, count in self._misses.items() if count >= self._vanish_misses
        )

    def settled(self, name: str) -> None:
        """Take note that the node of a queue was changed, or cannot be for now."""
        self._misses.pop(name, None)
        if name not in self.aside:
            self.finished.discard(name)  # until it is read again

    def returned(self) -> list[str]:
        """Return the retired queues that the broker has again."""
        return sorted((self._retired & self._listed) - self.finished)

    def over(self, parent: str) -> bool:
        """Return whether the children of a queue may begin, as far as it is concerned."""
        if parent in self.nodes:
            vanished = parent in self._retired and parent not in self._listed
            return (parent in self.finished and parent not in self.again) or vanished
        return parent not in self._listed

    def wait(self, name: str, parents: Sequence[str]) -> bool:
        """Let a queue wait for its parents; return whether it did not before."""
        new = name not in self._waiting
        self._waiting[name] = tuple(parents)
        return new

    @property
    def waiting(self) -> AbstractSet[str]:
        """The queues that wait for their parents."""
        return self._waiting.keys()

    def awaited(self) -> list[str]:
        """Return the queues whose nodes say when their children may begin."""
        wanted = {parent for parents in self._waiting.values() for parent in parents}
        return sorted((wanted & self.nodes) - self.finished)

    def begin(self) -> list[str]:
        """Return the queues whose parents are over now; they wait no longer."""
        ready = [
            name for name, parents in self._waiting.items() if all(map(self.over, parents))
        ]
        for name in ready:
            del self._waiting[name]
        return sorted(ready)

    def done_for(self) -> list[str]:
        """Return the finished queues that can be laid to rest: all their children have nodes."""
        over = self.finished - self.aside
        if not over:
            return []
        held = {
            parent
            for name, parents in self._parents.items()
            if name not in self.nodes
            for parent in parents
        }
        return sorted(over - held)


def _keep(names: set[str], name: str, among: bool) -> None:
    if among:
        names.add(name)
    else:
        names.discard(name)

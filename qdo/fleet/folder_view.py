"""Keeps a local copy of the nodes below one folder. The class is a machine without I/O.

The view watches first and then reads, so it misses no change in between. The view repeats both
after every reconnection, because servers do not restore such watches and do not send missed events.
The view applies a node only if the node's mzxid is larger than the mzxid of the copy. The view
cannot compare versions, because the versions of a recreated node begin at 0 again. There is one
exception: after a failover to a standby, the coordinator may have lost a change. Therefore the view
also applies an older node if it read the node after a `Sync` with a place that is not before the
copy.

The time `ltime` of the copy is a place in the coordinator's total order. The copy has every change
up to this place. The answer to a `Sync` is a place Z. This answer arrives after all events of
changes up to Z. The view sends reads for these events immediately, and answers arrive in the order
of the requests. So after the answer to the last of these reads, the copy has every change up to Z.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from qdo.coordination.protocol import machine as m

# Maximum number of nodes in a copy, and maximum size of their values. The view omits further nodes
# and sets `fault`.
MAX_NODES = 10_000
MAX_BYTES = 64 * 1024 * 1024
_Waiter = Callable[[], object]


@dataclass(frozen=True, slots=True)
class CopiedNode:
    """A node of the folder."""

    # The result of `parse`; None if there is a fault.
    value: Any
    version: int
    # Place of the node's last write in the coordinator's total order.
    mzxid: int
    size: int
    fault: str | None = None


class FolderView(m.Machine):
    """Keeps a copy of the nodes directly below a folder. Any thread may read `entries`.

    :ivar entries: the nodes by name. The view replaces nodes but never changes them.
    :ivar ltime: every change up to this zxid is in `entries`; 0 before the first complete copy.
    :ivar fault: reason why the copy is missing or incomplete; None for a complete copy.
    :param parse: a function that returns the value of a node's data, or raises ValueError for
        invalid data.
    """

    def __init__(
        self,
        folder: str,
        parse: Callable[[bytes], Any],
        on_change: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__()
        self.entries: dict[str, CopiedNode] = {}
        self.ltime = 0
        self.fault: str | None = None
        self._folder = folder
        self._parse = parse
        self._on_change = on_change
        self._bytes = 0
        self._dirty: set[str] = set()
        self._unread: set[str] = set()
        self._place = 0
        self._reads_sent = 0
        self._reads_answered = 0
        self._listed = False
        self._unasked: list[_Waiter] = []
        self._waiting: list[_Waiter] = []
        self._synced_at: list[tuple[int, list[_Waiter]]] = []
        self._places: deque[tuple[int, int, list[_Waiter]]] = deque()

    def when_fresh(self, ltime: int | None, then: Callable[[], object]) -> None:
        """Call a function once the copy holds every change up to `ltime`.

        :param ltime: a zxid; None for all changes acknowledged before this call.
        """
        if ltime is not None and self.ltime >= ltime:
            then()
        else:
            self._waiting.append(then)
            self._unasked.append(then)

    # --- the session --------------------------------------------------------------------

    def connected(self) -> None:
        self.ask(m.WatchTree(self._folder), self._watched)

    def suspended(self) -> None:
        self._listed = False
        self._dirty.clear()
        self._unread.clear()
        self._place = 0
        self._synced_at.clear()
        self._places.clear()
        self._unasked = list(self._waiting)

    def changed(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder == self._folder:
            self._dirty.add(name)

    def _watched(self, answer: m.Response) -> None:
        if isinstance(answer, m.Watching):
            self.ask(m.Children(self._folder), self._children)
        elif isinstance(answer, m.Refused):
            self.fault = answer.reason

    def _children(self, answer: m.Response) -> None:
        if isinstance(answer, m.Refused):
            self.fault = answer.reason
            return
        if isinstance(answer, m.NoResponse):
            return
        names = answer.names if isinstance(answer, m.ChildrenRead) else ()
        # Also read deleted nodes, for which the answer is `NodeMissing`.
        self._unread = {*names, *self.entries}
        self.fault = None
        self._listed = True
        self._sync()

    def _sync(self) -> None:
        waiters = self._unasked
        self._unasked = []
        self.ask(m.Sync(self._folder), lambda answer: self._synced(answer, waiters))

    def _synced(self, answer: m.Response, waiters: list[_Waiter]) -> None:
        if isinstance(answer, m.Synced):
            self._place = answer.zxid
            self._dirty |= self._unread
            self._unread = set()
            self._synced_at.append((answer.zxid, waiters))

    # --- reading ------------------------------------------------------------------------

    def flush(self) -> None:
        """Read the changed nodes, and request the time that a caller waits for."""
        dirty = self._dirty
        self._dirty = set()
        for name in dirty:
            self._reads_sent += 1
            self.ask(m.Get(f"{self._folder}/{name}"), partial(self._got, name, self._place))
        # The copy reaches this place after the answers to all reads sent so far.
        for zxid, waiters in self._synced_at:
            self._places.append((self._reads_sent, zxid, waiters))
        self._synced_at.clear()
        if self._listed and self._unasked:
            self._sync()
        self._advance()

    def _got(self, name: str, place: int, answer: m.Response) -> None:
        self._reads_answered += 1
        if not isinstance(answer, m.NoResponse):
            self.take(name, answer, place)
            self._advance()

    def take(self, name: str, answer: m.Response, place: int = 0) -> None:
        """Update the copy of a node from the answer to a read that the view sent at a place."""
        if isinstance(answer, m.NodeRead):
            self._apply(name, answer, place)
        elif isinstance(answer, m.NodeMissing):
            self._drop(name)
        elif isinstance(answer, m.Refused):
            self._replace(name, CopiedNode(None, -1, 0, 0, answer.reason))

    def _advance(self) -> None:
        """Set the time of the copy to the last place whose reads all have answers."""
        while self._places and self._places[0][0] <= self._reads_answered:
            _, zxid, waiters = self._places.popleft()
            self.ltime = max(self.ltime, zxid)
            for then in waiters:
                self._waiting.remove(then)
                then()

    def _apply(self, name: str, node: m.NodeRead, place: int) -> None:
        copy = self.entries.get(name)
        if copy is not None and (copy.mzxid == node.mzxid or copy.mzxid > max(node.mzxid, place)):
            return
        size = len(node.data)
        if copy is None and not self.has_room(size):
            self.fault = (
                f"{self._folder} must have at most {MAX_NODES:,} nodes and {MAX_BYTES >> 20} MiB,"
                f" so {name!r} is left out"
            )
            return
        value = fault = None
        try:
            value = self._parse(node.data)
        except ValueError as error:
            fault = str(error)
        self._replace(name, CopiedNode(value, node.version, node.mzxid, size, fault))

    def _replace(self, name: str, entry: CopiedNode) -> None:
        copy = self.entries.get(name)
        if copy == entry:
            return
        self._bytes += entry.size - (0 if copy is None else copy.size)
        self.entries[name] = entry
        self._on_change(name)

    def has_room(self, size: int) -> bool:
        """Return whether the copy can hold another node of this size."""
        return len(self.entries) < MAX_NODES and self._bytes + size <= MAX_BYTES

    def _drop(self, name: str) -> None:
        copy = self.entries.pop(name, None)
        if copy is not None:
            self._bytes -= copy.size
            self._on_change(name)

"""An in-memory ZooKeeper as the protocol's machines see it, made to be unpleasant.

One total order of transactions, with every earlier state kept so that a session can be served
by a follower that lags. What a session may rely on is what ZooKeeper promises, no more:

- its requests take effect and are answered in the order of sending;
- its reads never go back in time, and show at least its own acknowledged writes;
- a watch fires once, late perhaps, yet before a read of that session shows the newer state;
- when the connection is lost, any prefix of the requests on their way has taken or still takes
  effect, unanswered, but none after the session has reconnected;
- after reconnecting to another follower, reads are as new as the newest answer that arrived,
  not as the newest write that took effect;
- the leader alone expires a session, a timeout after the last contact it knows of. A follower
  tells it of contacts with its own pings only, each half tick, so the leader may miss the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdo.coordination.protocol.machine import (
    ANY_VERSION,
    CommitError,
    Committed,
    Created,
    CreateOp,
    DeleteOp,
    NodeRead,
    Op,
    Rejected,
    SetOp,
)
from tests.simulation.schedule import Schedule

if TYPE_CHECKING:
    from tests.simulation.network import Link

Change = tuple[str, "NodeRead | None", "NodeRead | None"]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the total order.

    :ivar session: who asked for it; the closed session itself when one is closed.
    :ivar changes: path, node before, node after, for every node written.
    """

    zxid: int
    time: float
    session: int
    changes: tuple[Change, ...]


class SessionEntry:
    """The leader's data about one session.

    :ivar touched: when the leader last heard of it.
    :ivar closed_time: when it ended, None while it lives.
    """

    __slots__ = ("closed_time", "closed_zxid", "ephemerals", "id", "link", "timeout", "touched")

    def __init__(self, id: int, timeout: float, now: float) -> None:
        self.id = id
        self.timeout = timeout
        self.touched = now
        self.closed_time: float | None = None
        self.closed_zxid = 0
        self.link: Link | None = None
        self.ephemerals: dict[str, None] = {}


class _Line:
    """The states one node (or list of children) went through, oldest first."""

    __slots__ = ("states", "zxids")

    def __init__(self) -> None:
        self.zxids: list[int] = []
        self.states: list[object] = []

    def add(self, zxid: int, state: object) -> None:
        if self.zxids and self.zxids[-1] == zxid:
            self.states[-1] = state
        else:
            self.zxids.append(zxid)
            self.states.append(state)

    def at(self, zxid: int) -> object:
        if not self.zxids or zxid < self.zxids[0]:
            return None
        if zxid >= self.zxids[-1]:
            return self.states[-1]
        return self.states[bisect_right(self.zxids, zxid) - 1]


class Coordinator:
    """The ensemble: one leader's order, seen by each link through its own follower.

    :ivar sluggish: followers are as far behind as they may be.
    :param tick: the server's tick in seconds.
    :param reuse_numbers: give sequential nodes the lowest free number (what qdo must not rely
        on being survivable; for a mutant).
    :param late_requests: let requests of a lost connection land after the reconnection (what
        ZooKeeper and the embedded coordinator exclude; for a mutant).
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        tick: float = 2.0,
        reuse_numbers: bool = False,
        late_requests: bool = False,
    ) -> None:
        self.schedule = schedule
        self.tick = tick
        self.reuse_numbers = reuse_numbers
        self.late_requests = late_requests
        self.zxid = 0
        self.down = False
        self.sluggish = False
        self.log: list[LogEntry] = []
        self.sessions: dict[int, SessionEntry] = {}
        self.links: list[Link] = []
        self.observers: list[Callable[[LogEntry], None]] = []
        self._times: list[float] = []
        self._nodes: dict[str, NodeRead] = {}
        self._lines: dict[str, _Line] = {}
        self._children: dict[str, dict[str, None]] = {"": {}}
        self._child_lines: dict[str, _Line] = {}
        self._counters: dict[str, int] = {}
        self._next_session = 0x1000

    # --- reading --------------------------------------------------------------------

    def node(self, path: str, view: int | None = None) -> NodeRead | None:
        """Return a node as of `view`, None if there was none; of now without `view`."""
        if view is None or view >= self.zxid:
            return self._nodes.get(path)
        line = self._lines.get(path)
        found = line.at(view) if line is not None else None
        return found if isinstance(found, NodeRead) else None

    def names(self, path: str, view: int | None = None) -> tuple[str, ...] | None:
        """Return the names below a node as of `view`, None if the node did not exist."""
        if self.node(path, view) is None:
            return None
        line = self._child_lines.get(path)
        found = line.at(self.zxid if view is None else view) if line is not None else None
        return found if isinstance(found, tuple) else ()

    def zxid_at(self, when: float) -> int:
        """Return the newest zxid committed at or before a time."""
        return bisect_right(self._times, when)

    # --- writing --------------------------------------------------------------------

    def ensure(self, paths: Iterable[str], data: bytes = b"") -> None:
        """Create persistent nodes and their parents where missing."""
        for path in paths:
            parts = path.strip("/").split("/")
            for count in range(1, len(parts) + 1):
                part = "/" + "/".join(parts[:count])
                if part not in self._nodes:
                    self.commit(0, (CreateOp(part, data if part == path else b""),))

    def commit(self, session: int, ops: tuple[Op, ...]) -> Committed | Rejected:
        """Apply a transaction, all of it or nothing; either way it takes its place."""
        staged: dict[str, NodeRead | None] = {}
        versions: list[int] = []
        for index, op in enumerate(ops):
            fault = self._stage(op, staged, versions)
            if fault is not None:
                self._append(session, {})
                return Rejected(index, fault)
        self._append(session, staged)
        return Committed(self.zxid if staged else 0, tuple(versions))

    def _stage(
        self, op: Op, staged: dict[str, NodeRead | None], versions: list[int]
    ) -> CommitError | None:
        path = op.path
        node = staged[path] if path in staged else self._nodes.get(path)
        if isinstance(op, CreateOp):
            if node is not None:
                return CommitError.NODE_EXISTS
            parent = path.rpartition("/")[0]
            above = staged[parent] if parent in staged else self._nodes.get(parent)
            if parent and above is None:
                return CommitError.NO_NODE
            staged[path] = NodeRead(op.data, 0, self.zxid + 1)
            versions.append(0)
            return None
        if node is None:
            return CommitError.NO_NODE
        if op.version not in (ANY_VERSION, node.version):
            return CommitError.BAD_VERSION
        if isinstance(op, SetOp):
            staged[path] = NodeRead(op.data, node.version + 1, self.zxid + 1, node.ephemeral_owner)
            versions.append(node.version + 1)
            return None
        versions.append(-1)
        if isinstance(op, DeleteOp):
            if self._children.get(path):
                return CommitError.OTHER
            staged[path] = None
        return None

    def create_sequential(self, session: int, prefix: str, data: bytes) -> Created | Rejected:
        """Create an ephemeral node whose name ends in its parent's next number."""
        parent = prefix.rpartition("/")[0]
        if parent not in self._nodes:
            self._append(session, {})
            return Rejected(0, CommitError.NO_NODE)
        number = self._counters.get(parent, 0)
        if self.reuse_numbers:
            number = next(n for n in range(1 << 20) if f"{prefix}{n:010d}" not in self._nodes)
        self._counters[parent] = self._counters.get(parent, 0) + 1
        path = f"{prefix}{number:010d}"
        self._append(session, {path: NodeRead(data, 0, self.zxid + 1, session)})
        return Created(path)

    def _append(self, session: int, staged: dict[str, NodeRead | None]) -> None:
        self.zxid = zxid = self.zxid + 1
        changes = []
        for path, after in staged.items():
            before = self._nodes.get(path)
            changes.append((path, before, after))
            self._put(zxid, path, before, after)
        entry = LogEntry(zxid, self.schedule.now, session, tuple(changes))
        self.log.append(entry)
        self._times.append(entry.time)
        if changes:
            for link in self.links:
                link.committed(entry)
            for observer in self.observers:
                observer(entry)

    def _put(self, zxid: int, path: str, before: NodeRead | None, after: NodeRead | None) -> None:
        if path not in self._lines:
            self._lines[path] = _Line()
        self._lines[path].add(zxid, after)
        if after is not None:
            self._nodes[path] = after
        else:
            self._nodes.pop(path, None)
        if (before is None) == (after is None):
            return
        parent, _, name = path.rpartition("/")
        siblings = self._children.setdefault(parent, {})
        shown = after or before
        owner = shown.ephemeral_owner if shown is not None else 0
        ephemerals = self.sessions[owner].ephemerals if owner else {}
        if after is not None:
            siblings[name] = None
            self._counters.setdefault(path, 0)
            ephemerals[path] = None
        else:
            siblings.pop(name, None)
            ephemerals.pop(path, None)
        self._child_lines.setdefault(parent, _Line()).add(zxid, tuple(siblings))

    # --- sessions -------------------------------------------------------------------

    def open_session(self, timeout: float) -> SessionEntry:
        """Begin a session."""
        session = SessionEntry(self._next_session, timeout, self.schedule.now)
        self._next_session += 1
        self.sessions[session.id] = session
        self._append(session.id, {})
        self.schedule.after(timeout, self._check_expiry, session)
        return session

    def close_session(self, id: int) -> None:
        """End a session: its ephemeral nodes go in one transaction."""
        session = self.sessions[id]
        if session.closed_time is not None:
            return
        self.schedule.note("session %x ends", id)
        session.closed_time = self.schedule.now
        session.closed_zxid = self.zxid + 1
        self._append(id, dict.fromkeys(session.ephemerals))
        if session.link is not None:
            session.link.session_ended()

    def watch_expiry(self, session: SessionEntry) -> None:
        """Expire a session one timeout after its last touch, unless there were later ones."""
        self.schedule.at(session.touched + session.timeout, self._check_expiry, session)

    def _check_expiry(self, session: SessionEntry) -> None:
        if session.closed_time is not None or self.down:
            return
        if session.link is not None and session.link.in_contact:
            return  # looked at again when the contact ends
        end = session.touched + session.timeout
        if self.schedule.now >= end:
            self.close_session(session.id)
        else:
            self.watch_expiry(session)

    # --- outages --------------------------------------------------------------------

    def go_down(self) -> None:
        """Lose the quorum: every connection ends, nothing can be reached."""
        self.schedule.note("coordinator goes down")
        self.down = True
        for link in self.links:
            link.lose()

    def come_up(self) -> None:
        """Elect a leader: the clocks of all sessions start again."""
        self.schedule.note("coordinator comes up")
        self.down = False
        for session in self.sessions.values():
            if session.closed_time is None:
                session.touched = self.schedule.now
                self.schedule.after(session.timeout, self._check_expiry, session)

"""An in-memory ZooKeeper as the protocol's machines see it, made to be unpleasant.

One total order of transactions, with every earlier state kept so that a session can be served
by a follower that lags. What a session may rely on is what ZooKeeper promises, no more:

- its requests take effect and are answered in the order of sending;
- what it reads never goes back in time, and shows at least its own acknowledged writes;
- a watch fires once, late perhaps, yet before a read of that session shows the newer state;
- when the connection is lost, any prefix of the requests on their way has taken or still takes
  effect, unanswered, but none after the session has reconnected;
- after reconnecting to another follower, reads are as new as the newest answer that arrived,
  not as the newest write that took effect;
- the leader alone expires a session, a time-out after the last contact it knows of. A follower
  tells it of contacts with its own pings only, each half tick, so the leader may miss the last.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qdo.coordination.machine import (
    ANY_VERSION,
    Answer,
    CheckOp,
    Children,
    Commit,
    Committed,
    Create,
    Created,
    CreateOp,
    DeleteOp,
    Fault,
    Get,
    Listing,
    Node,
    NoNode,
    Op,
    Refused,
    Request,
    SetOp,
    Then,
    Unanswered,
)
from tests.simulation.schedule import Schedule

Watcher = Callable[[str], None]
Deliver = Callable[..., None]
Item = tuple["Request | Exists", Then, "Watcher | None"]
Change = tuple[str, "Node | None", "Node | None"]

NO_NODE = NoNode()
UNANSWERED = Unanswered()


@dataclass(frozen=True, slots=True)
class Exists:
    """Watch a node whether it exists or not; a `Get` watches only one that exists."""

    path: str


@dataclass(frozen=True, slots=True)
class Transaction:
    """One entry of the total order.

    :ivar session: who asked for it; the closed session itself when one is closed.
    :ivar changes: path, node before, node after, for every node written.
    """

    zxid: int
    time: float
    session: int
    changes: tuple[Change, ...]


class Session:
    """What the leader knows of one session.

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
        self.log: list[Transaction] = []
        self.sessions: dict[int, Session] = {}
        self.links: list[Link] = []
        self.observers: list[Callable[[Transaction], None]] = []
        self._times: list[float] = []
        self._nodes: dict[str, Node] = {}
        self._lines: dict[str, _Line] = {}
        self._children: dict[str, dict[str, None]] = {"": {}}
        self._child_lines: dict[str, _Line] = {}
        self._counters: dict[str, int] = {}
        self._next_session = 0x1000

    # --- reading --------------------------------------------------------------------

    def node(self, path: str, view: int | None = None) -> Node | None:
        """Return a node as of `view`, None if there was none; of now without `view`."""
        if view is None or view >= self.zxid:
            return self._nodes.get(path)
        line = self._lines.get(path)
        found = line.at(view) if line is not None else None
        return found if isinstance(found, Node) else None

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

    def commit(self, session: int, ops: tuple[Op, ...]) -> Committed | Refused:
        """Apply a transaction, all of it or nothing; either way it takes its place."""
        staged: dict[str, Node | None] = {}
        versions: list[int] = []
        for index, op in enumerate(ops):
            fault = self._stage(op, staged, versions)
            if fault is not None:
                self._append(session, {})
                return Refused(index, fault)
        self._append(session, staged)
        return Committed(self.zxid if staged else 0, tuple(versions))

    def _stage(self, op: Op, staged: dict[str, Node | None], versions: list[int]) -> Fault | None:
        path = op.path
        node = staged[path] if path in staged else self._nodes.get(path)
        if isinstance(op, CreateOp):
            if node is not None:
                return Fault.NODE_EXISTS
            parent = path.rpartition("/")[0]
            above = staged[parent] if parent in staged else self._nodes.get(parent)
            if parent and above is None:
                return Fault.NO_NODE
            staged[path] = Node(op.data, 0, self.zxid + 1)
            versions.append(0)
            return None
        if node is None:
            return Fault.NO_NODE
        if op.version not in (ANY_VERSION, node.version):
            return Fault.BAD_VERSION
        if isinstance(op, SetOp):
            staged[path] = Node(op.data, node.version + 1, self.zxid + 1, node.ephemeral_owner)
            versions.append(node.version + 1)
            return None
        versions.append(-1)
        if isinstance(op, DeleteOp):
            if self._children.get(path):
                return Fault.OTHER
            staged[path] = None
        return None

    def create_sequential(self, session: int, prefix: str, data: bytes) -> Created | Refused:
        """Create an ephemeral node whose name ends in its parent's next number."""
        parent = prefix.rpartition("/")[0]
        if parent not in self._nodes:
            self._append(session, {})
            return Refused(0, Fault.NO_NODE)
        number = self._counters.get(parent, 0)
        if self.reuse_numbers:
            number = next(n for n in range(1 << 20) if f"{prefix}{n:010d}" not in self._nodes)
        self._counters[parent] = self._counters.get(parent, 0) + 1
        path = f"{prefix}{number:010d}"
        self._append(session, {path: Node(data, 0, self.zxid + 1, session)})
        return Created(path)

    def _append(self, session: int, staged: dict[str, Node | None]) -> None:
        self.zxid = zxid = self.zxid + 1
        changes = []
        for path, after in staged.items():
            before = self._nodes.get(path)
            changes.append((path, before, after))
            self._put(zxid, path, before, after)
        entry = Transaction(zxid, self.schedule.now, session, tuple(changes))
        self.log.append(entry)
        self._times.append(entry.time)
        if changes:
            for link in self.links:
                link.committed(entry)
            for observer in self.observers:
                observer(entry)

    def _put(self, zxid: int, path: str, before: Node | None, after: Node | None) -> None:
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

    def open_session(self, timeout: float) -> Session:
        """Begin a session."""
        session = Session(self._next_session, timeout, self.schedule.now)
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

    def watch_expiry(self, session: Session) -> None:
        """Expire a session a time-out after its last touch, unless there are others."""
        self.schedule.at(session.touched + session.timeout, self._check_expiry, session)

    def _check_expiry(self, session: Session) -> None:
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


class _Connection:
    """One connection of a link to one server.

    :ivar view: how far that server has followed the leader.
    :ivar lag: how many seconds it may be behind.
    :ivar direct: whether the server is the leader.
    :ivar cut: whether the server has lost its leader: it answers reads, writes hang.
    :ivar stalled: nothing gets through for the moment, in neither direction.
    :ivar contacts: when requests were processed that the leader has not been told of.
    :ivar phase: when, within half a tick, the server tells the leader of contacts.
    """

    __slots__ = (
        "busy",
        "catching_up",
        "child_watches",
        "contact_since",
        "contacts",
        "cut",
        "direct",
        "lag",
        "phase",
        "reply_at",
        "requests",
        "session",
        "stalled",
        "view",
        "watches",
    )  # fmt: skip

    def __init__(
        self, session: Session, view: int, lag: float, direct: bool, phase: float, now: float
    ) -> None:
        self.session = session
        self.view = view
        self.lag = lag
        self.direct = direct
        self.cut = False
        self.stalled = False
        self.requests: deque[Item] = deque()
        self.busy = False
        self.reply_at = now
        self.watches: dict[str, dict[Watcher, None]] = {}
        self.child_watches: dict[str, dict[Watcher, None]] = {}
        self.catching_up = False
        self.contact_since = now
        self.contacts: deque[float] = deque()
        self.phase = phase


class Link:
    """What a client library is to one process: a session, connections that come and go.

    :param deliver: takes ``(function, *arguments)`` and calls it in the process, in order,
        as soon as the process runs.
    :param on_connected: called with the session's id, whether it is a new session, and when the
        leader heard of it.
    :param on_suspended: the connection is lost.
    :param on_expired: the session is gone; a new one follows by itself.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        timeout: float,
        deliver: Deliver,
        *,
        on_connected: Callable[[int, bool, float], None],
        on_suspended: Callable[[], None],
        on_expired: Callable[[], None],
    ) -> None:
        self.coordinator = coordinator
        self.schedule = coordinator.schedule
        self.name = name
        self.timeout = timeout
        self.deliver = deliver
        self.on_connected = on_connected
        self.on_suspended = on_suspended
        self.on_expired = on_expired
        self.session: Session | None = None
        self.running = True
        self.dead = False
        self.slowness = 1.0
        self.steady = False
        self.sniped = 0
        self._connection: _Connection | None = None
        self._backlog: deque[Item] = deque()
        self._unanswered: deque[Then] = deque()
        self._seen = 0
        self._stray: deque[tuple[Commit | Create, Session]] = deque()
        self._connecting = False
        coordinator.links.append(self)

    # --- the process's side ---------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def impaired(self) -> bool:
        """Whether the connection is cut or stalled."""
        connection = self._connection
        return connection is not None and (connection.cut or connection.stalled)

    def connect(self) -> None:
        """Begin to connect, and go on trying."""
        if not self._connecting and not self.dead:
            self._connecting = True
            self.schedule.after(self._delay(0.05), self._connect)

    def submit(self, request: Request | Exists, then: Then, watcher: Watcher | None = None) -> None:
        """Send a request; it waits for a connection if there is none."""
        if self._connection is None:
            self._backlog.append((request, then, watcher))
            return
        self._send(self._connection, (request, then, watcher))

    def close(self) -> None:
        """End the session as a client does that stops in good order."""
        self.dead = True
        session = self.session
        self._drop(strays=True)
        if session is not None and not self.coordinator.down:
            self.schedule.after(self._delay(0.02), self.coordinator.close_session, session.id)

    def pause(self) -> None:
        """The process is stopped: no pings, nothing is handled."""
        self._end_contact()
        self.running = False

    def resume(self) -> None:
        """The process runs again."""
        self.running = True
        if self._connection is not None:
            self._connection.contact_since = self.schedule.now
        if self._connecting:
            self.schedule.after(0.0, self._connect)

    def die(self) -> None:
        """The process is dead; what it has sent may still arrive."""
        self.dead = True
        self._drop(strays=True)

    # --- faults ---------------------------------------------------------------------

    def lose(self) -> None:
        """Lose the connection, whatever is on its way."""
        if self._connection is None or self.dead:
            return
        self.schedule.note("%s loses its connection", self.name)
        unanswered = list(self._unanswered)
        suspended_first = self.schedule.chance() < 0.5
        self._drop(strays=True)
        if suspended_first:
            self.deliver(self.on_suspended)
        for then in unanswered:
            self.deliver(then, UNANSWERED)
        if not suspended_first:
            self.deliver(self.on_suspended)
        self.connect()

    def snipe(self, count: int) -> None:
        """Lose the connection after writes took effect and before their answers arrive."""
        self.sniped = count

    def cut(self) -> None:
        """Cut this link's server from the leader: reads go on, stale; the leader hears nothing."""
        if self._connection is not None and not self._connection.cut:
            self.schedule.note("%s: its server is cut from the leader", self.name)
            self._end_contact(cut=True)
            self._connection.cut = True

    def stall(self, duration: float) -> None:
        """Let nothing through for a while; then all of it arrives together."""
        connection = self._connection
        if connection is not None and not connection.stalled:
            self.schedule.note("%s: its network stalls for %.2f s", self.name, duration)
            self._end_contact()
            connection.stalled = True
            self.schedule.after(duration, self._unstall, connection)

    def _unstall(self, connection: _Connection) -> None:
        if connection is self._connection:
            connection.stalled = False
            connection.contact_since = self.schedule.now
            connection.busy = True
            self.schedule.after(0.0, self._process, connection)

    # --- the coordinator's side -------------------------------------------------------

    @property
    def in_contact(self) -> bool:
        """Whether the leader hears of this session."""
        connection = self._connection
        return (
            connection is not None
            and self.running
            and not connection.cut
            and not connection.stalled
        )

    def committed(self, entry: Transaction) -> None:
        """A transaction was committed: this link's server will follow."""
        connection = self._connection
        if connection is None or connection.catching_up:
            return
        if not (connection.watches or connection.child_watches):
            return
        for path, before, after in entry.changes:
            if path in connection.watches or (
                (before is None) != (after is None)
                and path.rpartition("/")[0] in connection.child_watches
            ):
                connection.catching_up = True
                delay = connection.lag * self.schedule.chance() + 0.002
                self.schedule.after(delay, self._catch_up, connection)
                return

    def session_ended(self) -> None:
        """The leader closed this link's session: its server will hang up soon."""
        if self._connection is not None:
            self.schedule.after(
                self._connection.lag * self.schedule.chance() + 0.002,
                self._hang_up,
                self._connection,
            )

    # --- inside -----------------------------------------------------------------------

    def _delay(self, most: float) -> float:
        return (0.001 + most * self.schedule.chance()) * self.slowness

    def _connect(self) -> None:
        if self.dead or not self._connecting or not self.running:
            return
        if self.coordinator.down:
            self.schedule.after(0.1 + self._delay(0.4), self._connect)
            return
        session = self.session
        self._settle_strays()
        if session is not None and session.closed_time is not None:
            self._expire()
            return
        self._connecting = False
        new = session is None
        if session is None:
            session = self.session = self.coordinator.open_session(self.timeout)
            session.link = self
        session.touched = self.schedule.now
        self._connection = self._new_connection(session)
        self.schedule.note("%s connects, session %x", self.name, session.id)
        backlog, self._backlog = self._backlog, deque()
        for item in backlog:
            self._send(self._connection, item)
        self.deliver(self.on_connected, session.id, new, self.schedule.now)

    def _new_connection(self, session: Session) -> _Connection:
        chance = self.schedule.chance
        head = self.coordinator.zxid
        sluggish = self.coordinator.sluggish
        direct = self.steady or chance() < (0.1 if sluggish else 0.4)
        lag = 0.0 if direct else chance() * chance() * 2.0
        view = head
        if lag:
            oldest = max(self._seen, self.coordinator.zxid_at(self.schedule.now - lag))
            view = oldest if sluggish else oldest + int((head - oldest + 1) * chance())
        phase = chance() * self.coordinator.tick / 2
        return _Connection(session, view, lag, direct, phase, self.schedule.now)

    def _expire(self) -> None:
        self.schedule.note("%s learns that its session is gone", self.name)
        self.session = None
        self._seen = 0
        backlog, self._backlog = self._backlog, deque()
        self.deliver(self.on_expired)
        for _, then, _ in backlog:
            self.deliver(then, UNANSWERED)
        self.schedule.after(self._delay(0.05), self._connect)

    def _send(self, connection: _Connection, item: Item) -> None:
        connection.requests.append(item)
        self._unanswered.append(item[1])
        if not connection.busy:
            connection.busy = True
            self.schedule.after(self._delay(0.02), self._process, connection)

    def _process(self, connection: _Connection) -> None:
        if connection is not self._connection or connection.stalled:
            return
        if not connection.requests:
            connection.busy = False
            return
        request, then, watcher = connection.requests[0]
        session = self.session
        write = isinstance(request, Commit | Create)
        if session is None or (write and connection.cut):
            return
        if write and session.closed_time is not None:
            self.lose()
            return
        connection.requests.popleft()
        if not connection.cut:
            self._settle_contacts(connection)
            connection.contacts.append(self.schedule.now)
        if isinstance(request, Commit | Create):
            answer = self._write(request, session)
            self._advance(connection, self.coordinator.zxid)
            if self.sniped and self.schedule.chance() < 0.5:
                self.sniped -= 1
                self.lose()
                return
        else:
            answer = self._read(connection, request, watcher)
        self._reply(connection, then, answer)
        if connection.requests:
            self.schedule.after(self._delay(0.004), self._process, connection)
        else:
            connection.busy = False

    def _write(self, request: Commit | Create, session: Session) -> Answer:
        if isinstance(request, Commit):
            answer: Answer = self.coordinator.commit(session.id, request.ops)
        else:
            answer = self.coordinator.create_sequential(session.id, request.path, request.data)
        if self.schedule.trace is not None:
            self.schedule.note(
                "%s: zxid %d %s -> %s",
                self.name,
                self.coordinator.zxid,
                _brief(request),
                _brief_answer(answer),
            )
        return answer

    def _read(
        self, connection: _Connection, request: Request | Exists, watcher: Watcher | None
    ) -> Answer:
        self._drift(connection)
        if isinstance(request, Get):
            answer: Answer = self.coordinator.node(request.path, connection.view) or NO_NODE
            if request.watch and watcher is not None and isinstance(answer, Node):
                connection.watches.setdefault(request.path, {})[watcher] = None
                self._rearm(connection)
        elif isinstance(request, Exists):
            answer = self.coordinator.node(request.path, connection.view) or NO_NODE
            if watcher is not None:
                connection.watches.setdefault(request.path, {})[watcher] = None
                self._rearm(connection)
        elif isinstance(request, Children):
            names = self.coordinator.names(request.path, connection.view)
            answer = NO_NODE if names is None else Listing(names)
            if request.watch and watcher is not None:
                connection.child_watches.setdefault(request.path, {})[watcher] = None
                self._rearm(connection)
        else:
            raise TypeError(f"no read: {request!r}")
        if self.schedule.trace is not None:
            self.schedule.note(
                "%s reads %s at %d of %d -> %s",
                self.name,
                request.path,
                connection.view,
                self.coordinator.zxid,
                _brief_answer(answer),
            )
        return answer

    def _rearm(self, connection: _Connection) -> None:
        """Make sure a watch armed on a stale view fires for what that view has not seen."""
        if connection.view < self.coordinator.zxid and not connection.catching_up:
            connection.catching_up = True
            delay = connection.lag * self.schedule.chance() + 0.002
            self.schedule.after(delay, self._catch_up, connection)

    def _drift(self, connection: _Connection) -> None:
        """Let the server follow the leader a little, at least as far as its lag allows."""
        head = self.coordinator.zxid
        if connection.cut or connection.view == head:
            return
        sluggish = self.coordinator.sluggish
        if not connection.lag or self.schedule.chance() < (0.1 if sluggish else 0.4):
            self._advance(connection, head)
            return
        oldest = max(connection.view, self.coordinator.zxid_at(self.schedule.now - connection.lag))
        further = 0.0 if sluggish else self.schedule.chance()
        self._advance(connection, oldest + int((head - oldest + 1) * further))

    def _catch_up(self, connection: _Connection) -> None:
        if connection is not self._connection:
            return
        connection.catching_up = False
        if not connection.cut:
            self._advance(connection, self.coordinator.zxid)

    def _advance(self, connection: _Connection, view: int) -> None:
        start, connection.view = connection.view, max(view, connection.view)
        if not (connection.watches or connection.child_watches):
            return
        for entry in self.coordinator.log[start:view]:
            for path, before, after in entry.changes:
                fired = connection.watches.pop(path, None)
                if fired:
                    self._fire(connection, fired, path)
                if (before is None) == (after is None):
                    continue
                fired = connection.child_watches.pop(path, None)
                if fired and after is None:
                    self._fire(connection, fired, path)
                parent = path.rpartition("/")[0]
                fired = connection.child_watches.pop(parent, None)
                if fired:
                    self._fire(connection, fired, parent)

    def _fire(self, connection: _Connection, watchers: Iterable[Watcher], path: str) -> None:
        # A client hands watches and answers to the program on two queues: one may overtake.
        late = self.schedule.chance() < 0.1
        when = max(connection.reply_at, self.schedule.now + self._delay(0.01))
        if late:
            when += 0.02 * self.schedule.chance()
        else:
            connection.reply_at = when
        for watcher in watchers:
            self.schedule.at(when, self._notify, connection, watcher, path)

    def _notify(self, connection: _Connection, watcher: Watcher, path: str) -> None:
        if connection is self._connection:
            self.deliver(watcher, path)

    def _reply(self, connection: _Connection, then: Then, answer: Answer) -> None:
        when = max(connection.reply_at, self.schedule.now + self._delay(0.02))
        connection.reply_at = when
        self.schedule.at(when, self._arrive, connection, then, answer, connection.view)

    def _arrive(self, connection: _Connection, then: Then, answer: Answer, view: int) -> None:
        if connection is not self._connection:
            return
        self._unanswered.popleft()
        self._seen = max(self._seen, view)
        self.deliver(then, answer)

    def _hang_up(self, connection: _Connection) -> None:
        if connection is self._connection:
            self.lose()

    def _end_contact(self, *, cut: bool = False) -> None:
        """Settle what the leader knows and will know; see `Coordinator`."""
        connection = self._connection
        if connection is None or not self.in_contact:
            return
        last = self.schedule.now - self.timeout / 10 * self.schedule.chance()
        for ping in (last - self.timeout / 10, last):
            if ping > connection.contact_since:
                connection.contacts.append(ping)
        self._settle_contacts(connection)
        if not cut:
            for contact in connection.contacts:
                when = self._reported(connection, contact)
                self.schedule.at(when, self._settle_contacts, connection)
        self.coordinator.watch_expiry(connection.session)

    def _reported(self, connection: _Connection, contact: float) -> float:
        """Return when the leader hears of a contact."""
        if connection.direct:
            return contact
        half = self.coordinator.tick / 2
        return math.ceil((contact - connection.phase) / half) * half + connection.phase

    def _settle_contacts(self, connection: _Connection) -> None:
        """Let the leader know of the contacts that its server has reported by now."""
        if connection.cut:
            return
        now, session = self.schedule.now, connection.session
        left: deque[float] = deque()
        for contact in connection.contacts:
            when = self._reported(connection, contact)
            if when <= now:
                session.touched = max(session.touched, when)
            else:
                left.append(contact)
        connection.contacts = left

    def _drop(self, *, strays: bool) -> None:
        connection, session = self._connection, self.session
        if connection is None or session is None:
            return
        self._end_contact()
        self._connection = None
        self._unanswered.clear()
        if strays and connection.requests:
            count = self.schedule.random.randrange(len(connection.requests) + 1)
            for request, _, _ in list(connection.requests)[:count]:
                if isinstance(request, Commit | Create):
                    self._stray.append((request, session))
                    self.schedule.after(self._delay(0.3), self._land)

    def _land(self) -> None:
        """Let the oldest request of a lost connection take effect."""
        if not self._stray:
            return
        request, session = self._stray.popleft()
        if session.closed_time is None and not self.coordinator.down:
            self.schedule.note("%s: a request of its lost connection lands", self.name)
            self._write(request, session)

    def _settle_strays(self) -> None:
        """Reconnecting ends what the old connection could still bring about."""
        if not self.coordinator.late_requests:
            while self._stray and self.schedule.chance() < 0.5:
                self._land()
            self._stray.clear()


def _brief(request: Commit | Create) -> str:
    if isinstance(request, Create):
        return f"create {request.path} {request.data.decode()}"
    return "; ".join(_brief_op(op) for op in request.ops)


def _brief_op(op: Op) -> str:
    name = "/".join(op.path.split("/")[-2:])
    if isinstance(op, CheckOp):
        return f"check {name}@{op.version}"
    if isinstance(op, SetOp):
        return f"set {name}@{op.version}={op.data.decode()}"
    if isinstance(op, DeleteOp):
        return f"delete {name}@{op.version}"
    return f"create {name}={op.data.decode()}"


def _brief_answer(answer: Answer) -> str:
    if isinstance(answer, Node):
        return f"{answer.data.decode()}@{answer.version}"
    if isinstance(answer, Committed):
        return f"done {answer.versions}"
    if isinstance(answer, Refused):
        return f"refused [{answer.index}] {answer.fault.name}"
    if isinstance(answer, Listing):
        return f"{list(answer.names)}"
    return repr(answer)

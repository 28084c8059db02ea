"""A client library on a modelled coordinator: one session, connections that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from qdo.coordination.protocol.machine import (
    Callback,
    Commit,
    CoordinatorRequest,
    Create,
    NoResponse,
    Response,
)
from tests.simulation.coordinator import Coordinator, LogEntry, SessionEntry
from tests.simulation.server import Exists, SimulatedServer, Watcher
from tests.simulation.vocabulary import answer_words, request_words

Deliver = Callable[..., None]
Item = tuple[CoordinatorRequest | Exists, Callback, "Watcher | None"]

UNANSWERED = NoResponse()


class Link:
    """The client library of one process: a session, connections that come and go.

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
        self.session: SessionEntry | None = None
        self.running = True
        self.dead = False
        self.slowness = 1.0
        self.steady = False
        self.sniped = 0
        self._server: SimulatedServer | None = None
        self._requests: deque[Item] = deque()
        self._busy = False
        self._reply_at = 0.0
        self._backlog: deque[Item] = deque()
        self._unanswered: deque[Callback] = deque()
        self._seen = 0
        self._stray: deque[tuple[Commit | Create, SessionEntry]] = deque()
        self._connecting = False
        coordinator.links.append(self)

    # --- the process's side ---------------------------------------------------------

    @property
    def impaired(self) -> bool:
        """Whether the connection is cut or stalled."""
        server = self._server
        return server is not None and (server.cut or server.stalled)

    def connect(self) -> None:
        """Start connecting, and keep trying."""
        if not self._connecting and not self.dead:
            self._connecting = True
            self.schedule.after(0.001 + 0.05 * self.schedule.chance(), self._connect)

    def submit(
        self, request: CoordinatorRequest | Exists, then: Callback, watcher: Watcher | None = None
    ) -> None:
        """Send a request; without a connection it waits for one."""
        if self._server is None:
            self._backlog.append((request, then, watcher))
            return
        self._send(self._server, (request, then, watcher))

    def close(self) -> None:
        """End the session as a client does that stops in good order."""
        self.dead = True
        session = self.session
        self._drop()
        if session is not None and not self.coordinator.down:
            self.schedule.after(self._delay(0.02), self.coordinator.close_session, session.id)

    def pause(self) -> None:
        """The process is stopped: no pings, nothing is handled."""
        self._end_contact()
        self.running = False

    def resume(self) -> None:
        """The process runs again."""
        self.running = True
        if self._server is not None:
            self._server.contact_since = self.schedule.now
        if self._connecting:
            self.schedule.after(0.0, self._connect)

    def die(self) -> None:
        """The process is dead; requests that it has sent may still arrive."""
        self.dead = True
        self._drop()

    # --- faults ---------------------------------------------------------------------

    def lose(self) -> None:
        """Lose the connection, whatever is on its way."""
        if self._server is None or self.dead:
            return
        self.schedule.note("%s loses its connection", self.name)
        unanswered = list(self._unanswered)
        suspended_first = self.schedule.chance() < 0.5
        self._drop()
        if suspended_first:
            self.deliver(self.on_suspended)
        for then in unanswered:
            self.deliver(then, UNANSWERED)
        if not suspended_first:
            self.deliver(self.on_suspended)
        self.connect()

    def take_over(self) -> None:
        """Let the parent attach to the session and leave it: its timeout begins again."""
        session = self.session
        if session is None or session.closed_time is not None or self.coordinator.down:
            return
        self.schedule.note("%s: its parent attaches to session %x", self.name, session.id)
        session.touched = self.schedule.now
        self.lose()
        self.coordinator.watch_expiry(session)

    def snipe(self, count: int) -> None:
        """Lose the connection after writes took effect and before their answers arrive."""
        self.sniped = count

    def cut(self) -> None:
        """Cut this link's server from the leader: reads are stale, and the leader hears nothing."""
        if self._server is not None and not self._server.cut:
            self.schedule.note("%s: its server is cut from the leader", self.name)
            self._end_contact(cut=True)
            self._server.cut = True

    def stall(self, duration: float) -> None:
        """Let nothing through for a while; then all of it arrives together."""
        server = self._server
        if server is not None and not server.stalled:
            self.schedule.note("%s: its network stalls for %.2f s", self.name, duration)
            self._end_contact()
            server.stalled = True
            self.schedule.after(duration, self._unstall, server)

    def _unstall(self, server: SimulatedServer) -> None:
        if server is self._server:
            server.stalled = False
            server.contact_since = self.schedule.now
            self._busy = True
            self.schedule.after(0.0, self._process, server)

    # --- the coordinator's side -------------------------------------------------------

    @property
    def in_contact(self) -> bool:
        """Whether the leader hears of this session."""
        return self._server is not None and self.running and self._server.in_contact

    def committed(self, entry: LogEntry) -> None:
        """A transaction was committed: this link's server will follow."""
        if self._server is not None:
            self._server.committed(entry)

    def session_ended(self) -> None:
        """The leader closed this link's session: its server will hang up soon."""
        if self._server is not None:
            self.schedule.after(
                self._server.lag * self.schedule.chance() + 0.002,
                self._hang_up,
                self._server,
            )

    # --- inside -----------------------------------------------------------------------

    def _delay(self, most: float) -> float:
        return (0.001 + most * self.schedule.chance()) * self.slowness

    def _connect(self) -> None:
        if self.dead or not self._connecting or not self.running:
            return
        if self.coordinator.down:
            self.schedule.after(0.1 + 0.4 * self.schedule.chance(), self._connect)
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
        self._server = self._new_server(session)
        self.schedule.note("%s connects, session %x", self.name, session.id)
        backlog, self._backlog = self._backlog, deque()
        for item in backlog:
            self._send(self._server, item)
        self.deliver(self.on_connected, session.id, new, self.schedule.now)

    def _new_server(self, session: SessionEntry) -> SimulatedServer:
        chance = self.schedule.chance
        head = self.coordinator.zxid
        sluggish = self.coordinator.sluggish
        direct = self.steady or chance() < (0.1 if sluggish else 0.4)
        lag = 0.0 if direct else chance() * chance() * 2.0
        view = head
        if lag:
            oldest = max(self._seen, self.coordinator.zxid_at(self.schedule.now - lag))
            view = oldest if sluggish else oldest + int((head - oldest + 1) * chance())
        server = SimulatedServer(
            self.coordinator,
            session,
            lambda watchers, path: self._fire(server, watchers, path),
            view=view,
            lag=lag,
            direct=direct,
        )
        return server

    def _expire(self) -> None:
        self.schedule.note("%s learns that its session is gone", self.name)
        self.session = None
        self._seen = 0
        backlog, self._backlog = self._backlog, deque()
        self.deliver(self.on_expired)
        for _, then, _ in backlog:
            self.deliver(then, UNANSWERED)
        self.schedule.after(0.001 + 0.05 * self.schedule.chance(), self._connect)

    def _send(self, server: SimulatedServer, item: Item) -> None:
        self._requests.append(item)
        self._unanswered.append(item[1])
        if not self._busy:
            self._busy = True
            self.schedule.after(self._delay(0.02), self._process, server)

    def _process(self, server: SimulatedServer) -> None:
        if server is not self._server or server.stalled:
            return
        if not self._requests:
            self._busy = False
            return
        request, then, watcher = self._requests[0]
        session = self.session
        write = isinstance(request, Commit | Create)
        if session is None or (write and server.cut):
            return
        if write and session.closed_time is not None:
            self.lose()
            return
        self._requests.popleft()
        server.contact()
        if isinstance(request, Commit | Create):
            answer = self._write(request, session)
            server.advance(self.coordinator.zxid)
            if self.sniped and self.schedule.chance() < 0.5:
                self.sniped -= 1
                self.lose()
                return
        else:
            answer = server.read(request, watcher)
        self._reply(server, then, answer)
        if self._requests:
            self.schedule.after(self._delay(0.004), self._process, server)
        else:
            self._busy = False

    def _write(self, request: Commit | Create, session: SessionEntry) -> Response:
        if isinstance(request, Commit):
            answer: Response = self.coordinator.commit(session.id, request.ops)
        else:
            answer = self.coordinator.create_sequential(session.id, request.path, request.data)
        if self.schedule.trace is not None:
            self.schedule.note(
                "%s: zxid %d %s -> %s",
                self.name,
                self.coordinator.zxid,
                request_words(request),
                answer_words(answer),
            )
        return answer

    def _fire(self, server: SimulatedServer, watchers: Iterable[Watcher], path: str) -> None:
        # A client hands watches and answers to the program on two queues: one may overtake.
        late = self.schedule.chance() < 0.1
        when = max(self._reply_at, self.schedule.now + self._delay(0.01))
        if late:
            when += 0.02 * self.schedule.chance()
        else:
            self._reply_at = when
        for watcher in watchers:
            self.schedule.at(when, self._notify, server, watcher, path)

    def _notify(self, server: SimulatedServer, watcher: Watcher, path: str) -> None:
        if server is self._server:
            self.deliver(watcher, path)

    def _reply(self, server: SimulatedServer, then: Callback, answer: Response) -> None:
        when = max(self._reply_at, self.schedule.now + self._delay(0.02))
        self._reply_at = when
        self.schedule.at(when, self._arrive, server, then, answer, server.view)

    def _arrive(self, server: SimulatedServer, then: Callback, answer: Response, view: int) -> None:
        if server is not self._server:
            return
        self._unanswered.popleft()
        self._seen = max(self._seen, view)
        self.deliver(then, answer)

    def _hang_up(self, server: SimulatedServer) -> None:
        # A server that is cut off does not hear of the end.
        if server is self._server and not server.cut:
            self.lose()

    def _end_contact(self, *, cut: bool = False) -> None:
        if self._server is not None and self.in_contact:
            self._server.end_contact(cut=cut)

    def _drop(self) -> None:
        server, session = self._server, self.session
        if server is None or session is None:
            return
        self._end_contact()
        server.closed = True
        self._server = None
        self._busy = False
        self._unanswered.clear()
        requests, self._requests = self._requests, deque()
        if requests:
            count = self.schedule.random.randrange(len(requests) + 1)
            for request, _, _ in list(requests)[:count]:
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
        """Reconnecting ends all possible effects of the old connection."""
        if not self.coordinator.late_requests:
            while self._stray and self.schedule.chance() < 0.5:
                self._land()
            self._stray.clear()

"""The server that a link is connected to: how far it is behind, its watches, its reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qdo.coordination.protocol.machine import (
    Children,
    ChildrenRead,
    Get,
    NodeMissing,
    Response,
    Stat,
)
from tests.simulation.coordinator import Coordinator, LogEntry, SessionEntry
from tests.simulation.vocabulary import answer_words

Watcher = Callable[[str], None]

NO_NODE = NodeMissing()


@dataclass(frozen=True, slots=True)
class Exists:
    """Watch a node whether it exists or not; a `Get` watches only one that exists."""

    path: str


Read = Get | Stat | Children | Exists


class SimulatedServer:
    """One connection's server.

    :param fire: called with watchers and the path that changed, before anything newer is read.
    :ivar view: how far this server has followed the leader.
    :ivar lag: how many seconds it may be behind.
    :ivar direct: whether it is the leader.
    :ivar cut: whether it has lost its leader: it answers reads, writes hang.
    :ivar stalled: nothing gets through to the client for the moment, in neither direction.
    :ivar contact_since: when the client was first heard of without a break.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        session: SessionEntry,
        fire: Callable[[Iterable[Watcher], str], None],
        *,
        view: int,
        lag: float,
        direct: bool,
    ) -> None:
        self.coordinator = coordinator
        self.schedule = coordinator.schedule
        self.session = session
        self.fire = fire
        self.view = view
        self.lag = lag
        self.direct = direct
        self.cut = False
        self.stalled = False
        self.closed = False
        self.contact_since = self.schedule.now
        self._phase = self.schedule.chance() * coordinator.tick / 2
        self._contacts: deque[float] = deque()
        self._watches: dict[str, dict[Watcher, None]] = {}
        self._child_watches: dict[str, dict[Watcher, None]] = {}
        self._catching_up = False

    # --- reading ------------------------------------------------------------------------

    def read(self, request: Read, watcher: Watcher | None) -> Response:
        """Answer from the state that this server has reached, or reaches just now."""
        self._drift()
        path = request.path
        if isinstance(request, Children):
            names = self.coordinator.names(path, self.view)
            answer: Response = NO_NODE if names is None else ChildrenRead(names)
            watched = request.watch and names is not None
        else:
            answer = self.coordinator.node(path, self.view) or NO_NODE
            watched = isinstance(request, Exists) or (
                request.watch and (isinstance(request, Stat) or answer is not NO_NODE)
            )
        if watched and watcher is not None:
            folder = self._child_watches if isinstance(request, Children) else self._watches
            folder.setdefault(path, {})[watcher] = None
            if self.view < self.coordinator.zxid:
                self._catch_up_soon()
        if self.schedule.trace is not None:
            self.schedule.note(
                "%s reads %s at %d of %d -> %s",
                self.session.link.name if self.session.link else "?",
                path,
                self.view,
                self.coordinator.zxid,
                answer_words(answer),
            )
        return answer

    def _drift(self) -> None:
        """Follow the leader a little, at least as far as the lag allows."""
        head = self.coordinator.zxid
        if self.cut or self.view == head:
            return
        sluggish = self.coordinator.sluggish
        if not self.lag or self.schedule.chance() < (0.1 if sluggish else 0.4):
            self.advance(head)
            return
        oldest = max(self.view, self.coordinator.zxid_at(self.schedule.now - self.lag))
        further = 0.0 if sluggish else self.schedule.chance()
        self.advance(oldest + int((head - oldest + 1) * further))

    # --- following the leader -----------------------------------------------------------

    def committed(self, entry: LogEntry) -> None:
        """Called at every commit; it matters only for watched nodes."""
        if self._catching_up or not (self._watches or self._child_watches):
            return
        for path, before, after in entry.changes:
            if path in self._watches or (
                (before is None) != (after is None)
                and path.rpartition("/")[0] in self._child_watches
            ):
                self._catch_up_soon()
                return

    def _catch_up_soon(self) -> None:
        if not self._catching_up:
            self._catching_up = True
            self.schedule.after(self.lag * self.schedule.chance() + 0.002, self._catch_up)

    def _catch_up(self) -> None:
        self._catching_up = False
        if not (self.cut or self.closed):
            self.advance(self.coordinator.zxid)

    def advance(self, view: int) -> None:
        """Follow the leader up to a transaction, firing watches on the way."""
        start, self.view = self.view, max(view, self.view)
        if not (self._watches or self._child_watches):
            return
        for entry in self.coordinator.log[start:view]:
            for path, before, after in entry.changes:
                self._fire(self._watches, path)
                if (before is None) != (after is None):
                    if after is None:
                        self._fire(self._child_watches, path)
                    self._fire(self._child_watches, path.rpartition("/")[0])

    def _fire(self, watches: dict[str, dict[Watcher, None]], path: str) -> None:
        fired = watches.pop(path, None)
        if fired:
            self.fire(fired, path)

    # --- telling the leader of contacts -------------------------------------------------

    @property
    def in_contact(self) -> bool:
        """Whether the leader gets the contacts of this server."""
        return not (self.cut or self.stalled)

    def contact(self) -> None:
        """Record the contact of a request."""
        if not self.cut:
            self._settle()
            self._contacts.append(self.schedule.now)

    def end_contact(self, *, cut: bool = False) -> None:
        """End the contact with the client or the leader.

        Clients ping each tenth of the timeout; the last ping was some time ago. A server that
        is cut off can report no contact any more, others do so in their time.
        """
        gap = self.session.timeout / 10
        last = self.schedule.now - gap * self.schedule.chance()
        self._contacts.extend(t for t in (last - gap, last) if t > self.contact_since)
        self._settle()
        if not cut:
            for contact in self._contacts:
                self.schedule.at(self._reported(contact), self._settle)
        self.cut = self.cut or cut
        self.coordinator.watch_expiry(self.session)

    def _reported(self, contact: float) -> float:
        """Return when the leader hears of a contact."""
        if self.direct:
            return contact
        half = self.coordinator.tick / 2
        return math.ceil((contact - self._phase) / half) * half + self._phase

    def _settle(self) -> None:
        """Pass contacts that have been reported by now to the leader."""
        if self.cut:
            return
        now, session = self.schedule.now, self.session
        left: deque[float] = deque()
        for contact in self._contacts:
            when = self._reported(contact)
            if when <= now:
                session.touched = max(session.touched, when)
            else:
                left.append(contact)
        self._contacts = left

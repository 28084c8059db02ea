"""Who rebalances: leadership that can be checked inside a transaction.

The candidate with the lowest number takes office by writing the `rebalancer` node at the
version it read, and keeps the version that its write left: the leader's fence. Everything a
leader writes checks that version, so a deposed leader can write nothing. "Not sure" means no:

=============  ===========================================  =================
state          cause                                        next
=============  ===========================================  =================
away           resigned or new, waiting out a cool-down     registering
registering    the candidate node is being created          following
following      a lower candidate is watched                 following, taking
taking         the write of `rebalancer` is under way       leading, away
leading        it was acknowledged                          away
=============  ===========================================  =================

A lost reply to taking office leads to `away`: the version is never read back, since it might
be another's. So does a refused fence, an unanswered plan, and `resign`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from enum import Enum

from qdo.coordination.layout import Layout, encode
from qdo.coordination.machine import (
    Answer,
    CheckOp,
    Children,
    Commit,
    Committed,
    CreateOp,
    DeleteOp,
    Get,
    Listing,
    Machine,
    Node,
    NoNode,
    SetOp,
    Unanswered,
)
from qdo.coordination.membership import Registration

log = logging.getLogger(__name__)

COOL_DOWN_SECONDS = 1.0
STEM = "candidate-"
_NUMBERED = re.compile(rf"{STEM}([0-9]{{10,19}})", re.ASCII)


class Office(Enum):
    AWAY = "away"
    REGISTERING = "registering"
    FOLLOWING = "following"
    TAKING = "taking"
    LEADING = "leading"


class Election(Machine):
    """One worker's candidacy."""

    def __init__(
        self,
        layout: Layout,
        worker: str,
        session: int,
        *,
        clock: Callable[[], float],
        on_elected: Callable[[int], None],
        on_deposed: Callable[[], None],
    ) -> None:
        super().__init__()
        self.office = Office.AWAY
        self._layout = layout
        self._worker = worker
        self._session = session
        self._clock = clock
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._registration: Registration | None = None
        self._path: str | None = None
        self._watched: str | None = None
        self._leaving: str | None = None
        self._return_at = float("-inf")
        self._up = False

    @property
    def leading(self) -> bool:
        """Whether this worker is leader as far as it knows; only its fence proves it."""
        return self.office is Office.LEADING

    def connected(self) -> None:
        self._up = True
        if self._leaving is not None:
            self._delete(self._leaving)
        if self.office is Office.TAKING:
            self.resign("the reply to taking office was lost")
        elif self.office is Office.REGISTERING and self._registration is not None:
            self._registration.connected()
            self._pass_on()
        elif self.office is Office.FOLLOWING:
            self._look()

    def suspended(self) -> None:
        self._up = False

    def changed(self, path: str) -> None:
        if self._up and self.office is Office.FOLLOWING and path == self._watched:
            self._look()

    def due(self) -> float:
        if self.office is Office.AWAY and self._up and self._leaving is None:
            return self._return_at
        return float("inf")

    def tick(self) -> None:
        if self._clock() >= self.due():
            self._register()

    def resign(self, reason: str, *, for_good: bool = False) -> None:
        """Give up office and candidacy, and stand again after a cool-down unless for good."""
        leading = self.leading
        if self.office is not Office.AWAY or for_good:
            log.info("%s: no candidate for rebalancer any more: %s", self._worker, reason)
        self.office = Office.AWAY
        self._return_at = float("inf") if for_good else self._clock() + COOL_DOWN_SECONDS
        self._registration = None
        if self._path is not None:
            self._leaving, self._path = self._path, None
            if self._up:
                self._delete(self._leaving)
        if leading:
            self._on_deposed()

    def _delete(self, path: str) -> None:
        def answered(answer: Answer) -> None:
            if not isinstance(answer, Unanswered):
                self._leaving = None

        self.ask(Commit((DeleteOp(path),)), answered)

    # --- standing ---------------------------------------------------------------------

    def _register(self) -> None:
        self.office = Office.REGISTERING
        self._registration = Registration(
            self._layout.election,
            STEM,
            encode({"worker": self._worker}),
            self._session,
            self._registered,
        )
        self._registration.connected()
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass on what the registration asks; its answers come back to it through us."""
        registration = self._registration
        while registration is not None and registration.outbox:
            request, then = registration.outbox.popleft()

            def answered(answer: Answer, then: Callable[[Answer], None] = then) -> None:
                then(answer)
                self._pass_on()

            self.ask(request, answered)

    def _registered(self, path: str) -> None:
        self._registration = None
        if self.office is not Office.REGISTERING:  # resigned meanwhile
            self._leaving = path
            self._delete(path)
            return
        self._path = path
        self.office = Office.FOLLOWING
        self._look()

    def _look(self) -> None:
        self._watched = None
        self.ask(Children(self._layout.election), self._listed)

    def _listed(self, answer: Answer) -> None:
        if self.office is not Office.FOLLOWING:
            return
        if isinstance(answer, NoNode):
            self._restore(self._layout.election)
        if not isinstance(answer, Listing):
            return
        own = (self._path or "").rpartition("/")[2]
        names = sorted(
            (name for name in answer.names if name.startswith(STEM)), key=_number
        )
        if own not in names:
            self._path = None
            self.resign("its candidate node is gone")
        elif names[0] == own:
            self.ask(Get(self._layout.rebalancer), self._rebalancer_read)
        else:
            before = names[names.index(own) - 1]
            self._watched = f"{self._layout.election}/{before}"
            self.ask(Get(self._watched, watch=True), self._predecessor_read)

    def _restore(self, path: str) -> None:
        """Make a node again that somebody deleted, and stand anew: else nobody ever leads."""
        self.ask(Commit((CreateOp(path, b""),)), lambda answer: None)
        self.resign(f"{path} is gone and is made again")

    def _predecessor_read(self, answer: Answer) -> None:
        if isinstance(answer, NoNode) and self.office is Office.FOLLOWING:
            self._look()

    # --- taking office ----------------------------------------------------------------

    def _rebalancer_read(self, answer: Answer) -> None:
        if self.office is not Office.FOLLOWING:
            return
        if isinstance(answer, NoNode):
            self._restore(self._layout.rebalancer)
        if not isinstance(answer, Node):
            return
        self.office = Office.TAKING
        take = SetOp(self._layout.rebalancer, encode({"worker": self._worker}), answer.version)
        self.ask(Commit((take, CheckOp(self._path or ""))), self._taken)

    def _taken(self, answer: Answer) -> None:
        if self.office is not Office.TAKING:
            return
        if isinstance(answer, Committed):
            self.office = Office.LEADING
            log.info("%s: elected as rebalancer", self._worker)
            self._on_elected(answer.versions[0])
        elif isinstance(answer, Unanswered):
            self.resign("the reply to taking office was lost")
        else:
            self.office = Office.FOLLOWING
            self._look()


def _number(name: str) -> tuple[int, str]:
    """Order candidates; what ZooKeeper has not numbered comes last and never leads."""
    found = _NUMBERED.fullmatch(name)
    return (int(found[1]) if found is not None else 1 << 62, name)

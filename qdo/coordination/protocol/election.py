"""Elect the rebalancer, with a fence that transactions check.

The candidate with the lowest number becomes leader by writing the `rebalancer` node at the version
that it read. The version after this write is the leader's fence. All writes of a leader check the
fence, so they fail after the loss of leadership. A worker in doubt does not lead:

=============  ===========================================  ====================
state          cause                                        next
=============  ===========================================  ====================
inactive       resigned or new, waiting out a cool-down     registering
registering    the candidate node is being created          following
following      a lower candidate is watched                 following, acquiring
acquiring      the write of `rebalancer` is in flight       leading, inactive
leading        it was acknowledged                          inactive
=============  ===========================================  ====================

A lost reply to the write leads to `inactive`. The worker never reads the version back, because
another worker may have written the node. A rejected fence, an unanswered plan and `resign` also
lead to `inactive`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from enum import Enum

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.registration import Registration
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode
from qdo.coordination.znodes.worker_node import parse_leader

log = logging.getLogger(__name__)
COOL_DOWN_SECONDS = 1.0
# The cool-down after the coordinator refused a request. No watch fires when an ACL changes.
REFUSED_SECONDS = 15.0
STEM = "candidate-"
_NUMBERED = re.compile(rf"{STEM}([0-9]{{10,19}})", re.ASCII)


class LeaderState(Enum):
    INACTIVE = "inactive"
    REGISTERING = "registering"
    FOLLOWING = "following"
    ACQUIRING = "acquiring"
    LEADING = "leading"


class Election(m.Machine):
    """One worker's candidacy for leader.

    :ivar fence: the fence of this worker while it is `leading`.
    :param process: the host, process and parent process of the worker. If this worker is lost, the
        next leader logs them.
    :param on_elected: a function of the fence, and of the name and process of the former leader.
    """

    def __init__(
        self,
        layout: Layout,
        worker: str,
        session: int,
        *,
        process: str,
        clock: Callable[[], float],
        on_elected: Callable[[int, str, str], None],
        on_deposed: Callable[[], None],
    ) -> None:
        super().__init__()
        self.office = LeaderState.INACTIVE
        self.fence = -1
        self._layout = layout
        self._worker = worker
        self._session = session
        self._process = process
        self._former = "", ""
        self._clock = clock
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._registration: Registration | None = None
        self._path: str | None = None
        self._watched: str | None = None
        self._leaving: str | None = None
        self._return_at = float("-inf")
        self._up = False
        self._ghosts: set[str] = set()

    @property
    def leading(self) -> bool:
        """Whether this worker believes that it is the leader; only the fence proves it."""
        return self.office is LeaderState.LEADING

    def connected(self) -> None:
        self._up = True
        if self._leaving is not None:
            self._delete(self._leaving)
        if self.office is LeaderState.ACQUIRING:
            self.resign("the reply to becoming leader was lost")
        elif self.office is LeaderState.REGISTERING and self._registration is not None:
            self._registration.connected()
            self._pass_on()
        elif self.office is LeaderState.FOLLOWING:
            self._look()

    def suspended(self) -> None:
        self._up = False

    def changed(self, path: str) -> None:
        if self._up and self.office is LeaderState.FOLLOWING and path == self._watched:
            self._look()

    def due(self) -> float:
        if self.office is LeaderState.INACTIVE and self._up and self._leaving is None:
            return self._return_at
        return float("inf")

    def tick(self) -> None:
        if self._clock() >= self.due():
            self._register()

    def resign(
        self, reason: str, *, for_good: bool = False, cool_down_seconds: float = COOL_DOWN_SECONDS
    ) -> None:
        """Give up leadership and candidacy; unless `for_good`, register again after a cool-down."""
        leading = self.leading
        if self.office is not LeaderState.INACTIVE or for_good:
            log.info("%s: resigned as candidate for rebalancer: %s", self._worker, reason)
        self.office = LeaderState.INACTIVE
        self._return_at = float("inf") if for_good else self._clock() + cool_down_seconds
        self._registration = None
        if self._path is not None:
            self._leaving = self._path
            self._path = None
            if self._up:
                self._delete(self._leaving)
        if leading:
            self._on_deposed()

    def _delete(self, path: str) -> None:
        def answered(answer: m.Response) -> None:
            if not isinstance(answer, m.NoResponse):
                self._leaving = None

        self.ask(m.Commit((m.DeleteOp(path),)), answered)

    # --- candidacy --------------------------------------------------------------------

    def _register(self) -> None:
        self.office = LeaderState.REGISTERING
        self._registration = Registration(
            self._layout.election,
            STEM,
            encode({"worker": self._worker}),
            self._session,
            self._registered,
            lambda: self._refused("create a node below", self._layout.election, "refused"),
        )
        self._registration.connected()
        self._pass_on()

    def _pass_on(self) -> None:
        registration = self._registration
        while registration is not None and registration.outbox:
            request, then = registration.outbox.popleft()

            def answered(answer: m.Response, then: Callable[[m.Response], None] = then) -> None:
                then(answer)
                self._pass_on()

            self.ask(request, answered)

    def _registered(self, path: str) -> None:
        self._registration = None
        if self.office is not LeaderState.REGISTERING:  # this worker has resigned since
            self._leaving = path
            self._delete(path)
            return
        self._path = path
        self.office = LeaderState.FOLLOWING
        self._look()

    def _look(self) -> None:
        self._watched = None
        self.ask(m.Children(self._layout.election), self._listed)

    def _listed(self, answer: m.Response) -> None:
        if self.office is not LeaderState.FOLLOWING:
            return
        if isinstance(answer, m.NodeMissing):
            self._recreate(self._layout.election)
        if isinstance(answer, m.Refused):
            self._refused("list", self._layout.election, answer.reason)
        if not isinstance(answer, m.ChildrenRead):
            return
        own = (self._path or "").rpartition("/")[2]
        names = [name for name in answer.names if name.startswith(STEM)]
        names = sorted((name for name in names if name not in self._ghosts), key=_number)
        if own not in names:
            self._path = None
            self.resign("its candidate node is gone")
        elif names[0] == own:
            self.ask(m.Get(self._layout.rebalancer), self._rebalancer_read)
        else:
            before = names[names.index(own) - 1]
            self._watched = path = f"{self._layout.election}/{before}"
            self.ask(m.Stat(path, watch=True), lambda answer: self._predecessor_read(path, answer))

    def _refused(self, what: str, path: str, reason: str) -> None:
        self.resign(
            f"it cannot {what} {path}: {reason}; correct its ACL", cool_down_seconds=REFUSED_SECONDS
        )

    def _recreate(self, path: str) -> None:
        """Create a deleted node of the election again, and become a candidate again."""
        self.ask(m.Commit((m.CreateOp(path, b""),)), lambda answer: None)
        self.resign(f"{path} was deleted; recreating it")

    def _predecessor_read(self, path: str, answer: m.Response) -> None:
        if self.office is not LeaderState.FOLLOWING or path != self._watched:
            return
        if isinstance(answer, m.NodeRead) and not answer.ephemeral_owner:
            self._ghosts.add(path.rpartition("/")[2])
            log.warning(
                "%s: ignoring %s: it has no session, so it is not a candidate; delete it",
                self._worker,
                path,
            )
            self._look()
        elif isinstance(answer, m.NodeMissing):
            self._look()

    # --- becoming leader --------------------------------------------------------------

    def _rebalancer_read(self, answer: m.Response) -> None:
        if self.office is not LeaderState.FOLLOWING:
            return
        if isinstance(answer, m.NodeMissing):
            self._recreate(self._layout.rebalancer)
        if isinstance(answer, m.Refused):
            self._refused("read", self._layout.rebalancer, answer.reason)
        if not isinstance(answer, m.NodeRead):
            return
        self.office = LeaderState.ACQUIRING
        self._former = parse_leader(answer.data)
        value = encode({"worker": self._worker, "process": self._process})
        take = m.SetOp(self._layout.rebalancer, value, answer.version)
        self.ask(m.Commit((take, m.CheckOp(self._path or ""))), self._taken)

    def _taken(self, answer: m.Response) -> None:
        if self.office is not LeaderState.ACQUIRING:
            return
        if isinstance(answer, m.Committed):
            self.office = LeaderState.LEADING
            log.info("%s: elected as rebalancer", self._worker)
            self.fence = answer.versions[0]
            self._on_elected(self.fence, *self._former)
        elif isinstance(answer, m.NoResponse):
            self.resign("the reply to becoming leader was lost")
        elif isinstance(answer, m.Rejected) and answer.fault is m.CommitError.OTHER:
            self._refused("write", self._layout.rebalancer, answer.reason)
        else:
            self.office = LeaderState.FOLLOWING
            self._look()


def _number(name: str) -> tuple[int, str]:
    """Return a candidate's sort key; names without a ZooKeeper number come last and never lead."""
    found = _NUMBERED.fullmatch(name)
    return (int(found[1]) if found is not None else 1 << 62, name)

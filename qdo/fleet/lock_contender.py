"""One contender for a lock. A machine without I/O.

A contender is an ephemeral sequential node ``x-<id>-<number>``, or ``s-<id>-<number>`` for a shared
lock. An exclusive one waits for the next smaller contender of any kind, a shared one for the next
smaller exclusive one. Numbers only grow, so no later contender comes first, and each one watches
one node only. Contenders acquire the lock in creation order, so none starves.

The fence is the zxid of the contender's creation. Holders of an exclusive lock come in that order.

A contender that gives up deletes its node, behind a barrier if its creation was not answered. So
a node of a caller that has left cannot get the lock later.

The leader deletes the folder of a lock after an hour without a contender. A contender without a
folder makes it in the request before its node: a caller that made it first, and waited for the
answer, could lose it again in between, as often as folders are deleted. Numbers then begin at 0
again, which is safe: the folder was empty. Fences still grow. Where the folder cannot be made, the
contender leaves; its caller makes all folders above and another contender.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.registration import Registration

_CONTENDER = re.compile("([xs])-[0-9a-f]{8}-([0-9]{10,})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Contender:
    """A node below a lock."""

    name: str
    exclusive: bool
    number: int

    @classmethod
    def parse(cls, name: str) -> Contender | None:
        match = _CONTENDER.fullmatch(name)
        return cls(name, match[1] == "x", int(match[2])) if match else None

    def waits_for(self, other: Contender) -> bool:
        return other.number < self.number and (self.exclusive or other.exclusive)


class LockContender(Registration):
    """Waits for a lock, holds it, and gives it up.

    :ivar fence: 0 before it holds the lock.
    :ivar left: whether it has no node, and will have none.
    :ivar homeless: whether it has left because the lock has no folder, and cannot get one.
    :ivar ahead: data of the contender that this one waits for, b"" if it waits for none.
    :param id: eight hexadecimal digits that no other contender has.
    :param on_change: called when it holds the lock, when it knows the contender ahead, when it is
        refused, and when it has left.
    """

    def __init__(
        self,
        folder: str,
        id: str,
        data: bytes,
        session: int,
        *,
        shared: bool,
        on_change: Callable[[], None],
    ) -> None:
        stem = f"{'s' if shared else 'x'}-{id}-"
        super().__init__(folder, stem, data, session, lambda path: self._survey(), on_change)
        self.fence = 0
        self.left = False
        self.homeless = False
        self._makes_folder = True
        self._zxid = 0
        self.ahead = b""
        self._on_change = on_change
        self._leaving = False
        self._watched = ""

    def leave(self) -> None:
        self._leaving = True
        if self.path is not None:
            self._delete()

    # --- the session --------------------------------------------------------------------

    def connected(self) -> None:
        super().connected()
        if self.path is not None:
            if self._leaving:
                self._delete()
            else:
                self._survey()

    def changed(self, path: str) -> None:
        if path == self._watched:
            self._survey()

    def _create(self) -> None:
        if self._leaving:
            self._gone()  # behind the barrier: no creation of this contender can follow
        else:
            super()._create()

    def _created(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing):
            self._find_no_folder()
        else:
            super()._created(answer)

    def _barrier_done(self, answer: m.Response) -> None:
        if isinstance(answer, m.Rejected):
            self._find_no_folder()
        else:
            super()._barrier_done(answer)

    def _listed(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing):
            self._find_no_folder()
        else:
            super()._listed(answer)

    def _find_no_folder(self) -> None:
        if self._leaving:
            self._gone()
        elif self._makes_folder:
            self.ask(m.Commit((m.CreateOp(self._folder, b""),)), self._folder_made)
            self._create()
        else:
            self.homeless = self._leaving = True
            self._gone()

    def _folder_made(self, answer: m.Response) -> None:
        if isinstance(answer, m.Rejected):
            self._makes_folder = answer.fault is m.CommitError.NODE_EXISTS

    # --- the order of contenders ----------------------------------------------------------

    def _survey(self) -> None:
        if self._leaving:
            self._delete()
        elif not self.fence and self.path is not None:
            if not self._zxid:
                # Send it together with the next request: this saves a round trip.
                self.ask(m.Stat(self.path), self._own_read)
            self.ask(m.Children(self._folder), self._surveyed)

    def _surveyed(self, answer: m.Response) -> None:
        if not isinstance(answer, m.ChildrenRead) or self.path is None or self._leaving:
            return
        own = Contender.parse(self.path.rpartition("/")[2])
        # Nodes of other programs are not contenders.
        contenders = filter(None, map(Contender.parse, answer.names))
        before = [each for each in contenders if own is not None and own.waits_for(each)]
        if before:
            last = max(before, key=lambda each: each.number)
            self._watched = f"{self._folder}/{last.name}"
            self.ask(m.Get(self._watched, watch=True), self._ahead_read)
        elif self._zxid and not self.fence:
            self.ahead = b""
            self.fence = self._zxid
            self._on_change()

    def _ahead_read(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing):
            self._survey()
        elif isinstance(answer, m.NodeRead):
            self.ahead = answer.data
            self._on_change()

    def _own_read(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeRead):
            self._zxid = answer.mzxid
        elif isinstance(answer, m.NodeMissing):
            self._gone()  # another program has deleted it

    # --- leaving --------------------------------------------------------------------------

    def _delete(self) -> None:
        if self.path is not None and not self.left:
            self.ask(m.Commit((m.DeleteOp(self.path),)), self._deleted)

    def _deleted(self, answer: m.Response) -> None:
        if not isinstance(answer, m.NoResponse):
            self._gone()

    def _gone(self) -> None:
        if not self.left:
            self.left = True
            self._on_change()

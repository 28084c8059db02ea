"""One contender for a lock. The class is a machine without I/O.

A contender is an ephemeral sequential node ``x-<id>-<number>``, or ``s-<id>-<number>`` for a shared
lock. An exclusive contender waits until the contender of either kind with the next lower number is
gone. A shared contender waits until the exclusive contender with the next lower number is gone.
Numbers only grow, so later contenders never come first. Each contender watches only one node.
Contenders acquire the lock in the order of their creation, so every contender gets its turn.

The fence is the zxid of the contender's creation. Each holder of an exclusive lock has a larger
fence than earlier holders.

A contender that gives up deletes its node. If the creation of its node got no answer, the contender
first sends a barrier. Otherwise the node of a departed caller could get the lock later.

The leader deletes the folder of a lock after an hour without a contender. A contender without a
folder creates the folder in the request right before its node. If the contender waited for the
answer, the leader could delete the folder again before the second request. In a new folder, numbers
begin at 0 again, which is safe because the old folder was empty. Fences still grow. If the
contender cannot create the folder, the contender leaves. The caller then creates all missing
folders and another contender.
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
    """Waits for a lock, holds it, and releases it.

    :ivar fence: the fence of the holder; 0 before the contender holds the lock.
    :ivar left: whether the contender has no node, and will never have one.
    :ivar homeless: whether the contender has left because it cannot create the lock's folder.
    :ivar ahead: data of the contender that this contender waits for, or b"".
    :param id: eight hexadecimal digits that no other contender has.
    :param on_change: a function to call when the contender holds the lock, knows the contender
        ahead, is refused, or has left.
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
            self._gone()  # after the barrier, the coordinator cannot create this contender's node
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
                # Send this request together with the next request, to save a round trip.
                self.ask(m.Stat(self.path), self._own_read)
            self.ask(m.Children(self._folder), self._surveyed)

    def _surveyed(self, answer: m.Response) -> None:
        if not isinstance(answer, m.ChildrenRead) or self.path is None or self._leaving:
            return
        own = Contender.parse(self.path.rpartition("/")[2])
        # Ignore nodes that other programs created.
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
            self._gone()  # another program has deleted the node

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

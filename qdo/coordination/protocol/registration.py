"""Register with exactly one ephemeral sequential node per session, even if answers are lost.

If the reply to the creation is lost, the node may or may not exist. Then the machine commits a
barrier transaction. After the barrier, no late request can take effect, and no lagging server can
return old data. The machine lists the nodes, and adopts a node with its session as
`ephemeralOwner`. Otherwise, the machine creates a node again. Workers, candidates and components
use this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qdo.coordination.protocol import machine as m
from qdo.coordination.znodes.values import encode

# The maximum number of queues in a description, because many clients read component nodes.
MOST_FAULTS = 100


class Registration(m.Machine):
    """Creates one node ``<folder>/<stem>NNNNNNNNNN``, and reports its path once."""

    def __init__(
        self,
        folder: str,
        stem: str,
        data: bytes,
        session: int,
        on_registered: Callable[[str], None],
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.path: str | None = None
        # The reason why the coordinator refused to create the node; "" if it did not refuse.
        self.refusal = ""
        self._folder = folder
        self._stem = stem
        self._data = data
        self._session = session
        self._on_registered = on_registered
        self._on_refused = on_refused
        self._sent = False
        self._unread = 0

    def connected(self) -> None:
        """Create the node; if an earlier reply was lost, find out whether the node exists."""
        if self.path is None:
            if self._sent:
                self.ask(m.Commit((m.CheckOp(self._folder),)), self._barrier_done)
            else:
                self._create()

    def _create(self) -> None:
        self._sent = True
        self.ask(m.Create(f"{self._folder}/{self._stem}", self._data), self._created)

    def _created(self, answer: m.Response) -> None:
        if isinstance(answer, m.Created):
            self._adopt(answer.path)
        elif isinstance(answer, m.Refused):
            self.refusal = answer.reason
            self._on_refused()

    def _barrier_done(self, answer: m.Response) -> None:
        if isinstance(answer, m.Committed):
            self.ask(m.Children(self._folder), self._listed)

    def _listed(self, answer: m.Response) -> None:
        if not isinstance(answer, m.ChildrenRead):
            return
        names = [name for name in answer.names if name.startswith(self._stem)]
        self._unread = len(names)
        for name in names:
            self._look(f"{self._folder}/{name}")
        if not names:
            self._create()

    def _look(self, path: str) -> None:
        self.ask(m.Stat(path), lambda answer: self._looked(path, answer))

    def _looked(self, path: str, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return  # `connected` starts over
        self._unread -= 1
        if isinstance(answer, m.NodeRead) and answer.ephemeral_owner == self._session:
            self._adopt(path)
        elif self._unread == 0 and self.path is None:
            self._create()

    def _adopt(self, path: str) -> None:
        if self.path is None:
            self.path = path
            self._on_registered(path)


class Component(Registration):
    """The description of a process; `faults` returns its unusable queues and the reasons."""

    def __init__(
        self,
        folder: str,
        host: str,
        value: dict[str, Any],
        session: int,
        on_registered: Callable[[str], None] = lambda path: None,
    ) -> None:
        super().__init__(folder, f"{host}-", encode(value), session, on_registered)
        self._due = False
        self.faults: Callable[[], dict[str, str]] = dict

    def connected(self) -> None:
        """Register, or rewrite the node, which the parent process may have written meanwhile."""
        super().connected()
        self._written = b""

    def refresh(self, value: dict[str, Any]) -> None:
        """Write the description of the process, even if unchanged, to show that it lives."""
        known = {**value.get("faults", {}), **self.faults()}
        faults = list(known.items())[:MOST_FAULTS]
        self._data = encode({**value, "faults": dict(faults)} if faults else value)
        self._due = True

    def flush(self) -> None:
        if self.path is not None and self._due:
            self._due = False
            # Do not check the version. Each write has the whole description, so it repairs a lost
            # write. It may also overwrite a note of the parent process.
            self.ask(m.Commit((m.SetOp(self.path, self._data, m.ANY_VERSION),)), _ignore)


def _ignore(answer: m.Response) -> None: ...

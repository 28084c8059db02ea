"""Watches on whole trees: ZooKeeper's addWatch (opcode 106), in its mode "persistent recursive".

kazoo does not support it. Servers have it since version 3.6. The watch stays armed until the
connection is lost; servers do not restore it for a client that connects again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

from kazoo.protocol.serialization import write_string
from kazoo.protocol.states import EVENT_TYPE_MAP, WatchedEvent

_INT = struct.Struct("!i")
_PERSISTENT_RECURSIVE = 1


class AddWatch:
    """A request for a watch on a node and everything below it; the answer is True."""

    type: ClassVar[int] = 106
    watcher = None

    def __init__(self, path: str) -> None:
        self.path = path

    def serialize(self) -> bytearray:
        """Return the request's body."""
        body = bytearray(write_string(self.path))
        body += _INT.pack(_PERSISTENT_RECURSIVE)
        return body

    @classmethod
    def deserialize(cls, buffer: bytes, offset: int) -> bool:
        """Read the answer, which has no content."""
        return True


class TreeWatchers:
    """The watched trees of one connection, by the full paths of their roots.

    Watchers are called on the thread of the connection and must return at once. So their events
    come in the order of the changes, and before the answers that follow them.
    """

    def __init__(self) -> None:
        self._watchers: dict[str, set[Callable[[WatchedEvent], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def add(self, root: str, watcher: Callable[[WatchedEvent], None]) -> None:
        """Call `watcher` for every change at or below a path."""
        self._watchers.setdefault(root, set()).add(watcher)

    def clear(self) -> None:
        """Forget all watches: the connection is lost."""
        self._watchers.clear()

    def fire(self, kind: int, path: str, client: Any) -> None:
        """Call the watchers of the trees that contain a path."""
        if not self._watchers or client._stopped.is_set():
            return
        event = WatchedEvent(EVENT_TYPE_MAP[kind], client._state, client.unchroot(path))
        for root, watchers in list(self._watchers.items()):
            if f"{path}/".startswith(f"{root.rstrip('/')}/"):
                for watcher in list(watchers):
                    watcher(event)

"""Operations of ZooKeeper 3.6 and later that kazoo lacks.

multiRead (opcode 22, ZOOKEEPER-1525) reads many nodes at once. Without multiRead, a worker that
takes a thousand queues makes a thousand reads, at about 100 us each in Python. With multiRead, the
same reads take a tenth of this time.

addWatch (opcode 106), in its mode "persistent recursive", watches whole trees. The watch stays
armed as long as the connection exists. Servers do not restore the watch when the client reconnects.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from kazoo.exceptions import EXCEPTIONS
from kazoo.protocol.serialization import GetData, MultiHeader, write_string
from kazoo.protocol.states import EVENT_TYPE_MAP, WatchedEvent, ZnodeStat

_INT = struct.Struct("!i")
_PERSISTENT_RECURSIVE = 1
_STAT_BYTES = struct.calcsize("!qqqqiiiqiiq")
_ERROR = -1


class MultiRead:
    """An operation that reads the data of many nodes.

    The answer is a list in the order of the paths. Each item is (data, ZnodeStat), or the exception
    that a single read would have raised.
    """

    type: ClassVar[int] = 22
    watcher = None

    def __init__(self, paths: Sequence[str]) -> None:
        self.reads = [GetData(path, None) for path in paths]

    def serialize(self) -> bytearray:
        body = bytearray()
        for read in self.reads:
            body += MultiHeader(read.type, False, -1).serialize()
            body += read.serialize()
        body += MultiHeader(_ERROR, True, -1).serialize()
        return body

    @classmethod
    def deserialize(
        cls, buffer: bytes, offset: int
    ) -> list[tuple[bytes | None, ZnodeStat] | Exception]:
        results: list[tuple[bytes | None, ZnodeStat] | Exception] = []
        header, offset = MultiHeader.deserialize(buffer, offset)
        while not header.done:
            if header.type == _ERROR:
                results.append(EXCEPTIONS[_INT.unpack_from(buffer, offset)[0]]())
                offset += _INT.size
            else:
                data, stat = GetData.deserialize(buffer, offset)
                results.append((data, stat))
                offset += _INT.size + len(data or b"") + _STAT_BYTES
            header, offset = MultiHeader.deserialize(buffer, offset)
        return results


class AddWatch:
    """An operation that watches a node and all nodes below it; the answer is True."""

    type: ClassVar[int] = 106
    watcher = None

    def __init__(self, path: str) -> None:
        self.path = path

    def serialize(self) -> bytearray:
        body = bytearray(write_string(self.path))
        body += _INT.pack(_PERSISTENT_RECURSIVE)
        return body

    @classmethod
    def deserialize(cls, buffer: bytes, offset: int) -> bool:
        """Return True, because the answer has no content."""
        return True


class TreeWatchers:
    """The watchers of one connection, by the full paths of the trees that they watch.

    The thread of the connection calls the watchers, which must return at once. So the watchers get
    events in the order of the changes, and before the answers that the server sent later.
    """

    def __init__(self) -> None:
        self._watchers: dict[str, set[Callable[[WatchedEvent], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def add(self, root: str, watcher: Callable[[WatchedEvent], None]) -> None:
        """Call `watcher` for every change at or below a path."""
        self._watchers.setdefault(root, set()).add(watcher)

    def clear(self) -> None:
        """Forget all watches after the loss of the connection."""
        self._watchers.clear()

    def fire(self, kind: int, path: str, client: Any) -> None:
        if not self._watchers or client._stopped.is_set():
            return
        event = WatchedEvent(EVENT_TYPE_MAP[kind], client._state, client.unchroot(path))
        for root, watchers in list(self._watchers.items()):
            if f"{path}/".startswith(f"{root.rstrip('/')}/"):
                for watcher in list(watchers):
                    watcher(event)

"""Reading many nodes in one request: ZooKeeper's multiRead (opcode 22, ZOOKEEPER-1525).

kazoo has no call for it. A worker that takes a thousand queues would otherwise send and
receive a thousand requests, at some 100 us each in Python; in batches the same reads take a
tenth of that. Servers know it from 3.6 on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

from kazoo.exceptions import EXCEPTIONS
from kazoo.protocol.serialization import GetData, MultiHeader
from kazoo.protocol.states import ZnodeStat

BATCH = 250
"""Nodes in a request: bounds the size of the answer and how long the server works on it."""

_ERROR = -1
_INT = struct.Struct("!i")


class MultiRead:
    """A request of many reads of data; the answer is a list in their order, each either
    (data, ZnodeStat) or the exception that this read would have raised."""

    type: ClassVar[int] = 22
    watcher = None

    def __init__(self, paths: Sequence[str]) -> None:
        self.reads = [GetData(path, None) for path in paths]

    def serialize(self) -> bytearray:
        """Return the request's body as jute records."""
        body = bytearray()
        for read in self.reads:
            body += MultiHeader(read.type, False, -1).serialize()
            body += read.serialize()
        body += MultiHeader(_ERROR, True, -1).serialize()
        return body

    @classmethod
    def deserialize(cls, buffer: bytes, offset: int) -> list[tuple[bytes, ZnodeStat] | Exception]:
        """Read the answer's body."""
        results: list[tuple[bytes, ZnodeStat] | Exception] = []
        header, offset = MultiHeader.deserialize(buffer, offset)
        while not header.done:
            if header.type == _ERROR:
                results.append(EXCEPTIONS[_INT.unpack_from(buffer, offset)[0]]())
                offset += _INT.size
            else:
                data, stat = GetData.deserialize(buffer, offset)
                results.append((data, stat))
                offset += _INT.size + len(data) + _STAT_BYTES
            header, offset = MultiHeader.deserialize(buffer, offset)
        return results


_STAT_BYTES = struct.calcsize("!qqqqiiiqiiq")


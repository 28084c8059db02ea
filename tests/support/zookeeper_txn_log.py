"""Reads ZooKeeper's transaction log: every change, in the order in which it took effect.

The format is that of ZooKeeper 3.6 to 3.9 (FileTxnLog, TxnHeader and the jute records of
org.apache.zookeeper.txn): a file header, then for each transaction a checksum, a length, the
bytes, and an end mark; the rest of the file is padded with zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CREATE, DELETE, SET_DATA, SET_ACL, CHECK, MULTI, CREATE2 = 1, 2, 5, 7, 13, 14, 15
CREATE_SESSION, CLOSE_SESSION, ERROR = -10, -11, -1


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What one operation did to one node; `data` is None where the node was removed."""

    path: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Txn:
    """One transaction."""

    zxid: int
    session: int
    changes: tuple[NodeChange, ...]


class _Reader:
    """Takes jute's primitives off a buffer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def buffer(self) -> bytes:
        length = max(0, self.number(">i"))
        self._at += length
        return self._data[self._at - length : self._at]

    def text(self) -> str:
        return self.buffer().decode()


def read_log(folder: Path) -> Iterator[Txn]:
    """Yield the transactions of all log files of a server, in order."""
    files = sorted(folder.glob("**/log.*"), key=lambda path: int(path.suffix[1:], 16))
    ephemerals: dict[int, set[str]] = {}
    for file in files:
        for record in _records(file.read_bytes()):
            yield _txn(_Reader(record), ephemerals)


def _records(data: bytes) -> Iterator[bytes]:
    at = 16
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">i", data, at + 8)
        if length <= 0:
            return
        yield data[at + 12 : at + 12 + length]
        at += 12 + length + 1


def _txn(reader: _Reader, ephemerals: dict[int, set[str]]) -> Txn:
    session = reader.number(">q")
    reader.number(">i")
    zxid = reader.number(">q")
    reader.number(">q")
    kind = reader.number(">i")
    changes = tuple(_changes(kind, reader, session, ephemerals))
    return Txn(zxid, session, changes)


def _changes(
    kind: int, reader: _Reader, session: int, ephemerals: dict[int, set[str]]
) -> Iterator[NodeChange]:
    if kind in (CREATE, CREATE2):
        path, data = reader.text(), reader.buffer()
        for _ in range(reader.number(">i")):
            reader.number(">i")
            reader.text()
            reader.text()
        if reader.number("?"):
            ephemerals.setdefault(session, set()).add(path)
        yield NodeChange(path, data)
    elif kind == SET_DATA:
        yield NodeChange(reader.text(), reader.buffer())
    elif kind == DELETE:
        path = reader.text()
        for paths in ephemerals.values():
            paths.discard(path)
        yield NodeChange(path, None)
    elif kind == MULTI:
        parts = [
            (reader.number(">i"), _Reader(reader.buffer())) for _ in range(reader.number(">i"))
        ]
        # A rejected transaction is logged too, its operations up to the culprit as if done.
        if all(part != ERROR for part, _ in parts):
            for part, record in parts:
                yield from _changes(part, record, session, ephemerals)
    elif kind == CLOSE_SESSION:
        for path in sorted(ephemerals.pop(session, ())):
            yield NodeChange(path, None)
    elif kind not in (CHECK, SET_ACL, CREATE_SESSION, ERROR):
        raise ValueError(f"the log holds a transaction of kind {kind}, which no test makes")

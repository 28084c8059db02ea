"""Reading many nodes in one request: ZooKeeper's multiRead (opcode 22, ZOOKEEPER-1525).

kazoo does not support it. A worker that takes a thousand queues would otherwise send and
receive a thousand requests, at some 100 us each in Python. In batches the same reads take a
tenth of that. Servers support it since version 3.6.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.exceptions import EXCEPTIONS, KazooException, NoNodeError
from kazoo.protocol.serialization import GetData, MultiHeader
from kazoo.protocol.states import ZnodeStat

from qdo.coordination.client import Client
from qdo.coordination.refusals import is_refusal, refusal_reason
from qdo.errors import CoordinatorUnreachableError, NodeRefusedError

BATCH = 250
"""Nodes in a request: limits the size of the answer and the server's time for it."""

_ERROR = -1
_INT = struct.Struct("!i")


class MultiRead:
    """A request of many reads of data.

    The answer is a list in the same order. Each item is (data, ZnodeStat), or the exception that
    this read would have raised.
    """

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
    def deserialize(
        cls, buffer: bytes, offset: int
    ) -> list[tuple[bytes | None, ZnodeStat] | Exception]:
        """Read the answer's body."""
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


_STAT_BYTES = struct.calcsize("!qqqqiiiqiiq")


WINDOW = 1000
"""Requests in flight at once: enough to hide the network, few enough to keep memory small."""


TIMEOUT_SECONDS = 30.0
"""Longest wait for one answer before the coordinator counts as unreachable."""


@dataclass(frozen=True, slots=True)
class NodeValue:
    """A node as it was read.

    :ivar data: b"" for a node without data, and for one that was refused.
    :ivar refused: why the coordinator did not return the node, None if it did.
    :ivar session: id of the session of an ephemeral node, 0 for a persistent node.
    :ivar written: when it was last written, Unix time of the coordinator's clock.
    """

    path: str
    data: bytes
    version: int
    session: int
    written: float
    refused: str | None = None


def read_nodes(client: Client, paths: Sequence[str]) -> list[NodeValue]:
    """Return the existing nodes at `paths`, in their order.

    A node that cannot be read hides no other: see `NodeValue.refused`.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    many = client.address.path is None and len(paths) > 1
    answers = _in_batches(client, paths) if many else pipelined(client, client.get_async, paths)
    found = []
    for path, answer in answers:
        if isinstance(answer, Exception):
            found.append(NodeValue(path, b"", -1, 0, 0.0, refusal_reason(answer)))
        elif answer is not None:
            data, stat = answer
            written = stat.mtime / 1000
            found.append(NodeValue(path, data or b"", stat.version, stat.ephemeralOwner, written))
    return found


def read_children(client: Client, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the sorted names below each node that exists.

    :raises NodeRefusedError: the children of a node cannot be listed.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    found = read_permitted_children(client, paths)
    for path, names in found.items():
        if names is None:
            raise NodeRefusedError(path=path, account=client.access.account_name())
    return {path: names for path, names in found.items() if names is not None}


def read_permitted_children(client: Client, paths: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the sorted names below each node that exists, None where they cannot be listed.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    answers = pipelined(client, client.get_children_async, paths)
    return {
        path: None if isinstance(names, Exception) else sorted(names)
        for path, names in answers
        if names is not None
    }


def pipelined(
    client: Client, send: Callable[[str], Any], paths: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield each path with its answer, None for a missing node, an error for a refused one."""
    for start in range(0, len(paths), WINDOW):
        part = paths[start : start + WINDOW]
        sent = [(path, send(path)) for path in part]
        for path, pending in sent:
            yield path, _answer(client, pending)


def _in_batches(client: Client, paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the data of nodes as `pipelined` does, read with one request for many nodes."""
    for start in range(0, len(paths), WINDOW):
        sent = []
        for at in range(start, min(start + WINDOW, len(paths)), BATCH):
            part = paths[at : min(at + BATCH, start + WINDOW)]
            pending = client.handler.async_result()
            client._call(MultiRead([client.chroot + path for path in part]), pending)
            sent.append((part, pending))
        for part, pending in sent:
            for path, value in zip(part, _answer(client, pending), strict=True):
                if isinstance(value, NoNodeError):
                    yield path, None
                elif isinstance(value, Exception) and not is_refusal(value):
                    raise _unreachable(client, value) from value
                else:
                    yield path, value


def _answer(client: Client, pending: Any) -> Any:
    try:
        return pending.get(timeout=TIMEOUT_SECONDS)
    except NoNodeError:
        return None
    except (KazooException, client.handler.timeout_exception) as error:
        if is_refusal(error):
            return error
        raise _unreachable(client, error) from error


def _unreachable(client: Client, error: BaseException) -> CoordinatorUnreachableError:
    return CoordinatorUnreachableError(
        url=client.address.url, reason=f"{type(error).__name__} {error}".strip()
    )

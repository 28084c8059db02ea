"""Send the requests of the state machines with a kazoo client, and translate the answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    SessionExpiredError,
)
from kazoo.protocol import serialization as kazoo_requests
from kazoo.protocol.serialization import (
    CheckVersion,
    Delete,
    Exists,
    GetChildren,
    GetData,
    SetData,
    Transaction,
)
from kazoo.protocol.states import WatchedEvent, ZnodeStat

from qdo.coordination.bulk_reads import BATCH, is_refusal, refusal_reason
from qdo.coordination.client import Client
from qdo.coordination.extra_operations import AddWatch, MultiRead
from qdo.coordination.protocol import machine as m

Watcher = Callable[[WatchedEvent], None]
_EPHEMERAL_SEQUENTIAL = 3
_UNANSWERED = (ConnectionLoss, ConnectionClosedError, SessionExpiredError)


class KazooDriver:
    """Sends requests, and passes a function to `put` that delivers the answer on the loop.

    Answers come in the order of the requests. A read that fails because of its node gets `Refused`.
    If a request fails for another reason, such as a full disk, the driver delivers no answer, but
    calls `refused`. Then the loop drops the connection.
    """

    def __init__(
        self,
        client: Client,
        put: Callable[[Callable[[], object]], None],
        refused: Callable[[Exception], None],
    ) -> None:
        self._client = client
        self.put = put
        self._refused = refused

    def read(
        self,
        request: m.Get | m.Stat | m.Children | m.Create | m.WatchTree | m.Sync,
        then: m.Callback,
        watcher: Watcher,
    ) -> None:
        path = self._client.chroot + request.path
        if isinstance(request, m.Create):
            self._send(
                kazoo_requests.Create(
                    path,
                    request.data,
                    self._client.access.acl_of(request.path),
                    _EPHEMERAL_SEQUENTIAL,
                ),
                partial(_created, self._client.chroot),
                then,
            )
        elif isinstance(request, m.Children):
            watch = watcher if request.watch else None
            self._send(GetChildren(path, watch), _listing, then)
        elif isinstance(request, m.WatchTree):
            self._client.tree_watchers.add(path or "/", watcher)
            self._send(AddWatch(path or "/"), lambda _: m.Watching(), then)
        elif isinstance(request, m.Sync):
            self._client._call(kazoo_requests.Sync(path or "/"), _SyncReply(self, then))
        elif isinstance(request, m.Stat):
            self._send(Exists(path, watcher if request.watch else None), _stat, then)
        elif request.watch:
            self._get_watched(path, then, watcher)
        else:
            self.read_many([(request, then)])

    def read_many(self, requests: list[tuple[m.Get, m.Callback]]) -> None:
        """Perform consecutive reads without watches; combine several reads into one request."""
        root = self._client.chroot
        if len(requests) == 1:
            [(request, then)] = requests
            self._send(GetData(root + request.path, None), node_read, then)
            return
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            many = MultiRead([root + request.path for request, _ in batch])
            self._client._call(many, _ManyReplies(self, [then for _, then in batch]))

    def commit(self, request: m.Commit, then: m.Callback) -> None:
        # Avoid kazoo's `TransactionRequest`, because it splits every path and checks every
        # argument. These steps take 15 us for each queue of a checkpoint, a third of the total
        # time.
        client = self._client
        self._send(Transaction([operation(client, op) for op in request.ops]), committed, then)

    def _send(self, request: Any, convert: Callable[[Any], m.Response], then: m.Callback) -> None:
        self._client._call(request, _Reply(self, convert, then))

    def deliver(self, then: m.Callback, convert: Callable[[Any], m.Response], value: Any) -> None:
        if not isinstance(value, Exception):
            then(convert(value))
        elif isinstance(value, NoNodeError):
            then(m.NodeMissing())
        elif isinstance(value, _UNANSWERED):
            then(m.NoResponse())
        elif is_refusal(value) and convert is not committed:
            then(m.Refused(refusal_reason(value)))
        else:
            self._refused(value)

    def last_zxid(self) -> int:
        return int(self._client.last_zxid)

    def _get_watched(self, path: str, then: m.Callback, watcher: Watcher) -> None:
        """Read a node and watch it; watch a missing node through `exists`."""

        def got(answer: m.Response) -> None:
            if isinstance(answer, m.NodeMissing):
                self._send(Exists(path, watcher), _stat, looked)
            else:
                then(answer)

        def looked(answer: m.Response) -> None:
            # If the node appeared between the two requests, read it. The watch of `exists` stays
            # armed.
            if isinstance(answer, m.NodeRead):
                self._get_watched(path, then, watcher)
            else:
                then(answer)

        self._send(GetData(path, watcher), node_read, got)


class _Reply:
    """Receives the answer of one operation from kazoo's connection."""

    # The connection delivers an answer before it reads the coordinator's next message. So the event
    # of a watch never arrives before the answer that armed the watch. With kazoo's own results and
    # watches, an event could arrive first, because they use two queues, each with a thread. A
    # machine that waits for the event would then wait forever.

    def __init__(
        self, driver: KazooDriver, convert: Callable[[Any], m.Response], then: m.Callback
    ) -> None:
        self._driver = driver
        self._convert = convert
        self._then = then

    def set(self, value: Any) -> None:
        self._driver.put(partial(self._driver.deliver, self._then, self._convert, value))

    set_exception = set


class _SyncReply:
    def __init__(self, driver: KazooDriver, then: m.Callback) -> None:
        self._driver = driver
        self._then = then

    def set(self, value: Any) -> None:
        # Read the zxid now, because a later answer may change it before the loop runs.
        answer = m.Synced(self._driver.last_zxid())
        self._driver.put(partial(self._then, answer))

    def set_exception(self, error: Exception) -> None:
        self._driver.put(partial(self._driver.deliver, self._then, node_read, error))


class _ManyReplies:
    def __init__(self, driver: KazooDriver, thens: list[m.Callback]) -> None:
        self._driver = driver
        self._thens = thens

    def set(self, values: list[Any]) -> None:
        self._driver.put(partial(self._deliver, values))

    def set_exception(self, error: Exception) -> None:
        self._driver.put(partial(self._deliver, [error] * len(self._thens)))

    def _deliver(self, values: list[Any]) -> None:
        for then, value in zip(self._thens, values, strict=True):
            self._driver.deliver(then, node_read, value)


def operation(client: Client, op: m.Op) -> SetData | CheckVersion | kazoo_requests.Create | Delete:
    """Return kazoo's request for an operation, with a path below the client's root."""
    path = client.chroot + op.path
    if isinstance(op, m.SetOp):
        return SetData(path, op.data, op.version)
    if isinstance(op, m.CheckOp):
        return CheckVersion(path, op.version)
    if isinstance(op, m.DeleteOp):
        return Delete(path, op.version)
    return kazoo_requests.Create(path, op.data, client.access.acl_of(op.path), 0)


def node_read(value: tuple[bytes | None, ZnodeStat]) -> m.NodeRead:
    data, stat = value
    return m.NodeRead(data or b"", stat.version, stat.mzxid, stat.ephemeralOwner)


def _stat(stat: ZnodeStat | None) -> m.Response:
    return m.NodeMissing() if stat is None else node_read((b"", stat))


def _listing(names: list[str]) -> m.Response:
    return m.ChildrenRead(tuple(map(sys.intern, names)))


def _created(root: str, path: str) -> m.Response:
    return m.Created(path.removeprefix(root))


def committed(results: list[Any]) -> m.Committed | m.Rejected | m.NoResponse:
    """Translate the results of a transaction; kazoo returns errors instead of raising them."""
    # In a failed transaction, operations before the failed operation have a RolledBackError, and
    # later operations have a RuntimeInconsistency.
    for index, result in enumerate(results):
        if isinstance(result, Exception) and not isinstance(result, RolledBackError):
            if isinstance(result, _UNANSWERED):
                return m.NoResponse()
            fault = _fault(result)
            other = fault is m.CommitError.OTHER
            return m.Rejected(index, fault, refusal_reason(result, "written") if other else "")
    zxid = 0
    versions = []
    for result in results:
        if isinstance(result, ZnodeStat):
            zxid = result.mzxid
            versions.append(result.version)
        else:
            versions.append(0 if isinstance(result, str) else -1)
    return m.Committed(zxid, tuple(versions))


def _fault(error: Exception) -> m.CommitError:
    if isinstance(error, BadVersionError):
        return m.CommitError.BAD_VERSION
    if isinstance(error, NoNodeError):
        return m.CommitError.NO_NODE
    if isinstance(error, NodeExistsError):
        return m.CommitError.NODE_EXISTS
    return m.CommitError.OTHER

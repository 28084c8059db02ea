"""Performs the requests of the state machines on a kazoo client, and puts the answers into
their terms."""

from __future__ import annotations

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
from kazoo.protocol.serialization import CheckVersion, Delete, SetData, Transaction
from kazoo.protocol.states import WatchedEvent, ZnodeStat
from kazoo.security import OPEN_ACL_UNSAFE

from qdo.coordination.client import Client
from qdo.coordination.machine import (
    Answer,
    CheckOp,
    Children,
    Commit,
    Committed,
    Create,
    Created,
    DeleteOp,
    Fault,
    Get,
    Listing,
    Node,
    NoNode,
    Op,
    Refused,
    SetOp,
    Then,
    Unanswered,
)
from qdo.coordination.multiread import BATCH, get_many_async

Watcher = Callable[[WatchedEvent], None]

_UNANSWERED = (ConnectionLoss, ConnectionClosedError, SessionExpiredError)


class Performer:
    """Sends requests; `put` gets, for each answer, a function that delivers it.

    Requests of one client are performed in the order of the calls, and answered in that order.
    """

    def __init__(self, client: Client, put: Callable[[Callable[[], object]], None]) -> None:
        self._client = client
        self._put = put

    def read(self, request: Get | Children | Create, then: Then, watcher: Watcher) -> None:
        """Perform a read, or the creation of an ephemeral node."""
        client = self._client
        if isinstance(request, Create):
            result = client.create_async(
                request.path, request.data, ephemeral=True, sequence=True
            )
            self._link(result, _created, then)
        elif isinstance(request, Children):
            watch = watcher if request.watch else None
            self._link(client.get_children_async(request.path, watch=watch), _listing, then)
        elif request.watch:
            self._get_watched(request, then, watcher)
        else:
            self.read_many([(request, then)])

    def read_many(self, requests: list[tuple[Get, Then]]) -> None:
        """Perform reads without watches that stand next to each other, as one if that helps."""
        if len(requests) == 1 or self._client.address.path is not None:
            for request, then in requests:
                self._link(self._client.get_async(request.path), _node, then)
            return
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            result = get_many_async(self._client, [request.path for request, _ in batch])
            result.rawlink(partial(self._got_many, [then for _, then in batch]))

    def _got_many(self, thens: list[Then], result: Any) -> None:
        self._put(partial(_deliver_many, result, thens))

    def commit(self, request: Commit, then: Then) -> None:
        """Perform a transaction.

        Its requests are made here, not by kazoo's `TransactionRequest`, which takes every path
        apart and checks every argument: 15 us for each queue of a checkpoint, a third of all.
        """
        root = self._client.chroot
        operations = [_operation(root, op) for op in request.ops]
        result = self._client.handler.async_result()
        self._client._call(Transaction(operations), result)
        self._link(result, _committed, then)

    def _link(self, result: Any, convert: Callable[[Any], Answer], then: Then) -> None:
        put = self._put

        def deliver(result: Any) -> None:
            put(partial(_deliver, result, convert, then))

        result.rawlink(deliver)

    def _get_watched(self, request: Get, then: Then, watcher: Watcher) -> None:
        """Read a node and watch it; a missing one is watched through `exists`.

        The node may appear between the two requests; then it is read after all, which leaves
        the watch armed that `exists` set.
        """

        def got(answer: Answer) -> None:
            if isinstance(answer, NoNode):
                result = self._client.exists_async(request.path, watch=watcher)
                self._link(result, _existence, looked)
            else:
                then(answer)

        def looked(answer: Answer) -> None:
            if isinstance(answer, Listing):
                self._get_watched(request, then, watcher)
            else:
                then(answer)

        self._link(self._client.get_async(request.path, watch=watcher), _node, got)


def _operation(root: str, op: Op) -> SetData | CheckVersion | kazoo_requests.Create | Delete:
    """Return kazoo's request for an operation, below the client's root."""
    path = root + op.path
    if isinstance(op, SetOp):
        return SetData(path, op.data, op.version)
    if isinstance(op, CheckOp):
        return CheckVersion(path, op.version)
    if isinstance(op, DeleteOp):
        return Delete(path, op.version)
    return kazoo_requests.Create(path, op.data, OPEN_ACL_UNSAFE, 0)


def _deliver(result: Any, convert: Callable[[Any], Answer], then: Then) -> None:
    error = result.exception
    if error is None:
        then(convert(result.value))
    elif isinstance(error, NoNodeError):
        then(NoNode())
    elif isinstance(error, _UNANSWERED):
        then(Unanswered())
    else:
        raise error


def _deliver_many(result: Any, thens: list[Then]) -> None:
    if isinstance(result.exception, _UNANSWERED):
        for then in thens:
            then(Unanswered())
    elif result.exception is not None:
        raise result.exception
    else:
        for then, value in zip(thens, result.value, strict=True):
            if isinstance(value, NoNodeError):
                then(NoNode())
            elif isinstance(value, Exception):
                raise value
            else:
                then(_node(value))


def _node(value: tuple[bytes, ZnodeStat]) -> Answer:
    data, stat = value
    return Node(data, stat.version, stat.mzxid, stat.ephemeralOwner)


def _existence(stat: ZnodeStat | None) -> Answer:
    """Say whether a node exists, as a listing of nothing or as no node."""
    return NoNode() if stat is None else Listing(())


def _listing(names: list[str]) -> Answer:
    return Listing(tuple(names))


def _created(path: str) -> Answer:
    return Created(path)


def _committed(results: list[Any]) -> Answer:
    """Read the list of a transaction: kazoo returns its errors, it does not raise them.

    Of a failed one the operations before the culprit carry RolledBackError, those after it
    RuntimeInconsistency.
    """
    for index, result in enumerate(results):
        if isinstance(result, Exception) and not isinstance(result, RolledBackError):
            if isinstance(result, _UNANSWERED):
                return Unanswered()
            return Refused(index, _fault(result))
    zxid = 0
    versions = []
    for result in results:
        if isinstance(result, ZnodeStat):
            zxid = result.mzxid
            versions.append(result.version)
        else:
            versions.append(0 if isinstance(result, str) else -1)
    return Committed(zxid, tuple(versions))


def _fault(error: Exception) -> Fault:
    if isinstance(error, BadVersionError):
        return Fault.BAD_VERSION
    if isinstance(error, NoNodeError):
        return Fault.NO_NODE
    if isinstance(error, NodeExistsError):
        return Fault.NODE_EXISTS
    return Fault.OTHER

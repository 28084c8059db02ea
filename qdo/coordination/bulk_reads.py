"""Read many nodes in few requests, without waiting for each response in turn.

The functions raise CoordinatorUnreachableError if the connection is lost for `LOSS_SECONDS`. After
a shorter loss, such as a change of server, they repeat the lost requests. `read_children` and
`names_below` raise NodeRefusedError if the account may not list the children of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kazoo.exceptions import (
    BadArgumentsError,
    ConnectionLoss,
    EphemeralOnLocalSessionError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NoNodeError,
    NotEmptyError,
    QuotaExceededError,
)
from kazoo.protocol.states import ZnodeStat

from qdo.coordination.client import Client
from qdo.coordination.extra_operations import MultiRead
from qdo.errors import CoordinatorUnreachableError, NodeRefusedError
from qdo.system.clock import clock
from qdo.text import describe

_OF_A_NODE = (
    BadArgumentsError,
    EphemeralOnLocalSessionError,
    InvalidACLError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NotEmptyError,
    QuotaExceededError,
)
# The maximum number of nodes per request, to limit the size of the response and the server's time.
BATCH = 250
# The maximum number of open requests: enough to hide network latency, few enough to save memory.
WINDOW = 1000
# The maximum wait for a response. Without a response, the coordinator counts as unreachable.
TIMEOUT_SECONDS = 30.0
# The time for which a client repeats requests that were lost with their connection.
LOSS_SECONDS = 5.0
# The pause before a client repeats a lost request.
AGAIN_SECONDS = 0.05


def is_refusal(error: object) -> bool:
    """Return whether an error concerns a single node, so that a retry would fail too."""
    return isinstance(error, _OF_A_NODE)


def refusal_reason(error: Exception, action: str = "read") -> str:
    """Return the reason why this account cannot read or write a node, with the remedy."""
    remedy = "; restore its ACL" if isinstance(error, NoAuthError) else ""
    return f"the node cannot be {action}: {describe(error)}{remedy}"


@dataclass(frozen=True, slots=True)
class NodeValue:
    """The result of reading one node."""

    path: str
    # The data; b"" if the node has no data or the coordinator refused the read.
    data: bytes
    version: int
    # The id of an ephemeral node's session; 0 for a persistent node.
    session: int
    # The Unix time of the last write, by the coordinator's clock.
    written: float
    # The reason why the coordinator refused to return the node, or None.
    refused: str | None = None
    # The number of the transaction that created the node. A later node at the same path has
    # another.
    created: int = 0


def read_nodes(client: Client, paths: Sequence[str]) -> list[NodeValue]:
    """Return the existing nodes at `paths`, in this order; see `NodeValue.refused`."""
    many = len(paths) > 1
    answers = _in_batches(client, paths) if many else pipelined(client, client.get_async, paths)
    found = []
    for path, answer in answers:
        if isinstance(answer, Exception):
            found.append(NodeValue(path, b"", -1, 0, 0.0, refusal_reason(answer)))
        elif answer is not None:
            data, stat = answer
            found.append(_value(path, data, stat))
    return found


def _value(path: str, data: bytes | None, stat: ZnodeStat) -> NodeValue:
    return NodeValue(
        path, data or b"", stat.version, stat.ephemeralOwner, stat.mtime / 1000, created=stat.czxid
    )


def read_children(client: Client, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the sorted names below each node that exists."""
    found = read_permitted_children(client, paths)
    for path, names in found.items():
        if names is None:
            raise NodeRefusedError(path=path, account=client.access.account_name())
    return {path: names for path, names in found.items() if names is not None}


def names_below(client: Client, path: str) -> list[str]:
    """Return the sorted names below a node, or an empty list if the node does not exist."""
    return read_children(client, [path]).get(path, [])


def exists_later(client: Client, path: str) -> Callable[[], bool]:
    """Ask whether a node exists; return a function that waits for the response."""
    pending = client.exists_async(path)
    again = partial(client.exists_async, path)
    return lambda: _answer(client, pending, again) is not None


def read_permitted_children(client: Client, paths: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the sorted names below each existing node; None if the account may not list them."""
    answers = pipelined(client, client.get_children_async, paths)
    return {
        path: None if isinstance(names, Exception) else sorted(names)
        for path, names in answers
        if names is not None
    }


def pipelined(
    client: Client, send: Callable[[str], Any], paths: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield each path with its result: None for a missing node, an error for a refused node."""
    for start in range(0, len(paths), WINDOW):
        part = paths[start : start + WINDOW]
        sent = [(path, send(path)) for path in part]
        for path, pending in sent:
            yield path, _answer(client, pending, partial(send, path))


def _in_batches(client: Client, paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the data of nodes as `pipelined` does, but read many nodes with each request."""

    def ask(part: Sequence[str]) -> Any:
        pending = client.handler.async_result()
        client._call(MultiRead([client.chroot + path for path in part]), pending)
        return pending

    for start in range(0, len(paths), WINDOW):
        sent = []
        for at in range(start, min(start + WINDOW, len(paths)), BATCH):
            part = paths[at : min(at + BATCH, start + WINDOW)]
            sent.append((part, ask(part)))
        for part, pending in sent:
            for path, value in zip(part, _answer(client, pending, partial(ask, part)), strict=True):
                if isinstance(value, NoNodeError):
                    yield path, None
                elif isinstance(value, Exception) and not is_refusal(value):
                    raise connection_lost(client, value) from value
                else:
                    yield path, value


def _answer(client: Client, pending: Any, again: Callable[[], Any]) -> Any:
    deadline = clock() + LOSS_SECONDS
    while True:
        try:
            return client.answer_to(pending, TIMEOUT_SECONDS)
        except NoNodeError:
            return None
        except (KazooException, client.handler.timeout_exception) as error:
            if is_refusal(error):
                return error
            if not isinstance(error, ConnectionLoss) or clock() > deadline:
                raise connection_lost(client, error) from error
        client.handler.sleep_func(AGAIN_SECONDS)
        pending = again()


def connection_lost(client: Client, error: BaseException) -> CoordinatorUnreachableError:
    return CoordinatorUnreachableError(
        url=client.address.url, reason=f"{type(error).__name__} {error}".strip()
    )

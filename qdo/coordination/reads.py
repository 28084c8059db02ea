"""Reading many znodes quickly: requests are pipelined, not sent one after the other's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import KazooException, NoNodeError

from qdo.coordination.client import Client
from qdo.errors import CoordinatorUnreachableError

WINDOW = 1000
"""Requests under way at once: enough to hide the network, few enough to keep memory small."""
TIMEOUT_SECONDS = 30.0
"""Longest wait for one answer before the coordinator counts as out of reach."""


@dataclass(frozen=True, slots=True)
class Read:
    """A node as it was read.

    :ivar session: id of the session that an ephemeral node belongs to, 0 for a persistent one.
    """

    path: str
    data: bytes
    version: int
    session: int


def read_nodes(client: Client, paths: Sequence[str]) -> list[Read]:
    """Return the nodes at `paths` in their order, leaving out those that do not exist.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    found = []
    for path, answer in _pipelined(client, client.get_async, paths):
        if answer is not None:
            data, stat = answer
            found.append(Read(path, data, stat.version, stat.ephemeralOwner))
    return found


def read_children(client: Client, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the sorted names below each node that exists.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    answers = _pipelined(client, client.get_children_async, paths)
    return {path: sorted(names) for path, names in answers if names is not None}


def _pipelined(
    client: Client, ask: Callable[[str], Any], paths: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield each path with its answer, None where there is no node."""
    for start in range(0, len(paths), WINDOW):
        part = paths[start : start + WINDOW]
        asked = [(path, ask(path)) for path in part]
        for path, pending in asked:
            yield path, _answer(client, pending)


def _answer(client: Client, pending: Any) -> Any:
    try:
        return pending.get(timeout=TIMEOUT_SECONDS)
    except NoNodeError:
        return None
    except (KazooException, client.handler.timeout_exception) as error:
        raise CoordinatorUnreachableError(
            url=client.address.url, reason=f"{type(error).__name__} {error}".strip()
        ) from error

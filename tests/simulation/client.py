"""The part of a client that a member uses, on a modeled link instead of a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.protocol.states import EventType, KeeperState, WatchedEvent

from qdo.coordination.client import Address
from qdo.coordination.kazoo_driver import Watcher
from qdo.coordination.protocol.machine import (
    Callback,
    Children,
    Commit,
    Create,
    Get,
    NodeMissing,
    NodeRead,
    Response,
    Stat,
)
from tests.simulation.network import Link
from tests.simulation.server import Exists


class _Empty(Exception):
    """The queue of events is empty."""


class _Events:
    """The queue of a member's loop: never waits, and wakes the loop for every event."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: deque[Any] = deque()

    def put(self, event: Any) -> None:
        self._events.append(event)
        self._wake()

    def get(self, timeout: float | None = None) -> Any:
        if not self._events:
            raise _Empty
        return self._events.popleft()

    get_nowait = get


class _Flag:
    """An event object without waiting."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


class _Handler:
    """The part of kazoo's handler that a member uses."""

    queue_empty = _Empty
    event_object = _Flag

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def queue_impl(self) -> _Events:
        return _Events(self._wake)


class LinkClient:
    """The part of a client that a member uses.

    :ivar lose: loses the connection; set when there is a link.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.address = Address.parse("zookeeper://modeled")
        self.lose: Callable[[], None] = lambda: None
        self.handler = _Handler(wake)
        self.client_id = (0, b"")
        self.negotiated_timeout_seconds: float | None = None
        self.heard_at: float | None = None

    def lost_server(self) -> str:
        """Return the server of the lost connection."""
        return "a modeled server"

    def drop_connection(self, reason: str) -> None:
        """Give the connection up, as a client does whose server is silent."""
        self.lose()


class LinkPerformer:
    """Sends a member's requests over a link; the answers come as events of its loop."""

    def __init__(self, link: Link, put: Callable[[Callable[[], object]], None]) -> None:
        self._link = link
        self._put = put
        self._watchers: dict[Watcher, Callable[[str], None]] = {}

    def read(
        self, request: Get | Stat | Children | Create, then: Callback, watcher: Watcher
    ) -> None:
        fired = self._watchers.get(watcher)
        if fired is None:
            fired = self._watchers[watcher] = partial(_fire, watcher)
        if isinstance(request, Get) and request.watch:
            self._get_watched(request, then, fired)
        else:
            self._link.submit(request, partial(self._answer, then), fired)

    def read_many(self, requests: list[tuple[Get, Callback]]) -> None:
        for request, then in requests:
            self._link.submit(request, partial(self._answer, then))

    def _get_watched(self, request: Get, then: Callback, fired: Callable[[str], None]) -> None:
        """Read and watch in two steps if the node is missing, as a client must."""

        def got(answer: Response) -> None:
            if isinstance(answer, NodeMissing):
                self._link.submit(Exists(request.path), partial(self._answer, looked), fired)
            else:
                then(answer)

        def looked(answer: Response) -> None:
            if isinstance(answer, NodeRead):
                self._get_watched(request, then, fired)
            else:
                then(answer)

        self._link.submit(request, partial(self._answer, got), fired)

    def commit(self, request: Commit, then: Callback) -> None:
        self._link.submit(request, partial(self._answer, then))

    def _answer(self, then: Callback, answer: Any) -> None:
        self._put(partial(then, answer))


def _fire(watcher: Watcher, path: str) -> None:
    watcher(WatchedEvent(EventType.CHANGED, KeeperState.CONNECTED, path))

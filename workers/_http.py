"""Connections for `qdo.programs.webhook`, which a receiver cannot keep busy for ever."""

from __future__ import annotations

import http.client
from typing import Any, cast

import urllib3

MOST_INTERIM = 10
"""Responses with the status 100 before the final one. http.client reads any number of them, and as
long as they arrive it never waits: a flood would block the event loop of the worker."""


class WebhookResponse(http.client.HTTPResponse):
    """A response after at most `MOST_INTERIM` interim ones."""

    _read = 0

    def _read_status(self) -> Any:
        self._read += 1
        if self._read > MOST_INTERIM + 1:
            raise http.client.HTTPException(f"more than {MOST_INTERIM} interim responses")
        return cast(Any, super())._read_status()


class _Connection(urllib3.connection.HTTPConnection):
    response_class = WebhookResponse


class _TlsConnection(urllib3.connection.HTTPSConnection):
    response_class = WebhookResponse


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def connections(timeout: urllib3.Timeout) -> urllib3.PoolManager:
    """Return a pool of connections. It does not retry: the policy of the queue decides."""
    manager = urllib3.PoolManager(maxsize=100, timeout=timeout, retries=False)
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return manager

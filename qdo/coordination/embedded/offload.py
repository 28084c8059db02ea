"""Runs calls that wait for the disk, as the client's handler requires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qdo.errors import QdoError

_MEANWHILE_SECONDS = 0.05


class Inline:
    """Runs a call in the connection's own thread."""

    def __call__(self, call: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
        return call()


class InThreadPool:
    """Runs a call in a native thread, while gevent's loop keeps running."""

    def __call__(self, call: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
        import gevent

        result = gevent.get_hub().threadpool.spawn(_caught, call)
        while not result.ready():
            result.wait(timeout=_MEANWHILE_SECONDS)
            meanwhile()
        value, error = result.get()
        if error is not None:
            raise error
        return value


def _caught(call: Callable[[], Any]) -> tuple[Any, QdoError | None]:
    # Returned as a value: gevent would print the traceback of an error.
    try:
        return call(), None
    except QdoError as error:
        return None, error

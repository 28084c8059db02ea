"""Forked copies of a worker process run nothing of the worker.

A fork copies all greenlets, and the event loop of which they wait. Code that waits through gevent
in the copy, such as a lock in a library's fork handler, would let them go on there: messages would
run a second time, and events of the shared epoll descriptor would be lost to the worker. So the
copy begins with an event loop of its own, which knows only the greenlet that forked.
"""

from __future__ import annotations

import os
from typing import Any

import gevent
import gevent.hub

_hubs: Any = gevent.hub


def isolate() -> None:
    """Isolate each forked copy of this process; call it before the app is imported.

    Handlers run in the order of their registration, so those of the app and of its libraries
    run later.
    """
    os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    current: Any = gevent.getcurrent()
    hub: Any = _hubs.Hub(default=False)
    _hubs.set_hub(hub)
    if current.parent is not None:  # it goes to its parent when it ends
        hub.parent = _outermost(current)
        current.parent = hub


def _outermost(greenlet: Any) -> Any:
    while greenlet.parent is not None:
        greenlet = greenlet.parent
    return greenlet

"""qdo distributes many ordered queues across a fleet of workers. Each queue has one owner.

Public are the names of `qdo` and of `qdo.settings`, `qdo.positions`, `qdo.errors`,
`qdo.idempotency`, `qdo.state`, `qdo.outbox`, `qdo.ingest`, `qdo.tracing`, `qdo.testing`,
`qdo.dashboard`, `qdo.contrib.django` and `qdo.contrib.starlette`, and for tools those that the
documentation of `qdo.ops.dead_letters`, `qdo.coordination.client` and
`qdo.coordination.queue_admin` lists. Everything else is private and may change in any version.

This module imports names at first use, so a program that only sends does not load the worker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qdo._version import __version__ as __version__

if TYPE_CHECKING:
    from qdo import errors as errors
    from qdo import idempotency as idempotency
    from qdo import outcomes as outcomes
    from qdo import positions as positions
    from qdo.app import App as App
    from qdo.errors import QdoError as QdoError
    from qdo.jobs.job import Job as Job
    from qdo.jobs.retry import Policy as Policy
    from qdo.jobs.retry import Rule as Rule
    from qdo.message import HIGH as HIGH
    from qdo.message import LOW as LOW
    from qdo.message import NORMAL as NORMAL
    from qdo.message import URGENT as URGENT
    from qdo.message import Batch as Batch
    from qdo.message import Message as Message
    from qdo.outcomes import DeadLetter as DeadLetter
    from qdo.outcomes import Event as Event
    from qdo.outcomes import FailedAt as FailedAt
    from qdo.outcomes import JobInterrupt as JobInterrupt
    from qdo.outcomes import Retry as Retry
    from qdo.outcomes import Skip as Skip
    from qdo.outcomes import Stop as Stop
    from qdo.requests.jobs import Request as Request
    from qdo.sending.messages import NewMessage as NewMessage
    from qdo.settings.settings import Settings as Settings
    from qdo.worker.worker import Worker as Worker

_MODULES = ("errors", "idempotency", "outcomes", "positions")
_NAMES = {
    "qdo.app": ("App",),
    "qdo.errors": ("QdoError",),
    "qdo.jobs.job": ("Job",),
    "qdo.jobs.retry": ("Policy", "Rule"),
    "qdo.message": ("HIGH", "LOW", "NORMAL", "URGENT", "Batch", "Message"),
    "qdo.outcomes": ("DeadLetter", "Event", "FailedAt", "JobInterrupt", "Retry", "Skip", "Stop"),
    "qdo.sending.messages": ("NewMessage",),
    "qdo.requests.jobs": ("Request",),
    "qdo.settings": ("Settings",),
    "qdo.worker.worker": ("Worker",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted((*_HOMES, "__version__"))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"qdo.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qdo' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

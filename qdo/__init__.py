"""qdo distributes many ordered queues across a fleet of workers. Each queue has one owner.

Public are the names of `qdo` and of `qdo.settings`, `qdo.positions`, `qdo.errors`,
`qdo.idempotency`, `qdo.state`, `qdo.outbox`, `qdo.ingest`, `qdo.tracing`, `qdo.testing`,
`qdo.dashboard`, `qdo.contrib.django` and `qdo.contrib.starlette`, and for tools those that the
documentation of `qdo.ops.dead_letters`, `qdo.coordination.client` and
`qdo.coordination.queue_admin` lists. Packages with brokers use `qdo.brokers` and the modules of
`qdo.testing.contracts`. Everything else is private and may change in any version.

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
    from qdo.fleet.documents import Documents as Documents
    from qdo.fleet.locks import HeldLock as HeldLock
    from qdo.fleet.locks import Section as Section
    from qdo.fleet.owners import Owner as Owner
    from qdo.fleet.permits import HeldPermit as HeldPermit
    from qdo.fleet.permits import PermitAsk as PermitAsk
    from qdo.jobs.job import Job as Job
    from qdo.jobs.retry import Policy as Policy
    from qdo.jobs.retry import Rule as Rule
    from qdo.message import HIGH as HIGH
    from qdo.message import LOW as LOW
    from qdo.message import NORMAL as NORMAL
    from qdo.message import URGENT as URGENT
    from qdo.message import Batch as Batch
    from qdo.message import Message as Message
    from qdo.ops.peek import PeekedMessage as PeekedMessage
    from qdo.outcomes import DeadLetter as DeadLetter
    from qdo.outcomes import Event as Event
    from qdo.outcomes import FailedAt as FailedAt
    from qdo.outcomes import JobInterrupt as JobInterrupt
    from qdo.outcomes import Retry as Retry
    from qdo.outcomes import Skip as Skip
    from qdo.outcomes import Stop as Stop
    from qdo.requests.calls import Handle as Handle
    from qdo.requests.calls import RequestTerms as RequestTerms
    from qdo.requests.jobs import Request as Request
    from qdo.sending.messages import MessageOptions as MessageOptions
    from qdo.sending.messages import NewMessage as NewMessage
    from qdo.sending.streams import Stream as Stream
    from qdo.settings.given import GivenSettings as GivenSettings
    from qdo.settings.settings import Settings as Settings
    from qdo.system.twins import AsyncBlock as AsyncBlock
    from qdo.worker.worker import Worker as Worker

_MODULES = ("errors", "idempotency", "outcomes", "positions")
_NAMES = {
    "qdo.app": ("App",),
    "qdo.errors": ("QdoError",),
    "qdo.fleet.documents": ("Documents",),
    "qdo.fleet.locks": ("HeldLock", "Section"),
    "qdo.fleet.owners": ("Owner",),
    "qdo.fleet.permits": ("HeldPermit", "PermitAsk"),
    "qdo.jobs.job": ("Job",),
    "qdo.jobs.retry": ("Policy", "Rule"),
    "qdo.message": ("HIGH", "LOW", "NORMAL", "URGENT", "Batch", "Message"),
    "qdo.ops.peek": ("PeekedMessage",),
    "qdo.outcomes": ("DeadLetter", "Event", "FailedAt", "JobInterrupt", "Retry", "Skip", "Stop"),
    "qdo.requests.calls": ("Handle", "RequestTerms"),
    "qdo.requests.jobs": ("Request",),
    "qdo.sending.messages": ("MessageOptions", "NewMessage"),
    "qdo.sending.streams": ("Stream",),
    "qdo.settings": ("Settings",),
    "qdo.settings.given": ("GivenSettings",),
    "qdo.system.twins": ("AsyncBlock",),
    "qdo.worker.worker": ("Worker",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted((*_HOMES, "__version__"))


# Type checkers see the imports above: they would take any name from `__getattr__` as Any.
if not TYPE_CHECKING:

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

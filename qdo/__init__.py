"""qdo shares many ordered queues out to a fleet of workers, each queue to one at a time.

Public names are loaded when they are first used, so that a program that only sends does not
pay for the worker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdo import errors as errors
    from qdo import outcomes as outcomes
    from qdo.app import App as App
    from qdo.errors import QdoError as QdoError
    from qdo.events import Event as Event
    from qdo.message import Batch as Batch
    from qdo.message import Message as Message
    from qdo.outcomes import DeadLetter as DeadLetter
    from qdo.outcomes import FailedAt as FailedAt
    from qdo.outcomes import Retry as Retry
    from qdo.outcomes import Skip as Skip
    from qdo.outcomes import Stop as Stop
    from qdo.policy import Policy as Policy
    from qdo.policy import Rule as Rule
    from qdo.sending import NewMessage as NewMessage
    from qdo.settings import Settings as Settings
    from qdo.stopping import JobInterrupt as JobInterrupt
    from qdo.worker.worker import Worker as Worker

__version__ = "0.1.0"

_HOMES = {
    "App": "qdo.app",
    "Batch": "qdo.message",
    "DeadLetter": "qdo.outcomes",
    "Event": "qdo.events",
    "FailedAt": "qdo.outcomes",
    "JobInterrupt": "qdo.stopping",
    "Message": "qdo.message",
    "NewMessage": "qdo.sending",
    "Policy": "qdo.policy",
    "QdoError": "qdo.errors",
    "Retry": "qdo.outcomes",
    "Rule": "qdo.policy",
    "Settings": "qdo.settings",
    "Skip": "qdo.outcomes",
    "Stop": "qdo.outcomes",
    "Worker": "qdo.worker.worker",
}

__all__ = [
    "App",
    "Batch",
    "DeadLetter",
    "Event",
    "FailedAt",
    "JobInterrupt",
    "Message",
    "NewMessage",
    "Policy",
    "QdoError",
    "Retry",
    "Rule",
    "Settings",
    "Skip",
    "Stop",
    "Worker",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "outcomes"):
        return importlib.import_module(f"qdo.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qdo' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

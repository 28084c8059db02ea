"""Tools for testing the jobs of an app without servers or waiting, with reproducible results.

This package imports its modules at first use, because pytest loads the package at startup.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdo.brokers.catalog import Backlog as Backlog
    from qdo.brokers.dead_letters import DeadLetterRecord as DeadLetterRecord
    from qdo.coordination.znodes.queue_node import FailureRecord as FailureRecord
    from qdo.testing.clock import Clock as Clock
    from qdo.testing.faults import POINTS as POINTS
    from qdo.testing.faults import Step as Step
    from qdo.testing.kit import TestKit as TestKit
    from qdo.testing.state import Attempt as Attempt

_HOMES = {
    "Attempt": "qdo.testing.state",
    "Backlog": "qdo.brokers.catalog",
    "Clock": "qdo.testing.clock",
    "DeadLetterRecord": "qdo.brokers.dead_letters",
    "FailureRecord": "qdo.coordination.znodes.queue_node",
    "POINTS": "qdo.testing.faults",
    "Step": "qdo.testing.faults",
    "TestKit": "qdo.testing.kit",
}

__all__ = sorted(_HOMES)

# As in `qdo`: type checkers see the imports above.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'qdo.testing' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)

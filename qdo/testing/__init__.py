"""Tools for testing the jobs of an app without servers or waiting, with reproducible results.

This package imports its modules at first use, because pytest loads the package at startup.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdo.testing.clock import Clock as Clock
    from qdo.testing.faults import POINTS as POINTS
    from qdo.testing.kit import TestKit as TestKit
    from qdo.testing.state import Attempt as Attempt

_HOMES = {
    "Attempt": "qdo.testing.state",
    "Clock": "qdo.testing.clock",
    "POINTS": "qdo.testing.faults",
    "TestKit": "qdo.testing.kit",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qdo.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Rates as people write them: ``50/s``, ``5/m``, ``100/h``."""

from __future__ import annotations

import math
import re
from typing import Any

from qdo.fleet.limit_node import is_rate

SECONDS = {"s": 1, "m": 60, "h": 3600}
RATE_TEXT = "must be a number of starts a second, minute or hour such as 50/s, 5/m or 100/h"
_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)/([smh])", re.ASCII)


def rate_of(text: Any) -> float:
    """Return the starts a second of a rate such as "50/s".

    :raises ValueError: it is not a rate, 0, or not between one a day and a million a second.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    rate = float(match[1]) / SECONDS[match[2]] if match else 0.0
    if not is_rate(rate):
        raise ValueError(f"{RATE_TEXT}, got {str(text)[:60]!r}")
    return rate


def rate_text(rate: float) -> str:
    """Return a rate in the unit in which it is at least one."""
    for unit, seconds in SECONDS.items():
        if rate * seconds >= 0.9995 or unit == "h":
            return f"{round(rate * seconds, 3):g}/{unit}"
    raise AssertionError


def default_burst(rate: float) -> int:
    """Return how many starts a rate allows at once: those of one second, at least one."""
    return max(1, math.ceil(rate))

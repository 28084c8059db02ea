"""The churn job at a pace that leaves time to kill workers midway, and with a gate."""

from __future__ import annotations

import os
import time
from typing import Any

from qdo import Message
from qdo.programs import churn

PACE_SECONDS = 0.01
GATE_VARIABLE = "TESTS_GATE"
"""Names a file; commits marked as `gated` wait until it exists."""


def job(message: Message, context: dict[str, Any]) -> None:
    """Take a moment, in which other queues continue, and count the commit."""
    time.sleep(PACE_SECONDS)
    while message.body["gated"] and not os.path.exists(os.environ[GATE_VARIABLE]):
        time.sleep(PACE_SECONDS)
    churn.job(message, context)

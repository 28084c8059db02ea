"""Statuses of queues, as commands and the dashboard judge them."""

from __future__ import annotations

from typing import Any

from qdo.ops.status import QueueStatus


def queue_status(queue: str = "q", **values: Any) -> QueueStatus:
    """Return the status of a queue without an owner and without messages, and these values."""
    empty: dict[str, Any] = {"owner": None, "owner_gone": False, "last": 0, "backlog": 0}
    empty |= {"oldest": None, "dead_letters": 0, "fault": None}
    return QueueStatus(queue=queue, **{**empty, **values})

"""Dead letters of a worker, for tests of their stores."""

from __future__ import annotations

from typing import Any

from qdo.brokers.dead_letters import DeadLetterRecord

DEAD_AT = 1_700_000_000.5


def dead_letter(queue: str = "q", position: int = 1, **changed: Any) -> DeadLetterRecord:
    """Return a dead letter whose fields are all set, but for those that are given."""
    values: dict[str, Any] = {
        "body": b'{"n":1}',
        "key": "k",
        "headers": '{"a":"b"}',
        "error": "ValueError: no",
        "traceback": "Traceback ...",
        "attempts": 10,
        "worker": "worker-0000000001",
        "fence": 42,
        "dead_at": DEAD_AT,
    }
    return DeadLetterRecord(queue, position, **{**values, **changed})

"""The whole app as one item: workers, states of queues, and the worst queues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from qdo.ops.items import QUEUE_SORTS, worst_item
from qdo.ops.queue_health import QueueHealth
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import Verdict
from qdo.ops.worker_status import WorkerStatus

WORST = 10
SILENT_SECONDS = 30.0
"""A worker reports every 10 s."""

Judged = Sequence[tuple[QueueStatus, Verdict]]


def overview(
    app: str, workers: Sequence[WorkerStatus], judged: Judged, worst: int = WORST
) -> dict[str, Any]:
    """Return the item of qdo.status/1.

    :param worst: the most queues that are listed.
    """
    counts = Counter(verdict.state for _, verdict in judged)
    bad = [each for each in judged if each[1].state.needs_attention]
    bad.sort(key=QUEUE_SORTS["state"])
    dead = [each.dead_letters for each, _ in judged]
    return {
        "app": app,
        "workers": len(workers),
        "silent_workers": silent(workers),
        "versions": sorted({str(dict(each.details).get("version", "?")) for each in workers}),
        "queues": len(judged),
        "dead_letters": None if None in dead else sum(each or 0 for each in dead),
        "states": {state.value: counts[state] for state in QueueHealth if counts[state]},
        "attention": len(bad),
        "worst": [worst_item(*each) for each in bad[:worst]],
    }


def silent(workers: Sequence[WorkerStatus]) -> list[str]:
    """Return the workers that have not reported for `SILENT_SECONDS`."""
    oldest = time.time() - SILENT_SECONDS
    return [each.worker for each in workers if each.reported < oldest]

"""The whole app as one item: workers, states of queues, and the worst queues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from heapq import nlargest
from typing import Any

from qdo.fleet.globs import exactly
from qdo.ops.items import QUEUE_SORTS, worst_item
from qdo.ops.queue_health import QueueHealth
from qdo.ops.reading.snapshot import MESSAGES
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import Verdict
from qdo.ops.worker_status import WorkerStatus
from qdo.queues import command_text
from qdo.text import join_some, pluralize

WORST = 10
SILENT_SECONDS = 30.0
"""A worker reports every 10 s."""
LONG_SECONDS = 30.0
MOST_NAMES = 3
MOST_RUNS = 3
"""This many messages that run for `LONG_SECONDS` are listed, before their queues are late."""

Judged = Sequence[tuple[QueueStatus, Verdict]]


def overview(
    app: str,
    workers: Sequence[WorkerStatus],
    judged: Judged,
    notices: Sequence[Mapping[str, str | None]] = (),
    worst: int = WORST,
    unread: Collection[str] = (),
) -> dict[str, Any]:
    """Return the item of qdo.status/1.

    :param notices: faults around the queues; see `qdo.ops.doctor.checks.notices`.
    :param worst: the most queues that are listed.
    :param unread: what could not be read, from `Statuses`.
    """
    counts = Counter(verdict.state for _, verdict in judged)
    bad = [each for each in judged if each[1].state.needs_attention]
    bad.sort(key=QUEUE_SORTS["state"])
    dead = [each.dead_letters for each, _ in judged]
    uncounted = None in dead or MESSAGES in unread
    return {
        "app": app,
        "workers": len(workers),
        "silent_workers": silent(workers),
        "versions": sorted({str(dict(each.details).get("version", "?")) for each in workers}),
        "queues": len(judged),
        "dead_letters": None if uncounted else sum(each or 0 for each in dead),
        "states": {state.value: counts[state] for state in QueueHealth if counts[state]},
        "notices": [*notices, *_dead_letter_notice(judged)],
        "long_runs": _long_runs(judged),
        "attention": len(bad),
        "worst": [worst_item(*each) for each in bad[:worst]],
    }


def _dead_letter_notice(judged: Judged) -> list[dict[str, str | None]]:
    """Return the notice of dead letters, if there are any: no state of a queue tells of them."""
    counts = Counter({each.queue: each.dead_letters or 0 for each, _ in judged})
    queues = [f"{queue} ({count})" for queue, count in counts.most_common() if count]
    if not queues:
        return []
    total = pluralize(counts.total(), "dead letter")
    reason = f"{total} in {pluralize(len(queues), 'queue')}: {join_some(queues, MOST_NAMES)}"
    remedy = "qdo dead-letters"
    return [{"check": "dead-letters", "status": "warning", "reason": reason, "remedy": remedy}]


def _long_runs(judged: Judged) -> list[dict[str, Any]]:
    """Return the messages that run for long in queues that need no attention yet, as items."""
    found = [
        {
            "queue": each.queue,
            "worker": each.owner,
            **asdict(each.running),
            "reason": f"{each.running.text()}.",
            "remedy": command_text("ps", exactly(each.queue), options="--stacks"),
        }
        for each, verdict in judged
        if each.running is not None
        and (each.running.seconds >= LONG_SECONDS or each.running.usual_seconds is not None)
        and not verdict.state.needs_attention
    ]
    return nlargest(MOST_RUNS, found, key=lambda each: each["seconds"])


def silent(workers: Sequence[WorkerStatus]) -> list[str]:
    """Return the workers that have not reported for `SILENT_SECONDS`."""
    oldest = time.time() - SILENT_SECONDS
    return [each.worker for each in workers if each.reported < oldest]

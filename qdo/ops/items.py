"""The JSON items of commands and the dashboard: one function for each kind."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from heapq import nlargest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from qdo.fleet.limit_node import rate_text
from qdo.fleet.names import exactly
from qdo.ops.verdicts import QueueHealth, Verdict
from qdo.queues import command_text
from qdo.text import iso_time, join_some, pluralize

if TYPE_CHECKING:
    from qdo.brokers.requests import PoolCounts
    from qdo.fleet.audit_entries import AuditEntry
    from qdo.fleet.components import ProcessDescription
    from qdo.fleet.limit_node import LimitNode
    from qdo.fleet.pause_machine import Pause
    from qdo.history.reports import RecordedOwner
    from qdo.ops.dead_letters import ErrorGroup, Letter
    from qdo.ops.status import QueueStatus
    from qdo.ops.worker_status import WorkerStatus


# Sort keys of queues. The largest numbers come first.
QUEUE_SORTS: dict[str, Callable[[tuple[QueueStatus, Verdict]], Any]] = {
    "name": lambda each: each[0].queue,
    "state": lambda each: (each[1].state.rank, -(each[0].behind_seconds or 0.0)),
    "age": lambda each: -(each[0].behind_seconds or 0.0),
    "backlog": lambda each: -(each[0].backlog or 0),
}
WORST = 10
_WORST_FACTS = (
    *("queue", "state", "behind_seconds", "backlog", "approximate", "owner"),
    *("reason", "remedy", "remedies"),
)
# A worker reports every 10 s.
SILENT_SECONDS = 30.0
LONG_SECONDS = 30.0
MOST_NAMES = 3
# Maximum number of listed messages that have run longer than `LONG_SECONDS`.
MOST_RUNS = 3
_SEPARATOR = re.compile(r"[-_./:]")


def queue_item(each: QueueStatus, verdict: Verdict) -> dict[str, Any]:
    judged = {
        "state": verdict.state.value,
        "reason": verdict.reason or None,
        "remedy": verdict.remedy or None,
        "remedies": list(verdict.remedies),
        "eta_seconds": verdict.eta_seconds,
    }
    return {"queue": each.queue, **judged, **each.dump()}


def worst_item(each: QueueStatus, verdict: Verdict) -> dict[str, Any]:
    """Return a queue as part of the item of qdo.status/1."""
    item = queue_item(each, verdict)
    return {name: item[name] for name in _WORST_FACTS}


def worker_item(each: WorkerStatus) -> dict[str, Any]:
    names = ("worker", "queues", "assigned", "reported", "fault")
    known = {name: getattr(each, name) for name in names} | {"filter": asdict(each.takes)}
    # Facts from the coordinator come first and override the worker's report.
    return {**known, **each.report.dump(), **known}


def component_item(process: ProcessDescription) -> dict[str, Any]:
    return {
        **asdict(process),
        "started": iso_time(process.started),
        "reported": iso_time(process.reported),
    }


def pause_item(pause: Pause) -> dict[str, Any]:
    return {
        "id": pause.id,
        "kind": "section" if pause.by else "pause",
        "queues": " ".join(pause.queues),
        "globs": list(pause.queues),
        "why": pause.why,
        "who": pause.who,
        "at": iso_time(pause.at or None),
        "until": iso_time(pause.until),
    }


def limit_item(name: str, node: LimitNode) -> dict[str, Any]:
    return {
        "limit": name,
        "max": node.max,
        "held": sum(each.held for each in node.permits),
        "waiting": sum(max(0, each.wants - each.held) for each in node.permits),
        "rate": None if node.rate is None else rate_text(node.rate),
        "burst": None if node.rate is None else node.burst,
        "holders": {each.worker: [each.held, each.wants] for each in node.permits},
        "starts": {each.worker: [each.held, each.wants] for each in node.starts},
        "declared": node.declared,
        "reason": node.reason,
        "fault": node.fault,
    }


def audit_item(entry: AuditEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "time": iso_time(entry.at),
        "by": entry.by,
        "account": entry.account,
        "command": entry.command,
        "target": entry.target,
        "from": entry.before,
        "to": entry.after,
        "reason": entry.reason,
        "fault": entry.fault,
    }


def owner_item(found: RecordedOwner) -> dict[str, Any]:
    """Return an item of qdo.history-owners/1."""
    return {
        "claimed": iso_time(found.claimed),
        "ended": iso_time(found.ended),
        "owner": found.owner,
        "host": found.host,
        "pid": found.pid,
        "fence": found.fence,
        "why": found.why,
    }


def letter_row(letter: Letter) -> dict[str, Any]:
    """Return the row of a dead letter, without the message."""
    return {
        "queue": letter.entry.queue,
        "id": letter.id,
        "kind": letter.kind,
        "dead_time": iso_time(letter.entry.dead_at),
        "attempts": letter.entry.attempts,
        "error": letter.entry.error,
    }


def kind_item(group: ErrorGroup) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "error": group.error,
        "count": group.count,
        "queues": group.queues,
        "oldest": iso_time(group.oldest),
        "newest": iso_time(group.newest),
    }


Judged: TypeAlias = "Sequence[tuple[QueueStatus, Verdict]]"


def overview(
    app: str,
    workers: Sequence[WorkerStatus],
    judged: Judged,
    notices: Sequence[Mapping[str, str | None]] = (),
    worst: int = WORST,
    unread: Collection[str] = (),
    pools: Mapping[str, PoolCounts] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the item of qdo.status/1, in which failed requests count as dead letters.

    :param notices: faults outside of queues (see `qdo.ops.doctor.notices`).
    :param unread: the unreadable parts, from `Statuses`.
    :param pools: the numbers of requests, from `Statuses`.
    """
    from qdo.ops.snapshot import MESSAGES  # a reader of queues has already imported this module

    counts = Counter(verdict.state for _, verdict in judged)
    bad = [each for each in judged if each[1].state.needs_attention]
    bad.sort(key=QUEUE_SORTS["state"])
    dead = [each.dead_letters for each, _ in judged]
    uncounted = None in dead or MESSAGES in unread
    failed = sum(each.failed for each in pools.values())
    backlogs = [each.backlog for each, _ in judged if each.backlog is not None]
    late = [verdict for each, verdict in judged if each.backlog and verdict.state.needs_attention]
    etas = [verdict.eta_seconds for _, verdict in judged if verdict.eta_seconds is not None]
    if any(verdict.eta_seconds is None for verdict in late):  # for example, without a worker
        etas = []
    return {
        "app": app,
        "workers": len(workers),
        "silent_workers": silent(workers),
        "versions": sorted({each.report.version or "?" for each in workers}),
        "queues": len(judged),
        "backlog": sum(backlogs) if backlogs or not judged else None,
        "approximate": any(each.approximate for each, _ in judged),
        "eta_seconds": max(etas, default=None),
        "requests": {
            "waiting": sum(each.waiting for each in pools.values()),
            "running": sum(each.running for each in pools.values()),
            "paused": sum(each.paused for each in pools.values()),
        },
        "dead_letters": None if uncounted else failed + sum(each or 0 for each in dead),
        "states": {state.value: counts[state] for state in QueueHealth if counts[state]},
        "notices": [*notices, *_dead_letter_notice(judged, pools)],
        "long_runs": _long_runs(judged),
        "attention": len(bad),
        "worst": [worst_item(*each) for each in bad[:worst]],
    }


def _dead_letter_notice(
    judged: Judged, pools: Mapping[str, PoolCounts]
) -> list[dict[str, str | None]]:
    """Return a notice about dead letters. The states of queues do not show dead letters."""
    counts = Counter({each.queue: each.dead_letters or 0 for each, _ in judged})
    counts.update({pool: each.failed for pool, each in pools.items()})
    places = [f"{name} ({count})" for name, count in counts.most_common() if count]
    if not places:
        return []
    reason = f"{pluralize(counts.total(), 'dead letter')}: {join_some(places, MOST_NAMES)}"
    remedy = "qdo dead-letters --by error"
    return [{"check": "dead-letters", "status": "warning", "reason": reason, "remedy": remedy}]


def _long_runs(judged: Judged) -> list[dict[str, Any]]:
    """Return items for the long-running messages of queues that do not need attention yet."""
    items = [
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
    return nlargest(MOST_RUNS, items, key=lambda each: each["seconds"])


def silent(workers: Sequence[WorkerStatus]) -> list[str]:
    oldest = time.time() - SILENT_SECONDS
    return [each.worker for each in workers if each.reported < oldest]


def _prefix(status: QueueStatus, verdict: Verdict) -> str:
    return _SEPARATOR.split(status.queue, maxsplit=1)[0] or status.queue


def _owner(status: QueueStatus, verdict: Verdict) -> str:
    return "none" if status.owner is None or status.owner_gone else status.owner


def _state(status: QueueStatus, verdict: Verdict) -> str:
    return verdict.state.value


GROUPINGS: Mapping[str, Callable[[QueueStatus, Verdict], str]] = MappingProxyType(
    {"prefix": _prefix, "owner": _owner, "state": _state}
)


def group_items(judged: Judged, by: str) -> list[dict[str, Any]]:
    """Return the items of qdo.groups/1, the worst state first."""
    groups: dict[str, list[tuple[QueueStatus, Verdict]]] = {}
    for each in judged:
        groups.setdefault(GROUPINGS[by](*each), []).append(each)
    ranked = [(_worst(members).state.rank, name, members) for name, members in groups.items()]
    return [_group(name, members) for _, name, members in sorted(ranked, key=lambda each: each[:2])]


def _worst(members: Judged) -> Verdict:
    return min((verdict for _, verdict in members), key=lambda each: each.state.rank)


def _group(name: str, members: Judged) -> dict[str, Any]:
    ages = [each.behind_seconds for each, _ in members if each.behind_seconds is not None]
    return {
        "group": name,
        "queues": len(members),
        "state": _worst(members).state.value,
        "attention": sum(verdict.state.needs_attention for _, verdict in members),
        "behind_seconds": max(ages, default=None),
        "backlog": _sum([each.backlog for each, _ in members]),
        "approximate": any(each.approximate for each, _ in members),
        "dead_letters": _sum([each.dead_letters for each, _ in members]),
    }


def _sum(counts: list[int | None]) -> int | None:
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None

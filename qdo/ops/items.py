"""What commands write as JSON, and the dashboard returns: one function for each kind of item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qdo.fleet.components import ProcessDescription
from qdo.fleet.hold_node import Hold
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.protocol.audit_entries import AuditEntry
from qdo.fleet.rates import rate_text
from qdo.ops.dead_letters import Letter
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import Verdict
from qdo.ops.worker_status import WorkerStatus
from qdo.positions import format_last
from qdo.text import iso_time

if TYPE_CHECKING:  # its import takes 5 ms
    from qdo.history.reports import RecordedOwner

QUEUE_SORTS: dict[str, Callable[[tuple[QueueStatus, Verdict]], Any]] = {
    "name": lambda each: each[0].queue,
    "state": lambda each: (each[1].state.rank, -(each[0].behind_seconds or 0.0)),
    "age": lambda each: -(each[0].behind_seconds or 0.0),
    "backlog": lambda each: -(each[0].backlog or 0),
}
"""Orders of queues. Numbers: the largest first."""


def queue_item(each: QueueStatus, verdict: Verdict) -> dict[str, Any]:
    """Return an item of qdo.queues/1."""
    marks = each.marks
    return {
        "queue": each.queue,
        "state": verdict.state.value,
        "reason": verdict.reason or None,
        "remedy": verdict.remedy or None,
        "owner": each.owner,
        "owner_gone": each.owner_gone,
        "untaken": each.untaken,
        "unclaimed": each.unclaimed,
        "waits_for": each.waits_for,
        "limits": each.limits,
        "last": str(each.last) if each.last else "",
        "last_time": format_last(each.last),
        "position": each.position,
        "backlog": each.backlog,
        "approximate": each.approximate,
        "behind_seconds": each.behind_seconds,
        "retention_seconds": each.retention_seconds,
        "oldest": str(each.oldest) if each.oldest else None,
        "delayed": each.delayed,
        "dead_letters": each.dead_letters,
        "fault": each.fault,
        "error": each.error,
        "held": each.held,
        "running": None if each.running is None else asdict(each.running),
        "failing": marks.dump() if marks is not None and not marks.blocked else None,
        "blocked": marks.dump() if marks is not None and marks.blocked else None,
        "also_blocked": [other.dump() for other in each.also_blocking],
    }


def worst_item(each: QueueStatus, verdict: Verdict) -> dict[str, Any]:
    """Return a queue in the item of qdo.status/1."""
    return {
        "queue": each.queue,
        "state": verdict.state.value,
        "behind_seconds": each.behind_seconds,
        "backlog": each.backlog,
        "approximate": each.approximate,
        "owner": each.owner,
        "reason": verdict.reason or None,
        "remedy": verdict.remedy or None,
    }


def worker_item(each: WorkerStatus) -> dict[str, Any]:
    """Return an item of qdo.workers/1."""
    known: dict[str, Any] = {
        "worker": each.worker,
        "queues": each.queues,
        "assigned": each.assigned,
        "reported": each.reported,
        "fault": each.fault,
        "filter": asdict(each.takes),
    }
    return {**known, **dict(each.details), **known}


def component_item(process: ProcessDescription) -> dict[str, Any]:
    """Return an item of qdo.components/1."""
    return {
        **asdict(process),
        "started": iso_time(process.started),
        "reported": iso_time(process.reported),
    }


def hold_item(hold: Hold) -> dict[str, Any]:
    """Return an item of qdo.holds/1."""
    return {
        "id": hold.id,
        "kind": "section" if hold.by else "pause",
        "queues": " ".join(hold.queues),
        "globs": list(hold.queues),
        "why": hold.why,
        "who": hold.who,
        "at": iso_time(hold.at or None),
        "until": iso_time(hold.until),
    }


def limit_item(name: str, node: LimitNode) -> dict[str, Any]:
    """Return an item of qdo.limits/1."""
    return {
        "limit": name,
        "max": node.max,
        "held": sum(each.held for each in node.permits),
        "waiting": sum(max(0, each.wants - each.held) for each in node.permits),
        "rate": None if node.rate is None else rate_text(node.rate),
        "burst": None if node.rate is None else node.burst,
        "holders": {each.worker: [each.held, each.wants] for each in node.permits},
        "starts": {each.worker: [each.held, each.wants] for each in node.starts},
        "reason": node.reason,
        "fault": node.fault,
    }


def audit_item(entry: AuditEntry) -> dict[str, Any]:
    """Return an item of qdo.audit/1."""
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
    """Return a dead letter without its message."""
    return {
        "queue": letter.entry.queue,
        "id": letter.id,
        "dead_time": iso_time(letter.entry.dead_at),
        "attempts": letter.entry.attempts,
        "error": letter.entry.error,
    }

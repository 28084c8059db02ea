"""Shows all facts about a queue or a worker, for `qdo queues NAME` and `qdo workers NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qdo.brokers.base import Broker
from qdo.brokers.registry import kind_of
from qdo.cli.connections import open_connections, open_coordinator
from qdo.cli.output import (
    ago,
    cell,
    changes_texts,
    emit,
    labelled,
    print_facts,
    print_heading,
    print_message,
)
from qdo.cli.readings import ReadOptions, owner_text, read_queues, report_unasked
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NotFoundError, QdoError
from qdo.fleet.action_machine import DONE
from qdo.fleet.actions import UNANSWERED
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import is_target
from qdo.fleet.live_settings import read_settings
from qdo.fleet.names import exactly
from qdo.history.reports import owners
from qdo.ops.decisions import id_of
from qdo.ops.items import audit_item, owner_item, queue_item, worker_item
from qdo.ops.runs import ask_owner, blocked_texts, read_runs, stack_text
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.live import SettingsInForce, with_version
from qdo.settings.settings import Settings
from qdo.text import iso_time, join_some, pluralize, short_duration

if TYPE_CHECKING:
    from qdo.app import App

# Maximum number of entries of the action log to show.
CHANGES = 5
# Maximum number of messages in flight to show.
RUNS = 10
# Maximum time for the owner of a queue to answer.
ASK_SECONDS = 2.0
NOT_ASKED: Mapping[str, Any] = MappingProxyType(
    {"runs": None, "in_flight": None, "runs_error": None}
)


def show_queues(
    names: Sequence[str],
    reading: ReadOptions,
    form: str,
    app: App | None,
    settings: Settings,
    *,
    asks: bool,
) -> None:
    """Show state, owner, progress, messages in flight, job and last changes of queues."""
    with open_connections(settings) as connections:
        client = connections.client
        layout = connections.layout
        readings_of = [(name, read_queues(connections, exactly(name), reading)) for name in names]
        workers = worker_statuses(client, layout)
        in_force = _in_force(client, layout, settings, app)
        items = []
        for name, readings in readings_of:
            judged = judge_all(readings, reading.rules)
            if not judged:
                raise NotFoundError(what="queue", name=name)
            status, verdict = judged[0]
            item = queue_item(status, verdict)
            owner = status.owner if asks and not status.owner_gone else None
            item |= _runs(client, layout, owner, name) if client and owner else NOT_ASKED
            item["failing_id"] = _failing_id(connections.broker, settings, status)
            owners = [each for each in workers if each.worker == item["owner"]]
            item["process"] = worker_item(owners[0]) if owners else None
            item["job"] = None if app is None else _job(app, in_force, name)
            # Include changes of globs that match the queue.
            selects = partial(is_target, glob=exactly(name))
            item["changes"] = _changes(client, layout, selects) if client else []
            item["owners"] = _owners(settings, name)
            items.append(item)
    if form == "table":
        for number, item in enumerate(items):
            print(end="\n" if number else "")
            _print_queue(item)
    else:
        emit("qdo.queue/1", items, form)
    for _, readings in readings_of:
        report_unasked(readings[-1])


def _print_queue(item: Mapping[str, Any]) -> None:
    print_heading(f"{item['queue']}: {item['state']}", item["reason"], item["remedy"])
    print_facts(_queue_facts(item))
    if item["runs"]:
        _print_stack(item["runs"][0])


def _changes(
    client: Client, layout: Layout, selects: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Return items for the latest changes of the selected targets."""
    entries = read_entries(
        client, layout, limit=CHANGES, selects=lambda entry: selects(entry.target)
    )
    return [audit_item(each) for each in entries]


def _runs(client: Client, layout: Layout, owner: str, queue: str) -> dict[str, Any]:
    """Ask the owner for the messages in flight. If there is no answer, return the reason."""
    try:
        asked = ask_owner(client, layout, owner, queue, RUNS, ASK_SECONDS)
    except QdoError as error:  # a read-only account cannot ask, but sees all other facts
        return {**NOT_ASKED, "runs_error": f"{owner} cannot be asked: {error}"}
    if asked.outcome == UNANSWERED:
        return {**NOT_ASKED, "runs_error": f"{owner} has not answered within {ASK_SECONDS:g} s"}
    if asked.outcome != DONE:
        return {**NOT_ASKED, "runs_error": f"{owner}: {asked.outcome}: {asked.result}"}
    answer = read_runs([asked])
    blocked = blocked_texts(answer)
    return {
        "runs": answer.items,
        "in_flight": answer.total,
        "runs_error": blocked[0] if blocked else None,
    }


def _owners(settings: Settings, queue: str) -> list[dict[str, Any]] | None:
    """Return the last owners of a queue; None if there is no history or it does not respond."""
    if not settings.history:
        return None
    try:
        records = owners(settings.history, settings.app, queue, 0.0, limit=CHANGES)
    except QdoError as error:
        print_message(f"cannot read the owners: {error}")
        return None
    return [owner_item(each) for each in records]


def _failing_id(broker: Broker | None, settings: Settings, status: QueueStatus) -> str | None:
    """Return the id of the failing or blocking message; None without such a message or id."""
    if status.marks is None:
        return None
    return id_of(broker, kind_of(settings.broker).positions, status.queue, status.marks.position)


def _in_force(
    client: Client | None, layout: Layout, settings: Settings, app: App | None
) -> Settings:
    """Return the settings, including the live settings if workers can use them."""
    if client is None or app is None:
        return settings
    try:
        return with_version(settings, read_settings(client, layout).current, app.origin)
    except QdoError:
        return settings


def _job(app: App, settings: Settings, queue: str) -> dict[str, Any] | None:
    job = app.job_for(queue)
    if job is None:
        return None
    # Import this late, because only a command that knows the app's code needs the engine.
    from qdo.worker.engine.context import policy_lookup

    policy = policy_lookup(app, SettingsInForce(settings))(queue)
    return {
        "job": job.name,
        "queues": job.queues,
        "executor": job.executor,
        "order": job.order,
        "concurrency": job.lanes,
        "batch": job.batch,
        "timeout_seconds": job.timeout_seconds,
        "limits": list(job.limits),
        "per_queue_rate": job.per_queue_rate,
        "attempts": policy.attempts,
        "then": policy.then,
    }


def _queue_facts(item: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    failing = item["blocked"] or item["failing"] or {}
    decision = failing.get("decision")
    return [
        ("owner", _owner(item, item["process"])),
        ("done", _done(item)),
        ("waiting", _waiting(item)),
        ("dead letters", _text(item["dead_letters"])),
        *_running(item),
        ("failing", _failing(item["failing_id"], failing)),
        ("next attempt", None if decision else _moment(failing.get("retry_at"))),
        ("decided", decision and f"{decision}; the owner has not carried it out yet"),
        ("also blocked", join_some([str(each["position"]) for each in item["also_blocked"]])),
        ("held", item["held"]),
        ("limits", ", ".join(item["limits"])),
        ("job", _job_text(item["job"])),
        *labelled("owners", map(_owner_text, item["owners"] or ())),
        *labelled("changes", changes_texts(item["changes"])),
    ]


def _running(item: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the owner's answer.

    If there is no answer, return the message in the owner's last report.
    """
    run = item["running"]
    runs = item["runs"]
    lines = [] if run is None or runs else [_run_text(run, f"{short_duration(run['seconds'])}+")]
    for each in runs or ():
        where = each["where"] and f", at {each['where']}"
        lines.append(_run_text(each, f"~{short_duration(each['seconds'])}") + (where or ""))
    if len(runs or ()) < (item["in_flight"] or 0):
        lines.append(f"{len(runs)} of {item['in_flight']} messages; see `qdo ps`")
    if item["runs_error"]:
        lines.append(f"unknown: {item['runs_error']}")
    return labelled("running", lines)


def _run_text(run: Mapping[str, Any], duration: str) -> str:
    return f"{run['id']}, attempt {run['attempt']}, for {duration}"


def _failing(id: str | None, failing: Mapping[str, Any]) -> str | None:
    if not failing:
        return None
    message = id or f"the message at position {failing['position']}"
    return f"{message}, {pluralize(failing['attempts'], 'attempt')}"


def _owner(item: Mapping[str, Any], process: Mapping[str, Any] | None) -> str:
    if process is None:
        return owner_text(item) or "none"
    return f"{item['owner']} on {process.get('host', '?')}, pid {process.get('pid', '?')}"


def _done(item: Mapping[str, Any]) -> str:
    position = item["position"] or item["last"]
    if not position:
        return "nothing yet"
    return f"through {item['last_time']}, position {position}"


def _waiting(item: Mapping[str, Any]) -> str:
    count = "an unknown number" if item["backlog"] is None else str(item["backlog"])
    parts = [f"~{count}" if item["approximate"] else count]
    if item["behind_seconds"] and item["backlog"] != 0:
        parts.append(f"the next is {short_duration(item['behind_seconds'])} old")
    if item["delayed"]:
        parts.append(f"{item['delayed']} delayed")
    return ", ".join(parts)


def _job_text(job: Mapping[str, Any] | None) -> str | None:
    if job is None:
        return None
    facts = [f"{job['job']}, queues {job['queues']}, order {job['order']}"]
    facts.append(f"{pluralize(job['attempts'], 'attempt')}, then {job['then']}")
    options = ("executor", "batch", "timeout_seconds", "per_queue_rate")
    facts += [f"{name} {job[name]}" for name in options if job[name] is not None]
    return ", ".join(facts)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _moment(value: Any) -> str | None:
    return iso_time(value) if value else None


def show_workers(names: Sequence[str], form: str, settings: Settings) -> None:
    """Show process, state, counters, filter and last changes of workers."""
    with open_coordinator(settings) as (client, layout):
        statuses = {each.worker: each for each in worker_statuses(client, layout)}
        missing = [name for name in names if name not in statuses]
        if missing or client is None:
            raise NotFoundError(what="worker", name=missing[0])
        items = []
        for name in names:
            changes = _changes(client, layout, name.__eq__)
            items.append(worker_item(statuses[name]) | {"changes": changes})
    if form != "table":
        emit("qdo.worker/1", items, form)
        return
    for number, item in enumerate(items):
        print(end="\n" if number else "")
        status = statuses[item["worker"]]
        print_heading(f"{status.worker}: {item.get('state') or 'unknown'}", item["fault"], None)
        print_facts(_worker_facts(status, item))


def _worker_facts(status: WorkerStatus, item: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    ended = [
        f"{item[name]} {name.replace('_', '-')}"
        for name in ("failed", "retried", "dead_lettered", "skipped", "lost")
        if item.get(name)
    ]
    processed = item.get("processed")
    return [
        ("process", f"pid {item.get('pid', '?')} on {item.get('host', '?')}"),
        ("started", _moment(item.get("started"))),
        ("reported", ago(status.reported)),
        ("version", f"qdo {item.get('version', '?')}, Python {item.get('python', '?')}"),
        ("queues", f"{status.queues} owned, {status.assigned} assigned"),
        ("running", f"{_text(item.get('busy')) or '?'} of {item.get('concurrency', '?')} jobs"),
        ("messages", processed if processed is None else ", ".join([f"{processed} done", *ended])),
        ("filter", str(status.takes) or None),
        ("jobs", join_some(status.takes.jobs)),
        *status.report.labelled(),
        *labelled("changes", changes_texts(item["changes"])),
    ]


def _owner_text(owner: Mapping[str, Any]) -> str:
    until = f" to {owner['ended']}" if owner["ended"] else ""
    why = f" ({owner['why']})" if owner["why"] else ""
    return f"{owner['claimed']}{until} {owner['owner']} on {owner['host']}, pid {owner['pid']}{why}"


def _print_stack(run: Mapping[str, Any]) -> None:
    heading = cell(f"--- message {run['id']} ---")
    print(f"\n{heading}\n{stack_text(run)}")

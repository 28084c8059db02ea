"""`qdo queue show` and `qdo worker show`: everything that is known about one of them."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from qdo.brokers.registry import positions_of
from qdo.cli.app_settings import import_app
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import cell, emit, print_message, values_text, width_of
from qdo.cli.readings import SHARED, read_queues, reading_options, report_unasked, rules_of
from qdo.errors import NotFoundError, QdoError
from qdo.fleet.audit import read_entries
from qdo.fleet.globs import exactly
from qdo.history.reports import owners
from qdo.ops.decisions import id_of
from qdo.ops.items import audit_item, owner_item, queue_item, worker_item
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.in_force import SettingsInForce
from qdo.settings.settings import Settings
from qdo.text import iso_time, join_some, pluralize, short_duration

if TYPE_CHECKING:
    from qdo.app import App

CHANGES = 5
"""How many entries of the action log are shown."""
WIDTH = 80
_LABEL = 14


@click.group()
def queue() -> None:
    """Show everything about one queue."""


@click.group()
def worker() -> None:
    """Show everything about one worker."""


@queue.command("show")
@click.argument("name")
@reading_options
@with_settings(*SHARED, "history", import_app=False)
@output_option
def show_queue(
    name: str,
    budget: int | None,
    window: str,
    late: str,
    stuck: str,
    form: str,
    settings: Settings,
) -> None:
    """Show state, owner, progress, failing message, job and last changes of a queue.

    The job is known if --app names the app as MODULE:APP. `qdo ps NAME` lists the messages that run
    now, and `qdo history` what the queue did before.
    """
    app, settings = import_app(settings)
    require_app(settings)
    exact = exactly(name)
    rules = rules_of(late, stuck)
    readings = read_queues(settings, exact, budget, window)
    judged = judge_all(readings, rules)
    if not judged:
        raise NotFoundError(what="queue", name=name)
    item = queue_item(*judged[0])
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        workers = worker_statuses(client, layout) if client else []
        entries = read_entries(client, layout, limit=CHANGES, glob=exact) if client else []
    item["failing_id"] = _failing_id(settings, judged[0][0])
    owners = [each for each in workers if each.worker == item["owner"]]
    item["process"] = worker_item(owners[0]) if owners else None
    item["job"] = None if app is None else _job(app, settings, name)
    item["changes"] = [audit_item(each) for each in entries]
    item["owners"] = _owners(settings, name)
    if form == "table":
        _print(f"{name}: {item['state']}", item["reason"], item["remedy"])
        _print_facts(_queue_facts(item))
        _print_owners(item["owners"] or ())
        _print_changes(item["changes"])
    else:
        emit("qdo.queue/1", [item], form, {})
    report_unasked(readings[-1])


def _owners(settings: Settings, queue: str) -> list[dict[str, Any]] | None:
    """Return the last owners of a queue; None without a history, or if it does not answer."""
    if not settings.history:
        return None
    try:
        found = owners(settings.history, settings.app, queue, 0.0, limit=CHANGES)
    except QdoError as error:
        print_message(f"cannot read the owners: {error}")
        return None
    return [owner_item(each) for each in found]


def _failing_id(settings: Settings, status: QueueStatus) -> str | None:
    """Return the id of the message that fails or blocks; None without one, or if it is unknown."""
    if status.marks is None:
        return None
    positions = positions_of(settings.broker)
    with open_connections(settings, coordinator=False) as connections:
        return id_of(connections.broker, positions, status.queue, status.marks.position)


def _job(app: App, settings: Settings, queue: str) -> dict[str, Any] | None:
    """Return the options of the queue's job; None if it has none."""
    job = app.job_for(queue)
    if job is None:
        return None
    # Imported late: only a command that knows the app needs the engine.
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
    return [
        ("owner", _owner(item, item["process"])),
        ("done", _done(item)),
        ("waiting", _waiting(item)),
        ("dead letters", _text(item["dead_letters"])),
        ("running", _running(item["running"])),
        ("failing", _failing(item["failing_id"], failing)),
        ("next attempt", _moment(failing.get("retry_at"))),
        ("also blocked", join_some([str(each["position"]) for each in item["also_blocked"]])),
        ("held", item["held"]),
        ("limits", ", ".join(item["limits"])),
        ("job", _job_text(item["job"])),
    ]


def _running(run: Mapping[str, Any] | None) -> str | None:
    if run is None:
        return None
    return f"{run['id']}, attempt {run['attempt']}, for {short_duration(run['seconds'])} or more"


def _failing(id: str | None, failing: Mapping[str, Any]) -> str | None:
    if not failing:
        return None
    message = id or f"the message at position {failing['position']}"
    return f"{message}, {pluralize(failing['attempts'], 'attempt')}"


def _owner(item: Mapping[str, Any], process: Mapping[str, Any] | None) -> str:
    if item["owner"] is None:
        return str(item["untaken"] or item["unclaimed"] or "none")
    if process is None:
        return f"{item['owner']} (gone)" if item["owner_gone"] else str(item["owner"])
    return f"{item['owner']} on {process.get('host', '?')}, pid {process.get('pid', '?')}"


def _done(item: Mapping[str, Any]) -> str:
    position = item["position"] or item["last"]
    if not position:
        return "nothing yet"
    return f"through {item['last_time']}, position {position}"


def _waiting(item: Mapping[str, Any]) -> str:
    count = "an unknown number" if item["backlog"] is None else str(item["backlog"])
    parts = [f"~{count}" if item["approximate"] else count]
    if item["behind_seconds"] is not None:
        parts.append(f"the next is {short_duration(item['behind_seconds'])} old")
    if item["delayed"]:
        parts.append(f"{item['delayed']} delayed")
    return ", ".join(parts)


def _job_text(job: Mapping[str, Any] | None) -> str | None:
    if job is None:
        return None
    facts = [f"{job['job']}, queues {job['queues']}, order {job['order']}"]
    facts.append(f"{job['attempts']} attempts, then {job['then']}")
    options = ("executor", "batch", "timeout_seconds", "per_queue_rate")
    facts += [f"{name} {job[name]}" for name in options if job[name] is not None]
    return ", ".join(facts)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _moment(value: Any) -> str | None:
    return iso_time(value) if value else None


@worker.command("show")
@click.argument("name")
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def show_worker(name: str, form: str, settings: Settings) -> None:
    """Show process, state, counters, filter and last changes of a worker.

    `qdo ps --worker NAME` lists the messages that run now, `qdo action NAME stacks` their stacks.
    """
    require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        found = [w for w in (worker_statuses(client, layout) if client else []) if w.worker == name]
        if not found or client is None:
            raise NotFoundError(what="worker", name=name)
        entries = read_entries(client, layout, limit=CHANGES, glob=exactly(name))
    item = worker_item(found[0])
    item["changes"] = [audit_item(each) for each in entries]
    if form == "table":
        _print(f"{name}: {item.get('state') or 'unknown'}", item["fault"], None)
        _print_facts(_worker_facts(found[0], item))
        _print_changes(item["changes"])
    else:
        emit("qdo.worker/1", [item], form, {})


def _worker_facts(status: WorkerStatus, item: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    ended = [
        f"{item[name]} {name.replace('_', '-')}"
        for name in ("failed", "retried", "dead_lettered", "skipped", "lost")
        if item.get(name)
    ]
    processed = item.get("processed")
    return [
        ("process", f"pid {item.get('pid', '?')} on {item.get('host', '?')}"),
        ("zone", item.get("zone")),
        ("started", _moment(item.get("started"))),
        ("reported", f"{short_duration(max(0.0, time.time() - status.reported))} ago"),
        ("version", f"qdo {item.get('version', '?')}, Python {item.get('python', '?')}"),
        ("queues", f"{status.queues} owned, {status.assigned} assigned"),
        ("running", f"{_text(item.get('busy')) or '?'} of {item.get('concurrency', '?')} jobs"),
        ("messages", processed if processed is None else ", ".join([f"{processed} done", *ended])),
        ("filter", str(status.takes) or None),
        ("jobs", join_some(status.takes.jobs)),
    ]


# --- what people read -------------------------------------------------------------------------


def _print(heading: str, reason: str | None, remedy: str | None) -> None:
    print(cell(heading))
    for text in (reason, remedy and f"-> {remedy}"):
        if text:
            print(_filled(cell(text), "  "))


def _print_facts(facts: Sequence[tuple[str, str | None]]) -> None:
    print()
    for label, text in facts:
        if text:
            indent = " " * _LABEL
            print(_filled(f"{label:{_LABEL}}{cell(text)}", "", indent))


def _print_owners(owners: Sequence[Mapping[str, Any]]) -> None:
    for number, each in enumerate(owners):
        label = "owners" if not number else ""
        until = f" to {each['ended']}" if each["ended"] else ""
        why = f" ({each['why']})" if each["why"] else ""
        text = f"{each['claimed']}{until} {each['owner']} on {each['host']}, pid {each['pid']}{why}"
        print(_filled(f"{label:{_LABEL}}{cell(text)}", "", " " * _LABEL))


def _print_changes(changes: Sequence[Mapping[str, Any]]) -> None:
    for number, each in enumerate(changes):
        label = "changes" if not number else ""
        to = values_text(each["to"])
        text = f"{each['time']} {each['by']}: {each['command']} {to}".rstrip()
        reason = f" ({each['reason']})" if each["reason"] else ""
        print(_filled(f"{label:{_LABEL}}{cell(text + reason)}", "", " " * _LABEL))


def _filled(text: str, first: str, others: str | None = None) -> str:
    """Return a text in lines of the terminal; ids and names are never cut."""
    return textwrap.fill(
        text,
        width_of(sys.stdout) or WIDTH,
        initial_indent=first,
        subsequent_indent=first if others is None else others,
        break_long_words=False,
        break_on_hyphens=False,
    )

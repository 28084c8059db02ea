"""`qdo queue show` and `qdo worker show`: everything that is known about one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from qdo.brokers.registry import positions_of
from qdo.cli.commands.workers import blocked_texts, stack_text
from qdo.cli.connections import open_connections
from qdo.cli.framework import import_app, output_option, require_app, with_settings
from qdo.cli.output import (
    LABEL,
    cell,
    emit,
    filled,
    print_changes,
    print_facts,
    print_heading,
    print_message,
)
from qdo.cli.readings import SHARED, read_queues, reading_options, report_unasked, rules_of
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NotFoundError, QdoError
from qdo.fleet.action_machine import DONE
from qdo.fleet.actions import UNANSWERED
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry, is_target
from qdo.fleet.names import exactly
from qdo.history.reports import owners
from qdo.ops.decisions import id_of
from qdo.ops.items import audit_item, owner_item, queue_item, worker_item
from qdo.ops.runs import ask_owner, read_runs
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.text import iso_time, join_some, pluralize, short_duration

if TYPE_CHECKING:
    from qdo.app import App

CHANGES = 5
"""How many entries of the action log are shown."""
RUNS = 10
"""How many messages in flight."""
ASK_SECONDS = 2.0
"""How long the owner may take to answer."""
NOT_ASKED: Mapping[str, Any] = MappingProxyType(
    {"runs": None, "in_flight": None, "runs_error": None}
)


@click.group()
def queue() -> None:
    """Show everything about one queue."""


@click.group()
def worker() -> None:
    """Show everything about one worker."""


@queue.command("show")
@click.argument("name")
@click.option(
    "--no-ask", is_flag=True, help="Do not ask the owner for its messages in flight: only read."
)
@reading_options
@with_settings(*SHARED, "history", import_app=False)
@output_option
def show_queue(
    name: str,
    no_ask: bool,
    budget: int | None,
    window: str,
    late: str,
    stuck: str,
    form: str,
    settings: Settings,
) -> None:
    """Show state, owner, progress, messages in flight, job and last changes of a queue.

    NAME is not a glob. The job is known if --app names the app as MODULE:APP. The owner is asked
    for its messages in flight, as `qdo ps` does: up to ten, and the stack of the first. It has two
    seconds; without an answer the command says so, and shows the longest run that it reported.

    With -o json, one item: that of `qdo queues` with `process`, `job`, `failing_id`, `changes`,
    `owners`, `runs`, `in_flight` and `runs_error`.
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
        entries = _changes(client, layout, exact) if client else []
        owner = None if no_ask or judged[0][0].owner_gone else judged[0][0].owner
        item |= _runs(client, layout, owner, name) if client and owner else NOT_ASKED
    item["failing_id"] = _failing_id(settings, judged[0][0])
    owners = [each for each in workers if each.worker == item["owner"]]
    item["process"] = worker_item(owners[0]) if owners else None
    item["job"] = None if app is None else _job(app, settings, name)
    item["changes"] = [audit_item(each) for each in entries]
    item["owners"] = _owners(settings, name)
    if form == "table":
        print_heading(f"{name}: {item['state']}", item["reason"], item["remedy"])
        print_facts(_queue_facts(item))
        _print_owners(item["owners"] or ())
        print_changes(item["changes"])
        if item["runs"]:
            _print_stack(item["runs"][0])
    else:
        emit("qdo.queue/1", [item], form, {})
    report_unasked(readings[-1])


def _changes(client: Client, layout: Layout, exact: str) -> list[AuditEntry]:
    """Return the latest changes of a queue; those of a glob are among them."""
    return read_entries(
        client, layout, limit=CHANGES, selects=lambda each: is_target(each.target, exact)
    )


def _runs(client: Client, layout: Layout, owner: str, queue: str) -> dict[str, Any]:
    """Ask the owner for the messages in flight; without an answer, tell why there is none."""
    try:
        asked = ask_owner(client, layout, owner, queue, RUNS, ASK_SECONDS)
    except QdoError as error:  # an account that only reads sees everything else
        return {**NOT_ASKED, "runs_error": f"{owner} cannot be asked: {error}"}
    if asked.outcome == UNANSWERED:
        return {**NOT_ASKED, "runs_error": f"{owner} has not answered within {ASK_SECONDS:g} s"}
    if asked.outcome != DONE:
        return {**NOT_ASKED, "runs_error": f"{owner}: {asked.outcome}: {asked.result}"}
    found = read_runs([asked])
    blocked = blocked_texts(found)
    return {
        "runs": found.items,
        "in_flight": found.total,
        "runs_error": blocked[0] if blocked else None,
    }


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
    ]


def _running(item: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the answer of the owner; without one, the message that it has reported."""
    run, runs, error = item["running"], item["runs"], item["runs_error"]
    lines = [] if run is None or runs else [_run_text(run, f"{short_duration(run['seconds'])}+")]
    for each in runs or ():
        where = each["where"] and f", at {each['where']}"
        lines.append(_run_text(each, f"~{short_duration(each['seconds'])}") + (where or ""))
    if len(runs or ()) < (item["in_flight"] or 0):
        lines.append(f"{len(runs)} of {item['in_flight']} messages; see `qdo ps`")
    if error:
        lines.append(f"unknown: {error}")
    return [("" if number else "running", line) for number, line in enumerate(lines)]


def _run_text(run: Mapping[str, Any], duration: str) -> str:
    return f"{run['id']}, attempt {run['attempt']}, for {duration}"


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
        entries = read_entries(
            client, layout, limit=CHANGES, selects=lambda each: each.target == name
        )
    item = worker_item(found[0])
    item["changes"] = [audit_item(each) for each in entries]
    if form == "table":
        print_heading(f"{name}: {item.get('state') or 'unknown'}", item["fault"], None)
        print_facts(_worker_facts(found[0], item))
        print_changes(item["changes"])
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
        ("started", _moment(item.get("started"))),
        ("reported", f"{short_duration(max(0.0, time.time() - status.reported))} ago"),
        ("version", f"qdo {item.get('version', '?')}, Python {item.get('python', '?')}"),
        ("queues", f"{status.queues} owned, {status.assigned} assigned"),
        ("running", f"{_text(item.get('busy')) or '?'} of {item.get('concurrency', '?')} jobs"),
        ("messages", processed if processed is None else ", ".join([f"{processed} done", *ended])),
        ("filter", str(status.takes) or None),
        ("jobs", join_some(status.takes.jobs)),
        *status.report.labelled(),
    ]


def _print_owners(owners: Sequence[Mapping[str, Any]]) -> None:
    for number, each in enumerate(owners):
        label = "owners" if not number else ""
        until = f" to {each['ended']}" if each["ended"] else ""
        why = f" ({each['why']})" if each["why"] else ""
        text = f"{each['claimed']}{until} {each['owner']} on {each['host']}, pid {each['pid']}{why}"
        print(filled(f"{label:{LABEL}}{cell(text)}", "", " " * LABEL))


def _print_stack(run: Mapping[str, Any]) -> None:
    heading = cell(f"--- message {run['id']} ---")
    print(f"\n{heading}\n{stack_text(run)}")

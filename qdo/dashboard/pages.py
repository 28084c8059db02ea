"""The pages about the whole app."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from flask import Blueprint, render_template, request

from qdo.dashboard import answers
from qdo.dashboard.board import board
from qdo.dashboard.paging import glob_of, paged
from qdo.dashboard.reading.event_log import EVENT_KINDS, MOST_EVENTS
from qdo.dashboard.reading.fleet_reader import Reading
from qdo.fleet.components import skew
from qdo.ops.changes import MOST_OF_A_KIND
from qdo.ops.items import component_item, worker_item
from qdo.ops.overview import overview as overview_of
from qdo.ops.overview import silent
from qdo.ops.queue_health import QueueHealth

WORST = 20
NEWEST_EVENTS = 10
EVENT_ROWS = AUDIT_ROWS = 100

pages = Blueprint("pages", __name__)


def page(template: str, **content: Any) -> str:
    """Return a page with the state of the reader, which every page shows."""
    shown = board()
    content["reading"] = content.get("reading") or shown.reading(0)
    content |= {"fault": shown.reader.fault, "reading_id": shown.reading_id, "now": time.time()}
    return render_template(template, **content)


@pages.get("/")
def overview() -> str:
    """Show workers, states of queues, and the worst queues."""
    reading = board().reading()
    if reading is None:
        return page("waiting.html")
    content = reading.once("overview", lambda: _overview(reading))
    newest = board().reader.events.newest()[:NEWEST_EVENTS]
    return page("overview.html", reading=reading, events=newest, **content)


def _overview(reading: Reading) -> dict[str, Any]:
    ages = [each.behind_seconds for each, verdict in reading.judged if _counts(verdict.state)]
    backlogs = [each.backlog for each, _ in reading.judged if each.backlog is not None]
    unread = reading.statuses.unread
    return {
        "item": overview_of(
            board().app, reading.workers, reading.judged, reading.notices, WORST, unread
        ),
        "oldest": max((each for each in ages if each is not None), default=None),
        "waiting": sum(backlogs) if backlogs or not reading.judged else None,
        "approximate": any(each.approximate for each, _ in reading.judged),
        "skew": skew(list(reading.processes)),
        "unread": unread,
    }


def _counts(state: QueueHealth) -> bool:
    """Return whether the age of a queue is one to worry about."""
    return state is not QueueHealth.PAUSED


@pages.get("/workers")
def workers() -> str:
    """List workers and the other processes."""
    reading = board().reading()
    if reading is None:
        return page("waiting.html")
    named = {each.name for each in reading.processes if each.kind == "worker"}
    others = [each for each in reading.processes if each.name not in named]
    busy = {(each.host, each.pid): each.busy for each in reading.processes}
    items = [worker_item(each) for each in reading.workers]
    for item in items:
        item["busy"] = busy.get((item.get("host"), item.get("pid")))
    return page(
        "workers.html",
        reading=reading,
        workers=items,
        silent=silent(reading.workers),
        others=[component_item(each) for each in others],
        skew=skew(list(reading.processes)),
        versions=Counter(str(each.version) for each in reading.processes if each.version),
    )


@pages.get("/events")
def events() -> str:
    """List what has changed between the readings."""
    reading = board().reading()
    if reading is None:
        return page("waiting.html")
    log, text = board().reader.events, request.args.get("glob", "").strip()
    kinds = [each for each in EVENT_KINDS if each in request.args.getlist("kind")]
    matching = log.newest(glob_of(text))
    chosen = [each for each in matching if each.kind in kinds] if kinds else matching
    return page(
        "events.html",
        reading=reading,
        text=text,
        kinds=EVENT_KINDS,
        chosen_kinds=kinds,
        counts=Counter(each.kind for each in matching),
        part=paged(chosen, request.args.get("page"), EVENT_ROWS),
        begin=log.begin,
        commands_fault=log.fault,
        most=MOST_EVENTS,
        most_of_a_kind=MOST_OF_A_KIND,
    )


@pages.get("/holds")
def holds() -> str:
    """List holds and limits."""
    found, fault = answers.attempt(lambda: answers.holds(board()))
    items, read = found or ([], None)
    limits, limits_fault = answers.attempt(lambda: answers.limits(board()))
    return page(
        "holds.html",
        holds=items,
        holds_fault=fault,
        late=answers.late_workers(read),
        limits=limits,
        limits_fault=limits_fault,
    )


@pages.get("/audit")
def audit() -> str:
    """List what operators changed."""
    glob = request.args.get("glob", "").strip()
    found, fault = answers.attempt(lambda: answers.audit(board(), glob_of(glob)))
    return page(
        "audit.html",
        glob=glob,
        entries=paged(found or [], request.args.get("page"), AUDIT_ROWS),
        audit_fault=fault,
    )


@pages.get("/settings")
def settings() -> str:
    """Show the settings in force."""
    live, fault = answers.attempt(lambda: answers.live_settings(board()))
    return page("settings.html", items=answers.config(board()), live=live, live_fault=fault)

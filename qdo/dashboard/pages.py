"""The pages of the dashboard, which show the whole app, its queues, and their dead letters."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from flask import Blueprint, render_template, request

from qdo.brokers.requests import OUTCOMES, STATES
from qdo.coordination.znodes.worker_report import MINUTES
from qdo.dashboard import answers
from qdo.dashboard.answers import glob_of, paged
from qdo.dashboard.board import board
from qdo.dashboard.reading import EVENT_KINDS, MOST_EVENTS, Reading
from qdo.dashboard.rendering import LineChart, bars, line_chart, without_empty_cells
from qdo.fleet.components import skew
from qdo.fleet.names import exactly
from qdo.ops import dead_letters as ops
from qdo.ops.changes import MOST_OF_A_KIND
from qdo.ops.items import QUEUE_SORTS, component_item, queue_item, silent, worker_item
from qdo.ops.peek import RECORDED
from qdo.ops.verdicts import QueueHealth
from qdo.settings.listing import config_items

WORST = 20
NEWEST_EVENTS = 10
EVENT_ROWS = AUDIT_ROWS = 100
ROWS = 50
# Maximum number of missing limits to show.
MISSING = 10

# A page, with the HTTP status if the status is not 200.
_Answer = str | tuple[str, int]
pages = Blueprint("pages", __name__)

LETTER_ROWS = 50
ENTRIES = 10
# Maximum number of failing messages on the page of a queue.
MARKS = 50
# Interval at which an open page asks for a new reading.
POLL_SECONDS = 2.0
# Charts have a gap if this many readings are missing.
GAP_PAUSES = 3.0


def page(template: str, **content: Any) -> str:
    """Return a page with the state of the reader, which every page shows."""
    shown = board()
    content["reading"] = content.get("reading") or shown.reading(0)
    content |= {"fault": shown.reader.fault, "reading_id": shown.reading_id, "now": time.time()}
    return without_empty_cells(render_template(template, **content))


def with_reading(view: Callable[[Reading], _Answer]) -> Callable[[], _Answer]:
    """Pass the last reading to a view. Before the first reading, show a page that waits."""

    @wraps(view)
    def shown() -> _Answer:
        found = board().reading()
        return page("waiting.html") if found is None else view(found)

    return shown


@pages.get("/reading")
def reading() -> tuple[str, dict[str, str]]:
    """Tell the script of an open page whether there is a new reading."""
    return board().reading_id, {"Content-Type": "text/plain"}


@pages.get("/")
@with_reading
def overview(reading: Reading) -> str:
    """Show workers, states of queues, and the worst queues."""
    content = reading.once("overview", lambda: _overview(reading))
    history, fault = answers.attempt(lambda: answers.history(board()))
    is_recorded = bool(board().settings.history)
    return page(
        "overview.html",
        reading=reading,
        events=board().reader.events.newest()[:NEWEST_EVENTS],
        rates=_rates(history) if is_recorded else _reported_rates(reading),
        rates_fault=fault,
        is_recorded=is_recorded,
        backlogs=_backlogs(reading),
        **content,
    )


def _overview(reading: Reading) -> dict[str, Any]:
    paused = QueueHealth.PAUSED
    ages = [each.behind_seconds for each, verdict in reading.judged if verdict.state is not paused]
    return {
        "item": reading.overview(board().app, WORST),
        "oldest": max((each for each in ages if each is not None), default=None),
        "skew": skew(list(reading.processes)),
        "unread": reading.statuses.unread,
    }


@pages.get("/workers")
@with_reading
def workers(reading: Reading) -> str:
    processes = reading.processes
    busy = {(each.host, each.pid): each.busy for each in processes if each.kind == "worker"}
    # If a job acquires a lock or cancels a message, its worker is also a client.
    others = [
        each for each in processes if each.kind != "worker" and (each.host, each.pid) not in busy
    ]
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


@pages.get("/requests")
def requests() -> str:
    pool = request.args.get("pool") or None
    state = request.args.get("state", "")
    state = state if state in (*STATES, *OUTCOMES) else ""
    pools, pools_fault = answers.attempt(lambda: answers.pools(board()))
    found, fault = answers.attempt(lambda: answers.requests(board(), pool, state))
    return page(
        "requests.html",
        pool=pool,
        state=state,
        states=(*STATES, *OUTCOMES),
        pools=pools or [],
        pools_fault=pools_fault,
        requests=found or [],
        requests_fault=fault,
        most=answers.REQUESTS,
    )


@pages.get("/events")
@with_reading
def events(reading: Reading) -> str:
    log = board().reader.events
    text = request.args.get("glob", "").strip()
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
def pauses() -> str:
    found, fault = answers.attempt(lambda: answers.pauses(board()))
    items, read = found or ([], None)
    late = answers.late_workers(read)
    return page("pauses.html", pauses=items, pauses_fault=fault, late=late)


def _listed(found: list[answers.Item] | None) -> answers.Part[answers.Item]:
    return paged(found or [], request.args.get("page"), ROWS)


@pages.get("/timers")
def timers() -> str:
    items, fault = answers.attempt(lambda: answers.timers(board()))
    items = sorted(items or [], key=lambda each: each["is_well"])
    return page("timers.html", part=_listed(items), timers_fault=fault)


@pages.get("/streams")
def streams() -> str:
    items, fault = answers.attempt(lambda: answers.streams(board()))
    part = _listed(items)
    reading = board().reading()
    judged = {} if reading is None else reading.by_name
    names = [each["shard"] for each in part.items if each["shard"] in judged]
    verdicts = {each: judged[each][1] for each in names}
    return page("streams.html", part=part, streams_fault=fault, verdicts=verdicts)


@pages.get("/limits")
def limits() -> str:
    items, fault = answers.attempt(lambda: answers.limits(board()))
    reading = board().reading()
    waits: dict[str, set[str]] = {}
    unusable: dict[str, str] = {}
    for worker in [] if reading is None else reading.workers:
        unusable |= worker.report.unusable
        for glob, names in worker.report.waits.items():
            for name in names:
                waits.setdefault(name, set()).add(glob)
    known = {each["limit"] for each in items or []}
    missing = [unusable[name] for name in sorted({*unusable} - known)[:MISSING]]
    items = sorted(items or [], key=lambda each: (not each["fault"], not each["waiting"]))
    return page(
        "limits.html", part=_listed(items), limits_fault=fault, waits=waits, missing=missing
    )


@pages.get("/audit")
def audit() -> str:
    glob = request.args.get("glob", "").strip()
    items, fault = answers.attempt(lambda: answers.audit(board(), glob_of(glob)))
    return page(
        "audit.html",
        glob=glob,
        entries=paged(items or [], request.args.get("page"), AUDIT_ROWS),
        audit_fault=fault,
    )


@pages.get("/settings")
def settings() -> str:
    live, fault = answers.attempt(lambda: answers.live_settings(board()))
    return page(
        "settings.html", items=config_items(board().settings, {}), live=live, live_fault=fault
    )


queue_pages = Blueprint("queues", __name__)


@queue_pages.get("/queues")
@with_reading
def queues(reading: Reading) -> str:
    """List queues. Filter, sort and limit them here, not in the browser."""
    text = request.args.get("glob", "").strip()
    sort = request.args.get("sort", "state")
    sort = sort if sort in QUEUE_SORTS else "state"
    states = [each.value for each in QueueHealth if each.value in request.args.getlist("state")]
    matching = answers.select(reading, glob_of(text), (), sort)
    counts = Counter(verdict.state.value for _, verdict in matching)
    chosen = [each for each in matching if each[1].state.value in states] if states else matching
    part = paged(chosen, request.args.get("page"), ROWS)
    return page(
        "queues.html",
        reading=reading,
        text=text,
        glob=glob_of(text),
        sort=sort,
        chosen_states=states,
        counts=counts,
        matching=len(matching),
        part=part,
        items=[queue_item(*each) for each in part.items],
        has_eta=any(verdict.eta_seconds is not None for _, verdict in part.items),
        etas={each.queue: verdict.eta_seconds for each, verdict in part.items},
        unasked=reading.statuses.unasked,
    )


@queue_pages.get("/queue")
@with_reading
def queue(reading: Reading) -> _Answer:
    name = request.args.get("name", "")
    judged = reading.by_name.get(name)
    if judged is None:
        return page("missing.html", reading=reading, what="queue", name=name), 404
    status, verdict = judged
    pauses, pauses_fault = answers.attempt(lambda: answers.pauses(board()))
    entries, entries_fault = answers.attempt(lambda: answers.audit_of(board(), name))
    dead, dead_fault = answers.attempt(lambda: _newest_letter(name, status.dead_letters))
    marks = [*filter(None, [status.marks]), *status.also_blocking, *status.also_failing][:MARKS]
    failing = _failing(name) if marks else []
    return page(
        "queue.html",
        reading=reading,
        name=name,
        name_glob=exactly(name),
        status=status,
        verdict=verdict,
        item=queue_item(status, verdict),
        marks=marks,
        messages={each["position"]: each for each in failing},
        pauses=_holding(name, (pauses or ([],))[0]),
        pauses_fault=pauses_fault,
        entries=(entries or [])[:ENTRIES],
        entries_fault=entries_fault,
        dead=dead,
        dead_fault=dead_fault,
        **_drawings(reading, name),
    )


@queue_pages.get("/messages")
def messages() -> str:
    """Show the next messages of a queue, or search for one message."""
    queue = request.args.get("queue", "")
    name = request.args.get("id", "").strip()
    found, fault = answers.attempt(lambda: answers.messages(board(), queue, name))
    return page("messages.html", queue=queue, id=name, items=found or [], messages_fault=fault)


def _failing(name: str) -> list[dict[str, Any]]:
    found, _ = answers.attempt(lambda: answers.messages(board(), name, kinds=sorted(RECORDED)))
    return found or []


def _newest_letter(name: str, count: int | None) -> dict[str, Any] | None:
    newest = answers.letter(board(), name) if count else None
    return None if newest is None else newest[1]


def _holding(name: str, pauses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in pauses if any(fnmatchcase(name, glob) for glob in each["globs"])]


def _drawings(reading: Reading, name: str) -> dict[str, Any]:
    samples = board().reader.samples.of(name)
    history = answers.history(board(), name)
    gap = _gap(reading)
    return {
        "ages": line_chart([(each.at, each.age_seconds) for each in samples], gap, 10.0),
        "backlogs": line_chart([(each.at, each.backlog) for each in samples], gap, 10.0),
        "history": history,
        "rates": _rates(history),
    }


def _rates(history: answers.ShownHistory | None) -> dict[str, Any] | None:
    """Return the chart of the attempts in the last hour, or None without a history."""
    if history is None:
        return None
    minutes = history.minutes
    counts = [(float(each.minute), each.done, each.failed) for each in minutes]
    slowest = next((each for each in minutes if each.p95_seconds is not None), None)
    return {**_drawn(counts), "fault": history.fault, "slowest": slowest}


def _reported_rates(reading: Reading) -> dict[str, Any]:
    newest = int(time.time() // 60)
    minutes = reading.once(("hour", newest), lambda: answers.last_hour(reading.workers, newest))
    drawn = _drawn([(minute * 60.0, done, failed) for minute, done, failed, _ in minutes])
    return {**drawn, "dead_lettered": sum(each[-1] for each in minutes)}


def _drawn(counts: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    begin, end = _hour()
    return {
        "bars": bars(counts, begin, end),
        "begin": begin,
        "end": end,
        "top": max((done + failed for _, done, failed in counts), default=0),
        "done": sum(each[1] for each in counts),
        "failed": sum(each[2] for each in counts),
    }


def _hour() -> tuple[int, int]:
    end = math.floor(time.time() / 60) * 60 + 60
    return end - 60 * MINUTES, end


def _backlogs(reading: Reading) -> LineChart | None:
    span = _hour()
    return line_chart(board().reader.samples.backlogs(span[0]), _gap(reading), 10.0, span)


def _gap(reading: Reading) -> float:
    return GAP_PAUSES * (reading.pause_seconds + POLL_SECONDS)


@queue_pages.get("/dead-letters")
def dead_letters() -> str:
    """Show dead letters grouped by error, or the dead letters with one kind of error."""
    text = request.args.get("glob", "").strip()
    kind = request.args.get("error")
    letters, fault = answers.attempt(lambda: answers.letters(board(), glob_of(text)))
    letters = letters or []
    if kind is not None:
        letters = [each for each in letters if ops.error_kind_of(each.entry.error) == kind]
    listed = kind is not None or request.args.get("list") is not None
    groups = [] if listed else ops.grouped(letters)
    elsewhere_fault = None
    if not listed and not text:
        elsewhere, elsewhere_fault = answers.attempt(lambda: answers.failed_elsewhere(board()))
        groups += elsewhere or []
    return page(
        "dead_letters.html",
        text=text,
        kind=kind,
        total=len(letters),
        groups=() if listed else paged(groups, request.args.get("page"), ROWS),
        elsewhere_fault=elsewhere_fault,
        part=paged(letters, request.args.get("page"), LETTER_ROWS) if listed else None,
        letters_fault=fault,
    )


@queue_pages.get("/dead-letter")
def dead_letter() -> _Answer:
    queue = request.args.get("queue", "")
    id = request.args.get("id", "")
    found, fault = answers.attempt(lambda: answers.letter(board(), queue, id))
    if found is None:
        code = 404 if fault is None else 503
        return page("missing.html", what="dead letter", name=id, reason=fault), code
    letter, item = found
    return page("dead_letter.html", letter=letter, item=item)

"""The pages about queues and their dead letters."""

from __future__ import annotations

import math
import time
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from flask import Blueprint, request

from qdo.dashboard import answers, letters
from qdo.dashboard.board import board
from qdo.dashboard.charts import bars, line_chart
from qdo.dashboard.pages import page
from qdo.dashboard.paging import glob_of, paged
from qdo.dashboard.reading.fleet_reader import Reading
from qdo.fleet.globs import exactly
from qdo.ops.items import QUEUE_SORTS, queue_item
from qdo.ops.queue_health import QueueHealth

ROWS = 50
LETTER_ROWS = 50
ENTRIES = 10
MARKS = 50
"""How many failing messages the page of a queue shows."""

queue_pages = Blueprint("queues", __name__)


@queue_pages.get("/queues")
def queues() -> str:
    """List queues: filtered, sorted and cut here, not in the browser."""
    reading = board().reading()
    if reading is None:
        return page("waiting.html")
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
def queue() -> str | tuple[str, int]:
    """Show one queue."""
    name = request.args.get("name", "")
    reading = board().reading()
    if reading is None:
        return page("waiting.html")
    found = reading.by_name.get(name)
    if found is None:
        return page("missing.html", reading=reading, what="queue", name=name), 404
    status, verdict = found
    holds, holds_fault = answers.attempt(lambda: answers.holds(board()))
    entries, entries_fault = answers.attempt(lambda: answers.audit_of(board(), name))
    dead, dead_fault = answers.attempt(lambda: _newest_letter(name, status.dead_letters))
    return page(
        "queue.html",
        reading=reading,
        name=name,
        name_glob=exactly(name),
        status=status,
        verdict=verdict,
        item=queue_item(status, verdict),
        marks=[
            *filter(None, [status.marks]),
            *status.also_blocking,
            *status.also_failing,
        ][:MARKS],
        holds=_holding(name, (holds or ([],))[0]),
        holds_fault=holds_fault,
        entries=(entries or [])[:ENTRIES],
        entries_fault=entries_fault,
        dead=dead,
        dead_fault=dead_fault,
        **_drawings(reading, name),
    )


def _newest_letter(name: str, count: int | None) -> dict[str, Any] | None:
    """Return the newest dead letter of a queue, with its traceback."""
    found = letters.letters(board(), name) if count else []
    own = [each for each in found if each.entry.queue == name]
    items = letters.exported(board(), own[:1])
    return items[0] if items else None


def _holding(name: str, holds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in holds if any(fnmatchcase(name, glob) for glob in each["globs"])]


def _drawings(reading: Reading, name: str) -> dict[str, Any]:
    """Return age, backlog and rate over time."""
    samples = board().reader.samples.of(name)
    history = answers.history(board(), name)
    end = math.floor(time.time() / 60) * 60 + 60
    begin = end - 60 * answers.MINUTES
    minutes = () if history is None else history.minutes
    counts = [(float(each.minute), each.done, each.failed) for each in minutes]
    return {
        "ages": line_chart([(each.at, each.age_seconds) for each in samples], 10.0),
        "backlogs": line_chart(
            [(each.at, None if each.backlog is None else float(each.backlog)) for each in samples],
            10.0,
        ),
        "history": history,
        "rates": bars(counts, begin, end),
        "rates_begin": begin,
        "rates_end": end,
        "rates_top": max((done + failed for _, done, failed in counts), default=0),
        "rates_done": sum(done for _, done, _ in counts),
        "rates_failed": sum(failed for _, _, failed in counts),
        "slowest": next((each for each in minutes if each.p95_seconds is not None), None),
    }


@queue_pages.get("/dead-letters")
def dead_letters() -> str:
    """Show dead letters grouped by error, or those of one kind of error."""
    text = request.args.get("glob", "").strip()
    kind = request.args.get("error")
    found, fault = answers.attempt(lambda: letters.letters(board(), glob_of(text)))
    found = found or []
    if kind is not None:
        found = [each for each in found if letters.error_kind_of(each.entry.error) == kind]
    listed = kind is not None or request.args.get("list") is not None
    return page(
        "dead_letters.html",
        text=text,
        kind=kind,
        total=len(found),
        groups=() if listed else paged(letters.grouped(found), request.args.get("page"), ROWS),
        part=paged(found, request.args.get("page"), LETTER_ROWS) if listed else None,
        letters_fault=fault,
    )


@queue_pages.get("/dead-letter")
def dead_letter() -> str | tuple[str, int]:
    """Show one dead letter with its traceback."""
    queue, id = request.args.get("queue", ""), request.args.get("id", "")
    found, fault = answers.attempt(lambda: letters.letter(board(), queue, id))
    if found is None:
        code = 404 if fault is None else 503
        return page("missing.html", what="dead letter", name=id, reason=fault), code
    item, body_bytes = found
    return page("dead_letter.html", item=item, body_bytes=body_bytes)

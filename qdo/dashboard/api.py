"""The JSON of the dashboard: the items of the commands of the same names, as with ``-o json``.

Long lists come in pages, and dead letters and events newest first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flask import Blueprint, Response, jsonify, request

from qdo.dashboard import answers
from qdo.dashboard.board import ANSWER_WAIT_SECONDS, board
from qdo.dashboard.reading import EVENT_KINDS, Reading
from qdo.errors import NotFoundError, QdoError, UnreachableError, UnreadError, UsageError
from qdo.ops.changes import event_item
from qdo.ops.items import QUEUE_SORTS, component_item, overview, queue_item, worker_item
from qdo.ops.verdicts import QueueHealth
from qdo.settings.listing import config_items

MOST_ITEMS = 1000
"""Items in one answer; `page` selects the next ones."""

api = Blueprint("api", __name__, url_prefix="/api")


@api.errorhandler(QdoError)
def failed(error: QdoError) -> tuple[Response, int]:
    code = 503 if isinstance(error, UnreachableError) else 404
    if not isinstance(error, UnreachableError | NotFoundError):
        code = 400 if isinstance(error, UsageError) else 500
    return jsonify(error=str(error)), code


def _reading() -> Reading:
    shown = board()
    found = shown.reading(ANSWER_WAIT_SECONDS)
    if found is None:
        raise UnreadError(reason=shown.reader.fault or "the first reading is not finished")
    return found


def _answer(schema: str, items: Iterable[Mapping[str, Any]]) -> Response:
    return jsonify({"schema": schema, "items": list(items)})


@api.get("/status")
def status() -> Response:
    found = _reading()
    unread = found.statuses.unread
    item = overview(board().app, found.workers, found.judged, found.notices, unread=unread)
    return _answer("qdo.status/1", [item])


@api.get("/queues")
def queues() -> Response:
    sort = request.args.get("sort", "name")
    states = request.args.getlist("state")
    _check([sort], QUEUE_SORTS)
    _check(states, _STATES)
    chosen = answers.select(_reading(), request.args.get("glob", "*"), states, sort)
    page = chosen[(_page() - 1) * MOST_ITEMS :][:MOST_ITEMS]
    return _answer("qdo.queues/1", [queue_item(*each) for each in page])


@api.get("/queue")
def queue() -> Response:
    name = request.args.get("name", "")
    found = _reading().by_name.get(name)
    if found is None:
        raise NotFoundError(what="queue", name=name)
    return _answer("qdo.queues/1", [queue_item(*found)])


@api.get("/workers")
def workers() -> Response:
    return _answer("qdo.workers/1", map(worker_item, _reading().workers))


@api.get("/components")
def components() -> Response:
    return _answer("qdo.components/1", map(component_item, _reading().processes))


@api.get("/dead-letters")
def dead_letters() -> Response:
    """Return the items of `qdo dead-letters`, in pages, newest first."""
    found = answers.letters(board(), request.args.get("glob", "*"))
    page = found[(_page() - 1) * _LETTERS :][:_LETTERS]
    return _answer("qdo.dead-letters/2", answers.exported(board(), page))


@api.get("/holds")
def holds() -> Response:
    return _answer("qdo.holds/1", answers.holds(board())[0])


@api.get("/limits")
def limits() -> Response:
    return _answer("qdo.limits/1", answers.limits(board()))


@api.get("/timers")
def timers() -> Response:
    return _answer("qdo.timers/1", answers.timers(board()))


@api.get("/pools")
def pools() -> Response:
    return _answer("qdo.pools/1", answers.pools(board()))


@api.get("/requests")
def requests() -> Response:
    """Return items of `qdo requests list POOL`: the newest that are not over."""
    return _answer("qdo.requests/1", answers.requests(board(), request.args.get("pool")))


@api.get("/events")
def events() -> Response:
    kinds = request.args.getlist("kind")
    _check(kinds, EVENT_KINDS)
    _reading()
    found = board().reader.events.newest(request.args.get("glob", "*"), kinds)
    return _answer("qdo.events/1", [event_item(each.at, each.change) for each in found])


@api.get("/audit")
def audit() -> Response:
    return _answer("qdo.audit/1", answers.audit(board(), request.args.get("glob", "*")))


@api.get("/config")
def config() -> Response:
    return _answer("qdo.config/1", config_items(board().settings, {}))


@api.get("/settings")
def settings() -> Response:
    return _answer("qdo.settings/1", answers.live_settings(board()).items)


_LETTERS = 100
_STATES = tuple(each.value for each in QueueHealth)


def _check(values: Iterable[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise UsageError(reason=f"it must be one of {', '.join(known)}, got {value!r}")


def _page() -> int:
    number = request.args.get("page", "1")
    if not number.isascii() or not number.isdecimal() or not 1 <= int(number[:9]) <= 1_000_000:
        raise UsageError(reason=f"page must be a number from 1 on, got {number!r}")
    return int(number[:9])

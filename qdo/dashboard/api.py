"""The JSON of the dashboard. The items are those of the commands' ``-o json``.

Long lists have pages. Dead letters and events are sorted newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from flask import Blueprint, Response, jsonify, request

from qdo.brokers.requests import OUTCOMES, STATES
from qdo.dashboard import answers
from qdo.dashboard.board import ANSWER_WAIT_SECONDS, Board, board
from qdo.dashboard.reading import EVENT_KINDS, Reading
from qdo.errors import NotFoundError, QdoError, UnreachableError, UnreadError, UsageError
from qdo.ops.changes import event_item
from qdo.ops.items import QUEUE_SORTS, component_item, queue_item, worker_item
from qdo.ops.verdicts import QueueHealth
from qdo.settings.listing import config_items

# Maximum number of items in a response. `page` selects further items.
MOST_ITEMS = 1000
_LETTERS = 100
_STATES = tuple(each.value for each in QueueHealth)

_Items = Iterable[Mapping[str, Any]]

api = Blueprint("api", __name__, url_prefix="/api")


@api.errorhandler(QdoError)
def failed(error: QdoError) -> tuple[Response, int]:
    code = 503 if isinstance(error, UnreachableError) else 404
    if not isinstance(error, UnreachableError | NotFoundError):
        code = 400 if isinstance(error, UsageError) else 500
    return jsonify(error=str(error)), code


def _read(shown: Board) -> Reading:
    reading = shown.reading(ANSWER_WAIT_SECONDS)
    if reading is None:
        fault = shown.reader.fault or "the first reading is not finished"
        raise UnreadError(reason=f"the dashboard has not read the app yet: {fault}")
    return reading


def _glob() -> str:
    return request.args.get("glob", "*")


def _check(values: Iterable[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise UsageError(reason=f"it must be one of {', '.join(known)}, got {value!r}")


def _page(items: Sequence[Any], size: int) -> Sequence[Any]:
    number = request.args.get("page", "1")
    if not number.isascii() or not number.isdecimal() or not 1 <= int(number[:9]) <= 1_000_000:
        raise UsageError(reason=f"page must be a number from 1 on, got {number!r}")
    return items[(int(number[:9]) - 1) * size :][:size]


def _queues(shown: Board) -> _Items:
    sort = request.args.get("sort", "name")
    states = request.args.getlist("state")
    _check([sort], QUEUE_SORTS)
    _check(states, _STATES)
    chosen = answers.select(_read(shown), _glob(), states, sort)
    return [queue_item(*each) for each in _page(chosen, MOST_ITEMS)]


def _queue(shown: Board) -> _Items:
    name = request.args.get("name", "")
    judged = _read(shown).by_name.get(name)
    if judged is None:
        raise NotFoundError(what="queue", name=name)
    return [queue_item(*judged)]


def _dead_letters(shown: Board) -> _Items:
    """Return a page of the items of `qdo dead-letters`, newest first."""
    return answers.exported(shown, _page(answers.letters(shown, _glob()), _LETTERS))


def _requests(shown: Board) -> _Items:
    """Return the items of `qdo requests list POOL` in one state, or of all unfinished requests."""
    state = request.args.get("state", "")
    _check([state] if state else [], (*STATES, *OUTCOMES))
    return answers.requests(shown, request.args.get("pool"), state)


def _events(shown: Board) -> _Items:
    kinds = request.args.getlist("kind")
    _check(kinds, EVENT_KINDS)
    _read(shown)
    events = shown.reader.events.newest(_glob(), kinds)
    return [event_item(each.at, each.change) for each in events]


# For each path, the schema of the items and the function that returns them.
_ANSWERS: dict[str, tuple[str, Callable[[Board], _Items]]] = {
    "status": ("qdo.status/1", lambda shown: [_read(shown).overview(shown.app)]),
    "queues": ("qdo.queues/1", _queues),
    "queue": ("qdo.queues/1", _queue),
    "workers": ("qdo.workers/1", lambda shown: map(worker_item, _read(shown).workers)),
    "components": ("qdo.components/1", lambda shown: map(component_item, _read(shown).processes)),
    "dead-letters": ("qdo.dead-letters/2", _dead_letters),
    "holds": ("qdo.holds/1", lambda shown: answers.pauses(shown)[0]),
    "limits": ("qdo.limits/1", answers.limits),
    "timers": ("qdo.timers/1", answers.timers),
    "streams": ("qdo.streams/1", answers.streams),
    "pools": ("qdo.pools/1", answers.pools),
    "requests": ("qdo.requests/1", _requests),
    "events": ("qdo.events/1", _events),
    "audit": ("qdo.audit/1", lambda shown: answers.audit(shown, _glob())),
    "config": ("qdo.config/1", lambda shown: config_items(shown.settings, {})),
    "settings": ("qdo.settings/1", lambda shown: answers.live_settings(shown).items),
}


def _answer(schema: str, items_of: Callable[[Board], _Items]) -> Response:
    return jsonify({"schema": schema, "items": list(items_of(board()))})


for _path, (_schema, _items_of) in _ANSWERS.items():
    api.add_url_rule(f"/{_path}", _path, partial(_answer, _schema, _items_of))

"""Pages for actions of operators, which call the functions of the commands of the same names.

Operators confirm each action after a page that shows the targets and their number.

A page can ask the owner of a queue for its messages in flight, like `qdo ps`. A question changes
nothing, so it needs no confirmation. Only operators may ask, because each question creates nodes in
the coordinator.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from flask import Blueprint, abort, flash, redirect, request, session, url_for
from werkzeug.wrappers import Response

from qdo.brokers.requests import RequestRecord
from qdo.connections.opened import Connections, noted_in_action_log
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import NodeRead
from qdo.coordination.transactions import read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.dashboard.access import may_act, operator_name
from qdo.dashboard.board import board
from qdo.dashboard.pages import page
from qdo.errors import NotFoundError, UsageError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import MAX_TEXT, Values
from qdo.fleet.names import exactly, match_everything
from qdo.fleet.pause_machine import paused_queues
from qdo.fleet.pauses import new_pause, pause_queues, resume_pause
from qdo.ops import dead_letters as ops
from qdo.ops import requests
from qdo.ops.dead_letters import Filter, Letter
from qdo.ops.decisions import OperatorDecision, check_store
from qdo.ops.decisions import decide as decide_in_queue
from qdo.ops.runs import RunsRead, ask_owner, read_runs
from qdo.positions import MOST_DIGITS
from qdo.requests.calls import Handle, RequestCalls
from qdo.text import pluralize, printable

# Maximum duration of a pause.
LASTING = {"": None, "15m": 900.0, "1h": 3600.0, "4h": 14400.0, "1d": 86400.0}
_DECISIONS: dict[OperatorDecision, str] = {
    "retry": "Retry",
    "skip": "Skip",
    "dead-letter": "Make a dead letter of",
}

# Maximum number of queues to read separately. For more, read the dead letters of all queues and
# filter them.
MOST_QUEUES = 20

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)
actions = Blueprint("actions", __name__, url_prefix="/actions")
asking = Blueprint("asking", __name__, url_prefix="/ask")

# Maximum waiting time of a page. The worker has one second less to answer.
ANSWER_SECONDS = 5.0
MOST_RUNS = 20
# Maximum number of waiting questions. Each question occupies one of the server's 16 threads.
MOST_AT_ONCE = 4


@actions.before_request
@asking.before_request
def _only_operators() -> None:
    if not may_act():
        abort(403, "only operators may act, and only if the dashboard allows actions")


@actions.post("/pause")
def pause() -> str | Response:
    glob = request.form.get("glob", "").strip()
    lasting = request.form.get("lasting", "")
    if lasting not in LASTING:
        raise UsageError(reason=f"a pause must last {', '.join(LASTING)}, got {lasting!r}")
    pause = new_pause([glob], _reason(), LASTING[lasting])
    takes = paused_queues([pause])
    reading = board().reading()
    if reading is None:
        raise UsageError(reason="the queues must be known to pause some of them; try again soon")
    if match_everything([glob], reading.by_name):
        reason = f"{printable(glob)} matches every queue; to pause all of them, use qdo pause"
        raise UsageError(reason=reason)
    names = [] if takes is None else list(filter(takes, reading.by_name))
    what = f"Pause {pluralize(len(names), 'queue')}: {printable(glob)}"
    if not _confirmed(len(names)):
        return _ask(what, names, len(names), glob=glob, lasting=lasting)
    by = operator_name()
    _do(what, lambda client, layout: pause_queues(client, layout, replace(pause, who=by), by))
    return redirect(url_for("pages.pauses"))


@actions.post("/resume")
def resume() -> str | Response:
    id = request.form.get("id", "")
    what = f"Resume the queues of pause {printable(id)}"
    if not _confirmed(1):
        return _ask(what, [], 1, id=id)
    reason = _reason()
    by = operator_name()
    _do(what, lambda client, layout: resume_pause(client, layout, id, reason, by))
    return redirect(url_for("pages.pauses"))


@actions.post("/decide")
def decide() -> str | Response:
    """Decide about the failing message of a queue that has the position in the form."""
    queue = request.form.get("queue", "")
    position = request.form.get("position", "")
    decision = next((each for each in _DECISIONS if each == request.form.get("decision")), None)
    is_number = position.isascii() and position.isdecimal() and len(position) <= MOST_DIGITS
    if decision is None or not is_number:
        raise UsageError(reason="choose a message, and one of retry, skip and dead-letter")
    if decision == "dead-letter":
        check_store(board().settings.broker)
    what = f"{_DECISIONS[decision]} message {position} of queue {printable(queue)}"
    if not _confirmed(1):
        return _ask(what, [], 1, queue=queue, position=position, decision=decision)
    reason = _reason()
    by = operator_name()

    def change(client: Client, layout: Layout) -> None:
        decide_in_queue(client, layout, queue, decision, (int(position),), reason, by)

    _do(what, change)
    return redirect(url_for("queues.queue", name=queue))


@actions.post("/letters")
def dead_letters() -> str | Response:
    what = request.form.get("what", "")
    if what not in ("retry", "discard"):
        raise UsageError(reason=f"choose retry or discard, got {what!r}")
    named = request.form.getlist("letter")
    chosen = _letters(named)
    if not chosen:
        raise NotFoundError(what="dead letter", name="that is selected and still exists")
    title = f"{what.capitalize()} {pluralize(len(chosen), 'dead letter')}"
    if not _confirmed(len(chosen)):
        shown = [f"{each.entry.queue} {each.id}" for each in chosen]
        return _ask(title, shown, len(chosen), what=what, letter=named)
    function = ops.retry if what == "retry" else ops.discard

    def change(connections: Connections) -> list[ops.LetterResult]:
        broker = connections.known_broker()
        return [] if broker is None else list(function(broker, chosen))

    results = _changed(change)
    done = sum(each.done for each in results)
    kept = [each.error for each in results if each.error is not None]
    verb = "retried" if what == "retry" else "discarded"
    text = f"{verb.capitalize()} {pluralize(done, 'dead letter')}"
    if kept:
        text += f"; {len(kept)} stayed: {kept[0]}"
    if gone := len(chosen) - done - len(kept):
        text += f"; {gone} {'was' if gone == 1 else 'were'} gone: another operator was faster"
    _tell(text)
    if done:
        queues = " ".join(sorted({each.entry.queue for each in chosen}))
        _note(f"dead-letters {what}", queues, {"dead_letters": len(chosen)}, {verb: done})
    return redirect(url_for("queues.dead_letters"))


@actions.post("/cancel-request")
def cancel_request() -> str | Response:
    id = request.form.get("id", "")
    shown = board()
    if not _confirmed(1):
        return _ask(f"Cancel request {printable(id)}", [], 1, id=id)
    reason = _reason()

    def change(connections: Connections) -> tuple[RequestRecord, RequestRecord | None]:
        broker = connections.known_broker()
        if broker is None:
            raise NotFoundError(what="request", name=id)
        before = requests.found(broker.requests, id)
        requests.check_change("cancel", before)
        calls = RequestCalls(shown.app, {})
        with calls.override_broker(broker, shown.settings):
            Handle(calls, id).cancel(reason)
        return before, broker.requests.find(id)

    record, after = _changed(change)
    was = requests.state_text(record)
    state = None if after is None else requests.state_text(after)
    _tell(f"Request {printable(id)} was {was}, and is {state or 'deleted'}")
    _note("requests cancel", id, {"state": was}, {"pool": record.pool, "state": state})
    return redirect(url_for("pages.requests"))


def _letters(named: Sequence[str]) -> list[Letter]:
    """Return the dead letters whose names (`Letter.name`) a form contains."""
    wanted = set(named)
    queues = {queue for each in wanted if (queue := _queue_in(each)) is not None}

    def read(connections: Connections) -> list[Letter]:
        broker = connections.known_broker()
        if broker is None:
            return []
        globs = map(exactly, queues) if len(queues) <= MOST_QUEUES else ["*"]
        found = (ops.find(broker, Filter(glob), time.time()) for glob in globs)
        return [each for letters in found for each in letters]

    found = board().acting.run(read) if queues else []
    return [each for each in found if each.name in wanted]


def _queue_in(name: str) -> str | None:
    try:
        _, queue, _ = json.loads(name)
    except (ValueError, TypeError, RecursionError):
        return None
    return queue if isinstance(queue, str) else None


def _note(command: str, target: str, before: Values, after: Values) -> None:
    reason = _reason()
    by = operator_name()

    def trail(client: Client, layout: Layout) -> AuditTrail:
        return AuditTrail(client, layout, command, reason, by)

    fault = noted_in_action_log(board().settings, trail, target, before, after)
    if fault is not None:
        flash(f"This change has no entry in the action log: {fault}")


def _reason() -> str:
    reason = " ".join(request.form.get("reason", "").split())
    if len(reason) > MAX_TEXT:
        raise UsageError(reason=f"a reason must have at most {MAX_TEXT} characters; shorten it")
    return reason


def _confirmed(count: int) -> bool:
    """Return whether the operator has confirmed this number of targets and given a reason."""
    return request.form.get("confirmed") == str(count) and bool(_reason())


def _ask(title: str, names: Sequence[str], count: int, **fields: str | Sequence[str]) -> str:
    repeated: Mapping[str, Sequence[str]] = {
        name: [value] if isinstance(value, str) else value for name, value in fields.items()
    }
    return page(
        "confirm.html",
        what=title,
        names=names,
        count=count,
        fields=repeated,
        reason=_reason(),
        again="confirmed" in request.form,
    )


def _do(what: str, change: Callable[[Client, Layout], Any]) -> None:
    shown = board()  # the thread of actions has no request context
    _changed(lambda opened: change(shown.coordinator(opened), opened.layout))
    _tell(f"Done: {what}")


def _changed(change: Callable[[Connections], _Result]) -> _Result:
    shown = board()
    try:
        return shown.acting.run(change)
    finally:  # even a failed action may have had an effect
        shown.direct.forget()
        shown.reader.look_again()


def _tell(text: str) -> None:
    _log.info("dashboard: %s: %s", session.get("name") or session.get("role"), text)
    flash(f"{text}.")


_waiting = threading.BoundedSemaphore(MOST_AT_ONCE)


@asking.post("/runs")
def runs() -> str:
    queue = request.form.get("queue", "")
    by = operator_name()
    shown = board()
    if not _waiting.acquire(blocking=False):
        abort(503, f"{MOST_AT_ONCE} questions wait for their answers; ask again in a few seconds")
    try:
        owner, found = shown.asking.get(
            ("runs", queue),
            lambda opened: _ask_owner(shown.coordinator(opened), opened.layout, queue, by),
        )
    finally:
        _waiting.release()
    return page("runs.html", name=queue, owner=owner, runs=found, items=_items(found))


def _items(found: RunsRead) -> list[dict[str, Any]]:
    """Return the messages with possible durations."""
    return [each for each in found.items[:MOST_RUNS] if 0 <= each["seconds"] < math.inf]


def _ask_owner(client: Client, layout: Layout, queue: str, by: str) -> tuple[str, RunsRead]:
    node = read(client, layout.queue(queue))
    owner = QueueNode.parse(node.data).owner if isinstance(node, NodeRead) else ""
    if not owner:
        return "", RunsRead()
    asked = ask_owner(client, layout, owner, queue, MOST_RUNS, ANSWER_SECONDS - 1.0, by)
    return owner, read_runs([asked])

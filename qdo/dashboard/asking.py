"""Asks the owner of a queue for its messages in flight, as `qdo ps` does.

Nothing changes, but it costs nodes of the coordinator and an entry of the action log: so it is for
operators, and needs no confirmation.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

from flask import Blueprint, abort, request

from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import NodeRead
from qdo.coordination.transactions import read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.dashboard.access import may_act, operator_name
from qdo.dashboard.board import board
from qdo.dashboard.pages import page
from qdo.ops.runs import RunsRead, ask_owner, read_runs

ANSWER_SECONDS = 5.0
"""How long a page waits in all; the worker has a second less."""
MOST_RUNS = 20
MOST_AT_ONCE = 4
"""Each question that waits has a thread of the server, which has 16."""

_waiting = threading.BoundedSemaphore(MOST_AT_ONCE)
asking = Blueprint("asking", __name__, url_prefix="/ask")


@dataclass(frozen=True, slots=True)
class OwnersAnswer:
    """What the owner of a queue answered.

    :ivar owner: "" if the queue has none.
    """

    owner: str
    runs: RunsRead


@asking.before_request
def _only_operators() -> None:
    if not may_act():
        abort(403, "only operators may ask workers, and only if the dashboard allows actions")


@asking.post("/runs")
def runs() -> str:
    """Show the messages of a queue that run now."""
    queue, by, shown = request.form.get("queue", ""), operator_name(), board()
    if not _waiting.acquire(blocking=False):
        abort(503, f"{MOST_AT_ONCE} questions wait for their answers; ask again in a few seconds")
    try:
        answer = shown.asking.get(
            ("runs", queue), lambda opened: _ask(*shown.coordinator(opened), queue, by)
        )
    finally:
        _waiting.release()
    return page(
        "runs.html", name=queue, owner=answer.owner, runs=answer.runs, items=_items(answer.runs)
    )


def _items(found: RunsRead) -> list[dict[str, Any]]:
    """Return the messages without numbers that no worker writes."""
    return [each for each in found.items[:MOST_RUNS] if 0 <= each["seconds"] < math.inf]


def _ask(client: Client, layout: Layout, queue: str, by: str) -> OwnersAnswer:
    node = read(client, layout.queue(queue))
    owner = QueueNode.parse(node.data).owner if isinstance(node, NodeRead) else ""
    if not owner:
        return OwnersAnswer("", RunsRead())
    asked = ask_owner(client, layout, owner, queue, MOST_RUNS, ANSWER_SECONDS - 1.0, by)
    return OwnersAnswer(owner, read_runs([asked]))

"""Server-sent events: tell open pages that there is a new reading."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

from flask import Blueprint, Response, request

from qdo.dashboard.board import Board, board
from qdo.system.clock import clock

MOST_CLIENTS = 100
"""Each holds a connection. Further pages ask again now and then instead."""
LOOK_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0
STREAM_SECONDS = 600.0
"""Then the browser connects again, so an ended session does not go on forever."""
RETRY_MILLISECONDS = 3000

Sleep = Callable[[float], object]


class EventStreams:
    """The streams of one dashboard.

    :param sleep: lets other requests run.
    """

    def __init__(self, sleep: Sleep = time.sleep, most: int = MOST_CLIENTS) -> None:
        self._sleep = sleep
        self._most = most
        self._lock = threading.Lock()
        self._open = 0

    def response(self) -> Response:
        """Answer a request for events."""
        with self._lock:
            if self._open >= self._most:
                return Response("too many open pages\n", 503, {"Retry-After": "30"})
            self._open += 1
        shown = board()
        known = request.headers.get("Last-Event-ID", "") or request.args.get("known", "")
        answer = Response(self._events(shown, known), mimetype="text/event-stream")
        answer.headers["X-Accel-Buffering"] = "no"
        answer.call_on_close(self._left)
        return answer

    @property
    def count(self) -> int:
        """How many streams are open."""
        return self._open

    def _left(self) -> None:
        with self._lock:
            self._open -= 1

    def _events(self, shown: Board, known: str) -> Iterator[str]:
        began = spoken = clock()
        yield f"retry: {RETRY_MILLISECONDS}\n\n"
        while clock() - began < STREAM_SECONDS:
            event, id = _event_of(shown)
            if id != known:
                known, spoken = id, clock()
                yield event
            elif clock() - spoken >= HEARTBEAT_SECONDS:
                spoken = clock()
                yield ": still here\n\n"
            self._sleep(LOOK_SECONDS)


def _event_of(shown: Board) -> tuple[str, str]:
    """Return the event of the last reading, and its id."""
    id = shown.reading_id
    data = {"fault": shown.reader.fault is not None}
    return f"id: {id}\nevent: reading\ndata: {json.dumps(data)}\n\n", id


def stream_blueprint(streams: EventStreams) -> Blueprint:
    """Return the route of the streams."""
    stream = Blueprint("stream", __name__)
    stream.get("/stream")(streams.response)
    return stream

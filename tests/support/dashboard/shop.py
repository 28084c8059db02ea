"""An app in a folder for tests of the dashboard: queues in many states, and no worker process."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flask import Flask
from flask.testing import FlaskClient

from qdo import App
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.coordination.znodes.values import encode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.dashboard import close_app, create_app
from qdo.dashboard.reading import FleetReader
from qdo.history.recorder import Recorder
from qdo.history.writer import HistoryWriter
from qdo.message import Message
from tests.support.processes import wait_until

POSITION = 135471512647131000
VIEWER = "viewer-token-0123456789"
OPERATOR = "operator-token-0123456789"
BASE = "http://localhost"
LAYOUT = Layout.of("shop")
BLOCKED_ERROR = "ValueError: no vase"


class FilledShop:
    """An app with a broker and a coordinator, and dashboards of it."""

    def __init__(self, folder: Path, coordinator: str, **changed: str) -> None:
        places = {
            "broker": f"sqlite:{folder / 'messages.db'}",
            "history": f"sqlite:{folder / 'history.db'}",
            "coordinator": coordinator,
            **changed,
        }
        self.folder = folder
        self.places = places
        self.app = App("shop", **places)
        self.client: Client = connect(coordinator, handler="threading")
        self.client.open(20)
        for path in LAYOUT.persistent:
            self.client.ensure_path(path)
        self._dashboards: list[Flask] = []

    def fill(self) -> None:
        """Add queues in several states."""
        self.app.send_many([("fine", 1), ("fine", 2), ("blocked", 3), ("orders-1", 4)])
        self.app.send_many([("dead", number) for number in range(3)])
        self.block("blocked", BLOCKED_ERROR)
        for number in range(3):
            self.bury("dead", number, f"LookupError: customer {number} is gone")

    def block(self, queue: str, error: str) -> None:
        """Let a message block a queue."""
        failure = FailureRecord(POSITION, 2, error, blocked_since=time.time() - 60)
        self.client.create(LAYOUT.queue(queue), QueueNode(last=7, failure=failure).encode())

    def bury(
        self,
        queue: str,
        number: int,
        error: str,
        body: bytes = b'{"secret": 1}',
        headers: str | None = None,
        dead_at: float = 0.0,
    ) -> None:
        """Store a dead letter."""
        record = DeadLetterRecord(
            queue=queue,
            position=POSITION + number,
            body=body,
            key=None,
            headers=headers,
            error=error,
            traceback=f"Traceback (most recent call last):\n  File x\n{error}",
            attempts=10,
            worker="worker-0000000001",
            fence=3,
            dead_at=dead_at or time.time() - number,
        )
        self.app.broker.dead_letters.store(record)

    def report(self, report: WorkerReport) -> str:
        """Let a worker that does nothing report; return its name."""
        paths = [
            self.client.create(path, data, ephemeral=True, sequence=True, makepath=True)
            for path, data in (
                (f"{LAYOUT.workers}/worker-", WorkerNode(()).encode()),
                (f"{LAYOUT.components}/worker/host-", encode(report.dump())),
            )
        ]
        return paths[0].rpartition("/")[2]

    def record(self, queue: str, error: str) -> None:
        """Record attempts of a queue in the history: one done, one failed."""
        recorder = Recorder()
        recorder.bind(lambda message, context: None)(Message(queue, 1, None), None)
        recorder.ended(Message(queue, 2, None, id="m-2"), "retry", error)
        writer = HistoryWriter(self.places["history"], "shop", recorder)
        writer.start()
        writer.close()

    def dashboard(self, **options: Any) -> Flask:
        """Return a dashboard; by default every visitor may look."""
        given = {"anonymous": "viewer_token" not in options, "pause_seconds": 0.05}
        flask = create_app(self.app.settings, **{**given, **options})
        flask.testing = True
        self._dashboards.append(flask)
        return flask

    def visitor(self, **options: Any) -> Visitor:
        """Return a visitor with a browser before a new dashboard."""
        return Visitor(self.dashboard(**options))

    def operator(self, **options: Any) -> Visitor:
        """Return an operator who has logged in."""
        given = {"viewer_token": VIEWER, "operator_token": OPERATOR, "allow_actions": True}
        visitor = self.visitor(**{**given, **options})
        visitor.log_in(OPERATOR, "Grace")
        return visitor

    def close(self) -> None:
        for each in self._dashboards:
            close_app(each)
        self.app.close()
        self.client.stop()
        self.client.close()


class Visitor:
    """A browser without JavaScript."""

    def __init__(self, flask: Flask) -> None:
        self.flask = flask
        self.http: FlaskClient = flask.test_client()

    @property
    def reader(self) -> FleetReader:
        found: FleetReader = self.flask.extensions["qdo"].reader
        return found

    def get(self, path: str, **options: Any) -> Any:
        """Return the answer for a page."""
        return self.http.get(path, base_url=BASE, **options)

    def page(self, path: str, **options: Any) -> str:
        """Return the text of a page that must exist, once the app has been read."""
        wait_until(lambda: self.reader.look(1.0) is not None, "the app is read")
        answer = self.get(path, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def items(self, path: str, **options: Any) -> list[dict[str, Any]]:
        """Return the items of an answer in JSON."""
        answer = self.get(path, **options)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.get_json()["items"]
        return found

    def csrf(self, path: str = "/login") -> str:
        """Return the token in the forms of a page."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.get(path).text)
        return found[1] if found else ""

    def post(self, path: str, csrf: str | None = None, **fields: str | Sequence[str]) -> Any:
        """Send a form of this dashboard."""
        token = self.csrf() if csrf is None else csrf
        headers = {"Origin": BASE}
        return self.http.post(path, base_url=BASE, data={"csrf": token, **fields}, headers=headers)

    def log_in(self, token: str, name: str = "") -> Any:
        """Log in with a token."""
        return self.post("/login", token=token, name=name)

    def act(self, path: str, reason: str, count: int, **fields: str | Sequence[str]) -> Any:
        """Carry out an action that was confirmed."""
        return self.post(path, confirmed=str(count), reason=reason, **fields)

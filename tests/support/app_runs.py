"""An app in a folder, run by real worker processes; its job writes down each of its runs.

The job appends lines of queue, body, attempt and pid to the file `out` in the folder.
"""

from __future__ import annotations

from pathlib import Path

import qdo
from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from tests.support.processes import Proc, whole_lines


class AppRuns:
    """An app in a folder, its worker processes, and the runs of its job."""

    def __init__(self, name: str, folder: Path, coordinator: str) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.broker = open_broker(f"sqlite:{folder / 'messages.db'}", name)
        self.app = qdo.App(name, broker=f"sqlite:{folder / 'messages.db'}")
        self.layout = Layout.of(name)
        self._client: Client | None = None
        self._procs: list[Proc] = []

    def start(self, source: str, *options: str) -> Proc:
        """Start `qdo-worker` with the source of the app."""
        (self.folder / "jobs.py").write_text(source)
        places = {"QDO_BROKER": f"sqlite:{self.folder / 'messages.db'}"}
        places["QDO_COORDINATOR"] = self.coordinator
        argv = ("-m", "qdo.cli.worker", "jobs:app", *options)
        proc = Proc.python(*argv, env=places, cwd=self.folder)
        self._procs.append(proc)
        return proc

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect(self.coordinator, handler="threading")
            self._client.open(10.0)
        return self._client

    def runs(self, queue: str) -> list[tuple[str, int]]:
        """Return body and attempt of every run of the job for a queue."""
        path = self.folder / "out"
        lines = whole_lines(path)
        return [(body, int(attempt)) for q, body, attempt, _ in map(str.split, lines) if q == queue]

    def pids(self) -> list[int]:
        path = self.folder / "out"
        lines = whole_lines(path)
        return [int(line.split()[3]) for line in lines]

    def node(self, queue: str) -> QueueNode:
        return QueueNode.parse(self.client.get(self.layout.queue(queue))[0])

    def close(self) -> None:
        for proc in self._procs:
            proc.__exit__(None, None, None)
        if self._client is not None:
            self._client.stop()
            self._client.close()
        self.broker.close()
        self.app.close()

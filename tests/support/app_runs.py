"""An app in a folder, run by real worker processes; its job writes down each of its runs.

The job appends lines of queue, body, attempt and pid to the file `out` in the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import qdo
from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from tests.support.cli import QDO, Ended, command
from tests.support.processes import Proc, wait_until, whole_lines

_JOBS = """
from pathlib import Path
import os

import gevent
import qdo

app = qdo.App("desk")


@app.job("*"{options})
def job(messages, context):
    for message in messages if isinstance(messages, list) else [messages]:
        with open("out", "a") as out:
            out.write(f"{{message.queue}} {{message.body}} {{message.attempt}} {{os.getpid()}}\\n")
        while Path(f"hold-{{message.body}}").exists():
            try:
                gevent.sleep(0.005)
            except BaseException:
                if not Path("stubborn").exists():
                    raise
        if Path(f"fail-{{message.body}}").exists():
            raise ValueError("no")
"""


class AppRuns:
    """An app in a folder, its worker processes, and the runs of its job."""

    def __init__(
        self, name: str, folder: Path, coordinator: str, broker: str | None = None
    ) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.broker_url = broker or f"sqlite:{folder / 'messages.db'}"
        self.broker = open_broker(self.broker_url, name)
        self.app = qdo.App(name, broker=self.broker_url)
        self.layout = Layout.of(name)
        self._client: Client | None = None
        self._procs: list[Proc] = []

    def start(self, source: str, *options: str) -> Proc:
        """Start `qdo-worker` with the source of the app."""
        (self.folder / "jobs.py").write_text(source)
        places = {"QDO_BROKER": self.broker_url}
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


class OperatorDesk(AppRuns):
    """An operator beside the workers of one app."""

    def work(self, *arguments: str, **options: Any) -> Proc:
        """Start a worker whose job has these options, such as ``order="key"``."""
        given = "".join(f", {name}={_source(value)}" for name, value in options.items())
        return self.start(_JOBS.format(options=given), *arguments)

    def drain(self, **options: Any) -> None:
        """Process everything with a worker of its own."""
        assert self.work("--burst", **options).wait(60.0) == 0

    def send(self, *bodies: Any, queue: str = "q", **options: Any) -> list[str]:
        return [self.app.send(queue, each, key=f"k{each}", **options) for each in bodies]

    def hold(self, body: Any) -> Path:
        """Let the job of a message wait until the returned file is deleted."""
        path = self.folder / f"hold-{body}"
        path.touch()
        return path

    def resist(self) -> None:
        """Let jobs continue when the worker ends their attempts."""
        (self.folder / "stubborn").touch()

    def qdo(self, *argv: str) -> Ended:
        return command(*QDO, *argv, cwd=self.folder, env=self.environment)

    def begin(self, *argv: str) -> Proc:
        """Start a command, and do not wait for it."""
        proc = Proc.python(*QDO, *argv, env=self.environment, cwd=self.folder)
        self._procs.append(proc)
        return proc

    @property
    def environment(self) -> dict[str, str]:
        places = {"QDO_BROKER": self.broker_url, "QDO_COORDINATOR": self.coordinator}
        return {"QDO_APP": "desk", **places}

    def items(self, *argv: str, code: int = 0) -> list[dict[str, Any]]:
        """Return what a command prints as JSON."""
        ended = self.qdo(*argv, "-o", "json")
        assert ended.code == code, ended.err
        found: list[dict[str, Any]] = json.loads(ended.out)["items"]
        return found

    def outcomes(self, *ids: str, code: int = 0, queue: str = "q") -> list[str]:
        """Cancel messages; return what became of each."""
        return [each["outcome"] for each in self.items("cancel", "--yes", queue, *ids, code=code)]

    def bodies(self, queue: str = "q") -> list[str]:
        """Return the bodies of all runs."""
        return [body for body, _ in self.runs(queue)]

    def wait_for(self, *bodies: Any, queue: str = "q") -> None:
        """Wait until these messages have begun."""
        wanted = {str(each) for each in bodies}
        wait_until(lambda: wanted <= set(self.bodies(queue)), f"the runs of {bodies}")

    def wait_done(self, queue: str = "q") -> QueueNode:
        """Wait until a queue is recorded as done, and return its node."""
        head = self.broker.catalog.head(queue)
        wait_until(lambda: self.node(queue).last >= head, "the end of the queue")
        return self.node(queue)

    def known(self, *queues: str) -> None:
        """Make the nodes of queues, as the leader does."""
        for queue in queues or ("q",):
            self.client.create(self.layout.queue(queue), b"", makepath=True)

    def requests(self) -> int:
        """Return how many requests to workers have not ended."""
        folder = self.layout.fleet.actions
        if not self.client.exists(folder):
            return 0
        workers = self.client.get_children(folder)
        return sum(len(self.client.get_children(f"{folder}/{each}")) for each in workers)

    def audit(self, command: str) -> list[AuditEntry]:
        """Return the entries of a command in the action log."""
        entries = read_entries(self.client, self.layout, limit=100)
        return [each for each in entries if each.command == command]


def _source(value: Any) -> str:
    """Return a value as Python source."""
    return f"qdo.{value!r}" if isinstance(value, qdo.Policy) else repr(value)

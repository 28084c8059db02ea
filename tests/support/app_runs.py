"""An app in a folder, run by real worker processes; its job writes down each of its runs.

The jobs are those of `tests.apps.notes`, or a test's own, which append such lines, too.
"""

from __future__ import annotations

import time
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import qdo
from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.ops.fleet import Fleet
from tests.support.cli import QDO, WORKER, Ended, command, run_in
from tests.support.processes import Proc, wait_until, whole_lines

_JOBS = """
import qdo
from tests.apps.notes import app, job

app.job({queues!r}{options})(job)
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
        self.app = qdo.App(name, broker=self.broker_url, coordinator=coordinator)
        self.layout = Layout.of(name)
        self._client: Client | None = None
        self.procs: list[Proc] = []

    def start(self, source: str, *options: str, **env: str) -> Proc:
        """Start `qdo-worker` with the source of the app."""
        (self.folder / "jobs.py").write_text(source)
        places = {"QDO_BROKER": self.broker_url, "QDO_COORDINATOR": self.coordinator, **env}
        proc = Proc.python(*WORKER, "jobs:app", *options, env=places, cwd=self.folder)
        self.procs.append(proc)
        return proc

    def work(self, *arguments: str, queues: str = "*", **options: Any) -> Proc:
        """Start a worker whose job has these options, such as ``order="key"``."""
        return self.start(jobs(queues, **options), *arguments)

    def qdo(self, *argv: str, stdin: str = "", **env: str) -> Ended:
        """Run a command for the app.

        It has a process of its own if it imports the app, starts another program, or runs beside
        others in threads of a test, which share one folder and one standard output.
        """
        surroundings = {**self.environment, **env}
        words = {*argv, surroundings["QDO_APP"]}
        apart = bool(words & {"--", "edit"}) or any(each.endswith(":app") for each in words)
        if not apart and current_thread() is main_thread():
            return run_in(self.folder, *argv, env=surroundings, stdin=stdin.encode())
        return command(*QDO, *argv, cwd=self.folder, env=surroundings, stdin=stdin.encode())

    @property
    def environment(self) -> dict[str, str]:
        places = {"QDO_BROKER": self.broker_url, "QDO_COORDINATOR": self.coordinator}
        return {"QDO_APP": self.app.name, **places}

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

    def said(self, word: str) -> list[list[str]]:
        """Return what follows a word in the lines of the file `said`, which some apps write."""
        lines = [line.split() for line in whole_lines(self.folder / "said")]
        return [words for first, *words in lines if first == word]

    def errors(self) -> list[str]:
        """Return the kinds of the errors of all dead letters."""
        return [each.error.partition(":")[0] for each in self.broker.dead_letters.records()]

    def workers(self) -> list[str]:
        """Return the registered workers."""
        path = self.layout.workers
        return sorted(self.client.get_children(path)) if self.client.exists(path) else []

    def node(self, queue: str) -> QueueNode:
        return QueueNode.parse(self.client.get(self.layout.queue(queue))[0])

    def close(self) -> None:
        for proc in self.procs:
            proc.__exit__(None, None, None)
        if self._client is not None:
            self._client.stop()
            self._client.close()
        self.broker.close()
        self.app.close()


class OperatorDesk(AppRuns):
    """An operator beside the workers of one app."""

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.client, self.layout, self.broker)

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

    def begin_first(self, *bodies: Any, **options: Any) -> tuple[list[str], Path, int]:
        """Start a worker that is in the job of the first of some messages.

        :return: their ids, the file that lets this job wait, and the process of the job.
        """
        ids = self.send(*bodies)
        held = self.hold(bodies[0])
        self.work(**options)
        self.wait_for(bodies[0])
        (process,) = self.pids()
        return ids, held, process

    def resist(self) -> None:
        """Let jobs continue when the worker ends their attempts."""
        (self.folder / "stubborn").touch()

    def begin(self, *argv: str) -> Proc:
        """Start a command, and do not wait for it."""
        proc = Proc.python(*QDO, *argv, env=self.environment, cwd=self.folder)
        self.procs.append(proc)
        return proc

    def items(self, *argv: str, code: int = 0) -> list[dict[str, Any]]:
        """Return what a command prints as JSON."""
        return self.qdo(*argv, "-o", "json").items(code)

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

    def wait_heard(self) -> None:
        """Wait until the only worker knows what operators have changed in its queues.

        It claims one more queue: the write of its node is refused until it has read the node again,
        and asks for the nodes of the queues that are listed there before it repeats the write.
        """
        queue = f"heard-{time.monotonic_ns()}"
        self.app.send(queue, 0)
        wait_until(lambda: bool(self.runs(queue)), "the worker has claimed one more queue")

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


def jobs(queues: str = "*", **options: Any) -> str:
    """Return the source of an app whose job has these options."""
    given = "".join(f", {name}={_source(value)}" for name, value in options.items())
    return _JOBS.format(queues=queues, options=given)


def _source(value: Any) -> str:
    """Return a value as Python source."""
    return f"qdo.{value!r}" if isinstance(value, qdo.Policy) else repr(value)

"""The processes and files of the demo, all in one folder, and who owns which queues."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.demo import ledger
from qdo.errors import QdoError
from qdo.ops.worker_status import worker_statuses
from qdo.system.processes import module_argv

APP = ledger.app.name
TARGET = "qdo.demo.ledger:app"
_WORKER = module_argv("qdo.cli.worker")
_LAST_LINES = 15


class DemoError(QdoError):
    """the demo failed: {reason}"""


class Sandbox(ExitStack):
    """A broker, a coordinator, and `parents`, worker commands; all of them end with the block."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.broker_url = f"sqlite:{folder / 'messages.db'}"
        self.coordinator_url = f"sqlite:{folder / 'coordination.db'}"
        self.log = folder / "workers.log"
        self.layout = Layout.of(APP)
        self.parents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Sandbox:
        with ExitStack() as stack:
            self.broker: Broker = open_broker(self.broker_url, APP)
            stack.callback(self.broker.close)
            self.client: Client = connect(self.coordinator_url)
            self.client.open(10.0)
            stack.callback(self.client.close)
            stack.callback(self.client.stop)
            stack.callback(self._clear)
            self.push(stack.pop_all())
        return self

    @property
    def ledger(self) -> Path:
        return self.folder / ledger.LEDGER_FOLDER

    def start_workers(self, processes: int, concurrency: int) -> None:
        """Start one `qdo-worker` command; each process runs `concurrency` jobs at the same time."""
        flags = {
            "--broker": self.broker_url,
            "--coordinator": self.coordinator_url,
            "--processes": str(processes),
            "--concurrency": str(concurrency),
        }
        with self.log.open("ab") as log:
            parent = subprocess.Popen(
                [*_WORKER, TARGET, *(word for pair in flags.items() for word in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_own_settings_only(os.environ),
            )
        self.parents.append(parent)

    def check(self) -> None:
        """Raise DemoError if a parent process has exited."""
        for parent in self.parents:
            code = parent.poll()
            if code is not None:
                raise DemoError(reason=f"qdo-worker exited with code {code}\n{self.last_log()}")

    def drain(self, timeout_seconds: float) -> list[int]:
        """Send SIGTERM to every parent process; return their exit codes."""
        for parent in self.parents:
            parent.send_signal(signal.SIGTERM)
        try:
            return [parent.wait(timeout_seconds) for parent in self.parents]
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                reason=f"workers did not drain within {timeout_seconds:g} s\n{self.last_log()}"
            ) from error
        finally:
            self.parents = [parent for parent in self.parents if parent.poll() is None]

    def last_log(self) -> str:
        if not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])

    def _clear(self) -> None:
        """Stop the processes that still run: drain, abort, kill."""
        for parent in self.parents:
            for _ in range(3):
                if parent.poll() is None:
                    parent.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        parent.wait(5.0)
            if parent.poll() is None:
                parent.kill()
                parent.wait()


def _own_settings_only(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove the user's settings: the demo has its own."""
    return {name: value for name, value in environ.items() if not name.startswith("QDO_")}


class WatchedFleet:
    """The worker nodes, kept up to date by watches; `moves` counts queues that changed worker."""

    def __init__(self, client: Client, layout: Layout) -> None:
        self.moves = 0
        self._client = client
        self._layout = layout
        self._news = threading.Condition()
        self._queues: dict[str, frozenset[str]] = {}
        self._owners: dict[str, str] = {}
        self._pids: dict[str, int] = {}
        client.ensure_path(layout.workers)
        client.ChildrenWatch(layout.workers, self._listed)

    def _listed(self, names: list[str]) -> None:
        with self._news:
            fresh = set(names) - self._queues.keys()
            for name in self._queues.keys() - set(names):
                del self._queues[name]
            for name in fresh:
                self._queues[name] = frozenset()
            self._news.notify_all()
        for name in fresh:
            self._client.DataWatch(self._layout.worker(name), partial(self._changed, name))

    def _changed(self, name: str, data: bytes | None, stat: Any) -> bool:
        if data is None:  # the worker is gone and its node will not come back
            return False
        queues = frozenset(WorkerNode.parse(data).queues)
        with self._news:
            if name not in self._queues:
                return False
            self._queues[name] = queues
            for queue in queues:
                if self._owners.setdefault(queue, name) != name:
                    self.moves += 1
                    self._owners[queue] = name
            self._news.notify_all()
        return True

    def queues_of(self, worker: str) -> frozenset[str]:
        with self._news:
            return self._queues.get(worker, frozenset())

    def counts(self) -> dict[str, int]:
        with self._news:
            return {name: len(self._queues[name]) for name in sorted(self._queues)}

    def pids(self) -> dict[str, int]:
        with self._news:
            unknown = self._queues.keys() - self._pids.keys()
        if unknown:
            for each in worker_statuses(self._client, self._layout):
                pid = each.report.pid
                if pid is not None:
                    self._pids[each.worker] = pid
        return self._pids

    def wait_owned(
        self, queues: Iterable[str], timeout_seconds: float, but: str = ""
    ) -> float | None:
        """Wait until workers other than `but` own all queues; return when, None on a timeout."""
        wanted = frozenset(queues)

        def owned() -> bool:
            held = [mine for name, mine in self._queues.items() if name != but]
            return wanted <= frozenset().union(*held)

        with self._news:
            return time.monotonic() if self._news.wait_for(owned, timeout_seconds) else None

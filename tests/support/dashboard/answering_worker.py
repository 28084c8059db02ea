"""A worker node without a worker process, which answers what operators ask."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

from qdo.coordination.client import connect
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.fleet.audit_entries import AuditEntry
from tests.support.dashboard.shop import LAYOUT


class AnsweringWorker:
    """A worker node whose program answers each action with a text.

    :ivar output: the text.
    :param queue: the queue that it owns.
    :param report: what it reports about itself; None for nothing.
    """

    def __init__(
        self,
        coordinator: str,
        output: str,
        queue: str,
        node: WorkerNode | None = None,
        report: WorkerReport | None = None,
    ) -> None:
        self.output = output
        self._client = client = connect(coordinator, handler="threading")
        client.open(20)
        value = (node or WorkerNode()).encode()
        path = client.create(f"{LAYOUT.workers}/worker-", value, ephemeral=True, sequence=True)
        self.name = path.rpartition("/")[2]
        if report is not None:
            component = f"{LAYOUT.components}/worker/{self.name}"
            value = json.dumps(replace(report, worker=self.name).dump()).encode()
            client.create(component, value, ephemeral=True, makepath=True)
        client.create(LAYOUT.queue(queue), QueueNode(owner=self.name).encode())
        self._folder = LAYOUT.fleet.actions_of(self.name)
        client.ensure_path(self._folder)
        client.ensure_path(LAYOUT.fleet.actionlog)
        client.ensure_path(LAYOUT.fleet.actionoutput)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        seen: set[str] = set()
        while not self._over.wait(0.02):
            for id in set(self._client.get_children(self._folder)) - seen:
                seen.add(id)
                output = f"{LAYOUT.fleet.actionoutput}/{id}"
                self._client.create(output, self.output.encode())
                after = {"outcome": "done", "result": ""}
                entry = AuditEntry(id, 0.0, target=self.name, after=after)
                self._client.create(LAYOUT.fleet.log_entry(id), entry.encode())

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._client.stop()
        self._client.close()

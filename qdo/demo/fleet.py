"""Watching which worker owns which queues, from outside the fleet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.ops.worker_status import worker_statuses


class WatchedFleet:
    """The contents of the worker nodes, kept up to date by watches.

    :ivar moves: how often a queue moved from one worker to another.
    """

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
        """Return the queues that a worker owns; empty if the worker is gone."""
        with self._news:
            return self._queues.get(worker, frozenset())

    def counts(self) -> dict[str, int]:
        """Return how many queues each registered worker owns, in order of registration."""
        with self._news:
            return {name: len(self._queues[name]) for name in sorted(self._queues)}

    def pids(self) -> dict[str, int]:
        """Return the process ids of all workers seen so far."""
        with self._news:
            unknown = self._queues.keys() - self._pids.keys()
        if unknown:
            for each in worker_statuses(self._client, self._layout):
                pid = dict(each.details).get("pid")
                if isinstance(pid, int):
                    self._pids[each.worker] = pid
        return self._pids

    def wait_owned(
        self, queues: Iterable[str], timeout_seconds: float, but: str = ""
    ) -> float | None:
        """Wait until registered workers other than `but` own all the queues.

        :returns: the time (CLOCK_MONOTONIC) of that; None on a timeout.
        """
        wanted = frozenset(queues)

        def owned() -> bool:
            held = [mine for name, mine in self._queues.items() if name != but]
            return wanted <= frozenset().union(*held)

        with self._news:
            return time.monotonic() if self._news.wait_for(owned, timeout_seconds) else None

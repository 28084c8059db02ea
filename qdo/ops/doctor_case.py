"""The input and the results of the checks of `qdo doctor`. The checks share what they read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from qdo.brokers.base import Broker
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.components import ProcessDescription, read_components
from qdo.jobs.job import Job
from qdo.jobs.retry import PolicyInForce
from qdo.jobs.timers import Timer
from qdo.ops.status import QueueStatus, Statuses, queue_statuses
from qdo.ops.verdicts import Verdict, judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses

# Maximum number of backlogs to request from a broker that needs a request for each backlog.
BACKLOGS = 20

Status = Literal["ok", "warning", "failed", "unknown"]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of a check. `remedy` is None if no action is needed."""

    status: Status
    text: str
    remedy: str | None = None


def ok(text: str) -> Diagnosis:
    return Diagnosis("ok", text)


def warning(text: str, remedy: str) -> Diagnosis:
    return Diagnosis("warning", text, remedy)


def failed(text: str, remedy: str) -> Diagnosis:
    return Diagnosis("failed", text, remedy)


def unknown(text: str, remedy: str | None = None) -> Diagnosis:
    return Diagnosis("unknown", text, remedy)


@dataclass(slots=True)
class Case:
    """An app and its services."""

    # None if the coordinator cannot be reached, or is a file that does not exist.
    client: Client | None
    # None if the broker cannot be reached, or is a file that does not exist.
    broker: Broker | None
    layout: Layout
    # The reasons why `client` or `broker` is None, with the keys "coordinator" and "broker".
    faults: Mapping[str, str]
    coordinator_url: str
    broker_url: str
    # The jobs of the app, or None if only the app's name is known.
    jobs: Sequence[Job] | None = None
    # The limits that workers create if no operator has created them.
    declared: Collection[str] = ()
    # The timers of the app, or None if only the app's name is known.
    timers: Mapping[str, Timer] | None = None
    policy_of: Callable[[str], PolicyInForce] | None = None
    _read: dict[str, Any] = field(default_factory=dict)
    _reading: Any = field(default_factory=threading.Lock)

    def statuses(self) -> Statuses:
        costly = self.broker and self.broker.capabilities.backlog_budget is not None
        budget = BACKLOGS if costly else None
        return self.once(
            "statuses",
            lambda: queue_statuses(self.client, self.layout, self.broker, "*", budget),
        )

    def names(self) -> list[str]:
        return self.once("names", lambda: self.opened().catalog.names_to_show())

    def judged(self) -> list[tuple[QueueStatus, Verdict]]:
        statuses = self.statuses()
        return self.once("judged", lambda: judge_all([statuses]))

    def workers(self) -> list[WorkerStatus]:
        return self.once("workers", lambda: worker_statuses(self.connected(), self.layout))

    def concurrency(self) -> list[int]:
        """Return the concurrency of each worker process, or an empty list without a coordinator."""
        live = self.workers() if self.client is not None else []
        return [each.report.concurrency or 0 for each in live]

    def processes(self) -> list[ProcessDescription]:
        return self.once("processes", lambda: read_components(self.connected(), self.layout))

    def connected(self) -> Client:
        if self.client is None:
            raise LookupError("coordinator")
        return self.client

    def opened(self) -> Broker:
        if self.broker is None:
            raise LookupError("broker")
        return self.broker

    def once(self, name: str, read: Callable[[], _Value]) -> _Value:
        """Return a value, which only the first call reads.

        The lock is needed because an abandoned check may still be reading.
        """
        with self._reading:
            if name not in self._read:
                self._read[name] = read()
        found: _Value = self._read[name]
        return found

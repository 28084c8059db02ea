"""The input of the checks of `qdo doctor`, read once, and their findings."""

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

# Backlogs that are requested from brokers that need a request for each.
BACKLOGS = 20

Status = Literal["ok", "warning", "failed", "unknown"]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of a check; `remedy` is None if there is nothing to do."""

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
    # None for the same reasons.
    broker: Broker | None
    layout: Layout
    # Why "coordinator" or "broker" is None.
    faults: Mapping[str, str]
    coordinator_url: str
    broker_url: str
    # The jobs of the app, None if only its name is known.
    jobs: Sequence[Job] | None = None
    # The limits that its workers make unless an operator has.
    declared: Collection[str] = ()
    # The timers of the app, None if only its name is known.
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
        """Return that of each worker process; none without a coordinator."""
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
        """Return what was read before, or read it. A check that was given up may still read."""
        with self._reading:
            if name not in self._read:
                self._read[name] = read()
        found: _Value = self._read[name]
        return found

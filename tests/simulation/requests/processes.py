"""Processes whose greenlets wait in virtual time, and the store that they reach over a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import ujson
from greenlet import getcurrent, greenlet

from qdo.brokers.requests import OVER, PAUSED, WAITING
from qdo.errors import UnreachableError
from qdo.positions import position_of_time
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from tests.simulation.invariants import Violation
from tests.simulation.schedule import Schedule

ROWS = "SELECT id, owner, take, pool, state, priority, due, number, outcome, mark FROM requests"
Record = tuple[str, str, int, str, int, int, float, int, "str | None", "str | None"]


class Task(greenlet):
    """A greenlet of a process; it is never resumed once that is dead."""

    process: SimulatedHost
    awaited: object = None

    def ready(self) -> bool:
        return bool(self.dead)


class SimulatedHost:
    """A process. It may be stopped, which it notices as little as it notices its death."""

    def __init__(self, tasks: Tasks, number: int) -> None:
        self.number = number
        self.alive = True
        self.stopped_until = self.cut_until = 0.0
        self.slots: list[Any] = []
        self.gone = [0.0]
        self._tasks = tasks

    def spawn(self, call: Callable[..., object], *args: Any) -> Task:
        task = Task(lambda _: call(*args), self._tasks.main)
        task.process = self
        self._tasks.later(0.0, task)
        return task


class Tasks:
    """Replaces the module `gevent` in the code that runs here."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.main = getcurrent()

    def later(self, seconds: float, task: Task, answer: object = None) -> None:
        task.awaited = token = object()
        self.schedule.after(seconds, self._resume, task, token, answer)

    def sleep(self, seconds: float, answer: object = None) -> Any:
        """Wait; return the answer, or raise it."""
        task: Any = getcurrent()
        self.later(seconds, task, answer)
        found = self.main.switch()
        if isinstance(found, BaseException):
            raise found
        return found

    def _resume(self, task: Task, token: object, answer: object) -> None:
        if task.process.alive and task.awaited is token:
            if self.schedule.now < task.process.stopped_until:
                again = task.process.stopped_until
                self.schedule.at(again, self._resume, task, token, answer)
            else:
                task.switch(answer)

    @staticmethod
    def spawn(call: Callable[..., object], *args: Any) -> Task:
        task: Any = getcurrent()
        return task.process.spawn(call, *args)


class CheckedStore:
    """The store in memory; each change is checked.

    :ivar rows: all requests by id.
    :ivar faults: share of the statements that are lost, with or without effect, or come late.
    :ivar ended: how many messages tell of the end of a request, by id.
    :ivar never: requests that were over before any worker took them.
    :ivar asked_to_end: requests that an operator cancels.
    """

    def __init__(self, tasks: Tasks, faults: float) -> None:
        self.tasks = tasks
        self.schedule = tasks.schedule
        self.rows: dict[str, Record] = {}
        self.faults = faults
        self.ended: Counter[str] = Counter()
        self.never: set[str] = set()
        self.asked_to_end: set[str] = set()
        self.retried: Counter[str] = Counter()
        store = MemoryStore(lambda: position_of_time(self.unix_time()))
        broker = MemoryBroker(store, "app")
        self._store = broker.requests
        self._queue = broker.reader("q", 0)
        self._connection = store.connection

    def unix_time(self) -> float:
        return 1e9 + self.schedule.now

    def close(self) -> None:
        self._connection.close()

    def send(self, name: str, args: Any, options: Any) -> Any:
        """Send a statement from the present task, which gets its answer, or an error."""
        schedule, chance = self.schedule, self.schedule.chance
        there = 0.002 + 0.03 * chance() ** 3
        outcome: list[Any] = []
        fault = chance() / self.faults if self.faults else 1.0
        if fault < 1.0:
            if fault > 0.3:  # it comes all the same, later than its sender thinks
                there += 2.0 * chance() ** 2 if fault > 0.6 else 0.0
                schedule.after(there, self._commit, name, args, options, [])
            lost = UnreachableError(what="the store", reason="the connection is lost")
            self.tasks.sleep(0.02 + 0.3 * chance() ** 2, lost)
        schedule.after(there, self._commit, name, args, options, outcome)
        task: Any = getcurrent()
        cut = max(0.0, task.process.cut_until - schedule.now)
        self.tasks.sleep(max(cut, there) + 0.002 + 0.3 * chance() ** 6)
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def _commit(self, name: str, args: Any, options: Any, outcome: list[Any]) -> None:
        changes, now = self._connection.total_changes, self.unix_time()
        try:
            outcome.append(getattr(self._store, name)(*args, **options))
        except Exception as error:  # noqa: BLE001 - it is the answer
            outcome.append(error)
        if self.schedule.trace is not None and name != "find":
            self.schedule.note("%s%r -> %r", name, args, outcome[0])
        if self._connection.total_changes != changes:
            self.check(name, args, now)

    def check(self, name: str, args: Any, now: float) -> None:
        """Require that a statement changed only what it may."""
        before, self.rows = self.rows, {row[0]: row for row in self._connection.execute(ROWS)}
        for id, new in self.rows.items():
            old = before.get(id, new)
            if old[4] == OVER and old != new and name != "retry":
                raise Violation("R1", f"{name}{args}: {old} becomes {new}")
            if old != new and name in ("end", "put_back", "note") and old[:3] != args[0]:
                raise Violation("R5", f"{name}{args}: {old} becomes {new}")
            if new[2] != old[2] + (new[2] != old[2]) or before.keys() - self.rows.keys():
                raise Violation("R5", f"{name}{args}: {old} becomes {new}")
            if old[4] == OVER != new[4]:
                self.retried[id] += 1
                self.never.discard(id)
            if old[4] == WAITING and new[4] == OVER:
                self.never.add(id)
            if '"cancel"' in (old[9] or "") and new[4] != OVER and new[9] != old[9]:
                raise Violation("mark", f"{name}{args}: {old} becomes {new}")
            answered = '"resume"' in (new[9] or "")
            if answered and (new[4] != PAUSED or (new != old and old[9] != args[2])):
                raise Violation("answer", f"{name}{args}: {old} becomes {new}")
            if new[8] == "cancelled" and id not in self.asked_to_end:
                raise Violation("R8", f"{name}{args}: nobody cancelled {new}")
        if name == "take":
            self._check_order(args, before.values(), now)
        self.check_messages()

    def _check_order(self, args: Any, before: Iterable[Record], now: float) -> None:
        owner, pool, places, _, oldest = args
        due = [
            (row[7], row[5], row[0])
            for row in before
            if row[3] == pool and row[4] == WAITING and row[6] <= now + 1e-5
        ]
        due.sort()
        due[oldest:] = sorted(due[oldest:], key=itemgetter(1, 0))
        right = {id for _, _, id in due[:places]}
        taken = {r[0] for r in before if r[4] == WAITING and self.rows[r[0]][1] == owner}
        if taken != right:
            raise Violation("R6", f"{owner} takes {taken} of {pool}, not {right}")

    def check_messages(self) -> None:
        """Require one message for each end."""
        for row in self._queue.fetch(100):
            told = ujson.loads(row[1])
            if told["outcome"] not in ("started", "paused"):
                self.ended[told["request"]] += 1
        for id, row in self.rows.items():
            if self.ended[id] != self.retried[id] + (row[4] == OVER):
                raise Violation("R3", f"{self.ended[id]} messages tell of the ends of {row}")

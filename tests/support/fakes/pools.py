"""A worker that takes the requests of pools from a store in memory whose answers get lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent.event import Event

import qdo
from qdo.errors import UnreachableError
from qdo.testing.memory_broker import MemoryBroker, MemoryRequests, MemoryStore
from qdo.worker.pools.duty import PoolDuty
from tests.support.engine import EngineSetup, until


class UnsureRequests(MemoryRequests):
    """Loses answers.

    :ivar calls: how often each method was called.
    :ivar lost: how many of the next answers of a method get lost once its work is done.
    :ivar down: whether it cannot be reached at all.
    """

    def __init__(self) -> None:
        self.broker = MemoryBroker(MemoryStore(), "test")
        super().__init__(self.broker)
        self.calls: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.down = False

    def _answer(self, name: str, *args: Any, **options: Any) -> Any:
        self.calls[name] += 1
        if self.down:
            raise UnreachableError(what="the store", reason="it is down")
        answer = getattr(MemoryRequests, name)(self, *args, **options)
        if self.lost[name]:
            self.lost[name] -= 1
            raise UnreachableError(what="the store", reason="its answer was lost")
        return answer


def _unsure(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: self._answer(name, *args, **options)


for _name in ("take", "note", "end", "put_back", "owners", "give_back", "expire"):
    setattr(UnsureRequests, _name, _unsure(_name))


class PoolSetup(EngineSetup):
    """A worker with a job for the pool `p`.

    :ivar runs: body, attempt and take of each start.
    :ivar looks: how often the worker looked for requests; it does so often.
    :ivar at_once: the most jobs that ran at once.
    :ivar gates: a request waits in its job for the event of its body.
    :param act: what the job does then, and returns.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        act: Callable[[qdo.Request], Any] = lambda request: request.body,
        app: qdo.App | None = None,
        settings: Any = None,
        **options: Any,
    ) -> None:
        self.store = UnsureRequests()
        monkeypatch.setattr("qdo.brokers.embedded.broker.EmbeddedRequests", lambda *_: self.store)
        waits = SimpleNamespace(sleep=gevent.sleep)
        monkeypatch.setattr("qdo.requests.jobs.time", waits)
        monkeypatch.setattr("qdo.requests.replies.time", waits)
        monkeypatch.setattr("qdo.requests.calls.time.sleep", gevent.sleep)
        self.looks = 0
        step = PoolDuty.step

        def counted(duty: PoolDuty) -> float:
            self.duty = duty
            seconds = step(duty)
            self.looks += 1
            return min(seconds, 0.05)

        monkeypatch.setattr(PoolDuty, "step", counted)
        super().__init__(folder, app, **(settings or {}))
        self.runs: list[tuple[Any, int, int]] = []
        self.gates: dict[Any, Event] = {}
        self.running = self.at_once = 0
        self._act = act
        given = {"policy": qdo.Policy(attempts=3, backoff_seconds=0.01), **options}
        self.app.job("p", pool=True, **given)(self.job)

    def job(self, request: qdo.Request, context: Any) -> Any:
        self.runs.append((request.body, request.attempt, request.take))
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        try:
            if request.body in self.gates:
                self.gates[request.body].wait()
            return self._act(request)
        finally:
            self.running -= 1

    def ask(self, *bodies: Any, **terms: Any) -> list[Any]:
        """Ask for requests whose ids are their bodies."""
        return [self.app.request("p", body, id=str(body), **terms) for body in bodies]

    def hold(self, *bodies: Any) -> None:
        """Let the jobs of requests wait for their gate."""
        self.gates.update((body, Event()) for body in bodies)

    def outcome(self, id: Any) -> str | None:
        record = self.store.find(str(id))
        return None if record is None else record.outcome

    def finish(self, *bodies: Any) -> None:
        """Wait until requests are over."""
        until(lambda: all(map(self.outcome, bodies)), "the end of the requests")

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many are in hands of workers."""
        found = self.store.counts().get("p")
        return (0, 0) if found is None else (found.waiting, found.running)

    def look(self, times: int = 3) -> None:
        """Wait until the worker has looked for requests some times more."""
        wanted = self.looks + times
        until(lambda: self.looks >= wanted, "a look for requests")


Make = Callable[..., PoolSetup]
"""Makes a worker, and starts it unless `start` is false."""

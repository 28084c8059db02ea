"""A worker of the test's own process, with the embedded broker and a coordinator it plays."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import gevent

from qdo.app import App
from qdo.brokers.registry import open_broker
from qdo.message import Message
from qdo.settings.settings import Settings
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.worker import ProcessContext, Worker
from tests.support.fakes.member import FakeMember, FakeRegistrar
from tests.support.processes import PATIENCE_SECONDS


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Let the engine run until `condition()` is true; fail after a deadline."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = 0.002
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {PATIENCE_SECONDS:g} s")
        gevent.sleep(pause)
        pause = min(1.25 * pause, 0.03)


class EngineSetup:
    """A worker and everything around it.

    :ivar app: give it jobs before `start`.
    """

    def __init__(
        self, folder: Path, app: App | None = None, target: str | None = None, **settings: Any
    ) -> None:
        url = settings.pop("broker", f"sqlite:{folder / 'messages.db'}")
        chosen = {"backoff_seconds": 0.01, "backoff_max_seconds": 0.05, **settings}
        self.settings = Settings(app="test", broker=url, **chosen)
        self.app = App("test") if app is None else app
        self.app.use(self.settings)
        self.broker = open_broker(url, "test")
        self.registrar = FakeRegistrar(self.settings)
        process = ProcessContext(target=target)
        self.worker = Worker(self.app, self.settings, process, self.registrar)
        self._greenlet: Any = None

    @property
    def member(self) -> FakeMember:
        """The newest registration."""
        return self.registrar.members[-1]

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the worker, once it has asked for a member."""
        assert self.registrar.parts is not None
        return self.registrar.parts.gate._dispatcher

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of `dispatcher`."""
        turns = self.dispatcher._turns
        assert isinstance(turns, Pipeline)
        return turns

    def start(self, *queues: str) -> None:
        """Run the worker, and grant it queues."""
        self._greenlet = gevent.spawn(self.worker.run)
        until(lambda: self.worker.state != "starting", "the registration")
        self.member.grant(*queues)

    def collect(self, *names: str, queues: str = "*", **options: Any) -> list[Any]:
        """Give the app a job; return the list to which it adds these attributes of each message.

        By default it adds the body.
        """
        found: list[Any] = []
        of = attrgetter(*(names or ("body",)))

        def job(message: Message, context: Any) -> None:
            found.append(of(message))

        self.app.job(queues, **options)(job)
        return found

    def send(self, queue: str, *bodies: Any) -> None:
        self.app.send_many([(queue, body) for body in bodies])

    def stop(self) -> None:
        self.worker.request_stop()

    def join(self) -> int:
        """Wait for the worker's end; return its exit code, or raise its error."""
        code: int = self._greenlet.get(timeout=PATIENCE_SECONDS)
        return code

    def end(self) -> int:
        """Stop the worker; return its exit code."""
        self.stop()
        return self.join()

    def ended(self) -> bool:
        return bool(self._greenlet.ready())

    def close(self) -> None:
        """End whatever still runs."""
        if self._greenlet is not None and not self._greenlet.ready():
            self.worker.request_stop()
            self.worker.request_stop()
            self._greenlet.join(timeout=PATIENCE_SECONDS)
        self.broker.close()

"""A worker process of the model: the engine and the consuming side of the SQS broker as they are.

Played are its coordinator, its network, its jobs and its time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from qdo.app import App
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.base import Capabilities, Subscription
from qdo.brokers.dead_letters import DeadLetterRecord, DeadLetterStore
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.broker import SqsBroker
from qdo.brokers.sqs.consumer import SqsConsumer
from qdo.brokers.sqs.in_flight import HELD_BYTES, MemoryBudget
from qdo.brokers.sqs.visibility import Timing
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.lease import Lease
from qdo.errors import UnreachableError
from qdo.jobs.options import Order
from qdo.message import Message
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.worker.engine.context import Engine
from qdo.worker.engine.dispatcher import Dispatcher, Loop
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.executors.router import GreenletExecutor
from tests.simulation.sqs.server import SimulatedCalls, SimulatedSqs
from tests.simulation.sqs.virtual_time import Life
from tests.support.aws.sqs_consumer import AnyQueue

VISIBILITY_SECONDS = 60
WAIT_SECONDS = 20
IDLE_SECONDS = 20.0
SESSION_SECONDS = 10.0
CHECKPOINT_SECONDS = 1.0
CONCURRENCY = 20


class Book:
    """Receipts as the memory shared with a parent keeps them."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[str, str]] = {}
        self._last = 0

    def keep(self, queue: str, receipt: str) -> int:
        self._last += 1
        self.places[self._last] = queue, receipt
        return self._last

    def drop(self, place: int) -> None:
        self.places.pop(place, None)


class ModelBroker(SqsBroker):
    """The consuming side alone; its creator receives the dead letters."""

    def __init__(
        self,
        receiver: SqsConsumer,
        buried: Callable[[DeadLetterRecord], None],
        lost: Callable[[int], None],
    ) -> None:
        self.capabilities = Capabilities(
            ordered=True,
            seekable=False,
            countable=True,
            delay=True,
            peek=False,
            max_body_bytes=1000,
            subscriptions=True,
        )
        self.dead_letters = BuriedDeadLetters(buried)  # type: ignore[assignment]
        self._wakes = []
        self._consumer = receiver
        self._lost = lost

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        def lose(position: int) -> None:
            self._lost(position)
            on_lost(position)

        return super().subscribe(queue, after, unconfirmed, lose)


class BuriedDeadLetters(DeadLetterStore):
    """Passes dead letters on."""

    def __init__(self, buried: Callable[[DeadLetterRecord], None]) -> None:
        self._buried = buried

    def store(self, record: DeadLetterRecord) -> None:
        self._buried(record)

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        raise NotImplementedError

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        raise NotImplementedError

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        raise NotImplementedError


class SimulatedWorker:
    """One worker process, and its registration.

    :param job: the function of its jobs, called with the worker and the messages.
    :param buried: called with dead letters.
    :param recorded: called with the claims to checkpoint, and with whether they have ended.
    :param left: receipts that a dead process held.
    :param heard: returns whether the coordinator answers.
    :param lost: called with the position of a message that SQS took back.
    :ivar in_session: the coordinator has its session; `lost`: it has found out that it has not.
    :ivar stopped: everything that the broker had begun has ended.
    """

    is_pool = False

    def __init__(
        self,
        name: str,
        server: SimulatedSqs,
        order: Order,
        job: Callable[[SimulatedWorker, Sequence[Message]], None],
        buried: Callable[[SimulatedWorker, DeadLetterRecord], None],
        recorded: Callable[[SimulatedWorker, Claim, bool], None],
        left: Sequence[tuple[str, str]],
        lost: Callable[[SimulatedWorker, int], None],
        heard: Callable[[], bool],
        *,
        batch: int | None = None,
    ) -> None:
        self.name = name
        self.life = Life(name)
        self.book = Book()
        self.claims: dict[str, Claim] = {}
        self.lost = False
        self.in_session = True
        self._server = server
        self._moments = server.moments
        self._order = order
        self._batch = batch
        self._job = job
        self._buried = buried
        self._recorded = recorded
        self._left = left
        self._lost = lost
        self._heard = heard
        self.stopped = False
        self._news = self._moments.event()
        self._dirty: dict[Claim, None] = {}
        self.lease = Lease(SESSION_SECONDS, self._moments.now)
        chance = random.Random(server.chance.random())
        self._make(chance)
        self.run(self._begin)

    def _make(self, chance: random.Random) -> None:
        moments = self._moments
        calls = SimulatedCalls(self._server, self.life)
        wakes: list[Callable[..., None]] = []
        # Some have no room for more than a message or two.
        self.budget = MemoryBudget(chance.choice((1, 100, HELD_BYTES)))
        self.receiver = SqsConsumer(
            SqsApi(
                calls,
                calls,
                ServiceAddress("sqs", "eu-west-1", "http://sqs.model"),
                AnyQueue(),
                wait_seconds=WAIT_SECONDS,
                visibility_seconds=VISIBILITY_SECONDS,
            ),
            lambda queues: [wake(queues) for wake in wakes] and None,
            visibility_seconds=VISIBILITY_SECONDS,
            idle_seconds=IDLE_SECONDS,
            wait_seconds=WAIT_SECONDS,
            receipts=self.book,
            budget=self.budget,
            timing=Timing(moments.clock, chance.random),
        )
        app = App("model")
        self._add_job(app)
        self.broker = ModelBroker(
            self.receiver,
            lambda letter: self._buried(self, letter),
            lambda position: self._lost(self, position),
        )
        settings = Settings(
            app="model",
            attempts=3,
            backoff_seconds=1.0,
            backoff_max_seconds=30.0,
            fetch=1000,
            turn_seconds=0.1,
            concurrency=CONCURRENCY,
        )
        engine = Engine.build(
            app,
            self.broker,
            GreenletExecutor(),
            SettingsInForce(settings),
            clock=moments.clock,
            jitter=chance.random,
        )
        self.pipeline = Pipeline(engine)
        self.dispatcher = Dispatcher(
            self.pipeline,
            concurrency=CONCURRENCY,
            loop=Loop(
                spawn=self.run,
                breathe=moments.sleep,
                schedule=self._news.set,
                clock=moments.clock,
            ),
        )
        wakes.append(self.dispatcher.wake)

    def _add_job(self, app: App) -> None:
        if self._batch is None:

            @app.job(order=self._order)
            def job(message: Message, context: Any) -> None:
                self._job(self, [message])

        else:

            @app.job(order="queue" if self._order == "key" else self._order, batch=self._batch)
            def jobs(messages: Sequence[Message], context: Any) -> None:
                self._job(self, messages)

    def run(self, call: Callable[..., object], *args: object) -> Any:
        """Run something in this process."""
        return self._moments.spawn_in(self.life, call, *args)

    def _begin(self) -> None:
        for duty in (self._tick, self._checkpoint, self._renew):
            self.run(duty)
        with contextlib.suppress(UnreachableError):
            self.broker.release(self._left)

    def _tick(self) -> None:
        while True:
            pause = self.dispatcher.due() - self._moments.now
            self._news.wait(None if pause == float("inf") else max(0.001, pause))
            self._news.clear()
            self.dispatcher.tick()

    def _checkpoint(self) -> None:
        while True:
            self._moments.sleep(CHECKPOINT_SECONDS)
            self.dispatcher.note_progress()
            dirty, self._dirty = self._dirty, {}
            for claim in dirty:
                self._recorded(self, claim, False)

    def _renew(self) -> None:
        while self.in_session:
            if self._heard():
                self.lease.heard(self._moments.now)
            self._moments.sleep(1.0)

    def life_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Have something happen in this process after a while, if it lives."""
        self._moments.later(seconds, lambda: self.run(call), self.life)

    # --- events of the coordinator -------------------------------------------------------

    def claim(self, claim: Claim) -> None:
        self.claims[claim.queue] = claim
        self.run(self.dispatcher.claimed, self, claim)

    def release(self, claim: Claim) -> None:
        claim.open = False
        self.run(self.dispatcher.releasing, self, claim)

    def lose(self) -> None:
        """Called when the session is lost."""
        self.lost = True
        self.lease.end()
        claims, self.claims = list(self.claims.values()), {}
        for claim in claims:
            claim.open = False
            self.dispatcher.lost(claim)

    def stop(self) -> None:
        """Finish the broker's pending operations cleanly."""
        self.run(self._stop)

    def _stop(self) -> None:
        while self.dispatcher.runners:
            self._moments.sleep(0.5)
        self.receiver.close()
        assert self.budget.held == 0, "something is counted that is not held"
        self.stopped = True

    # --- reports of the engine, as in `qdo.worker.engine.slot.ClaimReports` -----------------------

    def progress(self, claim: Claim) -> None:
        self._dirty[claim] = None

    def record(self, claim: Claim) -> bool:
        self._recorded(self, claim, False)
        return True

    def finished(self, claim: Claim) -> None:
        self._dirty.pop(claim, None)
        self._recorded(self, claim, True)
        self.claims.pop(claim.queue, None)

"""Turns of one queue, which a test makes one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qdo.app import App
from qdo.coordination.protocol.claims import Claim
from qdo.message import Message
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.worker.engine.context import Engine
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.engine.slot import Slot, SlotState, TurnResult
from qdo.worker.executors.router import GreenletExecutor
from tests.support.fakes.member import FakeMember
from tests.support.fakes.scripted_broker import ScriptedBroker


class Turnstile:
    """A pipeline over an in-memory broker, with one queue and a stopped clock.

    :param settings: beside those of these tests.
    :param options: of the job.
    """

    def __init__(
        self,
        broker: ScriptedBroker | None = None,
        queue: str = "q",
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.broker = ScriptedBroker() if broker is None else broker
        self.seen: list[Any] = []
        self.messages: list[Message] = []
        self.contexts: list[Any] = []
        self.failures: list[tuple[Message, BaseException]] = []
        self.act: Callable[[Message], object] = lambda message: None
        self.app = App("test", job_failure=self._failure)
        self.app.job(**options)(self._job)
        chosen = {"attempts": 3, "backoff_seconds": 1.0, "backoff_max_seconds": 10.0}
        chosen |= {"fetch": 1000, "turn_seconds": 0.02, **(settings or {})}
        self.engine = Engine.build(
            self.app,
            self.broker,
            GreenletExecutor(),
            SettingsInForce(Settings(app="test", **chosen)),
            clock=lambda: self.now,
            jitter=lambda: 0.0,
            context={"shared": 1},
        )
        self.pipeline = Pipeline(self.engine)
        self.member = FakeMember(self, now=lambda: self.now)
        self.slot = Slot(queue)
        (self.claim,) = self.member.grant(queue)
        self.claim.positions = self.broker.positions

    def claimed(self, claim: Claim) -> None:
        self.slot.claim = claim
        self.slot.member = self.member

    def releasing(self, claim: Claim) -> None:
        """The dispatcher's business."""

    def released(self, claim: Claim) -> None:
        """The counters' business."""

    def undone(self, claim: Claim) -> None:
        """Do nothing: a release follows."""

    def lost(self, claim: Claim) -> None:
        self.slot.claim = None

    def repositioned(self, old: Claim, new: Claim) -> None:
        self.slot.claim = None

    def _job(self, message: Message, context: Any) -> None:
        self.seen.append(message.body)
        self.messages.append(message)
        self.contexts.append(context)
        self.act(message)

    def _failure(self, message: Message, context: Any, error: BaseException) -> None:
        self.failures.append((message, error))

    def wait(self, seconds: float) -> Callable[..., None]:
        """Return what takes so long: a job or a fetch."""

        def wait(*_: Message) -> None:
            self.now += seconds

        return wait

    def turn(self) -> TurnResult:
        self.slot.state = SlotState.RUNNING
        return self.pipeline.turn(self.slot, self.member, self.claim)

    def turns(self) -> list[TurnResult]:
        """Run turns, each when its time has come, until the queue is at its tip."""
        ends: list[TurnResult] = []
        while not ends or ends[-1] in (TurnResult.MORE, TurnResult.WAIT):
            ends.append(self.turn())
            if ends[-1] is TurnResult.WAIT:
                self.now = self.slot.not_before
        return ends

"""What the engine counts of each message, however its attempt ends."""

from __future__ import annotations

from typing import Any

import pytest

from qdo.app import App
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.message import Message
from qdo.outcomes import Retry, Skip, Stop
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.worker.engine.context import Engine
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.engine.slot import TurnResult
from qdo.worker.executors.base import JobAborted, MessageExpired, NotStarted
from qdo.worker.executors.router import GreenletExecutor
from tests.support.fakes.scripted_broker import ScriptedBroker
from tests.support.turnstile import Turnstile


class CountedQueue(Turnstile):
    """One queue of a worker with metrics, whose job does what a test says."""

    def __init__(self, **options: Any) -> None:
        settings = {"attempts": 2, "turn_seconds": 60.0, "http": "127.0.0.1:0"}
        super().__init__(settings=settings, queues="q*", **options)

    def _job(self, message: Message, context: Any) -> None:
        self.act(message)

    def turn(self) -> TurnResult:
        end = super().turn()
        self.slot.message = None
        return end

    def counts(self) -> tuple[int, dict[str, int], int]:
        """Return messages done, other outcomes, and attempts with a duration."""
        assert self.pipeline.meters is not None
        assert [*self.pipeline.meters.by_glob] == ["q*"]
        meter = self.pipeline.meters.by_glob["q*"]
        return meter.done, dict(meter.outcomes), sum(meter.durations.counts)


@pytest.mark.parametrize(
    ("error", "outcomes", "timed"),
    [
        (ValueError(), {"retry": 1}, 3),
        (SystemExit(), {"retry": 1}, 3),
        (Retry(counts=False), {"wait": 1}, 3),
        (Skip("x"), {"skip": 1}, 3),
        (Stop("x"), {"stop": 1}, 3),
        (JobAborted(), {}, 3),
        (MessageExpired(), {}, 3),
        (NotStarted(), {}, 2),
    ],
)
@pytest.mark.parametrize("checkpoint", ["interval", "message"])
def test_only_messages_whose_job_returned_are_done(
    error: BaseException, outcomes: dict[str, int], timed: int, checkpoint: str
) -> None:
    """Two return, and the third one does not."""
    queue = CountedQueue(checkpoint=checkpoint)
    queue.broker.put("q", b"1", b"2", b"3")

    def act(message: Message) -> None:
        if message.body == 3:
            raise error

    queue.act = act
    queue.turn()
    assert queue.counts() == (2, outcomes, timed)


def test_a_body_that_cannot_be_decoded_is_no_done_message() -> None:
    queue = CountedQueue()
    queue.broker.put("q", b"1", b"{")
    queue.turn()
    assert queue.counts() == (1, {"dead-letter": 1}, 2)


def test_the_decision_of_an_operator_is_an_outcome_without_a_run() -> None:
    """The job of a skipped message was not called."""
    queue = CountedQueue()
    queue.broker.put("q", b"1", b"2")
    queue.claim.failure = FailureRecord(1, 1, "E", decision="skip")
    queue.turn()
    assert queue.counts() == (0, {"skip": 1}, 0)
    queue.turn()
    assert queue.counts() == (1, {"skip": 1}, 1)


_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpoint": "message"},
    {"order": "key"},
    {"order": "none"},
    {"batch": 1},
)


@pytest.mark.parametrize("options", _KINDS)
def test_turns_teach_how_long_messages_take(options: dict[str, Any]) -> None:
    queue = CountedQueue(**options)
    queue.broker.put("q", *[b"1"] * 30)
    queue.act = queue.wait(2.0)
    while queue.claim.done < 30:
        queue.turn()
    assert queue.slot.durations.usual_seconds == pytest.approx(2.0)
    assert queue.slot.durations.are_exceeded(20.0)


@pytest.mark.parametrize("options", _KINDS)
def test_failed_attempts_teach_nothing(options: dict[str, Any]) -> None:
    queue = CountedQueue(**options)
    queue.broker.put("q", b"1")

    def act(message: Message) -> None:
        queue.now += 2.0
        raise ValueError

    queue.act = act
    queue.turn()
    assert queue.slot.durations.usual_seconds == 0.0


def test_without_metrics_nothing_is_counted() -> None:
    app = App("test")
    engine = Engine.build(
        app, ScriptedBroker(), GreenletExecutor(), SettingsInForce(Settings(app="test"))
    )
    assert Pipeline(engine).meters is None

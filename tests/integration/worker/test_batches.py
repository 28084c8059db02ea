"""Jobs that take many messages at once: how batches are gathered, and how they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

import qdo
from qdo.brokers.base import Outgoing
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import UsageError
from qdo.worker.engine.slot import SlotState
from tests.support.engine import EngineSetup, until

FAST = {"backoff_seconds": 0.001, "backoff_max_seconds": 0.002}


class Batching:
    """A worker whose job takes batches, and the arguments of its calls.

    :ivar bad: bodies for which it fails as a whole; with `named` its error names the message.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = EngineSetup(folder, **settings)
        self.calls: list[list[Any]] = []
        self.times: list[float] = []
        self.attempts: list[int] = []
        self.events: list[qdo.Event] = []
        self.failures: list[Any] = []
        self.bad: dict[Any, BaseException] = {}
        self.named = False
        self.engine.app.observer(self.events.append)
        self.engine.app.failure(lambda message, context, error: self.failures.append(message.body))

    def job(self, batch: qdo.Batch, context: Any) -> None:
        bodies = [message.body for message in batch]
        self.calls.append(bodies)
        self.times.append(time.monotonic())
        self.attempts.append(batch.attempt)
        for index, body in enumerate(bodies):
            if body in self.bad:
                if self.named:
                    raise qdo.FailedAt(index) from self.bad[body]
                raise self.bad[body]

    def start(self, *bodies: Any, **options: Any) -> None:
        self.engine.app.job(**options)(self.job)
        self.engine.send("q", *bodies)
        self.engine.start("q")

    def done(self) -> list[Any]:
        """Return the positions that were reported to observers as done."""
        return [event.position for event in self.events if event.outcome == "done"]

    def behind(self) -> int:
        recorded = self.engine.member.recorded.get("q", 0)
        return self.engine.broker.catalog.backlog("q", recorded).count

    def letters(self) -> list[bytes]:
        return [each.body for each in self.engine.broker.dead_letters.records("q")]


@pytest.fixture
def batching(tmp_path: Path) -> Iterator[Batching]:
    made = Batching(tmp_path)
    yield made
    made.engine.close()


def test_messages_come_in_batches_in_their_order(batching: Batching) -> None:
    """Full ones as long as there are enough messages, then the rest."""
    batching.start(*range(25), batch=10)
    until(lambda: batching.behind() == 0)
    assert batching.calls == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert len(batching.done()) == 25
    assert batching.engine.pipeline.counters.processed == 25


def test_a_batch_waits_for_more(batching: Batching) -> None:
    """Until it is full, or its time is over."""
    batching.start(0, 1, batch=5, batch_wait_seconds=60)
    slots = batching.engine.dispatcher.slots
    until(lambda: slots["q"].state is SlotState.WAITING)
    batching.engine.send("q", 2, 3)
    until(lambda: len(slots["q"].gathered or ()) == 4)
    assert not batching.calls
    batching.engine.send("q", 4, 5)
    until(lambda: batching.calls)
    assert batching.calls == [[0, 1, 2, 3, 4]]


def test_a_batch_does_not_wait_for_ever(batching: Batching) -> None:
    """It runs the messages that have come by then; the time counts from the first message."""
    batching.start(0, 1, batch=5, batch_wait_seconds=0.05)
    began = time.monotonic()
    until(lambda: batching.calls)
    assert time.monotonic() - began > 0.03
    assert batching.calls == [[0, 1]]
    until(lambda: batching.behind() == 0)


def test_a_batch_that_says_where_it_failed(batching: Batching) -> None:
    """Those before are done; the failed one has its attempts, alone; then batches continue."""
    batching.bad[3] = ValueError("no")
    batching.named = True
    batching.start(*range(10), batch=10, policy=qdo.Policy(attempts=3, **FAST))
    until(lambda: batching.behind() == 0)
    assert batching.calls == [list(range(10)), [3], [3], [4, 5, 6, 7, 8, 9]]
    assert batching.attempts == [1, 2, 3, 1]
    assert batching.failures == [3, 3, 3]
    assert batching.letters() == [b"3"]
    assert batching.engine.broker.dead_letters.records("q")[0].error == "ValueError: no"
    assert len(batching.done()) == 9


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_that_is_none_of_the_batch_fails_it_whole(batching: Batching, index: int) -> None:
    """Nothing is taken for done on the word of a mistake."""
    batching.bad[3] = qdo.FailedAt(index)
    batching.start(*range(10), batch=10, policy=qdo.Policy(attempts=1))
    until(lambda: batching.behind() == 0)
    assert batching.calls[1:] == [[n] for n in range(10)]
    assert batching.letters() == [b"3"]


def test_a_batch_that_fails_whole_is_taken_apart(
    batching: Batching, caplog: pytest.LogCaptureFixture
) -> None:
    """Each message is run alone, once; only the bad one is a dead letter."""
    caplog.set_level(logging.WARNING)
    batching.bad[3] = ValueError("no")
    batching.start(*range(15), batch=10, policy=qdo.Policy(attempts=2, **FAST))
    until(lambda: batching.behind() == 0)
    alone = [[0], [1], [2], [3], [3], [4], [5], [6], [7], [8], [9]]
    assert batching.calls == [list(range(10)), *alone, [10, 11, 12, 13, 14]]
    assert batching.letters() == [b"3"]
    assert batching.failures == [3, 3]
    (record,) = [each for each in caplog.records if each.name.endswith(".batches")]
    place, count = record.args[:2]
    assert (place.fields["queue"], count) == ("q", 10)


def test_a_batch_that_asks_for_a_retry_gets_its_pause(batching: Batching) -> None:
    """This is not a failure: after the pause its messages run, and no attempt is counted."""
    batching.bad[0] = qdo.Retry(after=0.05)
    batching.start(0, 1, batch=10)
    until(lambda: batching.calls)
    batching.bad.clear()
    until(lambda: batching.behind() == 0)
    first, second, _ = batching.times
    assert second - first >= 0.05
    assert batching.attempts == [1, 1, 1]


def test_a_batch_may_wait_as_a_whole(batching: Batching) -> None:
    """It is not taken apart; a single message of it may wait as well."""
    batching.bad[0] = qdo.Retry(after=0.01, counts=False)
    batching.start(0, 1, 2, batch=10, policy=qdo.Policy(attempts=1, **FAST))
    until(lambda: len(batching.calls) > 2)
    batching.bad = {1: qdo.Retry(after=0.01, counts=False)}
    batching.named = True
    until(lambda: batching.calls[-1] == [1])
    batching.bad.clear()
    until(lambda: batching.behind() == 0)
    assert batching.calls[:3] == [[0, 1, 2]] * 3
    assert set(batching.attempts) == {1}
    assert batching.failures == []
    assert batching.letters() == []


def test_a_body_that_does_not_decode_ends_a_batch_before_it(batching: Batching) -> None:
    """The messages before it are run together, it becomes a dead letter, the rest follow."""
    batching.engine.app.job(batch=10)(batching.job)
    batching.engine.send("q", 0, 1)
    batching.engine.broker.send(Outgoing("q", b"{"))
    batching.engine.send("q", 2, 3)
    batching.engine.start("q")
    until(lambda: batching.behind() == 0)
    assert batching.calls == [[0, 1], [2, 3]]
    assert batching.letters() == [b"{"]


def test_after_a_crash_messages_are_run_alone(batching: Batching) -> None:
    """The message that crashed the process is unknown: each of the batch has its own attempts."""
    batching.engine.app.job(batch=3)(batching.job)
    batching.engine.send("q", *range(8))
    first = batching.engine.broker.reader("q", 0).fetch(1)[0][0]
    batching.engine.registrar.marks["q"] = FailureRecord(first, 1, "died", crashed=True)
    batching.engine.start("q")
    until(lambda: batching.behind() == 0)
    assert batching.calls == [[0], [1], [2], [3, 4, 5], [6, 7]]
    assert batching.attempts == [2, 1, 1, 1, 1]


def test_a_block_waits_with_the_message_that_failed(batching: Batching) -> None:
    """The messages before it in the batch are done and recorded."""
    batching.bad[2] = ValueError("no")
    batching.named = True
    batching.start(*range(5), batch=5, policy=qdo.Policy(attempts=1, then="block"))
    slots = batching.engine.dispatcher.slots
    until(lambda: slots["q"].state is SlotState.HELD)
    assert batching.behind() == 3
    batching.bad.clear()
    batching.engine.member.decide("q", None)
    until(lambda: batching.behind() == 0)
    assert batching.calls == [[0, 1, 2, 3, 4], [2, 3, 4]]


def test_a_claim_that_ends_while_gathering_runs_nothing(batching: Batching) -> None:
    """The gathered messages are dropped with it, and the next owner reads them again."""
    batching.start(0, 1, batch=5, batch_wait_seconds=60)
    slots = batching.engine.dispatcher.slots
    until(lambda: slots["q"].state is SlotState.WAITING)
    batching.engine.member.take_back("q")
    until(lambda: not slots)
    batching.engine.send("q", 2, 3, 4)
    batching.engine.member.grant("q")
    until(lambda: batching.behind() == 0)
    assert batching.calls == [[0, 1, 2, 3, 4]]


def test_a_job_may_stop_the_worker_with_a_batch(batching: Batching) -> None:
    """None of it is done, and nothing is taken apart."""
    batching.bad[0] = qdo.Stop("enough")
    batching.start(*range(5), batch=5)
    assert batching.engine.join() == 0
    assert batching.calls == [[0, 1, 2, 3, 4]]
    assert batching.behind() == 5


def test_a_batch_has_one_deadline(batching: Batching) -> None:
    """When its time is over it has failed as a whole; alone, each message has all of it."""

    def job(batch: qdo.Batch, context: Any) -> None:
        batching.calls.append([message.body for message in batch])
        if len(batch) > 1:
            gevent.sleep(30)

    batching.engine.app.job(batch=3, timeout_seconds=0.1)(job)
    batching.engine.send("q", 0, 1, 2)
    batching.engine.start("q")
    until(lambda: batching.behind() == 0)
    assert batching.calls == [[0, 1, 2], [0], [1], [2]]


@pytest.mark.parametrize("kind", ["thread", "asyncio"])
def test_batches_run_in_threads_and_as_coroutines(batching: Batching, kind: str) -> None:
    """A batch goes where a message goes."""
    if kind == "thread":
        batching.engine.app.job(batch=4, executor="thread")(batching.job)
    else:

        async def job(batch: qdo.Batch, context: Any) -> None:
            batching.job(batch, context)

        batching.engine.app.job(batch=4)(job)
    batching.engine.send("q", *range(6))
    batching.engine.start("q")
    until(lambda: batching.behind() == 0)
    assert batching.calls == [[0, 1, 2, 3], [4, 5]]


def test_max_messages_counts_what_is_in_batches(tmp_path: Path) -> None:
    batching = Batching(tmp_path, max_messages=6)
    batching.start(*range(20), batch=4)
    assert batching.engine.join() == 0
    assert batching.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    batching.engine.close()


def test_a_setting_may_not_send_batches_to_processes(tmp_path: Path) -> None:
    """The setting `executor` applies to jobs without an executor: rejected at the start."""
    batching = Batching(tmp_path, executor="process")
    batching.engine.app.job(batch=4)(batching.job)
    with pytest.raises(UsageError, match="process"):
        batching.engine.worker.run()
    batching.engine.broker.close()

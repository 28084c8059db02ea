"""Turns of a queue: order, limits, outcomes, and claims that end at any step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gevent
import pytest

from qdo.app import App
from qdo.brokers.base import Reader, Subscription
from qdo.brokers.sqs.codec import SQS_POSITIONS, make_position
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress
from qdo.errors import DatabaseFullError, UnsupportedError
from qdo.jobs.options import Order
from qdo.message import Message
from qdo.outcomes import DeadLetter, Retry, Skip
from qdo.worker.engine.fetcher import FIRST_LIMIT
from qdo.worker.engine.pipeline import running_in
from qdo.worker.engine.slot import SlotState, TurnResult
from qdo.worker.executors.base import JobAborted
from tests.support.fakes.scripted_broker import ScriptedBroker
from tests.support.turnstile import Turnstile


def raising(
    error: BaseException | type[BaseException], **fields: object
) -> Callable[[Message], None]:
    """Return a job that raises for messages with these fields."""

    def job(message: Message) -> None:
        if all(getattr(message, name) == value for name, value in fields.items()):
            raise error

    return job


def bury(stile: Turnstile, *faults: BaseException) -> None:
    """Let the job make its first message a dead letter, which the broker stores after these."""

    def job(message: Message) -> None:
        if message.position == 1:
            stile.broker.faults = [*faults]
            raise DeadLetter("bad")

    stile.act = job


@pytest.fixture
def stile() -> Turnstile:
    return Turnstile()


def test_messages_come_in_order_with_everything_they_carry(stile: Turnstile) -> None:
    """Body and headers are decoded; fence, attempt and id are set."""
    stile.broker.put("q", b'{"n": 1}', headers='{"a": "b"}')
    stile.broker.put("q", b'"two"')
    assert stile.turns() == [TurnResult.MORE, TurnResult.TIP]
    assert stile.seen == [{"n": 1}, "two"]
    first, second = stile.messages
    assert (first.headers, second.headers) == ({"a": "b"}, {})
    assert (first.fence, first.attempt, first.queue) == (stile.claim.fence, 1, "q")
    assert first.id != second.id
    assert stile.contexts[0] is stile.engine.context
    assert stile.claim.done == 2
    assert stile.pipeline.counters.processed == 2


def test_done_is_right_while_the_job_of_the_next_message_runs(stile: Turnstile) -> None:
    """The checkpointer may look whenever a job yields."""
    done = []
    stile.act = lambda message: done.append(stile.claim.done)
    stile.broker.put("q", b"1", b"2", b"3")
    stile.turns()
    assert done == [0, 1, 2]


def test_progress_is_told_once_a_turn(stile: Turnstile) -> None:
    """Not for each message, and not for a turn without any."""
    stile.broker.put("q", *[b"1"] * 10)
    stile.turns()
    assert stile.member.events == [("progress", "q")]
    assert stile.member.recorded["q"] == 10


def test_a_turn_ends_when_its_time_is_over(stile: Turnstile) -> None:
    """The row after it is kept for the next turn, not fetched again."""
    stile.act = stile.wait(0.015)
    stile.broker.put("q", b"1", b"2", b"3")
    assert stile.turn() is TurnResult.MORE
    assert stile.seen == [1, 2]
    fetches = len(stile.broker.fetches)
    assert stile.turn() is TurnResult.MORE
    assert stile.seen == [1, 2, 3]
    assert len(stile.broker.fetches) == fetches
    assert stile.turn() is TurnResult.TIP


def test_a_turn_takes_at_most_one_batch(stile: Turnstile) -> None:
    """Batches grow while turns get through them, up to `fetch`."""
    stile.broker.put("q", *[b"1"] * 3000)
    stile.turns()
    assert [limit for _, limit in stile.broker.fetches] == [16, 64, 256, 1000, 1000, 1000, 1000]
    assert stile.claim.done == 3000


def test_batches_shrink_where_jobs_are_slow(stile: Turnstile) -> None:
    """Rows of thousands of queues with slow jobs must not fill the memory."""
    stile.broker.put("q", *[b"1"] * 3000)
    for _ in range(4):
        stile.turn()
    stile.act = stile.wait(1)
    stile.turn()
    assert stile.slot.limit == FIRST_LIMIT


def test_no_message_starts_after_the_lease(stile: Turnstile) -> None:
    """Its end within a turn, and a turn after it."""
    stile.broker.put("q", b"1", b"2")
    stile.act = stile.wait(stile.member.lease.until - stile.now)
    assert stile.turn() is TurnResult.MORE
    assert stile.turn() is TurnResult.PAUSED
    assert stile.seen == [1]
    stile.member.lease.until = stile.now + 1
    stile.act = lambda message: None
    assert stile.turn() is TurnResult.MORE
    assert stile.seen == [1, 2]


def test_no_message_starts_after_a_fetch_outlasts_the_lease(stile: Turnstile) -> None:
    """The lease is looked at again after the broker answered."""
    stile.broker.put("q", b"1")
    stile.broker.during_fetch = stile.wait(stile.member.lease.until - stile.now + 1)
    assert stile.turn() is TurnResult.MORE
    assert stile.turn() is TurnResult.PAUSED
    assert stile.seen == []


@pytest.mark.parametrize("how", ["take_back", "lose", "seek"])
def test_a_claim_that_ends_while_fetching_starts_nothing(stile: Turnstile, how: str) -> None:
    """Released, lost or moved while the broker answers: its rows are not used."""
    stile.broker.put("q", b"1")
    stile.broker.during_fetch = lambda: _end(stile, how)
    stile.turn()
    assert stile.turn() is TurnResult.ENDED
    assert stile.seen == []


@pytest.mark.parametrize("how", ["take_back", "lose", "seek"])
def test_a_claim_that_ends_within_a_message_starts_no_other(stile: Turnstile, how: str) -> None:
    """The message in flight is finished, and only for a release does it count."""
    stile.broker.put("q", b"1", b"2")
    stile.act = lambda message: _end(stile, how)
    stile.turn()
    assert stile.turn() is TurnResult.ENDED
    assert stile.seen == [1]
    assert stile.claim.done == 1
    told = [("progress", "q")] if how == "take_back" else []
    assert stile.member.events == told


@pytest.mark.parametrize("how", ["take_back", "lose", "seek"])
def test_a_failure_after_the_claim_ended_is_left_to_the_next(stile: Turnstile, how: str) -> None:
    """It is not done, and no dead letter is written under a lost claim."""

    def fail(message: Message) -> None:
        _end(stile, how)
        raise ValueError("x")

    stile.act = fail
    stile.claim.failure = FailureRecord(1, 2, "ValueError: x")
    stile.slot.waited = True
    stile.broker.put("q", b"1", b"2")
    stile.turn()
    assert stile.seen == [1]
    if how == "take_back":  # still the owner: its third and last attempt
        assert len(stile.broker.letters) == 1
        assert stile.claim.done == 1
    else:
        assert stile.broker.letters == []
        assert stile.claim.done == 0
    assert len(stile.failures) == 1


def _end(stile: Turnstile, how: str) -> None:
    if how == "seek":
        if stile.claim.open:
            stile.member.seek("q", 7)
    elif stile.claim.open:
        getattr(stile.member, how)("q")


def test_a_failing_message_is_retried_then_a_dead_letter(stile: Turnstile) -> None:
    """Three attempts, 0.5 s and 1 s apart; then the queue continues."""
    times: list[tuple[float, int]] = []

    def fail(message: Message) -> None:
        if message.body == 2:
            times.append((stile.now, message.attempt))
            raise ValueError("no two")

    stile.act = fail
    stile.broker.put("q", b"1", b"2", b"3")
    stile.turns()
    assert stile.seen == [1, 2, 2, 2, 3]
    assert times == [(1000.0, 1), (1000.5, 2), (1001.5, 3)]
    assert stile.claim.done == 3
    (letter,) = stile.broker.letters
    assert (letter.queue, letter.position, letter.body) == ("q", 2, b"2")
    assert (letter.error, letter.attempts) == ("ValueError: no two", 3)
    assert (letter.worker, letter.fence) == (stile.member.name, stile.claim.fence)
    assert "fail" in letter.traceback
    assert [error.args for _, error in stile.failures] == [("no two",)] * 3
    counters = stile.pipeline.counters
    assert (counters.processed, counters.retried, counters.dead_lettered) == (2, 2, 1)


def test_nothing_passes_a_message_that_waits(stile: Turnstile) -> None:
    """During the backoff `done` stays before it."""
    stile.act = raising(ValueError)
    stile.broker.put("q", b"1", b"2")
    assert stile.turn() is TurnResult.WAIT
    assert stile.claim.done == 0
    assert stile.slot.not_before == 1000.5


@pytest.mark.parametrize("order", ["queue", "key"])
def test_a_failure_keeps_the_record_of_a_later_message(order: Order) -> None:
    """That one killed the former owner, which had not recorded how far it had got."""
    stile = Turnstile(order=order)
    later = FailureRecord(3, 1, "it died", crashed=True)
    stile.claim.failure = later
    stile.act = raising(ValueError("no"), body=1, attempt=1)
    stile.broker.put("q", b"1", b"2", b"3", b"4")
    assert stile.turn() is TurnResult.WAIT
    if stile.claim.refresh is not None:
        stile.claim.refresh()
    assert stile.claim.failure is not None
    assert (stile.claim.failure.position, stile.claim.failure.attempts) == (1, 1)
    assert stile.claim.out_of_order == OutOfOrderProgress((), (later,))
    stile.now = stile.slot.not_before
    stile.turns()
    assert [(each.body, each.attempt) for each in stile.messages] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (3, 2),
        (4, 1),
    ]
    assert stile.claim.done == 4
    if stile.claim.refresh is not None:
        stile.claim.refresh()
    assert (stile.claim.failure is None or stile.claim.failure.position <= 4) is True
    assert stile.claim.out_of_order is None


@pytest.mark.parametrize("order", ["queue", "key"])
def test_each_recorded_crash_is_judged_by_the_policy(order: Order) -> None:
    """Two messages killed former owners as often as they may: neither runs again."""
    stile = Turnstile(order=order)
    first, second = (FailureRecord(at, 3, "it died", crashed=True) for at in (1, 3))
    stile.claim.failure = first
    stile.claim.out_of_order = OutOfOrderProgress((), (second,))
    stile.broker.put("q", b"1", b"2", b"3", b"4")
    stile.turns()
    assert stile.seen == [2, 4]
    assert [message.position for message, _ in stile.failures] == [1, 3]
    assert stile.claim.done == 4


def test_a_success_after_failures_starts_the_count_anew(stile: Turnstile) -> None:
    """Attempts are of one message, not of the queue."""
    failing = [ValueError(), ValueError()]

    def act(message: Message) -> None:
        if message.body == 1 and failing:
            raise failing.pop()
        if message.body == 2 and message.attempt == 1:
            raise ValueError

    stile.act = act
    stile.broker.put("q", b"1", b"2")
    stile.turns()
    assert [message.attempt for message in stile.messages] == [1, 2, 3, 1, 2]
    assert stile.broker.letters == []


def test_a_dead_letter_is_stored_before_its_message_is_passed(stile: Turnstile) -> None:
    """While it is being stored, `done` is before it."""
    done = []
    stile.broker.during_bury = lambda: done.append(stile.claim.done)
    stile.act = raising(DeadLetter("bad address"))
    stile.broker.put("q", b"1")
    stile.turns()
    assert done == [0]
    assert stile.claim.done == 1
    assert stile.broker.letters[0].error == "bad address"


def test_a_dead_letter_that_cannot_be_stored_is_tried_again(stile: Turnstile) -> None:
    """Disk full: the queue waits, the job does not run again, nothing is lost."""
    bury(stile, *[DatabaseFullError(path="p", reason="full")] * 3)
    stile.broker.put("q", b"1", b"2")
    assert stile.turn() is TurnResult.WAIT
    assert stile.claim.done == 0
    assert stile.slot.not_before > stile.now
    stile.turns()
    assert stile.seen == [1, 2]
    assert [letter.position for letter in stile.broker.letters] == [1]
    assert stile.claim.done == 2


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (DatabaseFullError(path="p", reason="full"), logging.WARNING),
        (UnsupportedError(broker="Kinesis", what="keep it", remedy="add"), logging.ERROR),
    ],
)
def test_unsupported_dead_letters_are_logged_as_errors(
    stile: Turnstile, caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    """A full disk is temporary; a broker without dead letters needs an operator."""
    bury(stile, error)
    stile.broker.put("q", b"1")
    assert stile.turn() is TurnResult.WAIT
    (record,) = [each for each in caplog.records if each.name.endswith(".ends.broker")]
    assert record.levelno == level


def test_a_dead_letter_waits_for_the_lease(stile: Turnstile) -> None:
    """Without a lease the queue may have another owner already."""
    bury(stile, DatabaseFullError(path="p", reason="full"))
    stile.broker.put("q", b"1")
    stile.turn()
    stile.now = stile.member.lease.until
    assert stile.turn() is TurnResult.PAUSED
    assert stile.broker.letters == []


def test_a_queue_lost_during_a_dead_letter_does_not_advance(stile: Turnstile) -> None:
    """The next owner finds the message, and stores the same letter once."""
    stile.act = raising(DeadLetter("bad"))
    stile.broker.during_bury = lambda: stile.member.lose("q")
    stile.broker.put("q", b"1")
    assert stile.turn() is TurnResult.ENDED
    assert stile.claim.done == 0


@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b"[" * 100_000])
def test_a_body_that_does_not_decode_is_a_dead_letter_at_once(
    stile: Turnstile, body: bytes
) -> None:
    """The messages around it are processed; the letter has the body as it was."""
    stile.broker.put("q", b"1", body, b"3")
    stile.turns()
    assert stile.seen == [1, 3]
    (letter,) = stile.broker.letters
    assert (letter.body, letter.attempts) == (body, 1)
    assert "not valid JSON" in letter.error
    assert stile.failures[0][0].body == body
    assert stile.claim.done == 3


def test_headers_that_do_not_decode_are_a_dead_letter_too(stile: Turnstile) -> None:
    """They are the sender's, too."""
    stile.broker.put("q", b"1", headers="{")
    stile.turns()
    assert stile.seen == []
    assert stile.broker.letters[0].headers == "{"


def test_a_skipped_message_is_passed(stile: Turnstile) -> None:
    """Without a failure, without a dead letter."""
    stile.act = raising(Skip("a duplicate"), body=1)
    stile.broker.put("q", b"1", b"2")
    stile.turns()
    assert stile.seen == [1, 2]
    assert (stile.claim.done, stile.failures, stile.broker.letters) == (2, [], [])
    assert stile.pipeline.counters.skipped == 1
    assert stile.pipeline.counters.processed == 1


def test_a_job_that_asks_for_a_retry_gets_its_delay(stile: Turnstile) -> None:
    """Retry(after=30)."""
    stile.act = raising(Retry(after=30), attempt=1)
    stile.broker.put("q", b"1")
    assert stile.turn() is TurnResult.WAIT
    assert stile.slot.not_before == stile.now + 30


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), gevent.GreenletExit(), gevent.Timeout(1)]
)
def test_what_would_end_a_greenlet_fails_the_message_only(
    stile: Turnstile, error: BaseException
) -> None:
    """sys.exit() in a job does not end the worker."""
    stile.act = raising(error, attempt=1)
    stile.broker.put("q", b"1")
    assert stile.turns() == [TurnResult.WAIT, TurnResult.MORE, TurnResult.TIP]
    assert stile.failures[0][1] is error


def test_an_error_that_cannot_be_shown_fails_the_message_only(stile: Turnstile) -> None:
    """Its str() raises."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    stile.act = raising(Unspeakable)
    stile.broker.put("q", b"1", b"2")
    stile.turns()
    assert len(stile.broker.letters) == 2
    assert "cannot be shown" in stile.broker.letters[0].error


def test_errors_of_the_failure_hook_are_logged(
    stile: Turnstile, caplog: pytest.LogCaptureFixture
) -> None:
    """They change nothing about the message."""

    def hook(message: Message, context: Any, error: BaseException) -> None:
        raise SystemExit

    stile.app.hooks.replace_failure(hook)
    stile.act = raising(DeadLetter("bad"))
    stile.broker.put("q", b"1")
    stile.turns()
    assert stile.claim.done == 1
    (record,) = [each for each in caplog.records if each.exc_info]
    assert record.exc_info is not None
    assert record.exc_info[0] is SystemExit
    assert record.args == ("q",)


def test_a_broker_that_fails_is_retried(stile: Turnstile) -> None:
    """Order and place are kept; the pauses grow."""
    stile.broker.faults = [OSError("gone"), OSError("gone")]
    stile.broker.put("q", b"1")
    assert stile.turn() is TurnResult.WAIT
    first = stile.slot.not_before - stile.now
    assert stile.turn() is TurnResult.WAIT
    assert stile.slot.not_before - stile.now > first
    assert stile.turns() == [TurnResult.MORE, TurnResult.TIP]
    assert stile.seen == [1]
    assert stile.slot.broker_failures == 0


def test_a_job_may_ask_for_a_record_after_every_message() -> None:
    """Before the next message starts, also if its second attempt succeeds."""
    stile = Turnstile(checkpoint="message")
    recorded: list[int] = []
    fail_once = raising(ValueError, body=2, attempt=1)

    def act(message: Message) -> None:
        recorded.append(stile.member.recorded.get("q", 0))
        fail_once(message)

    stile.act = act
    stile.broker.put("q", b"1", b"2", b"3")
    stile.turns()
    assert [message.attempt for message in stile.messages] == [1, 1, 2, 1]
    assert recorded == [0, 1, 1, 2]
    assert stile.member.events.count(("record", "q")) == 3


def test_a_queue_without_a_job_waits_and_is_logged_once(
    stile: Turnstile, caplog: pytest.LogCaptureFixture
) -> None:
    """Its messages are not touched."""
    app = App("other")
    app.job("mail-*")(lambda message, context: None)
    stile.engine.jobs._app = app
    stile.broker.put("q", b"1")
    assert [stile.turn(), stile.turn()] == [TurnResult.TIP, TurnResult.TIP]
    (record,) = caplog.records
    assert (record.levelname, record.args) == ("ERROR", ("q",))
    assert stile.claim.done == 0


def test_the_next_batch_is_fetched_while_one_is_processed() -> None:
    """Where a fetch takes long; order is kept."""
    stile = Turnstile(settings={"fetch": 2})
    stile.broker.during_fetch = stile.wait(0.005)
    fetched: list[int] = []

    def yielding(message: Message) -> None:
        gevent.sleep(0)
        fetched.append(len(stile.broker.fetches))

    stile.act = yielding
    stile.broker.put("q", b"1", b"2", b"3", b"4")
    assert stile.turn() is TurnResult.MORE
    assert fetched[0] == 2
    stile.turns()
    assert stile.seen == [1, 2, 3, 4]


def test_a_prefetch_error_is_raised_when_its_rows_are_due() -> None:
    """The rows before it are processed first."""
    stile = Turnstile(settings={"fetch": 2})

    def long() -> None:
        stile.now += 0.005
        if len(stile.broker.fetches) == 2:
            raise OSError("gone")

    stile.broker.during_fetch = long
    stile.broker.put("q", b"1", b"2", b"3")
    assert stile.turns()[:2] == [TurnResult.MORE, TurnResult.WAIT]
    assert stile.seen == [1, 2, 3]


def test_rows_fetched_ahead_are_dropped_with_the_claim() -> None:
    """Also while they are fetched."""
    stile = Turnstile(settings={"fetch": 2})
    stile.broker.during_fetch = stile.wait(0.005)
    stile.broker.put("q", b"1", b"2", b"3")
    stile.turn()
    assert stile.slot.ahead is not None
    stile.pipeline.clear(stile.slot)
    assert stile.slot.rows is None
    assert stile.slot.ahead is None


def test_an_empty_batch_fetched_ahead_is_not_the_tip() -> None:
    """A message that came after that fetch is read in the same turn."""
    stile = Turnstile(settings={"fetch": 2})
    stile.broker.during_fetch = stile.wait(0.005)
    stile.broker.put("q", b"1")
    stile.turn()
    ahead = stile.slot.ahead
    assert ahead is not None
    gevent.sleep(0)
    stile.broker.put("q", b"2")
    assert stile.turn() is TurnResult.MORE
    assert stile.seen == [1, 2]


def test_an_aborted_job_is_not_done_and_not_failed(stile: Turnstile) -> None:
    """Its message stays for the next owner, without counting as an attempt."""
    stile.act = raising(JobAborted)
    stile.broker.put("q", b"1")
    assert stile.turn() is TurnResult.ENDED
    assert (stile.claim.done, stile.failures, stile.claim.failure) == (0, [], None)


def test_what_runs_can_be_read_from_the_stack(stile: Turnstile) -> None:
    """The watchdog names message and job without their having left word."""
    found: list[Any] = []
    stile.act = lambda message: found.append(running_in(sys._getframe()))
    stile.broker.put("q", b"1")
    stile.turns()
    assert found[0].message is stile.messages[0]
    assert found[0].job.name.endswith("Turnstile._job")
    assert running_in(sys._getframe()) is None


# --- brokers that take messages back ----------------------------------------------------


class LendingBroker(ScriptedBroker):
    """Has messages out on loan.

    :ivar gone: positions of those that it took back.
    """

    capabilities = replace(ScriptedBroker.capabilities, subscriptions=True)

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[int] = set()

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        return _Loan(self, queue)


class _Loan(Subscription):
    def __init__(self, broker: LendingBroker, queue: str) -> None:
        self._broker = broker
        self._queue = queue

    def reader(self, after: int) -> Reader:
        return self._broker.reader(self._queue, after)

    def at_tip(self) -> bool:
        return True

    def is_held(self, position: int) -> bool:
        return position not in self._broker.gone

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("failed_before", [True, False])
def test_messages_that_were_taken_back_are_passed_over(failed_before: bool) -> None:
    """Whether or not they failed elsewhere; they come again as new ones."""
    broker = LendingBroker()
    stile = Turnstile(order="none", broker=broker)
    broker.put("q", b"1", b"2", b"3")
    broker.gone = {1, 3}
    if failed_before:
        stile.claim.failure = FailureRecord(1, 1, "the worker was killed", crashed=True)
    stile.turns()
    assert stile.seen == [2]
    assert stile.pipeline.counters.expired == 2
    assert stile.claim.done == 3


class HidingBroker(LendingBroker):
    """Gives a message a new position to every owner, and may hide it for ten seconds."""

    positions = SQS_POSITIONS
    capabilities = replace(LendingBroker.capabilities, hold_seconds=10.0)

    def receive(self, moment: int, number: int) -> None:
        row = (make_position(moment, 0, number), b"%d" % number, None, None)
        self.stored.setdefault("q", []).append(row)


def hiding() -> Turnstile:
    """Return a stile whose message 7 failed once, elsewhere, and is not received yet."""
    stile = Turnstile(order="none", broker=HidingBroker())
    stile.claim.failure = FailureRecord(
        make_position(50, 0, 7), 1, "the worker was killed", crashed=True
    )
    return stile


def test_failures_of_hidden_messages_outlast_other_progress() -> None:
    """They lie ahead of the done messages, and count once the message is received."""
    stile = hiding()
    broker = stile.broker
    assert isinstance(broker, HidingBroker)
    broker.receive(60, 1)
    stile.turns()
    marks = stile.claim.failure
    assert marks is not None
    assert marks.position > stile.claim.done == make_position(60, 0, 1)
    assert (SQS_POSITIONS.identity(marks.position), marks.attempts) == (7, 1)
    broker.receive(70, 7)
    stile.turns()
    assert [(each.body, each.attempt) for each in stile.messages] == [(1, 1), (7, 2)]
    assert stile.claim.failure is None


def test_marks_of_a_message_that_is_gone_are_dropped() -> None:
    """It was not received for longer than it could be hidden, and the queue is empty."""
    stile = hiding()
    stile.turns()
    assert stile.claim.failure is not None
    stile.now += 10.0
    stile.turns()
    assert stile.claim.failure is None


def test_a_blocked_queue_whose_broker_must_be_asked_is_not_read() -> None:
    """New messages would only be hidden until an operator decides."""
    broker = HidingBroker()
    stile = Turnstile(order="queue", broker=broker)
    stile.claim.failure = FailureRecord(make_position(60, 0, 1), 3, "no", blocked_since=1.0)
    broker.receive(60, 1)
    assert stile.turn() is TurnResult.HELD
    assert stile.slot.lanes is None
    assert stile.seen == []


def test_a_subscription_is_told_whether_anything_may_be_started() -> None:
    """Not when the lease or the claim is over, nor while the queue waits for an operator."""
    stile = Turnstile(order="none", broker=HidingBroker())
    stile.turns()
    source = stile.slot.subscription
    assert source is not None
    assert source.may_start()
    assert source.in_flight() == []
    stile.slot.state = SlotState.HELD
    assert not source.may_start()
    stile.slot.state = SlotState.IDLE
    stile.now = stile.claim.lease.until
    assert not source.may_start()
    stile.now -= 1
    assert source.may_start()
    stile.claim.open = False
    assert not source.may_start()


def test_a_subscription_knows_the_messages_in_flight() -> None:
    """Of a queue with lanes those of all lanes."""
    broker = HidingBroker()
    stile = Turnstile(order="none", broker=broker)
    broker.receive(60, 1)
    broker.receive(61, 2)
    told: list[list[int]] = []

    def act(message: Message) -> None:
        gevent.sleep(0)  # lets the other one begin
        if stile.slot.subscription is not None:
            told.append(sorted(stile.slot.subscription.in_flight()))

    stile.act = act
    stile.turns()
    assert told[0] == [make_position(60, 0, 1), make_position(61, 0, 2)]


@pytest.mark.parametrize("order", ["queue", "key"])
@pytest.mark.parametrize("former", ["worker-9", ""])
def test_starts_after_a_gone_owner_are_recorded(order: Order, former: str) -> None:
    """Any of them may have ended it; after the tip, and after a release, none is recorded."""
    stile = Turnstile(order=order)
    if former:
        stile.claim.follow(former)
    begun: list[tuple[str, ...] | None] = []

    def note(message: Message) -> None:
        failure = stile.claim.failure
        recorded = stile.member.events[-1:] == [("record", "q")] and failure is not None
        begun.append(failure.begun_by if recorded and failure is not None else None)
        stile.now += 0.6

    stile.act = note
    stile.broker.put("q", b"1", b"2", b"3")
    stile.turns()
    stile.slot.state = SlotState.IDLE
    stile.broker.put("q", b"4")
    stile.turns()
    name = stile.member.name
    suspected = [(former, name), (former, name), (name,)] if former else [None] * 3
    assert begun == [*suspected, None]
    assert {each.attempt for each in stile.messages} == {1}
    assert stile.member.recorded["q"] == 4


def test_a_message_does_not_begin_once_its_claim_is_over(stile: Turnstile) -> None:
    """The claim may end while its start is being recorded: the next owner counts nothing then."""
    stile.claim.follow("worker-9")
    stile.broker.put("q", b"1", b"2")
    stile.member.record = lambda *_: stile.claim.close()  # type: ignore[method-assign,assignment]
    assert stile.turn() is TurnResult.MORE
    assert (stile.seen, stile.claim.done, stile.pipeline.counters.attempts) == ([], 0, 0)

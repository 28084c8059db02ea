"""Receipts of what a process held at a broker, in memory that outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from qdo.brokers.sqs_holding import Holding
from qdo.brokers.sqs_messages import Received
from qdo.brokers.sqs_receiver import SqsReceiver
from qdo.errors import UnreachableError
from qdo.worker.hands import make_memory
from qdo.worker.receipts import MOST_PLACES, PLACE_BYTES, Receipts, read


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_memory("receipts")
    yield fd
    os.close(fd)


def test_what_is_kept_can_be_read_until_it_is_dropped(memory: int) -> None:
    """Queue and receipt of each, in whatever place."""
    receipts = Receipts(memory)
    first, second = receipts.keep("q", "one"), receipts.keep("Ünïcode", "two")
    assert sorted(read(memory)) == [("q", "one"), ("Ünïcode", "two")]
    receipts.drop(first)
    assert read(memory) == [("Ünïcode", "two")]
    assert receipts.keep("q", "three") == first
    receipts.drop(first)
    receipts.drop(second)
    assert read(memory) == []


def test_it_outlives_its_process(memory: int) -> None:
    """Killed in the middle, without a word."""
    code = (
        "import os, signal\n"
        "from qdo.worker.receipts import Receipts\n"
        f"Receipts({memory}).keep('q', 'one')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=(memory,), check=False)
    assert ended.returncode < 0
    assert read(memory) == [("q", "one")]


def test_what_does_not_fit_is_not_kept(memory: int) -> None:
    """Neither a receipt that is too long nor one too many; dropping nowhere is nothing."""
    receipts = Receipts(memory)
    assert receipts.keep("q", "x" * PLACE_BYTES) == 0
    receipts.drop(0)
    for number in range(MOST_PLACES):
        assert receipts.keep("q", str(number))
    assert receipts.keep("q", "one too many") == 0
    assert len(read(memory)) == MOST_PLACES


def test_without_a_parent_nothing_is_kept() -> None:
    """A worker run by a test has nobody who would read it."""
    assert Receipts().keep("q", "one") == 0


def test_a_process_that_held_nothing_left_nothing(memory: int) -> None:
    """Its memory was never made."""
    Receipts(memory)
    assert read(memory) == []


def test_what_is_held_of_a_queue_is_kept(memory: int) -> None:
    """From the receipt to the confirmed delete, always the newest receipt of each message."""
    holding = Holding(0, (), 60.0, lambda: 0.0, "q", Receipts(memory))

    def message(number: int, receipt: str) -> Received:
        return Received(1, number, number, b"1", "g", None, receipt, "g", 1, None)

    holding.take([message(1, "one"), message(2, "two")], 0.0)
    assert sorted(read(memory)) == [("q", "one"), ("q", "two")]
    holding.take([message(1, "newer")], 0.0)
    assert sorted(read(memory)) == [("q", "newer"), ("q", "two")]
    done = holding.done(holding.rows(0, 1)[0].position)
    assert done is not None
    assert len(read(memory)) == 2
    holding.confirmed(done)
    assert read(memory) == [("q", "two")]
    for each in holding.undone():
        holding.given_back(each)
    assert read(memory) == []


class Released:
    """Takes note of what is given back, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.times: list[float] = []

    def release_receipts(self, queue: str, receipts: list[str]) -> None:
        if queue == "gone":
            raise UnreachableError(what="SQS", reason="no")
        self.calls.append((queue, receipts))
        self.times.append(time.monotonic())

    def receive_lost(self, queue: str, attempt: str) -> list[str]:
        return [f"{attempt} of {queue}"]


def test_what_a_dead_process_held_is_given_back_when_its_polls_are_over(memory: int) -> None:
    """Until then SQS would give it to them, and so to nobody; queues without a poll come first."""
    holding = Holding(0, (), 60.0, lambda: 0.0, "polled", Receipts(memory))
    holding.polling("id")
    holding.polling(None)
    assert read(memory) == []
    holding.polling("id")
    released = Released()
    receiver = SqsReceiver(
        released,  # type: ignore[arg-type]
        lambda queues: None,
        visibility_seconds=60,
        idle_seconds=0,
        wait_seconds=0.2,
    )
    began = time.monotonic()
    held = [("polled", "one"), *read(memory), ("gone", "x"), ("other", "two"), ("polled", "three")]
    with pytest.raises(UnreachableError):
        receiver.give_back(held)
    assert released.calls == [("other", ["two"]), ("polled", ["one", "three"])]
    assert released.times[0] - began < 0.2 <= released.times[1] - began


def test_what_went_to_the_poll_of_a_dead_process_is_given_back_by_its_id(memory: int) -> None:
    """In a FIFO queue: at once what is known, and what the poll took when that is over."""
    holding = Holding(0, (), 60.0, lambda: 0.0, "q.fifo", Receipts(memory))
    holding.polling("id")
    released = Released()
    receiver = SqsReceiver(
        released,  # type: ignore[arg-type]
        lambda queues: None,
        visibility_seconds=60,
        idle_seconds=0,
        wait_seconds=0.2,
    )
    receiver.give_back([("q.fifo", "one"), *read(memory)])
    assert released.calls == [("q.fifo", ["one"]), ("q.fifo", ["id of q.fifo"])]
    assert released.times[1] - released.times[0] >= 0.2

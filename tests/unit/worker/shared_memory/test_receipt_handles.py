"""The store of receipt handles held at a broker, which outlives its process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from qdo.brokers.sqs.codec import Received
from qdo.brokers.sqs.consumer import SqsConsumer
from qdo.brokers.sqs.in_flight import InFlightMessages
from qdo.errors import UnreachableError
from qdo.worker.shared_memory import (
    ENTRY_BYTES,
    MOST_ENTRIES,
    SharedReceiptStore,
    make_memory,
    read_receipts,
)


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_memory("receipts")
    yield fd
    os.close(fd)


def test_kept_handles_can_be_read_until_they_are_dropped(memory: int) -> None:
    """Queue and handle of each, in any entry."""
    receipts = SharedReceiptStore(memory)
    first, second = receipts.keep("q", "one"), receipts.keep("Ünïcode", "two")
    assert sorted(read_receipts(memory)) == [("q", "one"), ("Ünïcode", "two")]
    receipts.drop(first)
    assert read_receipts(memory) == [("Ünïcode", "two")]
    assert receipts.keep("q", "three") == first
    receipts.drop(first)
    receipts.drop(second)
    assert read_receipts(memory) == []


def test_handles_that_do_not_fit_are_not_kept(memory: int) -> None:
    """Too long, or one too many. Dropping entry 0 has no effect."""
    receipts = SharedReceiptStore(memory)
    assert receipts.keep("q", "x" * ENTRY_BYTES) == 0
    receipts.drop(0)
    for number in range(MOST_ENTRIES):
        assert receipts.keep("q", str(number))
    assert receipts.keep("q", "one too many") == 0
    assert len(read_receipts(memory)) == MOST_ENTRIES


def test_store_without_a_parent_keeps_nothing() -> None:
    """No other process would read it."""
    assert SharedReceiptStore().keep("q", "one") == 0


def test_process_that_held_nothing_left_nothing(memory: int) -> None:
    """It never set the size of its memory."""
    SharedReceiptStore(memory)
    assert read_receipts(memory) == []


def test_handles_are_kept_until_the_delete_is_confirmed(memory: int) -> None:
    """Always the newest handle of each message."""
    holding = InFlightMessages(0, (), 60.0, lambda: 0.0, "q", SharedReceiptStore(memory))

    def message(number: int, receipt: str) -> Received:
        return Received(1, number, number, b"1", "g", None, receipt, "g", 1, None)

    holding.take([message(1, "one"), message(2, "two")], 0.0)
    assert sorted(read_receipts(memory)) == [("q", "one"), ("q", "two")]
    holding.take([message(1, "newer")], 0.0)
    assert sorted(read_receipts(memory)) == [("q", "newer"), ("q", "two")]
    done = holding.done(holding.rows(0, 1)[0].position)
    assert done is not None
    assert len(read_receipts(memory)) == 2
    holding.confirmed(done)
    assert read_receipts(memory) == [("q", "two")]
    for each in holding.undone():
        holding.released(each)
    assert read_receipts(memory) == []


class Released:
    """Records the released handles, and when."""

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


def consumer(released: Released) -> SqsConsumer:
    return SqsConsumer(
        released,  # type: ignore[arg-type]
        lambda queues: None,
        visibility_seconds=60,
        idle_seconds=0,
        wait_seconds=0.2,
    )


def test_handles_are_released_when_the_dead_polls_are_over(memory: int) -> None:
    """Until then SQS would deliver to the dead polls. Queues without a poll come first."""
    holding = InFlightMessages(0, (), 60.0, lambda: 0.0, "polled", SharedReceiptStore(memory))
    holding.poll.opened("id")
    holding.poll.opened(None)
    assert read_receipts(memory) == []
    holding.poll.opened("id")
    released = Released()
    receiver = consumer(released)
    began = time.monotonic()
    held = [
        ("polled", "one"),
        *read_receipts(memory),
        ("gone", "x"),
        ("other", "two"),
        ("polled", "three"),
    ]
    with pytest.raises(UnreachableError):
        receiver.release(held)
    assert released.calls == [("other", ["two"]), ("polled", ["one", "three"])]
    assert released.times[1] - began >= 0.2


def test_messages_of_a_dead_poll_are_released_by_its_id(memory: int) -> None:
    """In a FIFO queue: known handles at once, those of the poll when the poll is over."""
    holding = InFlightMessages(0, (), 60.0, lambda: 0.0, "q.fifo", SharedReceiptStore(memory))
    holding.poll.opened("id")
    released = Released()
    receiver = consumer(released)
    receiver.release([("q.fifo", "one"), *read_receipts(memory)])
    assert released.calls == [("q.fifo", ["one"]), ("q.fifo", ["id of q.fifo"])]
    assert released.times[1] - released.times[0] >= 0.2

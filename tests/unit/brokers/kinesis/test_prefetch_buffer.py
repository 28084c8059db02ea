"""The prefetched messages of a shard: read, and not yet known to be done."""

from __future__ import annotations

import random

import pytest

from qdo.brokers.kinesis.api import Taken
from qdo.brokers.kinesis.positions import at_time, pack
from qdo.brokers.kinesis.reader import KEPT_BYTES, PrefetchBuffer


def at(number: int) -> int:
    return pack(number, 0, 1000 + number)


def rows(*numbers: int) -> list[Taken]:
    return [(at(number), b"%d" % number, None, None) for number in numbers]


def taken(hand: PrefetchBuffer, limit: int = 100) -> list[int]:
    return [int(row[1]) for row in hand.take(limit)]


def test_who_goes_back_gets_again_what_is_not_done() -> None:
    """Reading restarts at the position that the owner states."""
    hand = PrefetchBuffer(at(0))
    hand.add(rows(1, 2, 3, 4))
    taken(hand, 3)
    assert hand.rewind(at(1))
    assert taken(hand) == [2, 3, 4]
    hand.done_through(at(2))
    assert hand.rewind(at(2))
    assert taken(hand) == [3, 4]
    assert not hand.rewind(at(1))


def test_messages_may_be_done_in_any_order() -> None:
    """Messages before an unfinished one are kept with it."""
    hand = PrefetchBuffer(at(0))
    hand.add(rows(1, 2, 3, 4))
    taken(hand)
    for number in (3, 2):
        hand.done(at(number))
    assert hand.oldest() == at(1)
    hand.done(at(1))
    assert hand.oldest() == at(4)
    assert not hand.rewind(at(2))
    assert hand.rewind(at(3))
    assert taken(hand) == [4]


def test_what_was_not_given_out_is_not_done() -> None:
    """An owner can only finish messages that it got."""
    hand = PrefetchBuffer(at(0))
    hand.add(rows(1, 2))
    taken(hand, 1)
    hand.done_through(at(2))
    assert taken(hand) == [2]


def test_positions_in_flight_know_what_is_behind_them() -> None:
    """Before the first message, between two, behind the last."""
    hand = PrefetchBuffer(at(0))
    assert hand.behind(at(0)) is None
    hand.add(rows(1, 2))
    assert hand.behind(at(0)) == at(1)
    assert hand.behind(at(1)) == at(2)
    assert hand.behind(at(2)) is None
    assert hand.reaches(at(2))
    assert not hand.reaches(at(3))


def test_the_time_in_a_position_does_not_matter() -> None:
    """`last` in the queue node is the largest of all messages and not that of this one."""
    hand = PrefetchBuffer(at_time(at(1), 9_999))
    assert hand.rewind(at(1))
    hand.add(rows(2, 3))
    taken(hand)
    assert hand.rewind(at_time(at(2), 9_999))
    assert taken(hand) == [3]


def test_buffer_reaches_times_up_to_the_tip() -> None:
    """Nothing lies between them; another time must be asked for."""
    hand = PrefetchBuffer(500)
    hand.tip = 600
    hand.add(rows(1))
    assert hand.rewind(550)
    assert hand.rewind(600)
    assert not hand.rewind(499)
    assert not hand.rewind(601)
    taken(hand)
    hand.done_through(at(1))
    assert not hand.rewind(500)


def test_what_is_kept_for_going_back_is_bounded() -> None:
    """Beyond that Kinesis is asked again."""
    hand = PrefetchBuffer(at(0))
    body = bytes(KEPT_BYTES // 4)
    hand.add([(at(number), body, None, None) for number in range(1, 11)])
    assert hand.waiting_bytes == 10 * len(body)
    assert len(hand.take(10)) == 10
    assert hand.waiting_bytes == 0
    assert not hand.rewind(at(5))
    assert hand.rewind(at(6))
    assert hand.waiting_bytes == 4 * len(body)


@pytest.mark.parametrize("seed", range(20))
def test_any_history_gives_every_message_in_order(seed: int) -> None:
    """Takes, messages done in any order, and going back to the first that is not done."""
    dice = random.Random(seed)
    hand, next_row, done = PrefetchBuffer(at(0)), 1, set[int]()
    given: list[int] = []
    for _ in range(3000):
        step = dice.randrange(5)
        if step == 0:
            count = dice.randrange(5)
            hand.add(rows(*range(next_row, next_row + count)))
            next_row += count
        elif step in (1, 2):
            found = taken(hand, dice.randrange(1, 6))
            expected = (given[-1] + 1) if given else 1
            assert found == list(range(expected, expected + len(found)))
            given += found
        elif step == 3 and given:
            number = dice.choice(given[-8:])
            done.add(number)
            hand.done(at(number))
        elif dice.random() < 0.2:
            low = next(number for number in range(1, next_row + 1) if number not in done) - 1
            assert hand.rewind(at(low))
            given = list(range(1, low + 1))
    assert next_row > 1000
    assert len(hand._rows) < next_row

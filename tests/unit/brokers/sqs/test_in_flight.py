"""The messages held by an owner of an SQS queue, without SQS: receipts, rows, names and time."""

from __future__ import annotations

import pytest

from qdo.brokers.sqs.codec import SQS_POSITIONS, Received, sequence_of
from qdo.brokers.sqs.in_flight import (
    MOST_UNCONFIRMED,
    MOST_WAIT_SECONDS,
    InFlightMessage,
    InFlightMessages,
    name_of,
)
from qdo.brokers.sqs.url import HOLD_SECONDS
from tests.support.fakes.clocks import SettableClock

VISIBILITY = 60.0
SENT = 139_000_000_000_000_000


def message(
    number: int,
    *,
    sent: int = SENT,
    group: str | None = "g",
    receipt: str = "",
    message_id: int | None = None,
) -> Received:
    """Return the FIFO message with this sequence number; of a standard queue without group."""
    return Received(
        sent,
        number if group is not None else 0,
        number if message_id is None else message_id,
        b"%d" % number,
        group,
        None,
        receipt or f"receipt-{number}",
        group,
        1,
        None,
    )


@pytest.fixture
def clock() -> SettableClock[float]:
    return SettableClock(1000.0)


@pytest.fixture
def holding(clock: SettableClock[float]) -> InFlightMessages:
    return InFlightMessages(SQS_POSITIONS.resume_after(SENT - 5, None), (), VISIBILITY, clock)


def take(holding: InFlightMessages, clock: SettableClock[float], *messages: Received) -> list[int]:
    """Take messages in; return the positions of all rows."""
    holding.take(messages, clock.now)
    return [row.position for row in holding.rows(0, 1000)]


def held(holding: InFlightMessages, position: int) -> InFlightMessage:
    """Return a held message."""
    return next(each for each in holding.undone() if each.position == position)


# --- groups ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "followed"),
    [("g" * 10, True), ("g" * 9, False), ("g" * 9 + "h", False), (10 * [None], False)],
)
def test_a_full_answer_of_one_group_has_followers(
    holding: InFlightMessages, clock: SettableClock[float], groups: list[str | None], followed: bool
) -> None:
    """SQS returns them when the last of the answer is done, in FIFO queues only."""
    for start in (0, 10):
        came = [message(start + n, group=group) for n, group in enumerate(groups, 1)]
        positions = take(holding, clock, *came)
        for position in positions:
            assert held(holding, position).has_followers == followed
            holding.done(position)


# --- positions ------------------------------------------------------------------------


def test_positions_grow_in_the_order_of_receipt(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """Also where a message was sent before one that was received earlier."""
    positions = take(holding, clock, message(9), message(3, sent=SENT - 10**9), message(5))
    assert positions == sorted(positions)
    assert [sequence_of(position) for position in positions] == [9, 3, 5]


def test_last_is_the_newest_sent_time(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """To within the few 100 ns that keep positions apart."""
    first, second = take(holding, clock, message(1, sent=SENT + 70), message(2, sent=SENT))
    assert SQS_POSITIONS.to_time(first) == SENT + 70
    assert SQS_POSITIONS.to_time(second) == SENT + 71


def test_positions_of_an_owner_come_behind_the_recorded_last(clock: SettableClock[float]) -> None:
    """Whatever was recorded: `last` never goes back."""
    holding = InFlightMessages(
        SQS_POSITIONS.resume_after(SENT + 10**9, None), (), VISIBILITY, clock
    )
    (position,) = take(holding, clock, message(1))
    assert SQS_POSITIONS.to_time(position) > SENT + 10**9


# --- rows -----------------------------------------------------------------------------


def test_rows_can_be_read_again_until_they_are_done(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """The engine goes back to its `done` after each failure."""
    positions = take(holding, clock, message(1), message(2), message(3))
    assert [row.position for row in holding.rows(0, 2)] == positions[:2]
    assert [row.position for row in holding.rows(positions[1], 10)] == positions[2:]
    holding.done(positions[1])
    assert [row.position for row in holding.rows(0, 10)] == [positions[0], positions[2]]


def test_done_through_means_all_before(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """In line order only the last position is reported; each message is named once."""
    positions = take(holding, clock, message(1), message(2), message(3))
    assert [each.position for each in holding.done_through(positions[1])] == positions[:2]
    assert holding.done_through(positions[1]) == []
    assert len(holding) == 1


def test_done_twice_is_done_once(holding: InFlightMessages, clock: SettableClock[float]) -> None:
    """Else it would be deleted twice."""
    (position,) = take(holding, clock, message(1))
    assert holding.done(position) is not None
    assert holding.done(position) is None


# --- received again -------------------------------------------------------------------


def test_a_held_message_received_again_is_not_run_twice(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """It has a new receipt from then on, and only that can delete it."""
    (position,) = take(holding, clock, message(1))
    taken = holding.take([message(1, receipt="newer")], clock.now)
    assert (taken.fresh, taken.again) == (0, [])
    assert held(holding, position).receipt == "newer"


def test_a_done_message_received_again_is_deleted(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """Its deletion had not been confirmed."""
    (position,) = take(holding, clock, message(1))
    done = holding.done(position)
    assert done is not None
    holding.undeletable(done)
    taken = holding.take([message(1, receipt="newer")], clock.now)
    assert taken.fresh == 0
    assert [each.receipt for each in taken.again] == ["newer"]
    assert holding.rows(0, 10) == []


def test_another_message_with_the_same_sequence_number_is_run(clock: SettableClock[float]) -> None:
    """In another group, or in a recreated queue: done, held or neither, it is another message."""
    holding = InFlightMessages(0, [name_of(7)], VISIBILITY, clock)
    other = message(7, message_id=8, receipt="other")
    (position,) = take(holding, clock, other)
    taken = holding.take([message(7, message_id=9), message(7)], clock.now)
    assert [each.receipt for each in taken.again] == ["receipt-7"]
    assert taken.fresh == 1
    assert held(holding, position).receipt == "other"
    assert len(holding.rows(0, 10)) == 2


def test_a_deleted_message_is_not_remembered(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """The record beside `last` stays small."""
    (position,) = take(holding, clock, message(1))
    done = holding.done(position)
    assert done is not None
    assert holding.unconfirmed() == (name_of(1),)
    holding.confirmed(done)
    assert holding.unconfirmed() == ()


def test_names_of_earlier_owners_are_forgotten_in_time(clock: SettableClock[float]) -> None:
    """An empty answer shows that they were deleted, once no worker can still hide them."""
    holding = InFlightMessages(0, [name_of(7)], VISIBILITY, clock)
    holding.nothing_came(clock.now)
    assert holding.unconfirmed() == (name_of(7),)
    clock.now += 2 * VISIBILITY + MOST_WAIT_SECONDS
    holding.nothing_came(clock.now - 0.1)
    assert holding.unconfirmed() == (name_of(7),)
    holding.nothing_came(clock.now)
    assert holding.unconfirmed() == ()


def test_recorded_names_are_limited(holding: InFlightMessages, clock: SettableClock[float]) -> None:
    """A queue node must not grow with deletes that fail; the newest count."""
    for position in take(holding, clock, *map(message, range(1, MOST_UNCONFIRMED + 10))):
        holding.done(position)
    names = holding.unconfirmed()
    assert len(names) == MOST_UNCONFIRMED
    assert names[-1] == name_of(MOST_UNCONFIRMED + 9)


# --- time -----------------------------------------------------------------------------


def test_a_message_is_extended_at_half_of_its_time(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """Counted from before the request: SQS counts from later."""
    (position,) = take(holding, clock, message(1))
    assert holding.extensions.next_at() == clock.now + VISIBILITY / 2
    clock.now += VISIBILITY / 2
    (due,), over = holding.extensions.due(clock.now)
    assert (due.position, over) == (position, [])
    holding.extensions.extended(due, clock.now)
    assert holding.extensions.next_at() == clock.now + VISIBILITY / 2


def test_the_time_of_a_long_poll_is_not_taken_off(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """A poll waits for messages: only for the way of the answer something is taken off."""
    asked_at = clock.now
    clock.now += 2 * VISIBILITY
    holding.take([message(1)], asked_at)
    assert holding.extensions.due(clock.now) == ([], [])
    clock.now += 0.89 * VISIBILITY
    assert [len(each) for each in holding.extensions.due(clock.now)] == [1, 0]
    clock.now += 0.02 * VISIBILITY
    assert [len(each) for each in holding.extensions.due(clock.now)] == [0, 1]


def test_messages_are_extended_together(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """One request for ten: it includes messages that are due soon."""
    take(holding, clock, message(1))
    clock.now += 0.05 * VISIBILITY
    take(holding, clock, message(2))
    due, _ = holding.extensions.due(clock.now + 0.45 * VISIBILITY)
    assert len(due) == 2


def test_a_message_whose_time_is_over_is_nobodys(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """No extension was confirmed: SQS may have given it away."""
    (position,) = take(holding, clock, message(1))
    clock.now += VISIBILITY
    due, over = holding.extensions.due(clock.now)
    assert (due, [each.position for each in over]) == ([], [position])


def test_nothing_is_held_beyond_twelve_hours(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """SQS would reject an extension beyond them; the last one ends exactly there."""
    (position,) = take(holding, clock, message(1))
    start = clock.now
    over: list[InFlightMessage] = []
    while not over:
        clock.now = holding.extensions.next_at()
        due, over = holding.extensions.due(clock.now)
        for each in due:
            holding.extensions.extended(each, clock.now)
            assert each.until <= start + HOLD_SECONDS
    assert [each.position for each in over] == [position]
    assert start + HOLD_SECONDS >= clock.now > start + 0.99 * HOLD_SECONDS


def test_what_is_behind_a_lost_message_of_its_group_is_lost(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """They must not run before the lost one; other groups continue."""
    positions = take(holding, clock, message(1), message(2), message(3, group="other"), message(4))
    gone = holding.lost(held(holding, positions[1]))
    assert [each.position for each in gone] == [positions[1], positions[3]]
    assert [row.position for row in holding.rows(0, 10)] == [positions[0], positions[2]]
    assert not holding.is_held(positions[1])


def test_a_lost_message_of_a_standard_queue_goes_alone(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """A standard queue has no order to keep."""
    positions = take(holding, clock, message(1, group=None), message(2, group=None))
    gone = holding.lost(held(holding, positions[0]))
    assert [each.position for each in gone] == positions[:1]
    assert len(holding) == 1


def test_a_lost_message_is_run_when_it_comes_again(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """It was never deleted, so it counts as a new message."""
    (position,) = take(holding, clock, message(1))
    holding.lost(held(holding, position))
    (again,) = take(holding, clock, message(1))
    assert again > position


def test_names_are_kept_while_nobody_asks(clock: SettableClock[float]) -> None:
    """A long job prevents polls of the queue: messages behind it may be done already."""
    holding = InFlightMessages(0, [name_of(7)], VISIBILITY, clock)
    clock.now += 100 * VISIBILITY
    assert holding.unconfirmed() == (name_of(7),)
    assert [each.done for each in holding.take([message(7)], clock.now).again] == [True]


def test_names_are_kept_while_messages_may_be_hidden(clock: SettableClock[float]) -> None:
    """By a poll whose answer was lost, or because a message of their group is in flight."""
    holding = InFlightMessages(0, [name_of(7)], VISIBILITY, clock)
    clock.now += 100 * VISIBILITY
    holding.in_doubt()
    holding.nothing_came(clock.now)
    assert holding.unconfirmed() == (name_of(7),)
    clock.now += 100 * VISIBILITY
    take(holding, clock, message(8))
    holding.nothing_came(clock.now)
    assert holding.unconfirmed() == (name_of(7),)
    for held in holding.undone():
        holding.released(held)
    holding.nothing_came(clock.now)
    assert holding.unconfirmed() == ()


def test_an_extension_that_comes_too_late_for_the_cap_is_not_due(
    holding: InFlightMessages, clock: SettableClock[float]
) -> None:
    """Nor is it looked at again and again until the message is lost."""
    take(holding, clock, message(1))
    start = clock.now
    while clock.now < start + HOLD_SECONDS - 1.2 * VISIBILITY:
        clock.now = holding.extensions.next_at()
        for each in holding.extensions.due(clock.now)[0]:
            holding.extensions.extended(each, clock.now)
    clock.now = start + HOLD_SECONDS - 0.9 * VISIBILITY
    assert holding.extensions.due(clock.now) == ([], [])
    assert holding.extensions.next_at() > clock.now

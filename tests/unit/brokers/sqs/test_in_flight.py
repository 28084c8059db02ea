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


class HeldMessages(InFlightMessages):
    """The messages of a queue, on a clock that stands."""

    def __init__(self, last: int = 0, *names: str) -> None:
        self.clock = SettableClock(1000.0)
        super().__init__(last, names, VISIBILITY, self.clock)

    def came(self, *messages: Received) -> list[int]:
        """Take messages in; return the positions of all rows."""
        self.take(messages, self.clock.now)
        return self.positions()

    def positions(self, after: int = 0, limit: int = 1000) -> list[int]:
        return [row.position for row in self.rows(after, limit)]

    def at(self, position: int) -> InFlightMessage:
        return next(each for each in self.undone() if each.position == position)


@pytest.fixture
def holding() -> HeldMessages:
    return HeldMessages(SQS_POSITIONS.resume_after(SENT - 5, None))


# --- groups ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "followed"),
    [("g" * 10, True), ("g" * 9, False), ("g" * 9 + "h", False), (10 * [None], False)],
)
def test_a_full_answer_of_one_group_has_followers(
    holding: HeldMessages, groups: list[str | None], followed: bool
) -> None:
    """SQS returns them when the last of the answer is done, in FIFO queues only."""
    for start in (0, 10):
        came = [message(start + n, group=group) for n, group in enumerate(groups, 1)]
        positions = holding.came(*came)
        for position in positions:
            assert holding.at(position).has_followers == followed
            holding.done(position)


# --- positions ------------------------------------------------------------------------


def test_positions_grow_in_the_order_of_receipt(holding: HeldMessages) -> None:
    """Also where a message was sent before one that was received earlier."""
    positions = holding.came(message(9), message(3, sent=SENT - 10**9), message(5))
    assert positions == sorted(positions)
    assert [sequence_of(position) for position in positions] == [9, 3, 5]


def test_last_is_the_newest_sent_time(holding: HeldMessages) -> None:
    """To within the few 100 ns that keep positions apart."""
    first, second = holding.came(message(1, sent=SENT + 70), message(2, sent=SENT))
    assert SQS_POSITIONS.to_time(first) == SENT + 70
    assert SQS_POSITIONS.to_time(second) == SENT + 71


def test_positions_of_an_owner_come_behind_the_recorded_last() -> None:
    """Whatever was recorded: `last` never goes back."""
    holding = HeldMessages(SQS_POSITIONS.resume_after(SENT + 10**9, None))
    (position,) = holding.came(message(1))
    assert SQS_POSITIONS.to_time(position) > SENT + 10**9


# --- rows -----------------------------------------------------------------------------


def test_rows_can_be_read_again_until_they_are_done(holding: HeldMessages) -> None:
    """The engine goes back to its `done` after each failure."""
    positions = holding.came(message(1), message(2), message(3))
    assert holding.positions(0, 2) == positions[:2]
    assert holding.positions(positions[1], 10) == positions[2:]
    holding.done(positions[1])
    assert holding.positions() == [positions[0], positions[2]]


def test_done_through_means_all_before(holding: HeldMessages) -> None:
    """In line order only the last position is reported; each message is named once."""
    positions = holding.came(message(1), message(2), message(3))
    assert [each.position for each in holding.done_through(positions[1])] == positions[:2]
    assert holding.done_through(positions[1]) == []
    assert len(holding) == 1


def test_done_twice_is_done_once(holding: HeldMessages) -> None:
    """Else it would be deleted twice."""
    (position,) = holding.came(message(1))
    assert holding.done(position) is not None
    assert holding.done(position) is None


# --- received again -------------------------------------------------------------------


def test_a_held_message_received_again_is_not_run_twice(holding: HeldMessages) -> None:
    """It has a new receipt from then on, and only that can delete it."""
    (position,) = holding.came(message(1))
    taken = holding.take([message(1, receipt="newer")], holding.clock.now)
    assert (taken.fresh, taken.again) == (0, [])
    assert holding.at(position).receipt == "newer"


def test_a_done_message_received_again_is_deleted(holding: HeldMessages) -> None:
    """Its deletion had not been confirmed."""
    (position,) = holding.came(message(1))
    holding.undeletable(holding.done(position))
    taken = holding.take([message(1, receipt="newer")], holding.clock.now)
    assert taken.fresh == 0
    assert [each.receipt for each in taken.again] == ["newer"]
    assert holding.rows(0, 10) == []


def test_another_message_with_the_same_sequence_number_is_run() -> None:
    """In another group, or in a recreated queue: done, held or neither, it is another message."""
    holding = HeldMessages(0, name_of(7))
    other = message(7, message_id=8, receipt="other")
    (position,) = holding.came(other)
    taken = holding.take([message(7, message_id=9), message(7)], holding.clock.now)
    assert [each.receipt for each in taken.again] == ["receipt-7"]
    assert taken.fresh == 1
    assert holding.at(position).receipt == "other"
    assert len(holding.rows(0, 10)) == 2


def test_a_deleted_message_is_not_remembered(holding: HeldMessages) -> None:
    """The record beside `last` stays small."""
    (position,) = holding.came(message(1))
    done = holding.done(position)
    assert holding.unconfirmed() == (name_of(1),)
    holding.confirmed(done)
    assert holding.unconfirmed() == ()


def test_names_of_earlier_owners_are_forgotten_in_time() -> None:
    """An empty answer shows that they were deleted, once no worker can still hide them."""
    holding = HeldMessages(0, name_of(7))
    holding.nothing_came(holding.clock.now)
    assert holding.unconfirmed() == (name_of(7),)
    holding.clock.now += 2 * VISIBILITY + MOST_WAIT_SECONDS
    holding.nothing_came(holding.clock.now - 0.1)
    assert holding.unconfirmed() == (name_of(7),)
    holding.nothing_came(holding.clock.now)
    assert holding.unconfirmed() == ()


def test_recorded_names_are_limited(holding: HeldMessages) -> None:
    """A queue node must not grow with deletes that fail; the newest count."""
    for position in holding.came(*map(message, range(1, MOST_UNCONFIRMED + 10))):
        holding.done(position)
    names = holding.unconfirmed()
    assert len(names) == MOST_UNCONFIRMED
    assert names[-1] == name_of(MOST_UNCONFIRMED + 9)


# --- time -----------------------------------------------------------------------------


def test_a_message_is_extended_at_half_of_its_time(holding: HeldMessages) -> None:
    """Counted from before the request: SQS counts from later."""
    (position,) = holding.came(message(1))
    assert holding.extensions.next_at() == holding.clock.now + VISIBILITY / 2
    holding.clock.now += VISIBILITY / 2
    (due,), over = holding.extensions.due(holding.clock.now)
    assert (due.position, over) == (position, [])
    holding.extensions.extended(due, holding.clock.now)
    assert holding.extensions.next_at() == holding.clock.now + VISIBILITY / 2


def test_the_time_of_a_long_poll_is_not_taken_off(holding: HeldMessages) -> None:
    """A poll waits for messages: only for the way of the answer something is taken off."""
    asked_at = holding.clock.now
    holding.clock.now += 2 * VISIBILITY
    holding.take([message(1)], asked_at)
    assert holding.extensions.due(holding.clock.now) == ([], [])
    holding.clock.now += 0.89 * VISIBILITY
    assert [len(each) for each in holding.extensions.due(holding.clock.now)] == [1, 0]
    holding.clock.now += 0.02 * VISIBILITY
    assert [len(each) for each in holding.extensions.due(holding.clock.now)] == [0, 1]


def test_messages_are_extended_together(holding: HeldMessages) -> None:
    """One request for ten: it includes messages that are due soon."""
    holding.came(message(1))
    holding.clock.now += 0.05 * VISIBILITY
    holding.came(message(2))
    due, _ = holding.extensions.due(holding.clock.now + 0.45 * VISIBILITY)
    assert len(due) == 2


def test_a_message_whose_time_is_over_is_nobodys(holding: HeldMessages) -> None:
    """No extension was confirmed: SQS may have given it away."""
    (position,) = holding.came(message(1))
    holding.clock.now += VISIBILITY
    due, over = holding.extensions.due(holding.clock.now)
    assert (due, [each.position for each in over]) == ([], [position])


def test_nothing_is_held_beyond_twelve_hours(holding: HeldMessages) -> None:
    """SQS would reject an extension beyond them; the last one ends exactly there."""
    (position,) = holding.came(message(1))
    start = holding.clock.now
    over: list[InFlightMessage] = []
    while not over:
        holding.clock.now = holding.extensions.next_at()
        due, over = holding.extensions.due(holding.clock.now)
        for each in due:
            holding.extensions.extended(each, holding.clock.now)
            assert each.until <= start + HOLD_SECONDS
    assert [each.position for each in over] == [position]
    assert start + HOLD_SECONDS >= holding.clock.now > start + 0.99 * HOLD_SECONDS


def test_what_is_behind_a_lost_message_of_its_group_is_lost(holding: HeldMessages) -> None:
    """They must not run before the lost one; other groups continue."""
    positions = holding.came(message(1), message(2), message(3, group="other"), message(4))
    gone = holding.lost(holding.at(positions[1]))
    assert [each.position for each in gone] == [positions[1], positions[3]]
    assert holding.positions() == [positions[0], positions[2]]
    assert not holding.is_held(positions[1])


def test_a_lost_message_of_a_standard_queue_goes_alone(holding: HeldMessages) -> None:
    """A standard queue has no order to keep."""
    positions = holding.came(message(1, group=None), message(2, group=None))
    gone = holding.lost(holding.at(positions[0]))
    assert [each.position for each in gone] == positions[:1]
    assert len(holding) == 1


def test_a_lost_message_is_run_when_it_comes_again(holding: HeldMessages) -> None:
    """It was never deleted, so it counts as a new message."""
    (position,) = holding.came(message(1))
    holding.lost(holding.at(position))
    (again,) = holding.came(message(1))
    assert again > position


def test_names_are_kept_while_nobody_asks() -> None:
    """A long job prevents polls of the queue: messages behind it may be done already."""
    holding = HeldMessages(0, name_of(7))
    holding.clock.now += 100 * VISIBILITY
    assert holding.unconfirmed() == (name_of(7),)
    assert [each.done for each in holding.take([message(7)], holding.clock.now).again] == [True]


def test_names_are_kept_while_messages_may_be_hidden() -> None:
    """By a poll whose answer was lost, or because a message of their group is in flight."""
    holding = HeldMessages(0, name_of(7))
    holding.clock.now += 100 * VISIBILITY
    holding.in_doubt()
    holding.nothing_came(holding.clock.now)
    assert holding.unconfirmed() == (name_of(7),)
    holding.clock.now += 100 * VISIBILITY
    holding.came(message(8))
    holding.nothing_came(holding.clock.now)
    assert holding.unconfirmed() == (name_of(7),)
    for held in holding.undone():
        holding.released(held)
    holding.nothing_came(holding.clock.now)
    assert holding.unconfirmed() == ()


def test_an_extension_that_comes_too_late_for_the_cap_is_not_due(holding: HeldMessages) -> None:
    """Nor is it looked at again and again until the message is lost."""
    holding.came(message(1))
    start = holding.clock.now
    while holding.clock.now < start + HOLD_SECONDS - 1.2 * VISIBILITY:
        holding.clock.now = holding.extensions.next_at()
        for each in holding.extensions.due(holding.clock.now)[0]:
            holding.extensions.extended(each, holding.clock.now)
    holding.clock.now = start + HOLD_SECONDS - 0.9 * VISIBILITY
    assert holding.extensions.due(holding.clock.now) == ([], [])
    assert holding.extensions.next_at() > holding.clock.now

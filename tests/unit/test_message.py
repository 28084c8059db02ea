"""Positions are UUIDv1 times, and ids are the UUIDs made from them."""

from __future__ import annotations

import time
import uuid

import pytest

from qdo.message import Message
from qdo.positions import (
    format_position,
    message_id,
    position_now,
    position_of_time,
    time_of_position,
)

SAMPLE = 135471512647131000


@pytest.mark.parametrize("position", [0, 1, SAMPLE, 2**60 - 1])
@pytest.mark.parametrize("node", [0, 1, 0xC71C93193176, 2**48 - 1])
def test_an_id_is_the_uuid_of_its_position(position: int, node: int) -> None:
    """The standard library reads position, node and version back from the id."""
    made = uuid.UUID(message_id(position, node))
    assert (made.time, made.node, made.version, made.clock_seq) == (position, node, 1, 0)
    assert str(made) == message_id(position, node)


def test_a_position_reads_as_its_time() -> None:
    """The sample position is the moment that its documentation names."""
    assert format_position(SAMPLE) == "2012-01-29T17:34:24.713100Z"


def test_times_and_positions_convert_both_ways() -> None:
    """A Unix time survives the way to a position and back, to a microsecond."""
    assert time_of_position(position_of_time(1327858464.7131)) == pytest.approx(
        1327858464.7131, abs=1e-6
    )


def test_now_is_what_uuid1_says() -> None:
    """The clock behind positions agrees with the standard library's."""
    before = position_now()
    made = uuid.uuid1().time
    assert abs(made - before) < 10_000_000
    assert abs(time_of_position(before) - time.time()) < 1


def test_message_id_comes_from_the_broker_or_the_position() -> None:
    """A text is the broker's own id; a number is the node of a UUID."""
    assert Message("q", SAMPLE, None, id="abc").id == "abc"
    assert Message("q", SAMPLE, None, id=7).id == message_id(SAMPLE, 7)


def test_a_message_tells_when_it_was_sent() -> None:
    """The time of a message is that of its position; its name shows queue and attempt."""
    message = Message("orders", SAMPLE, {"a": 1}, attempt=3, id="abc")
    assert message.time == pytest.approx(1327858464.7131)
    assert repr(message) == "<Message abc of 'orders', attempt 3>"

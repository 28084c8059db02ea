"""Positions are UUIDv1 times, and ids are the UUIDs made from them."""

from __future__ import annotations

import os
import time
import uuid

import pytest

from qdo import message
from qdo.message import Message
from qdo.positions import (
    format_position,
    message_id,
    position_now,
    position_of_time,
    time_of_position,
)
from qdo.system.clock import clock
from qdo.system.processes import StopFlag

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


@pytest.fixture
def sign(monkeypatch: pytest.MonkeyPatch) -> StopFlag:
    """A flag that the messages of the test read."""
    made = StopFlag()
    monkeypatch.setattr(message, "SIGN", made)
    return made


def test_a_message_stops_once_the_lease_is_over(sign: StopFlag) -> None:
    """Until then the job may run on, even in a process that shares the flag."""
    seen = Message("q", SAMPLE, 1)
    assert not seen.stopping
    sign.begin_lease()
    sign.move_lease(clock() + 1000)
    other = StopFlag()
    other.adopt(os.dup(sign.share()))
    first = Message("q", SAMPLE, 1)
    assert not first.stopping
    sign.move_lease(clock() - 1)
    assert first.stopping
    assert not other.leased()


def test_another_lease_does_not_let_an_old_job_continue(sign: StopFlag) -> None:
    """The worker has lost its queues in between, and another one may run the message."""
    sign.begin_lease()
    sign.move_lease(clock() + 1000)
    old = Message("q", SAMPLE, 1)
    assert not old.stopping
    sign.move_lease(float("-inf"))
    sign.begin_lease()
    sign.move_lease(clock() + 1000)
    assert old.stopping
    assert not Message("q", SAMPLE, 1).stopping


def test_the_flag_forgets_its_lease_with_the_worker(sign: StopFlag) -> None:
    sign.begin_lease()
    sign.show(False)
    assert sign.leased()
    assert not Message("q", SAMPLE, 1).stopping


def test_a_message_stops_once_its_claim_has_ended(sign: StopFlag) -> None:
    """Also in a process that shares the flag; queues claimed together have the same fence."""
    other = StopFlag()
    other.adopt(os.dup(sign.share()))
    sign.end_claim("q", 7)
    assert Message("q", SAMPLE, 1, fence=7).stopping
    assert other.claim_ended("q", 7)
    for queue, fence in (("p", 7), ("q", 8)):
        assert not Message(queue, SAMPLE, 1, fence=fence).stopping
        sign.end_claim(queue, fence)
    sign.forget_claim("q", 7)
    assert [other.claim_ended(*each) for each in (("q", 7), ("p", 7), ("q", 8))] == [
        False,
        True,
        True,
    ]


def test_the_flag_has_a_page_of_claims(sign: StopFlag) -> None:
    """Those that it has no place for are shown as soon as others are forgotten."""
    for fence in range(600):
        sign.end_claim("q", fence)
    shown = [sign.claim_ended("q", fence) for fence in range(600)]
    assert shown == sorted(shown, reverse=True)
    assert shown[500]
    assert not shown[599]
    for fence in range(599):
        sign.forget_claim("q", fence)
    assert sign.claim_ended("q", 599)


@pytest.mark.parametrize("sent", ["1e308", "-1e308", "nan", "253402300800", "-1", "x", ""])
def test_times_that_no_date_has_are_none(sent: str) -> None:
    """A producer in another language may write anything: the position tells the time then."""
    foreign = Message("q", SAMPLE, 1, headers={"qdo-sent": sent, "qdo-due": sent})
    assert foreign.time == time_of_position(SAMPLE)
    assert foreign.due is None


@pytest.mark.parametrize("id", [5, ["a"], {"a": 1}, True, None, ""])
def test_an_id_that_is_not_text_is_none(id: object) -> None:
    """A header of another program; the position tells the id then."""
    assert Message("q", SAMPLE, 1, headers={"qdo-id": id}).id == Message("q", SAMPLE, 1).id  # type: ignore[dict-item]

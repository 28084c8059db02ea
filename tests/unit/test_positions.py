"""Positions that are not times: how they are recorded, counted and kept in memory."""

from __future__ import annotations

import pytest

from qdo.brokers.kinesis.positions import POSITIONS as KINESIS_POSITIONS
from qdo.brokers.sqs.codec import SQS_POSITIONS, make_position
from qdo.coordination.interrupted_attempts import InFlight, marked_node
from qdo.coordination.protocol.claims import Claim, OwnedQueue
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.message import Message
from qdo.positions import Positions
from qdo.worker.shared_memory import InFlightTable, encode_label, read_in_flight

MOMENT = 139_000_000_000_000_000
SEQUENCE = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898


def sqs(moment: int, sequence: int = 7, message_id: int = 2**127 + 5) -> int:
    return make_position(moment, sequence, message_id)


def kinesis(sequence: int, subsequence: int = 0, moment: int = MOMENT) -> int:
    return sequence << 96 | subsequence << 64 | moment


def owned(node: QueueNode, positions: Positions) -> tuple[OwnedQueue, Claim]:
    """Return a slot that owns a queue with this node, and its claim."""
    slot = OwnedQueue("q")
    slot.node = node
    slot.claim = claim = Claim.of("q", 1, node, Lease(10.0, 0.0), positions)
    return slot, claim


def test_last_is_the_time_of_what_is_done_in_sqs() -> None:
    """Nothing else is recorded: the position means nothing to the next owner."""
    slot, claim = owned(QueueNode(last=MOMENT), SQS_POSITIONS)
    assert slot.progressed() is slot.node
    claim.done = sqs(MOMENT + 30)
    assert slot.progressed() == QueueNode(last=MOMENT + 30)
    slot.node = slot.progressed()
    assert slot.progressed() is slot.node
    assert slot.has_recorded(claim.done)


def test_last_and_position_are_recorded_for_kinesis() -> None:
    """The next owner resumes behind the sequence number."""
    slot, claim = owned(QueueNode(), KINESIS_POSITIONS)
    claim.done = kinesis(SEQUENCE)
    node = slot.progressed()
    assert (node.last, node.position) == (MOMENT, str(SEQUENCE))
    slot.node = node
    assert slot.has_recorded(claim.done)
    assert slot.progressed() is node
    again = Claim.of("q", 2, QueueNode.parse(node.encode()), Lease(10.0, 0.0), KINESIS_POSITIONS)
    assert kinesis(SEQUENCE, 1) > again.done >= kinesis(SEQUENCE)


def test_last_does_not_go_back_where_records_arrived_out_of_time() -> None:
    """Arrival times of Kinesis may; the position counts."""
    slot, claim = owned(QueueNode(last=MOMENT, position=str(SEQUENCE)), KINESIS_POSITIONS)
    claim.done = kinesis(SEQUENCE + 1, moment=MOMENT - 500)
    node = slot.progressed()
    assert (node.last, node.position) == (MOMENT, str(SEQUENCE + 1))


def test_a_seek_to_a_time_leaves_no_position() -> None:
    """A claim begins at the time then, and records nothing before something is done."""
    slot, claim = owned(QueueNode(last=MOMENT), KINESIS_POSITIONS)
    assert claim.done == KINESIS_POSITIONS.resume_after(MOMENT, None)
    assert slot.progressed() is slot.node


def test_a_position_that_is_none_is_a_fault() -> None:
    """Such a queue is not processed, and its fault states the reason."""
    node = QueueNode(last=MOMENT, position="somewhere").checked(KINESIS_POSITIONS)
    assert "'somewhere'" in str(node.fault)
    assert QueueNode(last=MOMENT, position="somewhere").checked(Positions()).fault is None


@pytest.mark.parametrize("position", [sqs(MOMENT + 9, 2**90), kinesis(SEQUENCE, 3)])
def test_marks_name_wide_positions(position: int) -> None:
    """They survive writing and reading, and go when their message is done."""
    marks = FailureRecord(position, 2, "ValueError: no")
    node = QueueNode(last=MOMENT, failure=marks)
    assert QueueNode.parse(node.encode()) == node
    positions: Positions = SQS_POSITIONS if position > 2**300 else KINESIS_POSITIONS
    slot, claim = owned(node, positions)
    claim.done = position
    assert slot.progressed().failure is None


def test_runs_of_wide_positions_are_recorded() -> None:
    """Messages done beyond the watermark are not repeated after a handover."""
    runs = ((kinesis(SEQUENCE + 5), kinesis(SEQUENCE + 9)), (kinesis(SEQUENCE + 90),) * 2)
    node = QueueNode(last=MOMENT, position=str(SEQUENCE), out_of_order=OutOfOrderProgress(runs))
    assert QueueNode.parse(node.encode()) == node


def test_unconfirmed_names_are_recorded() -> None:
    """And whatever cannot be read of them is left out."""
    node = QueueNode(last=MOMENT, unconfirmed=("7", "8"))
    assert QueueNode.parse(node.encode()) == node
    assert QueueNode.parse(b'{"last": "5", "unconfirmed": 7}').unconfirmed == ()
    slot, claim = owned(node, SQS_POSITIONS)
    assert claim.unconfirmed == ("7", "8")
    claim.unconfirmed = ()
    assert slot.progressed() == QueueNode(last=MOMENT)


def test_word_of_a_wide_position_outlives_its_process(memory: int) -> None:
    """Whatever its width, and whatever message was in flight before it."""
    hands = InFlightTable(2, memory)
    notes = hands.notes(SQS_POSITIONS)
    first, second = (hands.take(encode_label("q" * 200, "worker-0000000101")) for _ in range(2))
    for position in (sqs(MOMENT), sqs(MOMENT + 1, 3, 2**128 - 1)):
        notes[first] = position
        assert [each.position for each in read_in_flight(memory)] == [position]
    notes[second] = sqs(MOMENT + 2)
    hands.give_back(first)
    assert [each.position for each in read_in_flight(memory)] == [sqs(MOMENT + 2)]


def test_a_crash_is_counted_by_the_name_of_the_message() -> None:
    """It had another position under the owner before."""
    earlier, now = sqs(MOMENT + 5), sqs(MOMENT + 99)
    node = QueueNode(last=MOMENT, owner="worker-1", failure=FailureRecord(earlier, 3))
    in_flight = InFlight("q", "worker-1", now, in_line=False)
    marked = marked_node(node, in_flight, "it died", SQS_POSITIONS)
    assert marked is not None
    assert marked.failure == FailureRecord(earlier, 4, "it died", crashed=True)
    other = InFlight("q", "worker-1", sqs(MOMENT + 99, 8), in_line=False)
    several = marked_node(node, other, "it died", SQS_POSITIONS)
    assert several is not None
    assert several.failure == node.failure
    assert several.out_of_order is not None


def test_messages_ask_the_broker_for_id_and_time() -> None:
    """Their positions are not times."""
    message = Message("q", sqs(MOMENT, 7, 5), None, id=SQS_POSITIONS)
    assert message.id == "00000000-0000-0000-0000-000000000005"
    assert message.time == Message("q", MOMENT, None).time

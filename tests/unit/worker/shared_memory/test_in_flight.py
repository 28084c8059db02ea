"""The table of messages in flight, which outlives its process, and the counted attempts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.coordination.interrupted_attempts import InFlight, marked_node
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.worker.shared_memory import (
    InFlightTable,
    LoopReport,
    encode_label,
    make_memory,
    read_in_flight,
    read_loop,
)

POSITION = 135471512647131000


def test_messages_in_flight_can_be_read(memory: int) -> None:
    """Queue, worker and position of each turn under way, without ended turns."""
    table = InFlightTable(3, memory)
    first, second = (table.take(encode_label(name, "worker-1")) for name in ("a", "b"))
    table.positions[first] = POSITION
    assert read_in_flight(memory) == [InFlight("a", "worker-1", POSITION)]
    table.positions[second] = 7
    table.give_back(first)
    assert read_in_flight(memory) == [InFlight("b", "worker-1", 7)]
    third = table.take(encode_label("c", "worker-22"))
    assert third == first
    assert read_in_flight(memory) == [InFlight("b", "worker-1", 7)]


def test_table_outlives_its_process(memory: int) -> None:
    """Killed with SIGKILL during a turn."""
    code = (
        "import os, signal\n"
        "from qdo.worker.shared_memory import InFlightTable, encode_label\n"
        f"table = InFlightTable(100, {memory})\n"
        "table.positions[table.take(encode_label('q', 'worker-1'))] = 42\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=(memory,), check=False)
    assert ended.returncode == -9
    assert read_in_flight(memory) == [InFlight("q", "worker-1", 42)]


def test_one_entry_can_be_read_alone(memory: int) -> None:
    """That of the message which blocked the event loop."""
    table = InFlightTable(3, memory)
    for name in ("a", "b"):
        table.positions[table.take(encode_label(name, "worker-1"))] = POSITION
    second = table.take(encode_label("c", "worker-1"))
    table.positions[second] = 7
    assert read_in_flight(memory, second) == [InFlight("c", "worker-1", 7)]


def test_a_turn_that_ends_in_doubt_stays_in_flight(memory: int) -> None:
    """Until its worker runs the next turn, which it does only under a lease."""
    table = InFlightTable(3, memory)
    index = table.take(encode_label("a", "worker-1"))
    table.positions[index] = POSITION
    table.give_back(index, in_doubt=True)
    assert table.of_worker("worker-1") == [InFlight("a", "worker-1", POSITION)]
    table.take(encode_label("b", "worker-2"))
    assert read_in_flight(memory) == [InFlight("a", "worker-1", POSITION)]
    table.take(encode_label("b", "worker-1"))
    assert read_in_flight(memory) == []


def test_counted_messages_of_a_worker_are_forgotten(memory: int) -> None:
    """The ended turns and those under way; entries of both are used again."""
    table = InFlightTable(2, memory)
    indexes = [table.take(encode_label(name, "worker-1")) for name in ("a", "b")]
    for index in indexes:
        table.positions[index] = POSITION
    table.give_back(indexes[0], in_doubt=True)
    table.forget_worker("worker-1")
    assert read_in_flight(memory) == []
    table.give_back(indexes[1], in_doubt=True)
    assert {table.take(encode_label("c", "worker-2")) for _ in range(2)} == set(indexes)


def test_the_state_of_the_loop_is_shared(memory: int) -> None:
    """What blocks it is valid only for the beat since which it does."""
    assert read_loop(memory) is None
    table = InFlightTable(1, memory)
    assert read_loop(memory) is None
    table.loop.beat(100.0, 99.0, 6.0)
    assert read_loop(memory) == LoopReport(100.0, 99.0, 6.0)
    table.loop.blocked(100.0, 2.0, 128, "queue q, job j")
    assert read_loop(memory) == LoopReport(100.0, 99.0, 2.0, 128, "queue q, job j")
    table.loop.beat(101.0, 99.0, 6.0)
    assert read_loop(memory) == LoopReport(101.0, 99.0, 6.0)
    table.loop.unwatched()
    assert read_loop(memory) is None


def test_a_long_description_of_the_job_is_cut(memory: int) -> None:
    """It must not reach into the entries of turns."""
    table = InFlightTable(1, memory)
    table.positions[table.take(encode_label("a", "worker-1"))] = POSITION
    table.loop.beat(100.0, 99.0, 6.0)
    table.loop.blocked(100.0, 2.0, 0, 2000 * "\u00e4")
    found = read_loop(memory)
    assert found is not None
    assert set(found.blocked_by) == {"\u00e4"}
    assert read_in_flight(memory) == [InFlight("a", "worker-1", POSITION)]


def test_process_that_died_at_its_start_has_no_entries(memory: int) -> None:
    """It never set the size of its memory."""
    assert read_in_flight(memory) == []


def test_turns_beyond_the_entries_are_not_recorded(memory: int) -> None:
    """They write to the entry that is never read."""
    table = InFlightTable(1, memory)
    first, second = table.take(encode_label("a", "w")), table.take(encode_label("b", "w"))
    table.positions[first] = table.positions[second] = 5
    assert [each.queue for each in read_in_flight(memory)] == ["a"]
    table.give_back(second)
    table.give_back(first)
    assert read_in_flight(memory) == []
    assert table.take(encode_label("c", "w")) == first


def test_table_without_shared_memory_accepts_writes() -> None:
    """A worker without a parent writes to private memory."""
    table = InFlightTable(100)
    index = table.take(encode_label("q", "w"))
    table.positions[index] = POSITION
    table.give_back(index)


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=200))
def test_every_queue_name_fits(name: str) -> None:
    """200 characters of 4 bytes each, and the name of the worker."""
    fd = make_memory()
    try:
        table = InFlightTable(2, fd)
        table.positions[table.take(encode_label(name, "worker-0000000101"))] = POSITION
        assert read_in_flight(fd) == [InFlight(name, "worker-0000000101", POSITION)]
    finally:
        os.close(fd)


IN_FLIGHT = InFlight("q", "worker-1", 50)
SEVERAL = InFlight("q", "worker-1", 50, in_line=False)


def marked(node: QueueNode, in_flight: InFlight = IN_FLIGHT, why: str = "it died") -> QueueNode:
    found = marked_node(node, in_flight, why)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "values",
    [
        {"last": 50},
        {"fault": "garbage"},
        {"failure": FailureRecord(50, 3, blocked_since=1.0)},
        {"failure": FailureRecord(50, 3, decision="skip")},
        {"out_of_order": OutOfOrderProgress(((45, 55),))},
        {"out_of_order": OutOfOrderProgress((), (FailureRecord(50, 3, blocked_since=1.0),))},
        {"out_of_order": OutOfOrderProgress((), (FailureRecord(50, 3, decision="skip"),))},
    ],
)
def test_no_attempt_is_counted(values: dict[str, Any]) -> None:
    """Message recorded as done, garbage, blocked queue, decided message; also beyond `last`."""
    node = QueueNode(**{"last": 40, "owner": "worker-1", **values})
    assert marked_node(node, SEVERAL if node.out_of_order else IN_FLIGHT, "it died") is None


@pytest.mark.parametrize(("marks", "attempts"), [(None, 1), (FailureRecord(50, 3), 4)])
def test_crash_counts_one_attempt(marks: FailureRecord | None, attempts: int) -> None:
    """Everything else in the node is unchanged."""
    node = QueueNode(last=40, owner="worker-1", seek=2, failure=marks, extra=(("note", 1),))
    assert marked(node) == QueueNode(
        last=40,
        owner="worker-1",
        seek=2,
        failure=FailureRecord(50, attempts, "it died", crashed=True),
        extra=(("note", 1),),
    )


def test_two_messages_that_kill_keep_their_counts() -> None:
    """They follow each other before `last` is recorded, and kill their process in turn."""
    node = QueueNode(last=40, owner="worker-1", failure=FailureRecord(45, 2))
    for attempts in (1, 2):
        node = marked(node)
        assert node.failure == FailureRecord(45, 2)
        second = FailureRecord(50, attempts, "it died", crashed=True)
        assert node.out_of_order == OutOfOrderProgress((), (second,))
    first = marked(node, InFlight("q", "worker-1", 45))
    assert first.failure == FailureRecord(45, 3, "it died", crashed=True)
    assert first.out_of_order == node.out_of_order


BEGUN = FailureRecord(50, 1, "it died", crashed=True, begun_by=("worker-1",))


@pytest.mark.parametrize(
    ("owner", "failure", "attempts"),
    [
        ("worker-1", BEGUN, 2),
        ("worker-1", FailureRecord(50, 0, begun_by=("worker-0", "worker-1")), 2),
        ("worker-1", FailureRecord(50, 1), 1),  # it waited for its next attempt
        ("worker-2", BEGUN, 1),  # the owner began nothing
        ("", BEGUN, 1),  # it released the queue
        ("worker-1", replace(BEGUN, blocked_since=1.0), 1),
        ("worker-1", replace(BEGUN, decision="skip"), 1),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_claim_counts_what_a_gone_owner_had_begun(
    owner: str, failure: FailureRecord, attempts: int, is_first: bool
) -> None:
    """It counts each attempt once: neither a later owner nor the worker itself counts it again."""
    node = QueueNode(last=40, owner=owner, failure=failure)
    if not is_first:
        above = OutOfOrderProgress((), (failure,))
        node = QueueNode(last=40, owner=owner, failure=FailureRecord(45, 3), out_of_order=above)
    for worker in ("worker-3", "worker-4"):
        node = QueueNode.parse(node.encode()).claimed_by(worker)
        assert node.owner == worker
        assert node.failures[-1].attempts == attempts
        assert is_first or node.failure == FailureRecord(45, 3)
    counted = attempts > failure.attempts
    assert all(each in node.failures[-1].error for each in failure.begun_by) or not counted
    for worker in failure.begun_by:
        assert marked_node(node, InFlight("q", worker, 50), "it died") is None


def test_a_claim_counts_nothing_that_a_parent_counted() -> None:
    node = QueueNode(last=40, owner="worker-1", failure=BEGUN)
    killed = FailureRecord(50, 2, "killed", crashed=True)
    assert marked(node, why="killed").claimed_by("worker-2").failure == killed


def test_entry_records_whether_several_may_be_in_flight(memory: int) -> None:
    """Then the failure record of one message does not replace that of another."""
    table = InFlightTable(2, memory)
    name = "q" * 200
    for in_line in (True, False):
        table.positions[table.take(encode_label(name, "worker-1", in_line))] = 50
    assert {(each.queue, each.in_line) for each in read_in_flight(memory)} == {
        (name, True),
        (name, False),
    }


def test_every_message_in_flight_gets_its_attempt() -> None:
    """Earlier failures are added to, other messages start at 1, and none is lost."""
    node = QueueNode(
        last=40,
        owner="worker-1",
        failure=FailureRecord(45, 2),
        out_of_order=OutOfOrderProgress(((47, 48),)),
    )
    node = marked(node, SEVERAL)
    first = FailureRecord(50, 1, "it died", crashed=True)
    assert node.failure == FailureRecord(45, 2)
    assert node.out_of_order == OutOfOrderProgress(((47, 48),), (first,))
    again = marked(node, SEVERAL)
    assert again.out_of_order is not None
    assert again.out_of_order.other_failures == (FailureRecord(50, 2, "it died", crashed=True),)
    head = marked(again, InFlight("q", "worker-1", 45, in_line=False))
    assert head.failure == FailureRecord(45, 3, "it died", crashed=True)

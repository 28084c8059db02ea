"""Doorbells: when a ring is heard, and which queues are listened to. No I/O."""

from __future__ import annotations

from typing import Any

import pytest

from qdo.coordination.protocol.doorbells import DoorbellWatches
from qdo.coordination.protocol.machine import NodeMissing, NodeRead, NoResponse, Response, Stat
from qdo.coordination.znodes.layout import Layout
from qdo.worker.duties.duty import AT_ONCE, LOOK_SECONDS, SOON_SECONDS, DoorbellListener
from qdo.worker.engine.slot import Slot, SlotState

LAYOUT = Layout.of("test")


class DoorbellSetup:
    """The machine, and the bells as a coordinator would have them.

    :ivar versions: of the bells that exist.
    """

    def __init__(self) -> None:
        self.rung: list[str] = []
        self.bells = DoorbellWatches(LAYOUT, self.rung.append)
        self.versions: dict[str, int] = {}
        self.watched: set[str] = set()
        self.asked = 0

    def watch(self, *queues: str) -> None:
        """Listen to queues, and get the answers to that."""
        self.bells.watch(queues)
        self.answer()

    def answer(self) -> None:
        while self.bells.outbox:
            request, then = self.bells.outbox.popleft()
            assert isinstance(request, Stat)
            assert request.watch
            self.asked += 1
            queue = request.path.removeprefix(f"{LAYOUT.doorbells}/")
            self.watched.add(queue)
            version = self.versions.get(queue)
            answer: Response = NodeMissing() if version is None else NodeRead(b"", version)
            then(answer)

    def poll_now(self, queue: str) -> None:
        self.versions[queue] = self.versions.get(queue, -1) + 1
        if queue in self.watched:
            self.watched.remove(queue)
            self.bells.changed(LAYOUT.doorbell(queue))

    def lose(self) -> None:
        while self.bells.outbox:
            self.bells.outbox.popleft()[1](NoResponse())
        self.watched.clear()
        self.bells.suspended()


@pytest.fixture
def bench() -> DoorbellSetup:
    made = DoorbellSetup()
    made.bells.connected()
    return made


def test_a_ring_is_heard_once(bench: DoorbellSetup) -> None:
    """Then the doorbell of the queue is not watched until the queue is idle again."""
    bench.watch("a", "b")
    bench.poll_now("a")
    bench.poll_now("a")
    assert bench.rung == ["a"]
    assert bench.asked == 2


def test_rings_while_nobody_listened_are_found_by_their_count(bench: DoorbellSetup) -> None:
    """The queue was busy meanwhile; without one nothing is heard."""
    bench.watch("a")
    bench.poll_now("a")
    bench.watch("a")
    assert bench.rung == ["a"]
    bench.poll_now("a")
    bench.poll_now("a")
    bench.watch("a")
    assert bench.rung == ["a"] * 3


def test_a_bell_that_was_ever_rung_counts_for_a_new_owner(bench: DoorbellSetup) -> None:
    """It may have been rung after its first poll. One that does not exist was not."""
    bench.poll_now("old")
    bench.watch("old", "new")
    assert bench.rung == ["old"]


def test_a_lost_connection_loses_no_ring(bench: DoorbellSetup) -> None:
    """Watches are gone with it; the counts are compared when it is back."""
    bench.watch("a", "b")
    bench.lose()
    bench.bells.watch(["c"])
    bench.poll_now("b")
    bench.bells.connected()
    bench.answer()
    assert bench.rung == ["b"]
    bench.poll_now("a")
    bench.poll_now("c")
    assert bench.rung == ["b", "a", "c"]


def test_a_request_without_an_answer_is_made_again(bench: DoorbellSetup) -> None:
    """As soon as the connection is back."""
    bench.bells.watch(["a"])
    bench.lose()
    bench.bells.connected()
    bench.answer()
    bench.poll_now("a")
    assert bench.rung == ["a"]


def test_queues_that_were_left_are_heard_no_more(bench: DoorbellSetup) -> None:
    """Also if the answer or the event was under way."""
    bench.poll_now("b")
    bench.bells.watch(["a", "b"])
    bench.bells.unwatch(["b"])
    bench.answer()
    bench.bells.unwatch(["a"])
    bench.poll_now("a")
    assert bench.rung == []


def test_a_bell_that_was_deleted_starts_afresh(bench: DoorbellSetup) -> None:
    """Operators may clean up at any time."""
    for _ in range(5):
        bench.poll_now("a")
    bench.watch("a")
    bench.watch("a")
    assert bench.rung == ["a"]
    del bench.versions["a"]
    bench.lose()
    bench.bells.connected()
    bench.answer()
    assert bench.rung == ["a"]
    bench.poll_now("a")
    assert bench.rung == ["a", "a"]


class FakeSubscription:
    """As much of a subscription as can be rung."""

    def __init__(self) -> None:
        self.rings = 0

    def poll_now(self) -> None:
        self.rings += 1


class RecordingMember:
    """Records the queues that it is asked to listen to."""

    def __init__(self) -> None:
        self.said: list[tuple[str, list[str]]] = []

    def watch_doorbells(self, queues: Any, gone: Any = ()) -> None:
        if gone:
            self.said.append(("leave", sorted(gone)))
        if queues:
            self.said.append(("attend", sorted(queues)))


def slot_of(name: str, state: SlotState) -> Slot:
    slot = Slot(name)
    slot.state = state
    slot.subscription = FakeSubscription()  # type: ignore[assignment]
    return slot


def test_only_queues_that_rest_are_listened_to() -> None:
    """Once each, until they are notified or released; all again after a new registration."""
    slots = {name: slot_of(name, SlotState.IDLE) for name in "ab"}
    slots["busy"] = slot_of("busy", SlotState.RUNNING)
    slots["none"] = Slot("none")
    doorman, member = DoorbellListener(slots), RecordingMember()
    doorman.step(member)
    doorman.step(member)
    assert member.said == [("attend", ["a", "b"])]
    doorman.rang("a")
    source: Any = slots["a"].subscription
    assert source.rings == 1
    slots["a"].state = SlotState.RUNNING
    doorman.step(member)
    slots["a"].state = SlotState.IDLE
    doorman.step(member)
    assert member.said[1:] == [("attend", ["a"])]
    del slots["b"]
    doorman.rang("b")
    doorman.step(member)
    assert member.said[2:] == [("leave", ["b"])]
    doorman.step(None)
    other = RecordingMember()
    doorman.step(other)
    assert other.said == [("attend", ["a"])]


def test_many_queues_are_listened_to_in_parts() -> None:
    """Checkpoints go through the same loop, and need not wait for ten thousand questions."""
    slots = {
        f"q{number}": slot_of(f"q{number}", SlotState.IDLE) for number in range(2 * AT_ONCE + 1)
    }
    doorman, member = DoorbellListener(slots), RecordingMember()
    pauses = [doorman.step(member) for _ in range(4)]
    assert [len(queues) for _, queues in member.said] == [AT_ONCE, AT_ONCE, 1]
    assert pauses == [SOON_SECONDS, SOON_SECONDS, LOOK_SECONDS, LOOK_SECONDS]

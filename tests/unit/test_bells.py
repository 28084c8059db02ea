"""Doorbells: when a ring is heard, and which queues are listened to. No I/O."""

from __future__ import annotations

from typing import Any

import pytest

from qdo.coordination.bells import Bells
from qdo.coordination.layout import Layout
from qdo.coordination.machine import Answer, Node, NoNode, Stat, Unanswered
from qdo.worker.doorman import AT_ONCE, LOOK_SECONDS, SOON_SECONDS, Doorman
from qdo.worker.slot import Slot, State

LAYOUT = Layout.of("test")


class Bench:
    """The machine, and the bells as a coordinator would have them.

    :ivar versions: of the bells that exist.
    """

    def __init__(self) -> None:
        self.rung: list[str] = []
        self.bells = Bells(LAYOUT, self.rung.append)
        self.versions: dict[str, int] = {}
        self.watched: set[str] = set()
        self.asked = 0

    def answer(self) -> None:
        while self.bells.outbox:
            request, then = self.bells.outbox.popleft()
            assert isinstance(request, Stat)
            assert request.watch
            self.asked += 1
            queue = request.path.removeprefix(f"{LAYOUT.bells}/")
            self.watched.add(queue)
            version = self.versions.get(queue)
            answer: Answer = NoNode() if version is None else Node(b"", version)
            then(answer)

    def ring(self, queue: str) -> None:
        self.versions[queue] = self.versions.get(queue, -1) + 1
        if queue in self.watched:
            self.watched.remove(queue)
            self.bells.changed(LAYOUT.bell(queue))

    def lose(self) -> None:
        while self.bells.outbox:
            self.bells.outbox.popleft()[1](Unanswered())
        self.watched.clear()
        self.bells.suspended()


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.bells.connected()
    return made


def test_a_ring_is_heard_once(bench: Bench) -> None:
    """Then the queue is not listened to until somebody wants it again."""
    bench.bells.attend(["a", "b"])
    bench.answer()
    bench.ring("a")
    bench.ring("a")
    assert bench.rung == ["a"]
    assert bench.asked == 2


def test_rings_while_nobody_listened_are_found_by_their_count(bench: Bench) -> None:
    """The queue was busy meanwhile; without one nothing is heard."""
    bench.bells.attend(["a"])
    bench.answer()
    bench.ring("a")
    bench.bells.attend(["a"])
    bench.answer()
    assert bench.rung == ["a"]
    bench.ring("a")
    bench.ring("a")
    bench.bells.attend(["a"])
    bench.answer()
    assert bench.rung == ["a"] * 3


def test_a_bell_that_was_ever_rung_counts_for_a_new_owner(bench: Bench) -> None:
    """It may have been rung after its first poll. One that does not exist was not."""
    bench.ring("old")
    bench.bells.attend(["old", "new"])
    bench.answer()
    assert bench.rung == ["old"]


def test_a_lost_connection_loses_no_ring(bench: Bench) -> None:
    """Watches are gone with it; the counts are compared when it is back."""
    bench.bells.attend(["a", "b"])
    bench.answer()
    bench.lose()
    bench.bells.attend(["c"])
    bench.ring("b")
    bench.bells.connected()
    bench.answer()
    assert bench.rung == ["b"]
    bench.ring("a")
    bench.ring("c")
    assert bench.rung == ["b", "a", "c"]


def test_a_request_without_an_answer_is_made_again(bench: Bench) -> None:
    """As soon as the connection is back."""
    bench.bells.attend(["a"])
    bench.lose()
    bench.bells.connected()
    bench.answer()
    bench.ring("a")
    assert bench.rung == ["a"]


def test_queues_that_were_left_are_heard_no_more(bench: Bench) -> None:
    """Also if the answer or the event was under way."""
    bench.ring("b")
    bench.bells.attend(["a", "b"])
    bench.bells.leave(["b"])
    bench.answer()
    bench.bells.leave(["a"])
    bench.ring("a")
    assert bench.rung == []


def test_a_bell_that_was_deleted_starts_afresh(bench: Bench) -> None:
    """Operators may clean up at any time."""
    for _ in range(5):
        bench.ring("a")
    bench.bells.attend(["a"])
    bench.answer()
    bench.bells.attend(["a"])
    bench.answer()
    assert bench.rung == ["a"]
    del bench.versions["a"]
    bench.lose()
    bench.bells.connected()
    bench.answer()
    assert bench.rung == ["a"]
    bench.ring("a")
    assert bench.rung == ["a", "a"]


class Source:
    """As much of a subscription as can be rung."""

    def __init__(self) -> None:
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1


class Member:
    """Keeps what it is asked to listen to."""

    def __init__(self) -> None:
        self.said: list[tuple[str, list[str]]] = []

    def attend_bells(self, queues: Any) -> None:
        self.said.append(("attend", sorted(queues)))

    def leave_bells(self, queues: Any) -> None:
        self.said.append(("leave", sorted(queues)))


def slot_of(name: str, state: State) -> Slot:
    slot = Slot(name)
    slot.state = state
    slot.subscription = Source()  # type: ignore[assignment]
    return slot


def test_only_queues_that_rest_are_listened_to() -> None:
    """Once each, until they are rung or given back; all again for a new registration."""
    slots = {name: slot_of(name, State.IDLE) for name in "ab"}
    slots["busy"] = slot_of("busy", State.RUNNING)
    slots["none"] = Slot("none")
    doorman, member = Doorman(slots), Member()
    doorman.step(member)
    doorman.step(member)
    assert member.said == [("attend", ["a", "b"])]
    doorman.rang("a")
    source: Any = slots["a"].subscription
    assert source.rings == 1
    slots["a"].state = State.RUNNING
    doorman.step(member)
    slots["a"].state = State.IDLE
    doorman.step(member)
    assert member.said[1:] == [("attend", ["a"])]
    del slots["b"]
    doorman.rang("b")
    doorman.step(member)
    assert member.said[2:] == [("leave", ["b"])]
    doorman.step(None)
    other = Member()
    doorman.step(other)
    assert other.said == [("attend", ["a"])]


def test_many_queues_are_listened_to_in_parts() -> None:
    """Checkpoints go through the same loop, and need not wait for ten thousand questions."""
    slots = {f"q{number}": slot_of(f"q{number}", State.IDLE) for number in range(2 * AT_ONCE + 1)}
    doorman, member = Doorman(slots), Member()
    pauses = [doorman.step(member) for _ in range(4)]
    assert [len(queues) for _, queues in member.said] == [AT_ONCE, AT_ONCE, 1]
    assert pauses == [SOON_SECONDS, SOON_SECONDS, LOOK_SECONDS, LOOK_SECONDS]

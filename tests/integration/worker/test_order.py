"""Queues whose messages need not all wait for each other: `order="key"` and `order="none"`."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import length_hint
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.event import Event

import qdo
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.errors import PolicyError
from qdo.message import Message
from qdo.system.clock import clock
from qdo.worker.engine import lanes
from qdo.worker.engine.fetcher import Fetcher
from qdo.worker.engine.lanes import Lanes
from qdo.worker.engine.slot import Rows, Slot, SlotState
from tests.support.engine import EngineSetup, until
from tests.support.processes import PATIENCE_SECONDS

FAST = {"backoff_seconds": 0.001, "backoff_max_seconds": 0.002}


class Keyed:
    """A worker whose job waits at gates: one for each body that has one.

    :ivar begun: bodies as they were started, and `ended` as they ended.
    :ivar most: largest number of messages in flight at once.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = EngineSetup(folder, **settings)
        self.gates: defaultdict[Any, Event] = defaultdict(Event)
        self.gated: set[Any] = set()
        self.failing: dict[Any, BaseException] = {}
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.attempts: list[tuple[Any, int]] = []
        self.fences: dict[Any, set[int]] = defaultdict(set)
        self.hand: Counter[str | None] = Counter()
        self.most = 0
        self.clashes = 0

    def job(self, message: Message, context: Any) -> None:
        self.begun.append(message.body)
        self.attempts.append((message.body, message.attempt))
        self.hand[message.key] += 1
        self.most = max(self.most, sum(self.hand.values()))
        self.clashes += self.hand[message.key] > 1
        try:
            if message.body in self.gated:
                self.gates[message.body].wait()
            if message.body in self.failing:
                raise self.failing[message.body]
            self.ended.append(message.body)
        finally:
            self.hand[message.key] -= 1

    def send(self, *messages: tuple[str | None, Any]) -> None:
        self.engine.app.send_many([("q", body, key) for key, body in messages])

    def hold(self, *bodies: Any) -> None:
        self.gated.update(bodies)

    def let_go(self, *bodies: Any) -> None:
        for body in bodies:
            self.gated.discard(body)
            self.gates[body].set()

    def recorded(self) -> int:
        """Return the number of messages behind the recorded `last`."""
        return self.engine.broker.catalog.backlog(
            "q", self.engine.member.recorded.get("q", 0)
        ).count


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    made = Keyed(tmp_path)
    yield made
    for gate in made.gates.values():
        gate.set()
    made.engine.close()


def replace_due(marks: FailureRecord) -> FailureRecord:
    """Return marks whose backoff is over."""
    return dataclasses.replace(marks, retry_at=0.0)


def qdo_node(node: QueueNode, marks: list[FailureRecord]) -> QueueNode:
    """Return a node with these marks, the first one foremost."""
    above = OutOfOrderProgress(
        node.out_of_order.done_ranges if node.out_of_order else (), tuple(marks[1:])
    )
    return dataclasses.replace(node, failure=marks[0], out_of_order=above)


def numbers(bodies: list[str], key: str) -> list[int]:
    """Return the numbers of one key's messages, which are named as in "a-7"."""
    return [int(body.partition("-")[2]) for body in bodies if body.partition("-")[0] == key]


def messages(keys: str, each: int) -> list[tuple[str | None, str]]:
    return [(key, f"{key}-{n}") for n in range(each) for key in keys]


def test_keys_run_side_by_side_and_each_in_order(keyed: Keyed) -> None:
    """A slow key delays no other key, and nothing of its own overtakes it."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.send(*messages("abcde", 20))
    keyed.hold("a-0")
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 80)
    assert all(numbers(keyed.ended, key) == list(range(20)) for key in "bcde")
    assert numbers(keyed.begun, "a") == [0]
    keyed.let_go("a-0")
    until(lambda: len(keyed.ended) == 100)
    assert numbers(keyed.ended, "a") == list(range(20))
    assert not keyed.clashes
    until(lambda: keyed.recorded() == 0)
    until(lambda: keyed.engine.dispatcher.slots["q"].state is SlotState.IDLE)
    assert keyed.engine.member.claims["q"].out_of_order is None
    assert keyed.engine.dispatcher.slots["q"].lanes is None


def test_a_wake_during_a_fetch_is_not_lost(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that arrives after an empty fetch has looked does not wait for a slow key."""
    fetch = Fetcher.fetch
    wake = Lanes.wake
    woken = Event()
    empty: list[Rows] = []

    def woke(lanes: Lanes) -> None:
        wake(lanes)
        woken.set()

    def slow(fetcher: Fetcher, slot: Slot, claim: Any) -> Rows:
        rows = fetch(fetcher, slot, claim)
        if not empty and not length_hint(rows):
            empty.append(rows)
            woken.clear()
            keyed.send(("b", "b-0"))
            assert woken.wait(PATIENCE_SECONDS)
        return rows

    monkeypatch.setattr(Lanes, "wake", woke)
    monkeypatch.setattr(Fetcher, "fetch", slow)
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.send(("a", "a-0"))
    keyed.hold("a-0")
    keyed.engine.start("q")
    until(lambda: keyed.ended == ["b-0"])
    keyed.let_go("a-0")
    until(lambda: keyed.ended == ["b-0", "a-0"])


def test_messages_without_a_key_are_one_lane(keyed: Keyed) -> None:
    """Messages without a key keep their order: their sender has not given up the order."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.send(*((None, f"a-{n}") for n in range(20)))
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 20)
    assert numbers(keyed.ended, "a") == list(range(20))
    assert keyed.most == 1


def test_without_order_no_message_waits_for_another(keyed: Keyed) -> None:
    """Up to `concurrency` are in flight, whatever their keys."""
    keyed.engine.app.job(order="none", concurrency=3)(keyed.job)
    keyed.send(*(("same", f"a-{n}") for n in range(10)))
    keyed.hold(*(f"a-{n}" for n in range(10)))
    keyed.engine.start("q")
    until(lambda: len(keyed.begun) == 3)
    keyed.let_go("a-1")
    until(lambda: len(keyed.begun) == 4)
    assert keyed.ended == ["a-1"]
    keyed.let_go(*(f"a-{n}" for n in range(10)))
    until(lambda: len(keyed.ended) == 10)
    assert keyed.most == 3


def test_concurrency_bounds_all_lanes_of_a_process(tmp_path: Path) -> None:
    """Two queues of ten keys and `concurrency` 4 in the settings: four at once, of both."""
    keyed = Keyed(tmp_path, concurrency=4)
    keyed.engine.app.job(order="key", concurrency=10)(keyed.job)
    bodies = [f"{queue}-{n}" for queue in "qr" for n in range(10)]
    for body in bodies:
        keyed.engine.app.send(body[0], body, key=body)
    keyed.hold(*bodies)
    keyed.engine.start("q", "r")
    until(lambda: len(keyed.begun) == 4)
    for done in range(len(bodies)):
        until(lambda done=done: len(keyed.begun) >= min(4 + done, 20))  # type: ignore[misc]
        keyed.let_go(next(body for body in keyed.begun if body in keyed.gated))
    until(lambda: len(keyed.ended) == 20)
    assert keyed.most == 4
    keyed.engine.close()


@pytest.mark.parametrize("how", ["take_back", "lose"])
def test_a_queue_that_waits_for_a_place_is_given_back_at_once(tmp_path: Path, how: str) -> None:
    """And the place that it waited for goes to the next queue in line."""
    keyed = Keyed(tmp_path, concurrency=1)
    keyed.engine.app.job(order="key")(keyed.job)
    for queue in "pqr":
        keyed.engine.app.send(queue, queue)
    keyed.hold("p")
    keyed.engine.start("p")
    until(lambda: keyed.begun == ["p"])
    slots = keyed.engine.dispatcher.slots
    keyed.engine.member.grant("q", "r")
    until(lambda: all(slots[queue].lanes for queue in "qr"))
    getattr(keyed.engine.member, how)("q")
    until(lambda: "q" not in slots)
    keyed.let_go("p")
    until(lambda: keyed.ended == ["p", "r"])
    keyed.engine.close()


def test_a_queue_with_lanes_takes_no_turn_from_others(tmp_path: Path) -> None:
    """Its turn lasts for as long as its jobs do: meanwhile others have theirs."""
    keyed = Keyed(tmp_path, concurrency=1)
    keyed.engine.app.job("k*", order="key")(keyed.job)
    keyed.engine.app.job()(keyed.job)
    for queue in ("k1", "k2", "plain"):
        keyed.engine.app.send(queue, queue)
    keyed.hold("k1", "k2")
    keyed.engine.start("k1", "k2")
    until(lambda: len(keyed.begun) == 1)
    keyed.engine.member.grant("plain")
    until(lambda: keyed.ended == ["plain"])
    keyed.let_go("k1", "k2")
    until(lambda: len(keyed.ended) == 3)
    assert keyed.engine.end() == 0


def test_what_all_queues_hold_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may read something, so that none waits forever; and all of it is released."""
    monkeypatch.setattr(lanes, "HELD_BYTES_IN_ALL", 20_000)
    keyed = Keyed(tmp_path)
    keyed.engine.app.job(order="key")(keyed.job)
    for queue in "pqr":
        keyed.engine.app.send_many([(queue, f"{queue}-{n}", "key") for n in range(300)])
    keyed.hold("p-0", "q-0", "r-0")
    keyed.engine.start("p", "q", "r")
    until(lambda: len(keyed.begun) == 3)
    permits = keyed.engine.pipeline._engine.permits
    assert 0 < permits.held_bytes < 60_000
    keyed.let_go("p-0", "q-0", "r-0")
    until(lambda: len(keyed.ended) == 900)
    assert all(numbers(keyed.ended, queue) == list(range(300)) for queue in "pqr")
    until(lambda: permits.held_bytes == 0)
    keyed.engine.close()


def test_a_handover_repeats_nothing_that_is_done(keyed: Keyed) -> None:
    """Progress above the watermark is recorded beside it, and the next owner continues."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.send(*messages("abc", 30))
    keyed.hold("a-3")
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 63)
    keyed.engine.member.take_back("q")
    keyed.let_go("a-3")
    until(lambda: not keyed.engine.member.claims)
    node = keyed.engine.registrar.nodes["q"]
    assert node.out_of_order is not None
    assert keyed.recorded() == 26 * 3
    keyed.engine.member.grant("q")
    until(lambda: len(keyed.ended) == 90)
    assert Counter(keyed.ended) == Counter(body for _, body in messages("abc", 30))
    assert all(numbers(keyed.ended, key) == list(range(30)) for key in "abc")


def test_what_was_not_recorded_is_repeated_in_order(keyed: Keyed) -> None:
    """A queue that is lost without a word: from the last record on, again."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.send(*messages("ab", 10))
    keyed.hold("a-0")
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 10)
    keyed.engine.registrar.nodes.clear()
    keyed.engine.registrar.recorded.clear()
    keyed.engine.member.lose("q")
    keyed.let_go("a-0")
    until(lambda: not keyed.engine.dispatcher.slots)
    keyed.engine.member.grant("q")
    until(lambda: len(keyed.ended) == 10 + 1 + 20)
    assert numbers(keyed.ended, "b") == 2 * list(range(10))


def test_a_failing_message_holds_up_its_key_only(keyed: Keyed) -> None:
    """Backoff, attempts and the dead letter apply only to that key."""
    policy = qdo.Policy(attempts=3, **FAST)
    keyed.engine.app.job(order="key", policy=policy)(keyed.job)
    keyed.failing["a-1"] = ValueError("no")
    keyed.send(*messages("ab", 5))
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 9)
    assert [n for body, n in keyed.attempts if body == "a-1"] == [1, 2, 3]
    assert numbers(keyed.ended, "a") == [0, 2, 3, 4]
    (letter,) = keyed.engine.broker.dead_letters.records("q")
    assert (letter.attempts, letter.key) == (3, "a")
    until(lambda: keyed.recorded() == 0)


def test_the_attempts_of_every_key_survive_a_handover(keyed: Keyed) -> None:
    """Several messages may fail at once; the next owner counts each one on."""
    policy = qdo.Policy(attempts=3, backoff_seconds=60, backoff_max_seconds=60)
    keyed.engine.app.job(order="key", policy=policy)(keyed.job)
    keyed.failing.update({"a-0": qdo.Retry(after=60), "b-0": qdo.Retry(after=60)})
    keyed.send(*messages("abc", 2))
    keyed.engine.start("q")
    until(lambda: len(keyed.attempts) == 4)
    until(lambda: keyed.engine.dispatcher.slots["q"].state is SlotState.WAITING)
    keyed.engine.member.take_back("q")
    until(lambda: not keyed.engine.member.claims)
    node = keyed.engine.registrar.nodes["q"]
    assert node.failure is not None
    assert node.out_of_order is not None
    assert (
        node.failure.attempts,
        [each.attempts for each in node.out_of_order.other_failures],
    ) == (1, [1])
    early = [replace_due(each) for each in (node.failure, *node.out_of_order.other_failures)]
    keyed.engine.registrar.nodes["q"] = qdo_node(node, early)
    keyed.failing.clear()
    keyed.engine.member.grant("q")
    until(lambda: len(keyed.ended) == 6)
    assert keyed.attempts[4:6] == [("a-0", 2), ("b-0", 2)]
    assert keyed.attempts[6:] == [("a-1", 1), ("b-1", 1)]


def test_a_block_holds_its_key_and_an_operator_ends_it(keyed: Keyed) -> None:
    """The others continue, new messages of them too."""
    policy = qdo.Policy(attempts=1, then="block")
    keyed.engine.app.job(order="key", policy=policy)(keyed.job)
    keyed.failing["a-0"] = ValueError("no")
    keyed.send(*messages("ab", 3))
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 3)
    keyed.send(("b", "b-3"), ("a", "a-3"))
    until(lambda: len(keyed.ended) == 4)
    claim = keyed.engine.member.claims["q"]
    until(lambda: claim.failure is not None and claim.failure.blocked)
    keyed.failing.clear()
    keyed.engine.member.decide("q", None)
    until(lambda: len(keyed.ended) == 8)
    assert numbers(keyed.ended, "a") == [0, 1, 2, 3]
    assert numbers(keyed.ended, "b") == [0, 1, 2, 3]


def test_without_order_a_failing_message_holds_up_nothing(keyed: Keyed) -> None:
    """All others are done while it waits, and its end moves the watermark over all."""
    policy = qdo.Policy(attempts=2, **FAST)
    keyed.engine.app.job(order="none", policy=policy)(keyed.job)
    keyed.failing["a-0"] = ValueError("no")
    keyed.send(*((None, f"a-{n}") for n in range(50)))
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 49)
    until(lambda: keyed.recorded() == 0)
    assert len(keyed.engine.broker.dead_letters.records("q")) == 1


def test_what_is_held_is_bounded(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with a whole window before it stops the queue, until it gets on."""
    monkeypatch.setattr(lanes, "WINDOW", 50)
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.hold("a-0")
    keyed.send(*(("a", f"a-{n}") for n in range(200)), *(("b", f"b-{n}") for n in range(10)))
    keyed.engine.start("q")
    until(lambda: keyed.begun == ["a-0"])
    gevent.sleep(0.05)
    found = keyed.engine.dispatcher.slots["q"].lanes
    assert found is not None
    assert 50 <= len(found.progress) <= 50 + 64
    keyed.let_go("a-0")
    until(lambda: len(keyed.ended) == 210)
    assert numbers(keyed.ended, "a") == list(range(200))


@pytest.mark.parametrize("order", ["key", "none"])
def test_new_messages_start_while_failing_ones_wait(keyed: Keyed, order: Any) -> None:
    """Nor must a long backoff of all read messages; a wakeup does not cause a retry."""
    policy = qdo.Policy(backoff_seconds=3600, backoff_max_seconds=3600)
    keyed.engine.app.job(order=order, policy=policy)(keyed.job)
    keyed.failing["a-0"] = ValueError("no")
    keyed.send(("a", "a-0"))
    keyed.engine.start("q")
    dispatcher = keyed.engine.dispatcher
    until(lambda: keyed.begun == ["a-0"] and dispatcher.slots["q"].state is SlotState.WAITING)
    for number in range(3):
        keyed.send(("b", f"b-{number}"), ("c", f"c-{number}"))
        until(lambda count=2 * number + 2: len(keyed.ended) == count)  # type: ignore[misc]
        until(lambda: dispatcher.slots["q"].state is SlotState.WAITING)
    assert keyed.begun.count("a-0") == 1
    assert len(dispatcher.alarms._waiting) == 1


def test_no_lane_starts_without_the_lease(keyed: Keyed) -> None:
    """Those that run end; the others continue when the lease does."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.hold("a-0")
    keyed.send(*messages("ab", 2))
    keyed.engine.start("q")
    until(lambda: keyed.ended == ["b-0", "b-1"])
    lease = keyed.engine.member.lease
    lease.until = clock()
    turn = clock() + keyed.engine.settings.turn_seconds
    until(lambda: clock() > turn, "the end of the turn that began with the lease")
    keyed.let_go("a-0")
    until(lambda: keyed.engine.dispatcher.slots["q"].state is SlotState.PAUSED)
    assert keyed.begun == ["a-0", "b-0", "b-1"]
    lease.until = clock() + 3600
    until(lambda: keyed.ended == ["b-0", "b-1", "a-0", "a-1"])


def test_lanes_go_on_beside_a_long_job_when_the_lease_does(keyed: Keyed) -> None:
    """While the lease is over nothing is started, the event loop turns, and the job continues."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.hold("a-0")
    keyed.send(("a", "a-0"))
    keyed.engine.start("q")
    until(lambda: keyed.begun == ["a-0"])
    lease = keyed.engine.member.lease
    lease.until = clock()
    keyed.send(("b", "b-0"))
    later = clock() + 0.2
    until(lambda: clock() > later, "some turns of the event loop")
    assert keyed.begun == ["a-0"]
    lease.until = clock() + 3600
    until(lambda: keyed.ended == ["b-0"])


def test_a_queue_reads_on_when_others_hold_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a blocked key, while another one holds all that may be held."""
    monkeypatch.setattr(lanes, "HELD_BYTES_IN_ALL", 5_000)
    keyed = Keyed(tmp_path)
    policy = qdo.Policy(attempts=1, then="block")
    keyed.engine.app.job(order="key", policy=policy)(keyed.job)
    keyed.failing["a-0"] = ValueError("no")
    keyed.hold("p-0")
    keyed.engine.app.send_many([("p", f"p-{n}", "key") for n in range(100)])
    keyed.engine.start("p", "q")
    until(lambda: keyed.begun == ["p-0"])
    keyed.send(("a", "a-0"))
    until(lambda: "a-0" in keyed.begun)
    keyed.send(("b", "b-0"))
    keyed.let_go("p-0")
    until(lambda: "b-0" in keyed.ended)
    keyed.engine.close()


def test_what_cannot_be_finished_is_aborted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each lane in flight; none of them is recorded as done."""
    keyed = Keyed(tmp_path, drain_seconds=0.05)
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.hold("a-0", "b-0")
    keyed.send(*messages("abc", 2))
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 2)
    assert keyed.engine.end() == 1
    assert sum("aborting message" in each.message for each in caplog.records) == 2
    assert keyed.ended == ["c-0", "c-1"]
    assert keyed.recorded() == 6
    keyed.engine.close()


def test_a_job_may_stop_the_worker_from_its_lane(keyed: Keyed) -> None:
    """No more messages are started; those in flight end and are recorded."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.failing["b-0"] = qdo.Stop("enough")
    keyed.hold("a-0")
    keyed.send(*messages("ab", 3))
    keyed.engine.start("q")
    until(lambda: keyed.engine.member.draining, "the worker has noticed")
    keyed.let_go("a-0")
    assert keyed.engine.join() == 0
    assert keyed.begun[:2] == ["a-0", "b-0"]
    assert keyed.ended == ["a-0"]
    assert keyed.engine.member.recorded["q"] > 0


def after_out_of_order(keyed: Keyed, tmp_path: Path) -> Keyed:
    """Return a worker without jobs that gets a queue with four messages done above `last`."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.send(*messages("ab", 5))
    keyed.hold("a-0")
    keyed.engine.start("q")
    until(lambda: len(keyed.ended) == 5)
    keyed.engine.member.take_back("q")
    keyed.let_go("a-0")
    until(lambda: not keyed.engine.member.claims)
    nodes, recorded = keyed.engine.registrar.nodes, keyed.engine.registrar.recorded
    keyed.engine.close()
    later = Keyed(tmp_path)
    later.engine.registrar.nodes, later.engine.registrar.recorded = nodes, recorded
    return later


def test_another_order_finds_what_was_done_out_of_line(keyed: Keyed, tmp_path: Path) -> None:
    """A job that is changed to order="queue" repeats nothing that is recorded above `last`."""
    later = after_out_of_order(keyed, tmp_path)
    later.engine.app.job()(later.job)
    later.engine.start("q")
    until(lambda: len(later.ended) == 4)
    assert later.ended == ["a-1", "a-2", "a-3", "a-4"]
    later.send(("a", "a-5"), ("b", "b-5"))
    until(lambda: later.ended[4:] == ["a-5", "b-5"])
    until(lambda: later.recorded() == 0)
    later.engine.close()


@pytest.mark.parametrize("order", ["key", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_whatever_happens(tmp_path: Path, order: Any, seed: int) -> None:
    """Handovers, losses, failures and retries in any mixture: every message ends, those of a
    key in order. Only messages that were unrecorded when the queue was lost run again."""
    chance = random.Random(seed)
    keyed = Keyed(tmp_path)
    tried: set[str] = set()

    def job(message: Message, context: Any) -> None:
        keyed.hand[message.key] += 1
        keyed.clashes += order == "key" and keyed.hand[message.key] > 1
        try:
            if chance.random() < 0.3:
                gevent.sleep(chance.random() / 200)
            if message.body not in tried and chance.random() < 0.1:
                tried.add(message.body)
                raise qdo.Retry(after=chance.random() / 100)
            keyed.ended.append(message.body)
        finally:
            keyed.hand[message.key] -= 1

    keyed.engine.app.job(order=order, concurrency=5)(job)
    sent = [(key, f"{key}-{n}") for n in range(40) for key in "abcdefg"]
    keyed.engine.start("q")
    excused: Counter[str] = Counter()
    for start in range(0, len(sent), 28):
        keyed.send(*sent[start : start + 28])
        gevent.sleep(chance.random() / 50)
        if chance.random() < 0.6 and "q" in keyed.engine.member.claims:
            lost = chance.random() < 0.5
            (keyed.engine.member.lose if lost else keyed.engine.member.take_back)("q")
            until(lambda: not keyed.engine.dispatcher.slots)
            if lost:
                excused.update(set(keyed.ended))
            keyed.engine.member.grant("q")
    until(lambda: {body for _, body in sent} == set(keyed.ended))
    until(lambda: keyed.recorded() == 0)
    assert not keyed.clashes
    counts = Counter(keyed.ended)
    assert all(count <= 1 + excused[body] for body, count in counts.items())
    if order == "key":
        for key in "abcdefg":
            first = list(dict.fromkeys(numbers(keyed.ended, key)))
            assert first == list(range(40))
    keyed.engine.close()


def test_a_settings_policy_may_not_block_without_an_order(tmp_path: Path) -> None:
    """Refused at the start of the worker, by the name of the table."""
    from qdo.jobs.policy_tables import QueuePolicy

    table = QueuePolicy("q*", then="block")
    keyed = Keyed(tmp_path, policies=(table,))
    keyed.engine.app.job(order="none")(keyed.job)
    with pytest.raises(PolicyError, match=r"'q\*'.*order='none'"):
        keyed.engine.worker.run()
    keyed.engine.broker.close()


def test_marks_that_are_read_while_their_lane_runs_count(tmp_path: Path) -> None:
    """An operator's word on a message holds also where its lane runs when it is read."""
    keyed = Keyed(tmp_path, turn_seconds=5.0)
    keyed.engine.app.job(order="key", concurrency=2)(keyed.job)
    keyed.hold("a-0")
    # The first fetch ends with the messages of "b", the second one returns the marked messages.
    keyed.send(("a", "a-0"), *(("b", f"b-{n}") for n in range(15)), ("a", "a-1"), ("a", "a-2"))
    position = keyed.engine.broker.reader("q", 0).fetch(100)[-2][0]
    keyed.engine.registrar.nodes["q"] = QueueNode(
        failure=FailureRecord(position, 3, "no", decision="skip")
    )
    keyed.engine.start("q")
    slots = keyed.engine.dispatcher.slots
    until(lambda: slots["q"].lanes is not None and len(slots["q"].lanes.progress) == 3)
    keyed.let_go("a-0")
    until(lambda: "a-2" in keyed.ended)
    assert "a-1" not in keyed.begun
    keyed.engine.close()


def test_a_turn_that_starts_nothing_waits(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that come mean nothing without claim or lease; looking for them would take a core."""
    looks = []
    advance = lanes.Lanes._advance

    def counted(self: lanes.Lanes) -> Any:
        looks.append(clock())
        return advance(self)

    keyed.engine.app.job(order="key")(keyed.job)
    keyed.hold("a-0")
    keyed.failing["b-0"] = qdo.Retry(after=0.05)
    keyed.send(("a", "a-0"), ("b", "b-0"))
    keyed.engine.start("q")
    until(lambda: "b-0" in keyed.begun)
    monkeypatch.setattr(lanes.Lanes, "_advance", counted)
    lease = keyed.engine.member.lease
    lease.until = clock()
    gevent.sleep(0.3)
    keyed.engine.member.take_back("q")
    gevent.sleep(0.1)
    assert len(looks) < 100
    keyed.let_go("a-0")
    until(lambda: not keyed.engine.member.claims)


def test_a_key_may_wait_longer_than_its_attempts(keyed: Keyed) -> None:
    """Waits are not counted; other keys go on meanwhile."""
    policy = qdo.Policy(attempts=2, backoff_seconds=0.001, backoff_max_seconds=0.002)
    keyed.engine.app.job(order="key", policy=policy)(keyed.job)
    keyed.failing["a-0"] = qdo.Retry(after=0.01, counts=False)
    keyed.send(("a", "a-0"), ("b", "b-0"), ("a", "a-1"))
    keyed.engine.start("q")
    until(lambda: keyed.begun.count("a-0") > 4)
    assert keyed.ended == ["b-0"]
    del keyed.failing["a-0"]
    until(lambda: keyed.ended == ["b-0", "a-0", "a-1"])
    assert {attempt for _, attempt in keyed.attempts} == {1}


def test_reading_that_failed_is_tried_again_while_a_lane_runs(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow message does not hold up reading after a fault; the log names the worker."""
    keyed.engine.app.job(order="key")(keyed.job)
    keyed.hold("a-0")
    keyed.send(("a", "a-0"))
    keyed.engine.start("q")
    until(lambda: keyed.begun == ["a-0"])
    fetcher = keyed.engine.pipeline._fetcher
    fetch, faults = fetcher.fetch, [OSError("no disk")]

    def failing(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return fetch(*args)

    monkeypatch.setattr(fetcher, "fetch", failing)
    keyed.send(("b", "b-0"))
    until(lambda: keyed.ended == ["b-0"])
    (record,) = [each for each in caplog.records if each.name.endswith(".ends.broker")]
    assert record.args is not None
    assert re.fullmatch(r"worker-\d+, queue q, fence \d+", str(record.args[0]))
    assert "no disk" in str(record.args[-1])


def test_a_batch_job_resumes_after_out_of_order_progress(keyed: Keyed, tmp_path: Path) -> None:
    """A job that is changed to batches gets batches of one until the messages above are done."""
    later = after_out_of_order(keyed, tmp_path)
    calls: list[list[str]] = []
    told: list[str] = []
    later.engine.app.observer(lambda event: told.append(event.outcome))

    @later.engine.app.job(batch=10)
    def job(batch: qdo.Batch, context: Any) -> None:
        calls.append([message.body for message in batch])
        if calls[-1] == ["a-2"]:
            raise qdo.FailedAt(0) from qdo.Skip("not this one")

    later.engine.start("q")
    until(lambda: later.recorded() == 0)
    assert calls == [["a-1"], ["a-2"], ["a-3"], ["a-4"]]
    assert told == ["done", "skip", "done", "done"]
    until(lambda: later.engine.dispatcher.slots["q"].state is SlotState.IDLE)
    later.send(("a", "a-5"), ("b", "b-5"))
    until(lambda: calls[4:] == [["a-5", "b-5"]])
    later.engine.close()


def test_what_is_recorded_of_failing_keys_is_bounded(keyed: Keyed) -> None:
    """Thousands of keys may fail at once, and their queue node stays small; blocks come first."""
    policy = qdo.Policy(attempts=2, backoff_seconds=60, backoff_max_seconds=60)

    def job(message: Message, context: Any) -> None:
        keyed.begun.append(message.body)
        raise KeyError("x" * 400) if message.body == "k-999" else ValueError("\u00e4" * 400)

    rules = (qdo.Rule(KeyError, attempts=1, then="block"),)
    keyed.engine.app.job(order="key", policy=dataclasses.replace(policy, rules=rules))(job)
    keyed.send(*((f"k-{n}", f"k-{n}") for n in range(1000)))
    keyed.engine.start("q")
    until(lambda: len(keyed.begun) == 1000)
    claim = keyed.engine.member.claims["q"]
    until(lambda: claim.refresh is not None)
    claim.refresh()  # type: ignore[misc]
    node = QueueNode(claim.done, failure=claim.failure, out_of_order=claim.out_of_order)
    assert len(node.encode()) < 100_000
    assert claim.failure is not None
    assert claim.failure.blocked
    assert claim.out_of_order is not None
    assert len(claim.out_of_order.other_failures) > 30

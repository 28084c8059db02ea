"""Which queue gets a turn, and when a claim's end is reported; no I/O, no real clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from qdo.coordination.protocol.claims import Claim
from qdo.fleet.pause_machine import Pause
from qdo.system.processes import SIGN
from qdo.worker.engine.dispatcher import PAUSE_CHECK_SECONDS, Dispatcher, Loop
from qdo.worker.engine.pauses import PauseGate
from qdo.worker.engine.slot import ClaimReports, Slot, SlotState, TurnResult
from tests.support.fakes.member import FakeMember


class DispatcherSetup:
    """A dispatcher whose turns are played by the test."""

    def __init__(self, concurrency: int = 10) -> None:
        self.now = 1000.0
        self.turns: list[str] = []
        self.cleared: list[str] = []
        self.ends: dict[str, list[TurnResult]] = {}
        self.during: dict[str, Callable[[], object]] = {}
        self.spawned: list[Callable[[], None]] = []
        self.scheduled = 0
        self.dispatcher = Dispatcher(
            self,
            concurrency=concurrency,
            loop=Loop(
                spawn=self.spawned.append,
                breathe=lambda: None,
                schedule=self._schedule,
                clock=lambda: self.now,
            ),
        )
        self.member = FakeMember(self, now=lambda: self.now)

    def _schedule(self) -> None:
        self.scheduled += 1

    # The listener of the fake member.

    def claimed(self, claim: Claim) -> None:
        self.dispatcher.claimed(self.member, claim)

    def releasing(self, claim: Claim) -> None:
        self.dispatcher.releasing(self.member, claim)

    def released(self, claim: Claim) -> None:
        """The counters' business."""

    def undone(self, claim: Claim) -> None:
        """Do nothing: a release follows."""

    def lost(self, claim: Claim) -> None:
        self.dispatcher.lost(claim)

    def repositioned(self, old: Claim, new: Claim) -> None:
        self.dispatcher.repositioned(self.member, old, new)

    # The runner of the turns.

    def turn(self, slot: Slot, member: ClaimReports, claim: Claim) -> TurnResult:
        assert slot.state is SlotState.RUNNING
        self.turns.append(slot.queue)
        during = self.during.pop(slot.queue, None)
        if during is not None:
            during()
        ends = self.ends.get(slot.queue)
        return ends.pop(0) if ends else TurnResult.TIP

    def clear(self, slot: Slot) -> None:
        self.cleared.append(slot.queue)

    def end(self, slot: Slot) -> None:
        self.clear(slot)

    def report_to(
        self, lane_turns_changed: Callable[[int], None], resume: Callable[[Any], None]
    ) -> None:
        """Do nothing: these turns have neither lanes nor permits."""

    # The test's hands.

    def run(self) -> list[str]:
        """Run all spawned turns to the end; return the turns, in order."""
        self.turns.clear()
        while self.spawned:
            self.spawned.pop(0)()
        return list(self.turns)

    def state(self, queue: str) -> SlotState:
        return self.dispatcher.slots[queue].state

    def finished(self) -> list[str]:
        return [queue for what, queue in self.member.events if what == "finished"]


@pytest.fixture
def bench() -> DispatcherSetup:
    return DispatcherSetup()


def test_a_claimed_queue_is_looked_at_once_and_then_idle(bench: DispatcherSetup) -> None:
    """claimed -> ready -> running -> idle, without a wake."""
    bench.member.grant("a")
    assert bench.state("a") is SlotState.READY
    assert bench.run() == ["a"]
    assert bench.state("a") is SlotState.IDLE
    assert bench.dispatcher.all_idle()
    assert bench.dispatcher.runners == 0


def test_a_wake_makes_an_idle_queue_ready(bench: DispatcherSetup) -> None:
    """Only the one that was named, once; unknown names are ignored."""
    bench.member.grant("a", "b")
    bench.run()
    bench.dispatcher.wake(["b", "unknown"])
    bench.dispatcher.wake(["b"])
    assert bench.run() == ["b"]


def test_a_wake_during_the_last_fetch_is_not_lost(bench: DispatcherSetup) -> None:
    """Found at its tip, but woken while running: looked at again."""
    bench.member.grant("a")
    bench.during["a"] = lambda: bench.dispatcher.wake(["a"])
    assert bench.run() == ["a", "a"]
    assert bench.state("a") is SlotState.IDLE


def test_a_queue_never_runs_twice_at_once(bench: DispatcherSetup) -> None:
    """A wake, and another runner, while it runs: it is not taken."""
    seen = []

    def other_runner() -> None:
        bench.dispatcher.wake(["a"])
        bench.dispatcher._run()
        seen.append(list(bench.turns))

    bench.member.grant("a")
    bench.during["a"] = other_runner
    bench.run()
    assert seen == [["a"]]


def test_busy_queues_take_turns(bench: DispatcherSetup) -> None:
    """A long queue goes to the end of the ring after each turn."""
    bench.ends["long"] = [TurnResult.MORE] * 3
    bench.member.grant("long", "b", "c")
    assert bench.run() == ["long", "b", "c", "long", "long", "long"]


def test_a_newcomer_waits_for_one_round_at_most(bench: DispatcherSetup) -> None:
    """It gets its turn after those that are ready now, however much they have."""
    bench.ends["a"] = [TurnResult.MORE] * 5
    bench.ends["b"] = [TurnResult.MORE] * 5
    bench.member.grant("a", "b")
    bench.during["b"] = lambda: bench.member.grant("new")
    turns = bench.run()
    assert turns.index("new") <= 4


def test_no_more_runners_than_allowed() -> None:
    """`concurrency` bounds the greenlets."""
    bench = DispatcherSetup(concurrency=2)
    bench.member.grant("a", "b", "c")
    assert len(bench.spawned) == 2
    assert sorted(bench.run()) == ["a", "b", "c"]


def test_a_waiting_queue_comes_back_when_its_time_has_come(bench: DispatcherSetup) -> None:
    """Backoff: it does not run earlier, and other queues continue."""
    bench.ends["a"] = [TurnResult.WAIT]

    def wait() -> None:
        bench.dispatcher.slots["a"].not_before = bench.now + 5

    bench.during["a"] = wait
    bench.member.grant("a", "b")
    assert bench.run() == ["a", "b"]
    assert bench.scheduled == 1
    assert bench.dispatcher.due() == bench.now + 5
    bench.dispatcher.wake(["a"])
    bench.dispatcher.tick()
    assert bench.run() == []
    assert not bench.dispatcher.all_idle()
    bench.now += 5
    bench.dispatcher.tick()
    assert bench.run() == ["a"]
    assert bench.dispatcher.due() == float("inf")


def test_lost_paused_queues_are_not_logged_as_resumed(
    bench: DispatcherSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """After a long stop the log must not look as if messages were started without a lease."""
    caplog.set_level("INFO")
    bench.ends.update(a=[TurnResult.PAUSED])
    bench.member.grant("a")
    bench.run()
    claim = bench.dispatcher.slots["a"].claim
    assert claim is not None
    assert bench.state("a") is SlotState.PAUSED
    bench.dispatcher.lost(claim)
    bench.now += PAUSE_CHECK_SECONDS
    bench.dispatcher.tick()
    assert [each.levelname for each in caplog.records] == ["WARNING"]  # of the pause


def test_paused_queues_resume_when_the_lease_is_valid(bench: DispatcherSetup) -> None:
    """By themselves, all of them, and not before."""
    bench.ends.update(a=[TurnResult.PAUSED], b=[TurnResult.PAUSED])
    lease = bench.member.lease
    bench.member.grant("a", "b")
    bench.now = lease.until + 1
    bench.run()
    assert bench.state("a") is SlotState.PAUSED
    assert bench.dispatcher.due() == bench.now + PAUSE_CHECK_SECONDS
    bench.now += PAUSE_CHECK_SECONDS
    bench.dispatcher.tick()
    assert bench.run() == []
    lease.until = bench.now + 10
    bench.now += PAUSE_CHECK_SECONDS
    bench.dispatcher.tick()
    assert bench.run() == ["a", "b"]
    assert bench.dispatcher.due() == float("inf")


@pytest.mark.parametrize("end", [TurnResult.TIP, TurnResult.WAIT, TurnResult.PAUSED])
def test_a_queue_that_does_not_run_is_released_at_once(
    bench: DispatcherSetup, end: TurnResult
) -> None:
    """Idle, waiting, paused: `finished` comes within `releasing`."""
    bench.ends["a"] = [end]
    bench.member.grant("a")
    bench.run()
    bench.member.take_back("a")
    assert bench.finished() == ["a"]
    assert "a" not in bench.dispatcher.slots
    bench.now += 1000
    bench.dispatcher.tick()
    bench.dispatcher.wake(["a"])
    assert bench.run() == []


def test_a_ready_queue_that_is_given_back_gets_no_turn(bench: DispatcherSetup) -> None:
    """Old entries of the ring are skipped."""
    bench.member.grant("a")
    bench.member.take_back("a")
    assert bench.finished() == ["a"]
    assert bench.run() == []


@pytest.mark.parametrize("calls", [["take_back"], ["lose", "grant", "take_back"]], ids="-".join)
def test_a_running_queue_is_released_after_its_message(
    bench: DispatcherSetup, calls: list[str]
) -> None:
    """`finished` is not reported while it runs, also under an old claim: no other may start."""
    said: list[list[str]] = []

    def during() -> None:
        for call in calls:
            getattr(bench.member, call)("a")
        said.append(bench.finished())

    bench.during["a"] = during
    bench.member.grant("a")
    bench.run()
    assert said == [[]]
    assert bench.finished() == ["a"]
    assert bench.dispatcher.slots == {}


@pytest.mark.parametrize("end", ["take_back", "lose", "hold", "seek", "lift", "decide"])
def test_a_running_job_learns_that_its_claim_ends(bench: DispatcherSetup, end: str) -> None:
    """No other claim's job does, and no later one of the same queue."""
    gate = PauseGate(bench.dispatcher)
    hold = Pause("1", ("a",))
    seen: list[list[bool]] = []

    def during() -> None:
        if end in ("hold", "lift"):
            gate.apply([hold])
        if end == "lift":
            gate.apply([])
        elif end == "seek":
            bench.member.seek("a", 5)
        elif end == "decide":
            old = bench.member.claims["a"]
            new = Claim("a", old.fence, old.done, old.lease)
            new.before = old
            bench.repositioned(old, new)
        elif end != "hold":
            getattr(bench.member, end)("a")
        seen.append([SIGN.claim_ended("a", 1), SIGN.claim_ended("b", 2)])

    bench.during["a"] = during
    bench.member.grant("a", "b")
    bench.run()
    assert seen == [[end not in ("lift", "decide"), False]]
    assert not SIGN.claims


def test_an_idle_queue_shows_no_end(bench: DispatcherSetup) -> None:
    """No job would forget it."""
    gate = PauseGate(bench.dispatcher)
    bench.member.grant("a", "b", "c")
    bench.run()
    gate.apply([Pause("1", ("a",))])
    bench.member.take_back("b")
    bench.member.lose("c")
    assert not SIGN.claims


@pytest.mark.parametrize("calls", [["lose"], ["lose", "grant", "lose"]], ids="-".join)
def test_nothing_is_said_of_a_queue_lost_while_running(
    bench: DispatcherSetup, calls: list[str]
) -> None:
    """Neither `finished` nor a further turn; a successor that is lost, too, is forgotten."""
    bench.ends["a"] = [TurnResult.MORE]
    bench.during["a"] = lambda: [getattr(bench.member, call)("a") for call in calls]
    bench.member.grant("a")
    assert bench.run() == ["a"]
    assert bench.finished() == []
    assert bench.dispatcher.slots == {}


def test_a_reclaimed_queue_begins_after_the_message_in_flight(bench: DispatcherSetup) -> None:
    """The new claim waits for the old one's end, then starts from nothing read."""
    claims = bench.member.grant("a")
    started: list[Claim | None] = []

    def during() -> None:
        bench.member.lose("a")
        bench.member.grant("a")
        slot = bench.dispatcher.slots["a"]
        started.append(slot.claim)

    bench.during["a"] = during
    assert bench.run() == ["a", "a"]
    assert started == [None]
    assert bench.dispatcher.slots["a"].claim is bench.member.claims["a"]
    assert bench.dispatcher.slots["a"].claim is not claims[0]


@pytest.mark.parametrize("end", [TurnResult.TIP, TurnResult.WAIT, TurnResult.PAUSED])
def test_a_moved_queue_is_checked_again(bench: DispatcherSetup, end: TurnResult) -> None:
    """A seek wakes even an idle queue, and ends a backoff."""
    bench.ends["a"] = [end]
    bench.member.grant("a")
    bench.run()
    bench.cleared.clear()
    new = bench.member.seek("a", 5)
    assert bench.run() == ["a"]
    assert bench.dispatcher.slots["a"].claim is new
    assert "a" in bench.cleared
    assert bench.finished() == []


@pytest.mark.parametrize("places", [[5], [5, 9]])
def test_a_queue_moved_while_running_goes_on_at_the_new_place(
    bench: DispatcherSetup, places: list[int]
) -> None:
    """At the last of several. The old claim ends with its message; it is not released."""
    bench.ends["a"] = [TurnResult.MORE]
    bench.during["a"] = lambda: [bench.member.seek("a", place) for place in places]
    bench.member.grant("a")
    assert bench.run() == ["a", "a"]
    claim = bench.dispatcher.slots["a"].claim
    assert claim is not None
    assert claim.done == places[-1]
    assert bench.finished() == []


def test_progress_under_way_is_noted(bench: DispatcherSetup) -> None:
    """A turn of slow jobs is checkpointed on the way; idle queues are not looked at."""
    bench.during["a"] = bench.dispatcher.note_progress
    bench.member.grant("a", "b")
    bench.run()
    assert bench.member.events == [("progress", "a")]


def test_an_idle_queue_takes_less_than_2_kib(bench: DispatcherSetup) -> None:
    """10,000 idle queues: slot, claim and table entry, without greenlets."""
    bench.member.grant("a")
    bench.run()
    slot = bench.dispatcher.slots["a"]
    assert slot.reader is None
    assert bench.spawned == []
    size = sys.getsizeof(slot) + sys.getsizeof(slot.claim) + sys.getsizeof(slot.queue)
    assert size < 1024

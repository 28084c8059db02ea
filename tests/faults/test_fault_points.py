"""A worker dies, or loses its lease, between any two steps: the delivery rules still hold.

Every step of a run with every outcome is found by running it once undisturbed. Then it is run
again for each step, with the fault there, and once the next owners are done the messages, the dead
letters and the effects of the jobs are compared with the rules of docs/delivery.rst.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qdo
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.embedded.dead_letters import EmbeddedDeadLetters
from qdo.jobs.job import Checkpoint
from qdo.jobs.options import Order
from qdo.ops.decisions import OperatorDecision
from qdo.testing import POINTS, TestKit
from qdo.testing.faults import Step

QUEUES = ("a", "b")
BODIES = ("one", "flaky", "two", "forward", "refused", "three", "bad", "unwanted", "four")
FAILS = {"bad", "refused", "unwanted"}
LETTERS = (b"bad", b"refused")
ATTEMPTS = 3
Mode: TypeAlias = Literal["interval", "slow", "message", "key", "batch"]
MODES: list[Mode] = ["interval", "slow", "message", "key", "batch"]
"""``slow``: jobs wait while progress is recorded, as in a job that yields; ``key``:
order="key", with all messages in one lane; ``batch``: up to four messages in one call."""


@dataclass(frozen=True, slots=True)
class StartedJob:
    """A start of a job, and the recorded progress of its queue at that time."""

    queue: str
    position: int
    body: str
    attempt: int
    fence: int
    last: int


@dataclass
class FaultPointApp:
    """An app whose jobs end in every way, and the results of its jobs.

    :ivar starts: every start of a job, also those that ended with their process.
    :ivar effects: effects of jobs, and a sink that compares fence and position would refuse
        when it comes twice: see `qdo.worker.metrics.catalog`.
    """

    mode: Mode
    attempts: int = ATTEMPTS
    starts: list[StartedJob] = field(default_factory=list)
    effects: list[StartedJob] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    highest: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.app = qdo.App("faulty", job_failure=lambda message, context, error: None)
        checkpoint: Checkpoint = "message" if self.mode == "message" else "interval"
        policy = qdo.Policy(attempts=self.attempts, backoff_seconds=1, backoff_max_seconds=4)
        if self.mode == "batch":
            self.app.job(batch=4, policy=policy)(self.batch_job)
        else:
            order: Order = "key" if self.mode == "key" else "queue"
            self.app.job(checkpoint=checkpoint, policy=policy, order=order)(self.job)
        self.kit = TestKit(self.app)

    def job(self, message: qdo.Message, context: Any) -> None:
        start = StartedJob(
            message.queue,
            message.position,
            message.body,
            message.attempt,
            message.fence,
            self.kit.last(message.queue),
        )
        self.starts.append(start)
        if self.mode == "slow":
            self.kit.spend(0.3)
        if message.body == "flaky" and message.attempt == 1:
            raise ConnectionError("once")
        if message.body == "refused":
            raise qdo.DeadLetter("refused")
        if message.body == "unwanted":
            raise qdo.Skip("unwanted")
        if message.body == "bad":
            raise ValueError("always")
        if message.body == "forward":
            self.app.send("sent", message.queue)
        self.effects.append(start)
        self.add(start)

    def batch_job(self, batch: qdo.Batch, context: Any) -> None:
        for index, message in enumerate(batch):
            try:
                self.job(message, context)
            except Exception as error:
                raise qdo.FailedAt(index) from error

    def add(self, start: StartedJob) -> None:
        """Count an effect, in the manner of the conditional write of docs/delivery.rst."""
        fence, position = self.highest.get(start.queue, (0, 0))
        if start.fence >= fence and start.position > position:
            self.highest[start.queue] = start.fence, start.position
            self.totals[start.queue] += 1

    def play(self) -> None:
        """Send all messages, wait until the live workers have processed them, and hand over."""
        with self.kit as kit:
            for body in BODIES:
                for queue in QUEUES:
                    kit.send(queue, body)
            kit.run_until_settled()
            kit.hand_over()
            kit.run_until_settled()  # where the fault hit the handover
            self.sent = kit.done("sent")
            self.letters = Counter((each.queue, each.body) for each in kit.dead_letters())
            self.skipped = {(each.queue, each.body) for each in kit.attempts(outcome="skip")}
            self.waiting = [body for queue in (*QUEUES, "sent") for body in kit.waiting(queue)]
            self.unhappened = kit.faults_left
            self.steps = kit.steps


def undisturbed(mode: Mode) -> list[Step]:
    """Return the steps of a run in which nothing happens."""
    run = FaultPointApp(mode)
    run.play()
    return run.steps


STEPS = {mode: undisturbed(mode) for mode in MODES}
EVERY_STEP = [
    pytest.param(mode, number, id=f"{mode}-{number}-{step.point}-{step.queue}")
    for mode, steps in STEPS.items()
    for number, step in enumerate(steps, start=1)
]
EVERY_CRASH = [
    pytest.param(*each.values, host, id=f"{each.id}-{'host' if host else 'process'}")
    for each in EVERY_STEP
    for host in (False, True)
    if not host or each.values[0] in ("interval", "batch")
]
"""Of a dead host the other workers know later: that is the same for each mode."""


def check_nothing_is_lost(run: FaultPointApp) -> None:
    """Every message ended as it should, and nothing waits."""
    assert run.waiting == []
    done = {(start.queue, start.body) for start in run.effects}
    expected = {(queue, body) for queue in QUEUES for body in BODIES if body not in FAILS}
    assert {each for each in done if each[0] != "sent"} == expected
    assert set(run.sent) == set(QUEUES)
    assert run.letters.keys() == {(queue, b'"%b"' % body) for queue in QUEUES for body in LETTERS}
    assert set(run.letters.values()) == {1}
    assert run.skipped == {(queue, "unwanted") for queue in QUEUES}


def check_order(run: FaultPointApp) -> None:
    """Under a fence messages start in order, and the first one is right behind `last`."""
    positions: dict[str, list[int]] = {}
    for start in run.starts:
        positions.setdefault(start.queue, []).append(start.position)
    set_aside = {start.position for start in run.starts if start.body in FAILS}
    stored = {queue: sorted(set(found)) for queue, found in positions.items()}
    begun: dict[tuple[str, int], int] = {}
    for start in run.starts:
        before = begun.get((start.queue, start.fence))
        known = stored[start.queue]
        if before is None:
            behind = [position for position in known if position > start.last]
            while run.mode == "key" and behind[0] in set_aside and behind[0] < start.position:
                behind.pop(0)  # passed in the same turn, and not recorded yet
            assert start.position == behind[0]
        else:
            following = known[known.index(before) : known.index(before) + 2]
            assert start.position in following
        begun[start.queue, start.fence] = start.position
    for queue, known in stored.items():
        first = dict.fromkeys(start.position for start in run.starts if start.queue == queue)
        assert list(first) == known


def repeated(run: FaultPointApp) -> dict[tuple[str, int], int]:
    """Return how often each message was run again after it had been run to its end."""
    counts = Counter((start.queue, start.position) for start in run.effects)
    return {place: count - 1 for place, count in counts.items() if count > 1}


def check_counts(run: FaultPointApp) -> None:
    """A sink that compares fence and position counts each message once."""
    assert {queue: run.totals[queue] for queue in QUEUES} == dict.fromkeys(QUEUES, 6)


def test_the_run_has_every_fault_point() -> None:
    """The enumeration below leaves out no kind of step but those of pools."""
    of_pools = {f"{when}-{what}" for when in ("before", "after") for what in ("take", "end")}
    for steps in STEPS.values():
        assert {step.point for step in steps} == set(POINTS) - of_pools


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_repeated_where_nothing_happens(mode: Mode) -> None:
    """The oracle itself: an undisturbed run passes every check, with no repetition."""
    run = FaultPointApp(mode)
    run.play()
    check_nothing_is_lost(run)
    check_order(run)
    check_counts(run)
    assert repeated(run) == {}
    assert run.sent == list(QUEUES)
    for queue in QUEUES:
        attempts = [
            each.attempt for each in run.starts if (each.queue, each.body) == (queue, "bad")
        ]
        assert attempts == [1, 2, 3]


@pytest.mark.parametrize(("mode", "number", "host"), EVERY_CRASH)
def test_a_crash_between_any_two_steps(mode: Mode, number: int, host: bool) -> None:
    """Nothing is lost, order holds, and only unrecorded messages are repeated, once."""
    run = FaultPointApp(mode)
    run.kit.crash_at(nth=number, host=host)
    run.play()
    assert run.unhappened == 0
    check_nothing_is_lost(run)
    check_order(run)
    check_counts(run)
    again = repeated(run)
    assert set(again.values()) <= {1}
    assert len({queue for queue, _ in again}) <= 1
    if mode in ("slow", "message"):
        assert len(again) <= 1
    crashed_in = run.steps[number - 1]
    if crashed_in.point in ("after-claim", "before-fetch", "after-checkpoint", "after-release"):
        assert again == {}
    attempts = Counter((start.queue, start.position, start.body) for start in run.starts)
    bad = [count for (_, _, body), count in attempts.items() if body == "bad"]
    assert max(bad) <= ATTEMPTS + 1  # a crash may forget an attempt that was not recorded


@pytest.mark.parametrize(("mode", "number"), EVERY_STEP)
def test_a_lease_lost_between_any_two_steps(mode: Mode, number: int) -> None:
    """The former owner finishes at most the message in flight, and a sink can reject its write."""
    run = FaultPointApp(mode)
    run.kit.lose_lease_at(nth=number)
    run.play()
    assert run.unhappened == 0
    check_nothing_is_lost(run)
    check_counts(run)
    late = [
        start
        for index, start in enumerate(run.effects)
        if any(
            other.queue == start.queue and other.fence > start.fence
            for other in run.effects[:index]
        )
    ]
    assert len(late) <= (4 if mode == "batch" else 1)
    assert set(repeated(run).values()) <= {1}


FAULTS = st.lists(
    st.tuples(st.sampled_from(["crash", "host", "lease"]), st.integers(1, 200)),
    min_size=2,
    max_size=4,
)


@settings(max_examples=150)
@given(mode=st.sampled_from(MODES), faults=FAULTS)
@pytest.mark.slow
def test_several_faults_in_a_run(mode: Mode, faults: list[tuple[str, int]]) -> None:
    """Also for workers that take over: each fault repeats only unrecorded messages."""
    run = FaultPointApp(mode, ATTEMPTS + len(faults))  # each crash may count as one
    for kind, number in faults:
        if kind == "lease":
            run.kit.lose_lease_at(nth=number)
        else:
            run.kit.crash_at(nth=number, host=kind == "host")
    run.play()
    check_nothing_is_lost(run)
    check_counts(run)
    assert max(repeated(run).values(), default=0) <= len(faults)


def test_a_dead_letter_that_cannot_be_stored_is_not_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its broker fails, and while the queue waits for it the worker dies: nothing is lost."""
    app = qdo.App("full")

    @app.job(policy=qdo.Policy(attempts=1))
    def job(message: qdo.Message, context: Any) -> None:
        raise ValueError("no")

    faults = [OSError("no space left")]
    bury = EmbeddedDeadLetters.store

    def failing(self: EmbeddedDeadLetters, letter: DeadLetterRecord) -> None:
        if faults:
            raise faults.pop()
        bury(self, letter)

    monkeypatch.setattr(EmbeddedDeadLetters, "store", failing)
    with TestKit(app) as kit:
        kit.send("q", "bad")
        kit.run_until_idle()
        assert (faults, kit.dead_letters(), kit.waiting("q")) == ([], [], ["bad"])
        kit.crash()
        kit.run_until_settled()
        assert [letter.body for letter in kit.dead_letters()] == [b'"bad"']
        assert kit.waiting("q") == []


def test_who_has_lost_the_lease_sets_nothing_aside() -> None:
    """Its attempt failed, the one of the new owner did not: that counts."""
    app = qdo.App("late")

    @app.job(policy=qdo.Policy(attempts=1))
    def job(message: qdo.Message, context: Any) -> None:
        if message.fence == 1:
            kit.lose_lease()
            raise ValueError("no")

    with TestKit(app) as kit:
        kit.send("q", 1)
        kit.run_until_settled()
        assert [(each.outcome, each.fence > 1) for each in kit.attempts()] == [
            ("done", True),
            ("lost", False),
        ]
        assert kit.dead_letters() == []


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_a_crash_at_any_step_of_a_blocked_queue(
    verdict: OperatorDecision,
) -> None:
    """Neither the block nor the decision is forgotten once it is recorded; order holds."""
    step = 0
    left = 0
    while not left:
        step += 1
        mended: list[bool] = []
        app = qdo.App("blocked")

        @app.job(policy=qdo.Policy(attempts=2, backoff_seconds=1, then="block"))
        def job(message: qdo.Message, context: Any, mended: list[bool] = mended) -> None:
            if message.body == "vase" and not mended:
                raise LookupError("no box")

        with TestKit(app) as kit:
            for body in ("book", "vase", "lamp"):
                kit.send("q", body)
            kit.crash_at(nth=step)
            kit.run_until_settled()
            assert kit.blocked()["q"].attempts in (2, 3)
            assert kit.waiting("q") == ["vase", "lamp"]
            mended.append(True)
            kit.decide("q", verdict)
            kit.run_until_settled()
            kit.hand_over()
            left = kit.faults_left
            assert (kit.waiting("q"), kit.blocked()) == ([], {})
            expected = ["book", "vase", "lamp"] if verdict == "retry" else ["book", "lamp"]
            assert list(dict.fromkeys(kit.done())) == expected
            assert set(kit.skipped()) == ({"vase"} if verdict == "skip" else set())
            letters = [letter.body for letter in kit.dead_letters()]
            assert letters == ([b'"vase"'] if verdict == "dead-letter" else [])
    assert step > 20

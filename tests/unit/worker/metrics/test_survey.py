"""The states of queues, and the age of the oldest message, as their owner knows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qdo.brokers.catalog import Backlog
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import NotFoundError
from qdo.message import Message
from qdo.positions import TIME_POSITIONS, position_of_time
from qdo.worker.engine.slot import Slot, SlotState
from qdo.worker.metrics.duty import ASKED, CHUNK, STATES, QueueSurvey, state_of

NOW = 1_700_000_000.0
DONE = position_of_time(NOW - 1000)


def at(seconds_ago: float) -> int:
    return position_of_time(NOW - seconds_ago)


def make(state: SlotState, queue: str = "q", done: int = DONE) -> tuple[Slot, Claim]:
    slot = Slot(queue)
    slot.state = state
    slot.claim = claim = Claim(queue, 1, done, Lease(10.0, 0.0))
    return slot, claim


def surveyed(*slots: Slot) -> QueueSurvey:
    survey = QueueSurvey()
    survey.take(slots, NOW, lambda: None)
    return survey


class CountingBroker:
    """A broker that records which queues are looked up."""

    def __init__(self, oldest: float | None = None, polled: bool = False) -> None:
        self.capabilities = SimpleNamespace(subscriptions=polled)
        self.positions = TIME_POSITIONS
        self.catalog = self
        self.names: list[str] = []
        self._oldest = oldest

    def backlog(self, queue: str, after: int) -> Backlog:
        assert after == DONE + len(queue)
        self.names.append(queue)
        if self._oldest is None:
            raise NotFoundError(what="queue", name=queue)
        return Backlog(1, at(self._oldest), 0)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SlotState.IDLE, "idle"),
        (SlotState.READY, "ready"),
        (SlotState.RUNNING, "running"),
        (SlotState.WAITING, "waiting"),
        (SlotState.LIMITED, "limited"),
        (SlotState.PAUSED, "lease-expired"),
        (SlotState.HELD, "waiting"),
    ],
)
def test_states_of_slots(state: SlotState, expected: str) -> None:
    slot, _ = make(state)
    assert state_of(slot) == expected
    assert surveyed(slot).states == {**dict.fromkeys(STATES, 0), expected: 1}


@pytest.mark.parametrize("state", [SlotState.WAITING, SlotState.RUNNING, SlotState.HELD])
def test_a_failure_of_the_next_message_names_the_state(state: SlotState) -> None:
    """Until the message is done, whatever the slot does."""
    slot, claim = make(state)
    claim.failure = FailureRecord(DONE + 1, 1, "E")
    assert state_of(slot) == "failing"
    claim.failure = FailureRecord(DONE + 1, 1, "E", blocked_since=NOW)
    assert state_of(slot) == "blocked"
    claim.failure = FailureRecord(DONE + 1, 0, "no key", blocked_since=NOW, retry_at=NOW)
    assert state_of(slot) == "blocked"
    claim.done = DONE + 1
    assert state_of(slot) not in ("failing", "blocked")


def test_held_queues_are_paused() -> None:
    """Also while their message in flight is being finished, and if they fail."""
    slot, claim = make(SlotState.RUNNING)
    claim.failure = FailureRecord(DONE + 1, 1, "E")
    claim.pause()
    assert state_of(slot) == "paused"


def test_a_queue_whose_broker_fails_is_unreadable() -> None:
    slot, _ = make(SlotState.WAITING)
    slot.broker_failures = 1
    assert state_of(slot) == "unreadable"


def test_a_lost_queue_runs_until_its_message_has_ended() -> None:
    slot, _ = make(SlotState.RUNNING)
    slot.claim = None
    slot.message = Message("q", at(5), None)
    survey = surveyed(slot)
    assert (survey.states["running"], survey.jobs) == (1, 1)


@pytest.mark.parametrize("state", [SlotState.IDLE, SlotState.STILL, SlotState.HELD])
def test_queues_that_wait_for_somebody_have_no_age(state: SlotState) -> None:
    slot, claim = make(state)
    slot.rows = iter([(at(50), b"", None, None)])
    if state is SlotState.HELD:
        claim.failure = FailureRecord(at(50), 1, "E", blocked_since=NOW)
    if state is SlotState.STILL:
        claim.pause()
    assert surveyed(slot).oldest is None


def test_the_oldest_of_all_queues_counts() -> None:
    """What each owner knows: the message in flight, the failing one, or the next one it read."""
    in_flight, _ = make(SlotState.RUNNING)
    in_flight.message = Message("q", at(10), None)
    failing, claim = make(SlotState.WAITING)
    claim.failure = FailureRecord(at(30), 1, "E")
    read, _ = make(SlotState.READY)
    read.rows = iter([(at(20), b"", None, None)])
    gathering, _ = make(SlotState.WAITING)
    gathering.gathered = [(at(15), b"", None, None)]
    polled, _ = make(SlotState.RUNNING)
    polled.subscription = SimpleNamespace(behind_seconds=lambda: 40.0)  # type: ignore[assignment]
    slots = [gathering, in_flight, read, failing, polled]
    for slot, seconds in zip(slots, (15, 10, 20, 30, 40), strict=True):
        assert surveyed(slot).age(NOW) == pytest.approx(seconds)
    assert surveyed(*slots).age(NOW) == pytest.approx(40)
    assert next(read.rows)[0] == at(20)  # looking takes no row


def test_delayed_messages_count_from_their_due_time() -> None:
    slot, _ = make(SlotState.RUNNING)
    headers = {"qdo-due": str(NOW - 3), "qdo-sent": str(NOW - 500)}
    slot.message = Message("q", at(3), None, headers=headers)
    assert surveyed(slot).age(NOW) == pytest.approx(3, abs=0.1)


def test_what_the_owner_does_not_know_is_looked_up() -> None:
    """At most for the few queues that are farthest behind."""
    names = ["q" * n for n in range(1, 20)]
    slots = [make(SlotState.READY, name, DONE + len(name))[0] for name in reversed(names)]
    survey, broker = surveyed(*slots), CountingBroker(oldest=70)
    survey.ask(broker)  # type: ignore[arg-type]
    assert broker.names == names[:ASKED]
    assert survey.age(NOW) == pytest.approx(70)


def test_a_polled_broker_is_never_asked() -> None:
    survey, broker = surveyed(make(SlotState.READY)[0]), CountingBroker(oldest=70, polled=True)
    survey.ask(broker)  # type: ignore[arg-type]
    assert (broker.names, survey.oldest) == ([], None)


def test_an_error_of_the_broker_is_left_to_the_queue() -> None:
    survey, broker = surveyed(*[make(SlotState.READY, "q", DONE + 1)[0]] * 5), CountingBroker()
    survey.ask(broker)  # type: ignore[arg-type]
    assert len(broker.names) == 1


def test_others_get_their_turn_during_a_long_survey() -> None:
    breaths: list[Any] = []
    slot, _ = make(SlotState.IDLE)
    QueueSurvey().take([slot] * (3 * CHUNK + 1), NOW, lambda: breaths.append(1))
    assert len(breaths) == 3

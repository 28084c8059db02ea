"""Random stories of workers on one queue of SQS in virtual time; see `tests.simulation.sqs`."""

from __future__ import annotations

import pytest

from qdo.jobs.options import Order
from tests.simulation.sqs.mutants import MUTANTS
from tests.simulation.sqs.world import BrokenInvariant, SqsWorld, world


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "order", "batch"),
    [
        ("fifo", "key", None),
        ("fifo", "queue", None),
        ("fifo", "queue", 7),
        ("standard", "none", None),
    ],
)
def test_nothing_is_lost_or_out_of_order(
    seed: int, kind: str, order: Order, batch: int | None
) -> None:
    """Whatever befalls workers and network, all is done, in order, and once if it can be."""
    with world(seed, kind, order, batch) as stage:
        stage.tell(30)


def bury_first(stage: SqsWorld) -> None:
    """Let the first of five messages fail, and its dead letter take long."""
    stage.begin_worker()
    stage.send(5, groups=1)
    for number, fact in stage.facts.items():
        fact.seconds, fact.fails = 0.01, 99 if number == 1 else 0
    stage.bury_seconds = (100.0,)
    stage.go_on(20.0)


@pytest.mark.parametrize(("order", "batch"), [("key", None), ("queue", 7)])
def test_a_message_taken_back_while_its_dead_letter_is_stored(
    order: Order, batch: int | None
) -> None:
    """Its queue continues: the message comes again, with those behind it."""
    with world(1, "fifo", order, batch) as stage:
        bury_first(stage)
        stage.server.steal(1.0)
        stage.go_on(60.0)
        stage.bury_seconds = (0.5,)
        stage.finish()


@pytest.mark.parametrize(("order", "batch"), [("key", None), ("queue", 7)])
def test_a_message_is_in_flight_until_its_dead_letter_is_stored(
    order: Order, batch: int | None
) -> None:
    """Whatever becomes of those behind it, and of the claim: it is held, and then deleted."""
    with world(1, "fifo", order, batch) as stage:
        bury_first(stage)
        stage.server.steal(1.0, only={2})
        stage.go_on(40.0)
        stage.hand_over()
        stage.finish()


def test_followers_of_a_reclaimed_message_wait_for_it() -> None:
    """They are held by this owner still, and would run before it otherwise."""
    with world(1, "fifo", "key") as stage:
        stage.begin_worker()
        stage.send(5, groups=1)
        for number, fact in stage.facts.items():
            fact.seconds, fact.fails = 100.0 if number == 1 else 0.01, 0
        stage.go_on(20.0)
        assert stage.server.steal(1.0, only={2}) == [2]
        stage.finish()


SEEDS = 10
"""Stories in which a mistake must show at the latest."""


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_mistakes_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A story that finds nothing would be worth nothing."""
    plant, kind, order = MUTANTS[name]
    plant(monkeypatch)
    for seed in range(SEEDS):
        with world(seed, kind, order) as stage:
            try:
                stage.tell(30)
            except BrokenInvariant:
                return
    pytest.fail(f"{SEEDS} stories hold although the code {name}")

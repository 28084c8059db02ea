"""The order of a queue is the order of its commits: `qdo.postgresql.schema`.

Transactions of several sessions are interleaved in every way. After each step a reader reads on,
and a listener looks which queues have changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdo.postgresql import schema
from tests.support.postgresql.schedules import Interleaver, OrderError, Step, interleaved
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase

PROGRAMS = {
    "append": ("append A", "commit"),
    "send": ("send A", "commit"),
    "stage": ("stage A", "commit"),
    "undone": ("stage A", "append A", "rollback"),
    "at once": ("stage A", "now", "commit"),
    "savepoint": ("savepoint", "append A", "back", "stage A", "commit"),
    "large": ("append A", "savepoint", "large A", "back", "commit"),
    "staged before": ("stage A", "savepoint", "now", "back", "commit"),
}
"""What a session does in one transaction."""
SMALL = ("append", "stage", "undone", "at once")


@pytest.fixture
def stage(postgresql: PostgresqlDatabase) -> Iterator[Interleaver]:
    """Four sessions on a schema."""
    found = Interleaver(postgresql.conninfo(), 4)
    yield found
    found.close()


def programs(level: str, *names: str) -> list[list[str]]:
    return [[f"begin {level}", *PROGRAMS[name]] for name in names]


# --- every order ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "queue", "names"),
    [
        pytest.param("rc", "A", SMALL, marks=pytest.mark.long("every pair of transactions")),
        ("rc", "A", ("append", "stage")),
        ("rc", "a", ("append", "stage")),
        ("rr", "A", ("append", "stage")),
        ("s", "A", ("append", "stage")),
        ("s", "a", ("stage",)),
    ],
)
def test_two_transactions(
    stage: Interleaver, level: str, queue: str, names: tuple[str, ...]
) -> None:
    for pair in itertools.combinations_with_replacement(names, 2):
        for steps in interleaved(programs(level, *pair)):
            if steps[0][0] == 0 or pair[0] != pair[1]:  # the other half is the same
                stage.run(renamed(steps, queue), queue)


@pytest.mark.parametrize("name", ["savepoint", "large", "staged before"])
def test_savepoints(stage: Interleaver, name: str) -> None:
    for steps in interleaved(programs("rc", name, "append")):
        stage.run(steps, "A")


def test_three_transactions(stage: Interleaver) -> None:
    """Without their beginnings, which lock nothing at this level."""
    begun = [(number, "begin rc") for number in range(3)]
    for steps in interleaved([PROGRAMS[name] for name in ("append", "stage", "stage")]):
        stage.run([*begun, *steps], "A")


def renamed(steps: list[Step], queue: str) -> list[Step]:
    return [(number, action.replace(" A", f" {queue}")) for number, action in steps]


# --- any order --------------------------------------------------------------------------

QUEUES = "ABcd"
ACTIONS = [
    *(f"begin {level}" for level in ("rc", "rr", "s")),
    *(f"{word} {queue}" for word in ("append", "send", "stage", "large") for queue in QUEUES),
    *("commit", "rollback", "savepoint", "back", "now"),
]
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ACTIONS)), min_size=4, max_size=30)


@given(steps=STEPS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schedule(stage: Interleaver, steps: list[Step]) -> None:
    begun = [(number, "begin rc") for number in range(4)]
    stage.run([*begun, *steps], QUEUES)


# --- the tests find what would break the rule -------------------------------------------


def without_lock(text: str) -> str:
    return changed(text, "ORDER BY id FOR NO KEY UPDATE\n            ) AS", "ORDER BY id\n) AS")


def positions_looked_at(text: str) -> str:
    """A listener that remembers the largest position it has seen.

    It also forgets which transactions run: how far its snapshots list those depends on what else
    happens on the server.
    """
    largest = "coalesce((SELECT max(position) + 1 FROM {schema}.messages), 0)"
    text = changed(text, "pg_snapshot_xmax(pg_current_snapshot())::text::bigint", largest)
    text = changed(text, "messages.xid = ANY (seen_running)", "false")
    bounds = "messages.xid >= seen_next AND messages.xid < next_xid"
    return changed(text, bounds, "position >= seen_next")


def position_before_lock(text: str) -> str:
    """A sender that takes its position first."""
    lock = "    IF {schema}.lock_queues(of_app, names, lock_ms) THEN\n"
    take = "    first := {schema}.reserve(count);\n"
    start = text.index("CREATE OR REPLACE FUNCTION {schema}.append")
    append = changed(changed(text[start:], take, ""), lock, take + lock)
    return text[:start] + append


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize("mutate", [without_lock, positions_looked_at, position_before_lock])
def test_a_broken_rule_is_found(
    mutate: Callable[[str], str],
    bare_database: PostgresqlDatabase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = schema.script
    mutant = mutate(script("{schema}", 3600)).replace("{schema}", "qdo")
    monkeypatch.setattr(schema, "script", lambda *given: mutant)
    prepared(bare_database.url())
    stage = Interleaver(bare_database.conninfo(), 3)
    try:
        with pytest.raises(OrderError):
            run_all(stage)
    finally:
        stage.close()


def run_all(stage: Interleaver) -> None:
    begun = [(number, "begin rc") for number in range(3)]
    found = [("append A", "append A", "commit"), ("append B", "commit"), ("append A",)]
    for steps in interleaved(found):
        stage.run([*begun, *steps], "AB")

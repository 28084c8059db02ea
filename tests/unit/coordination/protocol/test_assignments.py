"""What fits into an assignment."""

from __future__ import annotations

import random

import pytest

from qdo.coordination.protocol.assignments import Assignments, Change
from qdo.coordination.protocol.machine import Committed, CreateOp, SetOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import MAX_VALUE_BYTES
from qdo.coordination.znodes.worker_node import WorkerNode, parse_assignment

WORKERS = {"worker-0000000001": WorkerNode()}


def _names(count: int) -> list[str]:
    """Return names that cannot be compressed to less than about half."""
    numbers = random.Random(1)
    return [f"a{numbers.getrandbits(760):0190x}" for _ in range(count)]


@pytest.fixture
def assignments() -> Assignments:
    return Assignments(
        Layout.of("app"),
        commit=lambda ops, then: then(Committed(1, (-1, *range(len(ops))))),
        observe=lambda request, then: None,
        on_conflict=lambda: None,
    )


def _plan(assignments: Assignments, queues: list[str]) -> list[Change]:
    changes = assignments.changes(WORKERS, {"worker-0000000001": queues})
    if changes:
        assignments.write(changes)
    return changes


def test_new_names_do_not_crowd_out_queues_that_were_assigned(
    assignments: Assignments, caplog: pytest.LogCaptureFixture
) -> None:
    """However many arrive, and wherever they stand in the alphabet."""
    old = [f"q{number}" for number in range(1000)]
    ((_, share, op),) = _plan(assignments, old)
    assert (share, type(op)) == (frozenset(old), CreateOp)
    flood = _names(10_000)
    ((_, share, op),) = _plan(assignments, [*old, *flood])
    assert isinstance(op, SetOp)
    assert share > frozenset(old)
    assert parse_assignment(op.data) == share == assignments.queues()
    assert MAX_VALUE_BYTES // 2 < len(op.data) <= MAX_VALUE_BYTES
    (record,) = caplog.records
    assert record.args == ("11000 queues", "worker-0000000001", 11_000 - len(share))
    assert _plan(assignments, [*old, *flood]) == []  # nothing flutters


def test_cut_queues_get_the_room_of_those_that_go(assignments: Assignments) -> None:
    """As soon as the next plan is made."""
    flood = _names(10_000)
    ((_, first, _),) = _plan(assignments, flood)
    rest = [name for name in flood if name not in first][:4000]
    ((_, share, _),) = _plan(assignments, rest)
    assert share == frozenset(rest)

"""The planner of a fleet without filters: with provably the fewest moves, whatever the order.

The tests of the planner for filters play such fleets, too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdo.coordination.protocol.assignments import Assignments, Change
from qdo.coordination.protocol.machine import Committed, CreateOp, SetOp
from qdo.coordination.protocol.planner import plan
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import MAX_VALUE_BYTES
from qdo.coordination.znodes.worker_node import WorkerNode, parse_assignment
from tests.support.plans import moves

Holdings = dict[str, list[str]]

QUEUES = st.lists(st.integers(0, 40).map("q{}".format), unique=True, max_size=24)
WORKERS = st.lists(st.integers(0, 9).map("w{}".format), unique=True, max_size=7)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[str], list[str], Holdings]:
    """Queues, workers, and current owners: also unknown ones, and queues with several owners."""
    queues, workers = draw(QUEUES), draw(WORKERS)
    holders = draw(WORKERS)
    held = st.lists(st.integers(0, 40).map("q{}".format), unique=True, max_size=16)
    return queues, workers, {holder: draw(held) for holder in {*workers, *holders}}


def owners(
    queues: Iterable[str], workers: Iterable[str], current: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Return the current owner of each queue, as in the planner's documentation."""
    known, found = set(queues), dict[str, str]()
    for worker in sorted(set(workers)):
        for queue in current.get(worker, ()):
            if queue in known:
                found.setdefault(queue, worker)
    return found


def fewest_moves(queues: list[str], workers: list[str], owner: Mapping[str, str]) -> int:
    """Return the fewest moves of any balanced plan, by trying who gets the larger shares.

    With the shares fixed a worker keeps as many of its queues as fit, and no plan can let it
    keep more. So the minimum over all choices of larger shares is the true minimum.
    """
    floor, larger = divmod(len(queues), len(workers))
    held = {worker: sum(o == worker for o in owner.values()) for worker in workers}
    return len(queues) - max(
        sum(min(held[worker], floor + (worker in chosen)) for worker in workers)
        for chosen in itertools.combinations(workers, larger)
    )


def moved_queues(planned: Mapping[str, list[str]], owner: Mapping[str, str]) -> int:
    return sum(owner.get(q) != worker for worker, share in planned.items() for q in share)


@pytest.mark.slow
@settings(max_examples=300)
@given(fleets())
def test_no_balanced_plan_moves_less(fleet: tuple[list[str], list[str], Holdings]) -> None:
    """Against the minimum over every way to hand out the larger shares."""
    queues, workers, current = fleet
    if not workers:
        return
    owner = owners(queues, workers, current)
    planned = plan(queues, workers, current)
    assert moved_queues(planned, owner) == fewest_moves(queues, workers, owner)


@given(fleets(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_neither_loads_nor_moves(
    fleet: tuple[list[str], list[str], Holdings], chance: random.Random
) -> None:
    """Names decide, not the order in which a coordinator happens to list them."""
    queues, workers, current = fleet
    # Of a queue that several have the first by name counts, whatever the order.
    shuffled = {worker: chance.sample(held, len(held)) for worker, held in current.items()}
    mixed = {worker: shuffled[worker] for worker in chance.sample(list(shuffled), len(shuffled))}
    one = plan(queues, workers, current)
    other = plan(chance.sample(queues, len(queues)), chance.sample(workers, len(workers)), mixed)
    assert {w: len(share) for w, share in one.items()} == {
        w: len(share) for w, share in other.items()
    }
    owner = owners(queues, workers, current)
    assert moved_queues(one, owner) == moved_queues(other, owner)


class _Counted(str):
    """A name that counts how often it is compared with another."""

    __slots__ = ()
    comparisons = 0

    def __lt__(self, other: str) -> bool:
        _Counted.comparisons += 1
        return super().__lt__(other)


class _Tallied(list[str]):
    """Queues that count how often they are handed out."""

    handed_out = 0

    def __iter__(self) -> Iterator[str]:
        for queue in super().__iter__():
            _Tallied.handed_out += 1
            yield queue


def _operations(queues: int, workers: int) -> tuple[int, int]:
    """Return how many comparisons of workers and steps over queues a plan takes."""
    names: list[str] = [_Counted(f"w{number:05d}") for number in range(workers)]
    random.Random(workers).shuffle(names)
    ids = _Tallied(f"q{number}" for number in range(queues))
    shares = enumerate(names[1:])
    current: Holdings = {name: _Tallied(ids[start::workers]) for start, name in shares}
    _Counted.comparisons = _Tallied.handed_out = 0
    plan(ids, names, current)
    return _Counted.comparisons, _Tallied.handed_out


def test_the_work_grows_with_queues_and_hardly_with_workers() -> None:
    """W log W comparisons of names, and each queue is looked at a fixed number of times."""
    for queues, workers in ((1_000, 10), (10_000, 10), (10_000, 1_000), (40_000, 4_000)):
        comparisons, handed_out = _operations(queues, workers)
        assert comparisons <= workers * math.ceil(math.log2(workers)) + workers
        assert handed_out <= 2 * queues


def test_moves_counts_new_queues_too() -> None:
    """A queue that had no worker costs a claim as well."""
    assert moves({"w1": ["a", "b"]}, {"w1": ["a"], "w2": ["b", "c"]}) == 2


# --- lists of assigned queues --------------------------------------------------------------


MEMBERS = {"worker-0000000001": WorkerNode()}


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
    changes = assignments.changes(MEMBERS, {"worker-0000000001": queues})
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

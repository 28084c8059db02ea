"""Plans for workers that take only some queues: legal, as even as can be, and with few moves."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qdo.coordination.protocol.planner import plan, plan_filtered
from qdo.queues import EVERYTHING, QueueFilter
from tests.support.plans import moves

Holdings = dict[str, list[str]]
Fleet = tuple[list[str], dict[str, QueueFilter], Holdings]
MovedFleet = tuple[Fleet, dict[str, str]]

FILTERS = st.builds(
    QueueFilter,
    st.lists(st.sampled_from(["*", "a*", "b*", "c*"]), min_size=1, max_size=2).map(tuple),
    st.lists(st.sampled_from(["a*", "b*", "c1"]), max_size=1).map(tuple),
    st.lists(st.sampled_from(["*", "a*", "?1"]), min_size=1, max_size=2).map(tuple),
)


@st.composite
def fleets(draw: st.DrawFn, most_queues: int = 24, most_workers: int = 7) -> Fleet:
    """Queues of three families, workers with and without filters, and the current owners."""
    name = st.builds("{}{}".format, st.sampled_from("abc"), st.integers(0, 9))
    queues = draw(st.lists(name, unique=True, max_size=most_queues))
    names = draw(st.lists(st.integers(0, 9).map("w{}".format), unique=True, max_size=most_workers))
    kinds = draw(st.just([EVERYTHING]) | st.lists(FILTERS, min_size=1, max_size=4))
    workers = {name: draw(st.sampled_from(kinds)) for name in names}
    held = st.lists(name, unique=True, max_size=10)
    return queues, workers, {name: draw(held) for name in (*workers, "stranger")}


@st.composite
def moved_fleets(draw: st.DrawFn, most_queues: int = 24, most_workers: int = 7) -> MovedFleet:
    """A fleet, and the workers that operators want for some queues."""
    fleet = draw(fleets(most_queues=most_queues, most_workers=most_workers))
    names = st.sampled_from([*fleet[1], "stranger"])
    wishes = st.dictionaries(st.sampled_from([*fleet[0], "z0"]), names, max_size=5)
    return fleet, draw(wishes)


def effective(fleet: MovedFleet) -> dict[str, str]:
    """Return the moves that count."""
    (queues, workers, _), wishes = fleet
    return {
        queue: name
        for queue, name in wishes.items()
        if queue in queues and name in workers and workers[name].takes(queue)
    }


def owners(fleet: Fleet) -> dict[str, str]:
    """Return who has each queue and may keep it; of several the first by name."""
    queues, workers, current = fleet
    found: dict[str, str] = {}
    for queue in queues:
        holders = [name for name in sorted(workers) if queue in current.get(name, ())]
        if holders and workers[holders[0]].takes(queue):
            found[queue] = holders[0]
    return found


def group_changes(fleet: Fleet, owner_after: Mapping[str, str]) -> int:
    """Return how many queues have a worker with another filter than before, or had none."""
    before, filters = owners(fleet), fleet[1]
    return sum(
        queue not in before or filters[before[queue]].canonical() != filters[worker].canonical()
        for queue, worker in owner_after.items()
    )


def by_queue(planned: Mapping[str, list[str]]) -> dict[str, str]:
    return {queue: worker for worker, share in planned.items() for queue in share}


def squares(owner: Mapping[str, str]) -> int:
    return sum(load * load for load in Counter(owner.values()).values())


@given(fleets())
def test_every_queue_that_is_taken_has_one_worker_that_takes_it(fleet: Fleet) -> None:
    """A queue that matches no worker has no owner, and is reported."""
    queues, workers, _ = fleet
    planned, untaken = plan_filtered(*fleet)
    assert set(planned) == set(workers)
    given_out = sorted(queue for share in planned.values() for queue in share)
    taken = [queue for queue in queues if any(each.takes(queue) for each in workers.values())]
    assert given_out == sorted(taken)
    assert sorted(untaken) == sorted(set(queues) - set(taken))
    assert all(workers[name].takes(queue) for name, share in planned.items() for queue in share)


@given(fleets())
def test_workers_of_equal_filters_are_balanced_within_one(fleet: Fleet) -> None:
    """As they are in a fleet without filters."""
    planned, _ = plan_filtered(*fleet)
    filters = {name: each.canonical() for name, each in fleet[1].items()}
    for kind in set(filters.values()):
        loads = [len(share) for name, share in planned.items() if filters[name] == kind]
        assert max(loads) - min(loads) <= 1


SPELLINGS = {
    "w0": QueueFilter(("*", "a*")),
    "w1": EVERYTHING,
    "w2": EVERYTHING,
    "w3": QueueFilter(("a*",)),
}
"""Two spellings of all queues, beside a filter that keeps `plan` from doing all the work."""


@pytest.mark.slow
@settings(max_examples=250)
@given(fleets(most_queues=6, most_workers=4))
@example((["a0", "a1"], {**SPELLINGS}, {"w2": ["a0", "a1"]}))
@example((["a0", "a1"], {name: SPELLINGS[name] for name in ("w0", "w1")}, {"w1": ["a0", "a1"]}))
def test_no_plan_is_more_even_or_moves_less_between_groups(
    fleet: Fleet,
) -> None:
    """Against every plan there is."""
    queues, workers, _ = fleet
    planned, untaken = plan_filtered(*fleet)
    taken = [queue for queue in queues if queue not in untaken]
    choices = [[name for name in workers if workers[name].takes(queue)] for queue in taken]
    best = min(
        (squares(owner), group_changes(fleet, owner))
        for chosen in itertools.product(*choices)
        if (owner := dict(zip(taken, chosen, strict=True))) is not None
    )
    found = by_queue(planned)
    assert (squares(found), group_changes(fleet, found)) == best


LEFT_OVER = {"w0": EVERYTHING, "w1": QueueFilter(jobs=("a*",)), "w2": EVERYTHING}, {"z0": "w0"}
"""Workers, and the move of a queue that is not there any more."""


@given(moved_fleets())
@example(((["a0", "b0"], LEFT_OVER[0], {}), LEFT_OVER[1]))
def test_a_moved_queue_stays_with_its_worker(fleet: MovedFleet) -> None:
    """As long as that worker is there and takes it; otherwise the move counts for nothing.

    The same input gives the same plan: two rebalancers that see the same publish the same.
    """
    (queues, workers, current), wishes = fleet
    planned, untaken = plan_filtered(queues, workers, current, wishes)
    found = by_queue(planned)
    kept = effective(fleet)
    assert {queue: found[queue] for queue in kept} == kept
    assert sorted([*found, *untaken]) == sorted(queues)
    assert all(workers[name].takes(queue) for queue, name in found.items())
    assert plan_filtered(queues, workers, current, kept) == (planned, untaken)


@pytest.mark.slow
@settings(max_examples=150)
@given(moved_fleets(most_queues=6, most_workers=4))
def test_no_plan_with_those_moves_is_more_even(fleet: MovedFleet) -> None:
    """Against every plan there is."""
    (queues, workers, current), wishes = fleet
    planned, untaken = plan_filtered(queues, workers, current, wishes)
    kept = effective(fleet)
    taken = [queue for queue in queues if queue not in untaken]
    choices = [
        [kept[queue]] if queue in kept else [name for name in workers if workers[name].takes(queue)]
        for queue in taken
    ]
    best = min(
        squares(dict(zip(taken, chosen, strict=True))) for chosen in itertools.product(*choices)
    )
    assert squares(by_queue(planned)) == best


@given(moved_fleets(), st.randoms(use_true_random=False))
def test_planning_again_moves_nothing(fleet: MovedFleet, chance: random.Random) -> None:
    """A rebalancer that is called twice does not churn, in whatever order queues are listed."""
    (queues, workers, current), wishes = fleet
    planned, _ = plan_filtered(queues, workers, current, wishes)
    listed = chance.sample(queues, len(queues))
    again, _ = plan_filtered(listed, workers, planned, wishes)
    assert moves(planned, again) == 0


@given(fleets())
def test_without_filters_both_planners_agree(fleet: Fleet) -> None:
    """The fast one, which looks at no glob; also where all filters are equal and take all."""
    queues, workers, current = fleet
    expected = plan(queues, workers, current)
    unfiltered = dict.fromkeys(workers, EVERYTHING)
    assert plan_filtered(queues, unfiltered, current) == (expected, [] if workers else queues)
    starred = dict.fromkeys(workers, QueueFilter(("a*", "*")))
    assert plan_filtered(queues, starred, current)[0] == expected


@given(fleets())
def test_a_worker_that_takes_nothing_here_changes_nothing(fleet: Fleet) -> None:
    """A new worker whose filter matches no queue moves none."""
    queues, workers, _ = fleet
    before, _ = plan_filtered(*fleet)
    joined = {**workers, "newcomer": QueueFilter(("z*",))}
    after, _ = plan_filtered(queues, joined, before)
    assert after.pop("newcomer") == []
    assert moves(before, after) == 0


def test_a_job_of_a_new_version_moves_only_its_queues() -> None:
    """In a rolling deploy the other queues stay, unless the load requires a move."""
    old = QueueFilter(jobs=("a*",))
    new = QueueFilter(jobs=("a*", "b*"))
    queues = [f"a{n}" for n in range(8)] + ["b0", "b1"]
    fleet = {"w1": old, "w2": old, "w3": old}
    before, untaken = plan_filtered(queues, fleet, {})
    assert untaken == ["b0", "b1"]
    after, untaken = plan_filtered(queues, {**fleet, "w4": new}, before)
    assert untaken == []
    assert set(after["w4"]) >= {"b0", "b1"}
    assert sorted(map(len, after.values())) == [2, 2, 3, 3]
    assert moves(before, after) == 2
    replaced, _ = plan_filtered(queues, {"w4": new, "w5": new}, after)
    assert set(replaced["w4"]) >= set(after["w4"])


def test_load_is_passed_on_over_several_workers() -> None:
    """A worker without directly shared queues can still be relieved."""
    workers = {
        "w1": QueueFilter(("a*",)),
        "w2": QueueFilter(("a*", "b*")),
        "w3": QueueFilter(("b*", "c*")),
    }
    queues = [f"a{n}" for n in range(9)] + ["b0", "b1", "b2"]
    current = {"w1": queues[:9], "w2": queues[9:], "w3": []}
    planned, _ = plan_filtered(queues, workers, current)
    assert sorted(map(len, planned.values())) == [3, 4, 5]
    assert moves(current, planned) == 7
    assert set(planned["w3"]) == {"b0", "b1", "b2"}


def test_thousands_of_queues_and_workers_are_planned_in_time() -> None:
    """Whole groups are levelled at once; the number of queues hardly matters for that."""
    families = [f"f{n}-" for n in range(20)]
    queues = [f"{families[n % 20]}{n}" for n in range(20_000)]
    workers = {
        f"w{n:03}": QueueFilter((f"{families[n % 20]}*", f"{families[(n + 1) % 20]}*"))
        for n in range(400)
    }
    planned, untaken = plan_filtered(queues, workers, {})
    assert untaken == []
    assert {len(share) for share in planned.values()} == {50}

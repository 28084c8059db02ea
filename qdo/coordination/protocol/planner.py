"""Assign queues to workers with the fewest moves, so that loads differ by at most one.

With Q queues and W workers, every worker gets floor(Q/W) or ceil(Q/W) queues, and exactly
Q mod W workers get the larger share. The moves are fewest if the workers that hold most queues get
the larger shares. A worker that holds h queues and may keep s of them gives up max(0, h - s).
Moving a larger share from a worker that holds at most floor(Q/W) to a worker that holds more never
increases the sum of these numbers. Kafka's sticky assignor (KIP-54) relies on the same argument.
`plan` is for queues that any worker may handle; `plan_filtered` is for all other queues.

Cost: O(Q + W log W) time and O(Q) space, because `plan` sorts only the workers.

`plan_filtered` is for workers that take only some queues. Workers with equal filters form a group.
All filters that take every queue are equal. Queues that match the same groups form a class. A
worker to which an operator moved queues forms a separate group. The moved queues form a class that
only this group takes. So moved queues stay with the worker and count as its load. `plan_filtered`
first distributes each class among the groups. Then, like `plan`, it distributes the share of each
group among the group's workers.

The shares of the groups are an optimal semi-matching (Harvey, Ladner, Lovasz, Tamir: Semi-
matchings for bipartite graphs and load balancing, 2006). The planner passes queues from group to
group. It stops when no worker has at least two more queues than a worker that can get one of them.
According to their theorem, the result minimizes the sum of the squared loads, the largest load and
every other convex measure. In the flow network of classes and groups, the plan is a flow of least
convex cost. The flow begins with the present distribution and grows along shortest paths. A queue
that leaves its present group counts 1, and a queue that returns counts -1. At the end, the planner
follows paths that change no load and have a negative length. So no residual cycle is negative.
Therefore no plan with the same loads moves fewer queues to another group (Ahuja, Magnanti, Orlin:
Network flows, 1993, chapters 9 and 14).

Properties of a plan:

1. A worker gets only queues that match its filter. Every queue that matches a filter has one
   worker. Apart from moved queues, workers with equal filters differ by at most one queue.
2. No plan has a smaller sum of squared loads.
3. No plan with the same sum moves fewer queues to another group.
4. Within a group, the fewest possible queues move, given the group's queues. If queues of a class
   must leave the group, the fullest workers give up these queues.
5. A second plan for the same input moves no queue.

Cost: one match of each queue with each filter, then O(Q log W). A path costs O(C G) for C classes
and G groups. As many queues as possible follow a path at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from qdo.queues import QueueFilter

FAR = 1 << 60
# The queues that each worker has and may keep, by class.
Homes = dict[str, list[list[str]]]


def plan(
    queues: Iterable[str], workers: Iterable[str], current: Mapping[str, Iterable[str]]
) -> dict[str, list[str]]:
    """Return the queues of each worker.

    :param workers: all workers that may handle queues. Without workers, the plan is empty.
    :param current: the present queues of each worker. The plan ignores unknown workers and queues.
        A queue of several workers counts for the first worker by name.
    :returns: a list of queues for each worker. The order of the input decides which surplus queues
        move, but not their number or the loads.
    """
    homeless = dict.fromkeys(queues)
    names = sorted(set(workers))
    if not names:
        return {}
    floor, larger = divmod(len(homeless), len(names))
    shares = {name: _claim(homeless, current.get(name, ())) for name in names}
    # Python's sort is stable, so the name decides between workers with the same number of queues.
    by_load = sorted(names, key=lambda name: -len(shares[name]))
    quota = {name: floor + (rank < larger) for rank, name in enumerate(by_load)}
    pool = list(homeless)
    for name in names:
        share = shares[name]
        pool.extend(share[quota[name] :])
        del share[quota[name] :]
    for name in names:
        missing = quota[name] - len(shares[name])
        if missing:
            shares[name].extend(pool[-missing:])
            del pool[-missing:]
    return shares


def _claim(homeless: dict[str, None], held: Iterable[str]) -> list[str]:
    """Move held queues from `homeless` to a list; keep their order."""
    share = []
    for queue in held:
        if queue in homeless:
            del homeless[queue]
            share.append(queue)
    return share


def plan_filtered(
    queues: Iterable[str],
    workers: Mapping[str, QueueFilter],
    current: Mapping[str, Iterable[str]],
    moves: Mapping[str, str] | None = None,
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the queues of each worker, and the queues that match no worker's filter.

    :param current: the present queues of each worker; see `planner.plan`.
    :param moves: the worker of each queue that an operator moved. A move counts only if the queue
        is in `queues`, and the worker is in `workers` and takes the queue.
    """
    names = list(queues)
    present = set(names) if moves else ()
    moves = {
        queue: worker
        for queue, worker in (moves or {}).items()
        if queue in present and worker in workers and workers[worker].takes(queue)
    }
    if not moves and all(each.everything for each in workers.values()):
        return plan(names, workers, current), [] if workers else names
    groups, classes = _sorted_out(names, workers, moves)
    untaken = classes.pop((), _Class(())).queues
    taken = list(classes.values())
    homes = _homes(taken, groups, current)
    flow = _Flow(groups, taken, homes)
    flow.level()
    flow.settle()
    return _handed_out(flow, groups, homes), list(untaken)


@dataclass(slots=True)
class _Class:
    """A class of queues, which match the same groups."""

    takers: tuple[int, ...]
    queues: dict[str, None] = field(default_factory=dict)


def _sorted_out(
    queues: Iterable[str], workers: Mapping[str, QueueFilter], moves: Mapping[str, str]
) -> tuple[list[list[str]], dict[tuple[int, ...], _Class]]:
    """Return the workers of each group, and each class with the groups that take it."""
    alone = frozenset(moves.values())
    groups: dict[tuple[QueueFilter, str], list[str]] = {}
    for name in sorted(workers):
        key = workers[name].canonical(), name if name in alone else ""
        groups.setdefault(key, []).append(name)
    number_of = {names[0]: number for number, names in enumerate(groups.values())}
    numbers: dict[QueueFilter, list[int]] = {}  # match equal filters only once
    for number, (takes, _) in enumerate(groups):
        numbers.setdefault(takes, []).append(number)
    matchers = [(each.matcher(), found) for each, found in numbers.items()]
    classes: dict[tuple[int, ...], _Class] = {}
    for queue in dict.fromkeys(queues):
        if queue in moves:
            takers: tuple[int, ...] = (number_of[moves[queue]],)
        else:
            takers = tuple(sorted(n for takes, found in matchers if takes(queue) for n in found))
        if takers not in classes:
            classes[takers] = _Class(takers)
        classes[takers].queues[queue] = None
    return list(groups.values()), classes


def _homes(
    classes: list[_Class], groups: list[list[str]], current: Mapping[str, Iterable[str]]
) -> Homes:
    """Move held queues out of the classes into homes; the remaining queues are homeless."""
    group_of = {name: group for group, names in enumerate(groups) for name in names}
    number_of = {queue: number for number, each in enumerate(classes) for queue in each.queues}
    takers = [frozenset(each.takers) for each in classes]
    homes: Homes = {}
    for name in sorted(group_of):
        rows = homes[name] = [[] for _ in classes]
        for queue in current.get(name, ()):
            # Remove each found queue, because a queue of several workers counts only for the first.
            number = number_of.pop(queue, None)
            if number is not None and group_of[name] in takers[number]:
                rows[number].append(queue)
                del classes[number].queues[queue]
    return homes


class _Flow:
    """The number of queues of each class in each group.

    :ivar amounts: the planned numbers by class and group.
    :ivar homes: the present numbers by class and group.
    """

    def __init__(self, groups: list[list[str]], classes: list[_Class], homes: Homes) -> None:
        self.classes = classes
        self.sizes = [len(names) for names in groups]
        self.homes = [
            [sum(len(homes[name][number]) for name in names) for names in groups]
            for number in range(len(classes))
        ]
        self.amounts = [list(row) for row in self.homes]
        self.totals: list[int] = [
            sum(row[group] for row in self.amounts) for group in range(len(groups))
        ]
        for number in range(len(classes)):
            self._place_homeless(number)

    def _place_homeless(self, number: int) -> None:
        """Give each homeless queue to the group with the emptiest worker."""
        takers = self.classes[number].takers
        heap = [(self._least(group), group) for group in takers]
        heapify(heap)
        for _ in self.classes[number].queues:
            group = heap[0][1]
            self.amounts[number][group] += 1
            self.totals[group] += 1
            heapreplace(heap, (self._least(group), group))

    def _most(self, group: int, less: int = 0) -> int:
        """Return the load of a group's fullest worker after `less` queues left the group."""
        return -(-(self.totals[group] - less) // self.sizes[group])

    def _least(self, group: int, more: int = 0) -> int:
        """Return the load of a group's emptiest worker after `more` queues joined the group."""
        return (self.totals[group] + more) // self.sizes[group]

    # --- improving --------------------------------------------------------------------

    def level(self) -> None:
        """Pass queues on until no worker has two more than a worker that can get them."""
        while any(self._improve(source, 2, FAR) for source in self._fullest_first()):
            pass

    def settle(self) -> None:
        """Let queues return to their present groups if this changes no load."""
        while any(self._improve(source, 1, 0) for source in self._fullest_first()):
            pass

    def _fullest_first(self) -> list[int]:
        return sorted(range(len(self.sizes)), key=lambda group: (-self._most(group), group))

    def _improve(self, source: int, gap: int, below: int) -> bool:
        """Pass queues to a group with at least `gap` less load; False without such a group."""
        costs, came_from = self._paths(source)
        most = self._most(source)
        found = [
            (self._least(group), cost, group)
            for group, cost in enumerate(costs)
            if group != source and cost < below and most - self._least(group) >= gap
        ]
        if not found:
            return False
        target = min(found)[2]
        steps = []
        group = target
        while group != source:
            number, before = came_from[group]
            steps.append((number, before, group))
            group = before
        amount = min(self._room(step) for step in steps)
        amount = _largest(amount, lambda n: self._may_shift(source, target, gap, n))
        for number, before, after in steps:
            self.amounts[number][before] -= amount
            self.amounts[number][after] += amount
        self.totals[source] -= amount
        self.totals[target] += amount
        return True

    def _may_shift(self, source: int, target: int, gap: int, amount: int) -> bool:
        """Return whether passing on the last of `amount` queues still improves the plan."""
        return self._most(source, amount - 1) - self._least(target, amount - 1) >= gap

    def _room(self, step: tuple[int, int, int]) -> int:
        """Return the number of queues that can make a step at the same cost."""
        number, source, target = step
        has = self.amounts[number][source]
        home = self.homes[number][source]
        room = has - home if has > home else has
        missing = self.homes[number][target] - self.amounts[number][target]
        return min(room, missing) if missing > 0 else room

    def _leaving(self, number: int, group: int) -> int:
        return 1 if self.amounts[number][group] <= self.homes[number][group] else 0

    def _entering(self, number: int, group: int) -> int:
        return -1 if self.amounts[number][group] < self.homes[number][group] else 0

    def _paths(self, source: int) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Find the cheapest path to each group; return costs and previous steps (Bellman-Ford)."""
        costs = [FAR] * len(self.sizes)
        costs[source] = 0
        came_from: dict[int, tuple[int, int]] = {}
        changed = True
        while changed:
            changed = False
            for number, each in enumerate(self.classes):
                amounts = self.amounts[number]
                leaving = [
                    (costs[group] + self._leaving(number, group), group)
                    for group in each.takers
                    if amounts[group] and costs[group] < FAR
                ]
                if not leaving:
                    continue
                cost, before = min(leaving)  # come from the cheapest group
                for group in each.takers:
                    reached = cost + self._entering(number, group)
                    if group != before and reached < costs[group]:
                        costs[group] = reached
                        came_from[group] = number, before
                        changed = True
        return costs, came_from


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` for which `holds` is true; `holds(1)` is true."""
    low = 1
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# --- from groups to workers ---------------------------------------------------------------


def _handed_out(flow: _Flow, groups: list[list[str]], homes: Homes) -> dict[str, list[str]]:
    free = [list(each.queues) for each in flow.classes]
    for group, names in enumerate(groups):
        for number, pool in enumerate(free):
            surplus = flow.homes[number][group] - flow.amounts[number][group]
            pool.extend(_given_up(names, homes, number, max(0, surplus)))
    shares: dict[str, list[str]] = {}
    for group, names in enumerate(groups):
        queues = [queue for name in names for held in homes[name] for queue in held]
        for number, pool in enumerate(free):
            missing = flow.amounts[number][group] - flow.homes[number][group]
            if missing > 0:
                queues.extend(pool[-missing:])
                del pool[-missing:]
        kept = {name: [queue for held in homes[name] for queue in held] for name in names}
        shares.update(plan(queues, names, kept))
    return shares


def _given_up(names: list[str], homes: Homes, number: int, surplus: int) -> list[str]:
    """Take queues of a class from the fullest workers of a group that hold such queues."""
    heap = [(-sum(map(len, homes[name])), name) for name in names if homes[name][number]]
    heapify(heap)
    gone: list[str] = []
    while len(gone) < surplus:
        load, name = heap[0]
        gone.append(homes[name][number].pop())
        if homes[name][number]:
            heapreplace(heap, (load + 1, name))
        else:
            heappop(heap)
    return gone

"""The plan: which worker should handle which queue, balanced within one, with the fewest moves.

With Q queues and W workers every worker gets floor(Q/W) or ceil(Q/W) queues, and exactly
Q mod W workers get the larger share. Giving the larger shares to those who hold most already
minimises the moves: a worker that holds h queues and may keep s of them gives up
max(0, h - s), and moving a larger share from a worker that holds at most floor(Q/W) to one
that holds more never increases the sum. This is the argument behind Kafka's sticky assignor
(KIP-54), here for queues that any worker may handle; `filtered_planner` is for the others.

Cost: O(Q + W log W) time, O(Q) space; nothing is sorted but the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def plan(
    queues: Iterable[str],
    workers: Iterable[str],
    current: Mapping[str, Iterable[str]],
) -> dict[str, list[str]]:
    """Return the queues of each worker.

    :param queues: all queues to be handled.
    :param workers: all workers that may handle them; without workers the plan is empty.
    :param current: the present queues of each worker. Unknown workers and queues in it are
        ignored; a queue of several workers counts for the first of them by name.
    :returns: a list of queues for each worker. The order of the input decides which surplus
        queues move, but not how many, nor each worker's load.
    """
    homeless = dict.fromkeys(queues)
    names = sorted(set(workers))
    if not names:
        return {}
    floor, larger = divmod(len(homeless), len(names))
    shares = {name: _claim(homeless, current.get(name, ())) for name in names}
    # Python's sort is stable: among workers with equally many queues the name decides.
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
    """Move the held queues from `homeless` to a list, in their order."""
    share = []
    for queue in held:
        if queue in homeless:
            del homeless[queue]
            share.append(queue)
    return share


def moves(before: Mapping[str, Iterable[str]], after: Mapping[str, Iterable[str]]) -> int:
    """Return how many queues have a different worker than before; new queues count as moved."""
    owner = {queue: worker for worker, queues in before.items() for queue in queues}
    return sum(owner.get(queue) != worker for worker, queues in after.items() for queue in queues)

"""`qdo move`: operators, the leader and real workers, on both coordinators."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from qdo.coordination.znodes.values import load
from qdo.coordination.znodes.worker_node import WorkerNode, parse_moves
from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, freeze, wait_until

JOBS = "from tests.apps.moving import app\n"
HELD = f"""
import os, time
open("held", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
{JOBS}
"""
QUEUES = ("a", "b", "c", "slow")


def started(runs: AppRuns, processes: int = 2, *options: str) -> Proc:
    """Start workers, and wait until they have all queues."""
    runs.app.send_many([(name, 0) for name in QUEUES if name != "slow"])
    runs.app.send("slow", 0, delay_seconds=1e6)
    before = set(runs.workers())
    proc = runs.start(JOBS, "--processes", str(processes), "--session-timeout-seconds=20", *options)
    wait_until(lambda: len(set(runs.workers()) - before) == processes, "the workers")
    wait_until(lambda: settled(runs), "their queues")
    return proc


def settled(runs: AppRuns) -> bool:
    """Whether every queue has a live owner, and the loads differ by one at most."""
    if not all(runs.client.exists(runs.layout.queue(name)) for name in QUEUES):
        return False
    alive = runs.workers()
    found = [owner(runs, name) for name in QUEUES]
    loads = [found.count(name) for name in alive]
    return set(found) <= set(alive) and max(loads) - min(loads) <= 1


def owner(runs: AppRuns, queue: str) -> str:
    return runs.node(queue).owner


def other(runs: AppRuns, queue: str) -> str:
    return next(name for name in runs.workers() if name != owner(runs, queue))


def moves(runs: AppRuns) -> dict[str, str]:
    return parse_moves(runs.client.get(runs.layout.assignments)[0])


def pid_of(runs: AppRuns, worker: str) -> int:
    """Return the process of a worker, which has the same session as its component."""
    session = runs.client.get(runs.layout.worker(worker))[1].ephemeralOwner
    folder = f"{runs.layout.components}/worker"
    for name in runs.client.get_children(folder):
        data, stat = runs.client.get(f"{folder}/{name}")
        if stat.ephemeralOwner == session:
            return int(load(data)[0]["pid"])
    raise AssertionError(f"{worker} has no process")


def leader(runs: AppRuns) -> str:
    return str(load(runs.client.get(runs.layout.rebalancer)[0])[0]["worker"])


@contextmanager
def frozen(runs: AppRuns, pid: int) -> Iterator[None]:
    freeze(pid, runs.coordinator)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # killed
            os.kill(pid, signal.SIGCONT)


def rebalance(runs: AppRuns) -> dict[str, dict[str, Any]]:
    ended = runs.qdo("move", "--plan", "-o", "json")
    assert ended.code == 0, ended.err
    return {each["queue"]: each for each in json.loads(ended.out)["items"]}


def test_a_queue_moves_and_stays(runs: AppRuns) -> None:
    """Also when the leader plans again; loads stay even, and each message runs once."""
    started(runs, 3)
    target = other(runs, "a")
    ended = runs.qdo("move", "a", target, "--reason", "cache is warm there", "-o", "json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["items"][0]["worker"] == target
    assert owner(runs, "a") == target
    wait_until(lambda: settled(runs), "the balance")
    names = sorted(runs.client.get_children(runs.layout.fleet.actionlog))
    entry = json.loads(runs.client.get(runs.layout.fleet.log_entry(names[-1]))[0])
    assert (entry["command"], entry["target"], entry["to"]) == ("move", "a", {"owner": target})
    assert rebalance(runs) == {}
    with frozen(runs, pid_of(runs, next(name for name in runs.workers() if name != leader(runs)))):
        runs.app.send("new", 1)  # the leader plans again
        wait_until(lambda: runs.client.exists(runs.layout.queue("new")), "the new queue")
    wait_until(lambda: len(runs.runs("new")) == 1, "its message")
    assert owner(runs, "a") == target
    again = runs.qdo("move", "a", target)
    assert again.code == 0, again.err
    assert sorted(runs.client.get_children(runs.layout.fleet.actionlog)) == names
    assert [len(runs.runs(name)) for name in "abc"] == [1, 1, 1]


def test_the_owner_finishes_its_message_first(runs: AppRuns) -> None:
    """The other queues of both workers go on meanwhile, and nothing is repeated."""
    started(runs)
    runs.app.send("slow", 1)
    before, target = owner(runs, "slow"), other(runs, "slow")
    wait_until(lambda: runs.qdo("ps", "-o", "name").out != "", "the message")
    ended = runs.qdo("move", "slow", target, "--timeout", "1s")
    assert ended.code == 1, ended.err
    assert owner(runs, "slow") == before
    runs.app.send_many([(name, 1) for name in "abc"])
    wait_until(lambda: all(len(runs.runs(name)) == 2 for name in "abc"), "the other queues")
    (runs.folder / "go").touch()
    wait_until(lambda: owner(runs, "slow") == target, "the next owner")
    runs.app.send("slow", 2)
    wait_until(lambda: len(runs.runs("slow")) == 2, "the next message")
    assert runs.runs("slow") == [("1", 1), ("2", 1)]


def test_an_owner_may_die_before_it_has_released(runs: AppRuns) -> None:
    """The named worker gets the queue, and runs the message that was in flight again."""
    started(runs)
    runs.app.send("slow", 1)
    before, target = owner(runs, "slow"), other(runs, "slow")
    wait_until(lambda: runs.qdo("ps", "-o", "name").out != "", "the message")
    assert runs.qdo("move", "slow", target, "--timeout", "0s").code == 0
    os.kill(pid_of(runs, before), signal.SIGKILL)
    wait_until(lambda: owner(runs, "slow") == target, "the named worker")
    (runs.folder / "go").touch()
    wait_until(lambda: len(runs.runs("slow")) == 1, "the message")
    assert runs.runs("slow") == [("1", 2)]
    assert runs.pids()[-1] == pid_of(runs, target)


def test_a_move_ends_with_its_worker(runs: AppRuns) -> None:
    """A worker that is killed while it has the queue loses it to the others, as without a move."""
    started(runs)
    target = other(runs, "a")
    assert runs.qdo("move", "a", target).code == 0
    os.kill(pid_of(runs, target), signal.SIGKILL)
    wait_until(lambda: target not in runs.workers() and settled(runs), "another owner")
    runs.app.send("a", 1)
    wait_until(lambda: len(runs.runs("a")) == 2, "its message")
    assert runs.qdo("move", "a", target).code == 6
    wait_until(lambda: len(runs.workers()) == 2, "the restarted worker")
    heir = other(runs, "b")
    assert runs.qdo("move", "b", heir).code == 0
    assert moves(runs) == {"b": heir}


def test_a_new_leader_carries_out_a_move(runs: AppRuns) -> None:
    """The leader is frozen when the operator asks, and then killed."""
    started(runs, 3)
    first = leader(runs)
    queue = next(name for name in "abc" if owner(runs, name) != first)
    target = next(name for name in runs.workers() if name not in (first, owner(runs, queue)))
    pid = pid_of(runs, first)
    with frozen(runs, pid):
        ended = runs.qdo("move", queue, target, "--timeout", "0s")
        assert ended.code == 0, ended.err
        assert owner(runs, queue) != target
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: owner(runs, queue) == target, "the move")
    runs.app.send(queue, 1)
    wait_until(lambda: len(runs.runs(queue)) == 2, "its message")
    assert {body for body, _ in runs.runs(queue)} == {"0", "1"}


def test_the_last_of_two_operators_wins(runs: AppRuns) -> None:
    """While the leader is frozen both write; afterwards the queue has one owner."""
    started(runs, 3)
    first = leader(runs)
    queue = next(name for name in "abc" if owner(runs, name) != first)
    targets = [name for name in runs.workers() if name != owner(runs, queue)]
    with frozen(runs, pid_of(runs, first)):
        for target in targets:
            assert runs.qdo("move", queue, target, "--timeout", "0s").code == 0
        assert moves(runs) == {queue: targets[-1]}
    wait_until(lambda: owner(runs, queue) == targets[-1], "the last move")
    owned = [
        name
        for name in runs.workers()
        if queue in WorkerNode.parse(runs.client.get(runs.layout.worker(name))[0]).queues
    ]
    assert owned == [targets[-1]]


def test_refuses_what_cannot_be(runs: AppRuns) -> None:
    """A worker that is not registered, or does not take the queue; and nothing is written."""
    started(runs, 1)
    runs.start(JOBS, "--queues", "z*")
    wait_until(lambda: len(runs.workers()) == 2, "the second worker")
    before = runs.client.get(runs.layout.assignments)[1].version
    unfit = next(name for name in runs.workers() if name != owner(runs, "a"))
    tried = [("a", "worker-0000009999"), ("a", "x"), ("nowhere", unfit), ("a", unfit)]
    assert [runs.qdo("move", *each).code for each in tried] == [6, 6, 6, 5]
    assert runs.client.get(runs.layout.assignments)[1].version == before


def test_a_draining_worker_gets_no_queue(runs: AppRuns) -> None:
    started(runs)
    target = other(runs, "a")
    path = runs.layout.worker(target)
    node = WorkerNode.parse(runs.client.get(path)[0])
    with frozen(runs, pid_of(runs, target)):
        runs.client.set(path, WorkerNode(node.queues, draining=True).encode())
        assert runs.qdo("move", "a", target).code == 5
    assert moves(runs) == {}


def test_a_dry_run_tells_what_the_leader_does_next(runs: AppRuns) -> None:
    """While the leader is frozen a worker joins; what was predicted happens when it continues."""
    started(runs, 1)
    first = leader(runs)
    assert rebalance(runs) == {}
    runs.start(HELD)  # before the freeze: the leader's session must outlast it
    wait_until((runs.folder / "held").exists, "the second worker is about to register")
    with frozen(runs, pid_of(runs, first)):
        (runs.folder / "go").touch()
        wait_until(lambda: len(runs.workers()) == 2, "the second worker")
        joined = other(runs, "a")
        found = rebalance(runs)
        dry = runs.qdo("move", "a", joined, "--dry-run")
        assert (dry.code, moves(runs)) == (0, {}), dry.err
    assert {(each["before"], each["after"]) for each in found.values()} == {(first, joined)}
    assert len(found) == 2
    wait_until(
        lambda: {name for name in QUEUES if owner(runs, name) == joined} == found.keys(),
        "what was predicted",
    )
    assert rebalance(runs) == {}
    assert runs.qdo("move").code == runs.qdo("move", "a", joined, "--plan").code == 2

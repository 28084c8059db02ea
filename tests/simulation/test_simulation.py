"""Seeded histories keep every invariant, and the means to find out are sound themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from qdo.coordination.protocol.machine import (
    CheckOp,
    CommitError,
    Committed,
    Created,
    CreateOp,
    Rejected,
    SetOp,
)
from tests.simulation.__main__ import REGRESSIONS
from tests.simulation.coordinator import Coordinator
from tests.simulation.history import play
from tests.simulation.mutants.__main__ import check_edits
from tests.simulation.mutants.edits import MUTANTS, Mutant
from tests.simulation.schedule import Schedule
from tests.support.paths import ROOT

HISTORIES, HISTORIES_WITH_SWITCHES = 2000, 500


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command: in a process of its own, where the order of sets is fixed too."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def _hold(histories: int | None, *names: str) -> None:
    """Play histories in a world with switches: none violates an invariant."""
    count = histories or (HISTORIES_WITH_SWITCHES if names else HISTORIES)
    switches = [each for name in names for each in ("--switch", name)]
    run = _run("--histories", str(count), *switches, "--json")
    assert run.stdout, run.stderr
    found = json.loads(run.stdout)
    text = f"{found}; python -m tests.simulation {' '.join(switches)} --seed {found['seed']}"
    assert found["invariant"] == "", text


@pytest.mark.timeout(300)
def test_no_history_violates_an_invariant(histories: int | None) -> None:
    """Two thousand histories of crashes, stops, lost answers, expiries and seeks."""
    _hold(histories)


def test_no_history_with_filters_violates_an_invariant(histories: int | None) -> None:
    """The same with workers that take only some queues: no worker ever owns any other queue,
    equal workers are balanced within one, and a queue that matches no worker has no owner."""
    _hold(histories, "filters")


def test_no_history_with_limits_violates_an_invariant(histories: int | None) -> None:
    """The same with jobs that need permits: the shares never exceed `max`, no process uses more
    than its share, dead processes hold nothing for long, and everybody gets a turn."""
    _hold(histories, "limits")


def test_no_history_with_moves_violates_an_invariant(histories: int | None) -> None:
    """The same with operators who hand queues to workers: at the end each has the queues that were
    moved to it, all others are balanced, and no queue ever had two owners. Jobs wait before they
    begin, and none begins once its worker's session is over."""
    _hold(histories, "moves", "waits")


def test_no_history_with_actions_violates_an_invariant(histories: int | None) -> None:
    """The same with operators: each action is done at most once, by the worker or its parent, not
    after it has expired, and ends with one entry in the transaction that deletes it."""
    _hold(histories, "actions")


def test_seeds_that_failed_once_are_played_forever() -> None:
    """Each of them found something wrong in its day."""
    for seed in REGRESSIONS:
        violation, _ = play(seed)
        assert violation is None, f"seed {seed}: {violation}"


def test_a_seed_gives_the_same_history_again() -> None:
    """The trace of a failure can be printed after the fact."""
    traces = [play(7, tracing=True)[1].schedule.trace for _ in range(2)]
    assert traces[0]
    assert traces[0] == traces[1]


@pytest.mark.slow
def test_a_history_does_not_hang_on_the_order_of_sets() -> None:
    """The machines go through sets in no order of their own: any seed repeats anywhere."""
    script = (
        "import sys, zlib; from tests.simulation.history import play;"
        "print(zlib.crc32(repr([play(s, tracing=True)[1].schedule.trace"
        " for s in range(40)]).encode()))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": order},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in ("1", "2")
    }
    assert len(digests) == 1


def test_a_mutant_is_found() -> None:
    """The command prints the violated invariant and its place, and fails."""
    run = _run("--histories", "200", "--json", "--switch", "close_living")
    assert run.returncode == 1
    assert json.loads(run.stdout)["invariant"] in ("1", "7")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_fits_the_source(mutant: Mutant) -> None:
    """A list of mutants that no longer apply would prove nothing."""
    check_edits(mutant)


# --- the modelled coordinator -----------------------------------------------------------


def _coordinator() -> Coordinator:
    coordinator = Coordinator(Schedule(1))
    coordinator.ensure(["/a"])
    return coordinator


def test_a_transaction_is_all_or_nothing() -> None:
    """The error has the index of the first bad operation, and nothing has changed."""
    coordinator = _coordinator()
    answer = coordinator.commit(1, (CreateOp("/a/b", b""), SetOp("/a", b"x", 7)))
    assert answer == Rejected(1, CommitError.BAD_VERSION)
    assert coordinator.node("/a/b") is None


def test_operations_of_a_transaction_see_each_other() -> None:
    """As in ZooKeeper, each operation is checked against the result of those before it."""
    coordinator = _coordinator()
    answer = coordinator.commit(
        1, (CreateOp("/a/b", b""), SetOp("/a/b", b"x", 0), CheckOp("/a/b", 1))
    )
    assert answer == Committed(coordinator.zxid, (0, 1, -1))


def test_earlier_states_can_be_read() -> None:
    """A lagging follower serves such a state."""
    coordinator = _coordinator()
    before = coordinator.zxid
    coordinator.commit(1, (SetOp("/a", b"x", 0), CreateOp("/a/b", b"")))
    then, now = coordinator.node("/a", before), coordinator.node("/a")
    assert (then and then.data, now and now.data) == (b"", b"x")
    assert coordinator.names("/a", before) == ()
    assert coordinator.names("/a") == ("b",)


def test_the_end_of_a_session_takes_its_nodes() -> None:
    """In one transaction; numbers are not given again."""
    coordinator = _coordinator()
    session = coordinator.open_session(4.0)
    first = coordinator.create_sequential(session.id, "/a/n-", b"")
    coordinator.close_session(session.id)
    second = coordinator.create_sequential(coordinator.open_session(4.0).id, "/a/n-", b"")
    assert (first, second) == (Created("/a/n-0000000000"), Created("/a/n-0000000001"))
    assert coordinator.names("/a") == ("n-0000000001",)

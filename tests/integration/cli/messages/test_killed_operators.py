"""An operator dies at any transaction, or a worker before it knows of a request.

`test_cancel`, `test_purge` and `tests/integration/coordination/test_moves.py` kill them, too.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest

from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.ops.peek import waiting_rows
from tests.support.app_runs import OperatorDesk
from tests.support.cli import clean_environment
from tests.support.processes import Proc, paused, wait_until

DYING = """
import os, signal, sys
from qdo.coordination import transactions

left, moment = int(sys.argv.pop(1)), sys.argv.pop(1)
commit_each = transactions.commit_each

def die_at(when):
    if left == 0 and moment == when:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(client, found):
    global left
    left -= 1
    die_at("before")
    answers = commit_each(client, found)
    die_at("after")
    return answers

transactions.commit_each = counted
sys.argv[0] = "qdo"
from qdo.cli.main import main
sys.exit(main())
"""
"""Runs `qdo` until the transaction with a number, and dies before or after it."""
FIRST, SECOND = (FailureRecord(at, 1, "no", blocked_since=1.0) for at in (1, 2))
BLOCKED = QueueNode(failure=FIRST, out_of_order=OutOfOrderProgress((), (SECOND,)))


@dataclass(frozen=True)
class Killed:
    """A command that is killed at a transaction.

    :ivar argv: its arguments; Q stands for the name of the queue.
    :ivar command: its name in the action log.
    :ivar node: the queue's node before.
    :ivar again: exit codes of its repetition.
    """

    argv: tuple[str, ...]
    command: str
    node: QueueNode | None = None
    again: tuple[int, ...] = (0,)


COMMANDS = {
    "seek": Killed(("seek", "Q", "latest", "--yes"), "seek"),
    "purge": Killed(("purge", "Q", "--yes"), "purge"),
    "cancel": Killed(("cancel", "Q", "ID", "--yes"), "cancel"),
    "delete": Killed(("delete", "Q", "--with-messages", "--yes"), "delete", again=(0, 6)),
    "pause": Killed(("pause", "Q"), "pause"),
    "skip": Killed(("skip", "--yes", "Q", "1"), "skip", BLOCKED, again=(0, 5)),
}


def state(desk: OperatorDesk, queue: str) -> tuple[bytes | None, bool]:
    """Return everything of a queue that these commands change."""
    path, holds = desk.layout.queue(queue), desk.layout.fleet.holds
    node = desk.client.get(path)[0] if desk.client.exists(path) else None
    held = desk.client.get(holds)[0] if desk.client.exists(holds) else b""
    return node, f'"{queue}"'.encode() in held


@pytest.mark.parametrize("name", COMMANDS)
def test_an_operator_killed_at_each_transaction(local: OperatorDesk, name: str) -> None:
    """The change is there with its entry, or neither; the repeated command completes it."""
    killed = COMMANDS[name]
    (local.folder / "dying.py").write_text(DYING)
    deaths = 0
    for step in range(1, 10):
        for moment in ("before", "after"):
            queue = f"q-{step}-{moment}"
            (id,) = local.send(1, queue=queue)
            local.known(queue)
            if killed.node is not None:
                local.client.set(local.layout.queue(queue), killed.node.encode())
            before = state(local, queue)
            argv = [{"Q": queue, "ID": id}.get(each, each) for each in killed.argv]
            with Proc.python(
                "dying.py",
                str(step),
                moment,
                *argv,
                env=clean_environment(local.environment),
                cwd=local.folder,
            ) as command:
                code = command.wait(60.0)
            if code == 0:
                assert deaths > 1, command.output
                return
            assert code == -signal.SIGKILL, command.output
            deaths += 1
            logged = [each for each in local.audit(killed.command) if each.target == queue]
            assert (state(local, queue) != before) == bool(logged), (step, moment)
            assert local.qdo(*argv).code in killed.again
            assert state(local, queue) != before
            if killed.node is BLOCKED:  # the decision is about no other message
                assert local.node(queue).seek == 1
                assert SECOND in local.node(queue).failures
            assert [each for each in local.audit(killed.command) if each.target == queue]
    raise AssertionError("the command has no end")


@pytest.mark.parametrize("target", ["earliest", "3"])
def test_a_worker_killed_before_it_knows_of_a_seek(desk: OperatorDesk, target: str) -> None:
    """Its queue resumes at the operator's position; the message in flight is not repeated."""
    desk.send(1, 2, 3, 4)
    places = [row.position for row in waiting_rows(desk.broker, "q", 0, 9)]
    held = desk.hold(2)
    desk.work()
    desk.wait_for(2)
    (process,) = set(desk.pids())
    with paused(process, desk.broker_url, desk.coordinator):
        place = target if target == "earliest" else str(places[2])
        assert desk.qdo("seek", "q", place, "--yes").code == 0
        os.kill(process, signal.SIGKILL)
    held.unlink()
    desk.wait_done()
    following = ["1", "2", "3", "4"] if target == "earliest" else ["4"]
    wait_until(lambda: len(desk.bodies()) == 2 + len(following), "the runs")
    assert desk.bodies() == ["1", "2", *following]
    (entry,) = desk.audit("seek")
    assert entry.target == "q"

"""Workers with different broker files do not run beside each other."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.app_runs import OperatorDesk
from tests.support.processes import wait_until

Machines = list[OperatorDesk]


@pytest.fixture
def machines(tmp_path: Path, coordinator_url: str) -> Iterator[Machines]:
    """Two folders that stand for machines, each with a broker file, on one coordinator."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            desk = OperatorDesk("desk", tmp_path / name, coordinator_url)
            made.append(stack.enter_context(closing(desk)))
        yield made


def wait_done(machines: Machines, *bodies: str) -> None:
    wait_until(
        lambda: sorted(body for each in machines for body in each.bodies()) == sorted(bodies),
        f"the messages {bodies}",
    )


def test_a_worker_with_another_broker_file_does_not_start(machines: Machines) -> None:
    """The error names both files; the first worker, and more on its file, run on."""
    one, two = machines
    one.work().wait_for_line("worker-0000000000: registered")
    other = two.work()
    assert other.wait() == 2, other.output
    assert "registered;" not in other.output
    [line] = [line for line in other.output.splitlines() if line.startswith("qdo-worker: ")]
    remedy = "qdo admin broker file --reset"
    for part in (one.broker_url, two.broker_url, socket.gethostname(), remedy):
        assert part in line
    two.work("--broker", one.broker_url).wait_for_line(r"worker-\d+: registered")
    one.send("sent")
    wait_done(machines, "sent")


def test_two_first_workers_agree_on_one_broker_file(machines: Machines) -> None:
    """Started at the same moment, one of them runs, and the other exits."""
    both = [each.work() for each in machines]
    ended: list[int] = []

    def one_exited() -> bool:
        ended[:] = [n for n, each in enumerate(both) if "qdo-worker: " in each.output]
        return bool(ended)

    wait_until(one_exited, "one of them is refused")
    assert both[ended[0]].wait() == 2
    winner = 1 - ended[0]
    both[winner].wait_for_line("registered;")
    machines[winner].send("sent")
    wait_done(machines, "sent")


def test_a_broker_file_is_changed_on_purpose(machines: Machines) -> None:
    """Once all workers have stopped; the positions of the queues stay."""
    one, two = machines
    one.send("before")
    first = one.work()
    wait_done(machines, "before")
    refused = one.qdo("admin", "broker", "file", "--reset", "--yes")
    assert (refused.code, refused.out) == (5, "")
    assert "worker-0000000000" in refused.err
    first.send(signal.SIGTERM)
    assert first.wait() == 0, first.output
    [item] = one.items("admin", "broker", "file")
    assert (item["address"], item["host"]) == (one.broker_url, socket.gethostname())
    assert one.qdo("admin", "broker", "file", "--reset", "--yes").code == 0
    assert one.items("admin", "broker", "file") == []
    [entry] = one.audit("admin broker file --reset")
    assert entry.before is not None
    assert entry.before["address"] == one.broker_url
    two.send("after")
    two.work().wait_for_line(r"worker-\d+: registered")
    wait_done(machines, "before", "after")
    old = one.work()
    assert old.wait() == 2, old.output


def test_a_deleted_broker_file_is_not_replaced_silently(machines: Machines) -> None:
    """A new file has a new id, also in the same place."""
    desk = machines[0]
    desk.drain()
    desk.broker.close()
    for each in desk.folder.glob("messages.db*"):
        if each.is_file():
            each.unlink()
    again = desk.work("--burst")
    assert again.wait() == 2, again.output
    assert desk.qdo("admin", "broker", "file", "--reset", "--yes").code == 0
    assert desk.work("--burst").wait() == 0

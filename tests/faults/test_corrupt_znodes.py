"""Garbage in znodes, and znodes deleted under running workers: other queues are not affected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from qdo.coordination.client import Client
from qdo.coordination.protocol.rebalancer import RECONCILE_SECONDS
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import QueueNameError
from qdo.queues import check_queue_name
from tests.support.fleet import LAYOUT, MemberFleet
from tests.support.processes import wait_until


@pytest.fixture
def fleet(coordinator_url: str) -> Iterator[MemberFleet]:
    fleet = MemberFleet(coordinator_url)
    yield fleet
    fleet.close()


def names(count: int) -> list[str]:
    return [f"queue-{number:03}" for number in range(count)]


def test_an_invalid_owner_name_means_no_owner(fleet: MemberFleet, outsider: Client) -> None:
    """Such a queue is free, and its owner is not looked up."""
    outsider.ensure_path(LAYOUT.queues)
    for queue, owner in (("a", ".."), ("b", "x/y"), ("c", "\\ud800"), ("d", "\\u0000")):
        outsider.create(LAYOUT.queue(queue), f'{{"last": "5", "owner": "{owner}"}}'.encode())
    member, _ = fleet.join()
    fleet.wait(lambda: set(fleet.owned()) == set("abcd"), "all are claimed")
    assert QueueNode.parse(outsider.get(LAYOUT.queue("a"))[0]).owner == member.name


def test_foreign_nodes_beside_workers_and_candidates(fleet: MemberFleet, outsider: Client) -> None:
    """They get no queues, are never elected, and disturb no worker, even if they cannot be deleted:
    as the assignment of a former worker, with a node of another tool below it."""
    for path in (LAYOUT.workers, LAYOUT.election, LAYOUT.assignments):
        outsider.ensure_path(path)
    outsider.create(f"{LAYOUT.workers}/monitor", b"")
    outsider.create(f"{LAYOUT.workers}/worker-x", b"[]")
    for name in ("candidate-²", "candidate-" + "9" * 5000, "candidate-", "other"):
        outsider.create(f"{LAYOUT.election}/{name}", b"")
    for name in ("notes/of/mine", "worker-0000009999/x"):
        outsider.create(f"{LAYOUT.assignments}/{name}", b"", makepath=True)
    fleet.join()
    fleet.create_queues(names(6))
    fleet.wait(lambda: fleet.balanced(6), "the one worker has all queues")
    assert outsider.exists(f"{LAYOUT.assignments}/notes/of/mine")


def test_a_changed_assignment_is_written_again_at_once(
    fleet: MemberFleet, outsider: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker releases its queues, and has them back before the next reconciliation."""
    fleet.join()
    fleet.join()
    fleet.create_queues(names(8))
    fleet.wait(lambda: fleet.balanced(8), "two workers share the queues")
    paths = [LAYOUT.assignment(member.name) for member, _ in fleet.members]
    assert len(paths) == 2
    for path, vandalism in itertools.product(paths, (b"nonsense", b'{"queues": []}', None)):
        vandalized = -1
        if vandalism is None:
            outsider.delete(path)
        else:
            vandalized = outsider.set(path, vandalism).version

        def repaired(path: str = path, vandalized: int = vandalized) -> bool:
            stat = outsider.exists(path)
            return stat is not None and stat.version > vandalized

        fleet.wait(repaired, "the assignment is written again", RECONCILE_SECONDS / 4)
        fleet.wait(lambda: fleet.balanced(8), "two workers share the queues again")
        assert (path,) in [record.args for record in caplog.records]


def delete_folder(outsider: Client, path: str) -> None:
    """Delete a node with all below it, at once: the leader writes its nodes again one by one."""

    def below(path: str) -> list[str]:
        found = [f"{path}/{name}" for name in outsider.get_children(path)]
        return [each for child in found for each in (*below(child), child)]

    def deleted() -> bool:
        transaction = outsider.transaction()
        for each in (*below(path), path):
            transaction.delete(each)
        return not any(isinstance(result, Exception) for result in transaction.commit())

    wait_until(deleted, "the folder is deleted")


@pytest.mark.parametrize("folder", ["assignments", "election", "rebalancer", "components"])
def test_a_deleted_folder_is_recreated(fleet: MemberFleet, outsider: Client, folder: str) -> None:
    """Workers come, go and share the queues as before."""
    fleet.join()
    fleet.join()
    fleet.create_queues(names(12))
    fleet.wait(lambda: fleet.balanced(12), "two workers share the queues")
    delete_folder(outsider, f"{LAYOUT.root}/{folder}")
    fleet.join()
    fleet.leave(0)
    fleet.leave(0)
    fleet.wait(lambda: fleet.balanced(12), "the remaining worker has all queues")
    fleet.join()
    fleet.wait(lambda: fleet.balanced(12), "two workers share the queues again")


def test_deleted_queues_come_back_when_they_are_created(
    fleet: MemberFleet, outsider: Client
) -> None:
    """Even if their folder was deleted with them."""
    fleet.join()
    fleet.create_queues(names(4))
    fleet.wait(lambda: fleet.balanced(4), "all queues are claimed")
    delete_folder(outsider, LAYOUT.queues)
    fleet.wait(lambda: outsider.exists(LAYOUT.queues) is not None, "the folder is recreated")
    fleet.create_queues(names(4))
    fleet.wait(lambda: fleet.balanced(4), "all queues are claimed again")


def test_a_rejected_name_blocks_no_other_queue(fleet: MemberFleet, outsider: Client) -> None:
    """qdo rejects the names that ZooKeeper rejects; one that gets past affects no other queue."""
    with pytest.raises(QueueNameError):
        check_queue_name("😀")
    fleet.join()
    fleet.create_queues(["a", "😀", "\ufff5", "z"])
    fleet.wait(lambda: {"a", "z"} <= set(fleet.owned()), "the others are claimed")
